"""The live engine against what it stands on, in interleaved pairs.

    python benchmarks/engine.py [--pairs N]

1. Time per output token with the adapter attached, all experts on the device and nothing pruned, against the stock
   model of transformers, on layers of some milliseconds.
2. Bytes per second of the transfer engine, checkpoint to slot, against the probe's raw reads of the same bytes.

Prints medians of paired ratios with 95 % intervals; exit code 1 where the two models' texts differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from trace_record import BATCH, EXPERTS, LAYERS, NEW_TOKENS, build_checkpoint, open_session

from probes.disk import DirectFile, aligned_buffer
from runtime.experts.transfer import DiskSource, Request, TransferEngine
from runtime.statistics import paired_ratio
from runtime.worker import RankSession

READS = 48


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        build_checkpoint(Path(folder))
        session = open_session(Path(folder))
        try:
            session.execution.fill_caches()
            same = compare_models(session, Path(folder), pairs)
            compare_reads(session, pairs)
        finally:
            session.close()
    return 0 if same else 1


def compare_models(session: RankSession, folder: Path, pairs: int) -> bool:
    """Print TPOT with the adapter ÷ stock TPOT; whether both wrote the same tokens."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=session.dtype).eval()
    prompts = session.encoded_prompts()
    ours, theirs, same = [], [], True
    for pair in range(pairs + 1):
        done = session.run_pass(prompts, session.router)
        seconds, tokens = decode_stock(stock, prompts)
        same = same and tokens == done.token_ids
        if pair > 0:  # the first pair warms up
            ours.append(done.tpot_seconds)
            theirs.append(seconds)
    ratio = paired_ratio(theirs, ours, seed=0)
    layer = float(np.median(theirs)) / LAYERS
    sys.stdout.write(
        f"TPOT, adapter ÷ stock: {ratio.ratio:.3f} [{ratio.ci95[0]:.3f}, {ratio.ci95[1]:.3f}] "
        f"over {pairs} pairs, batch {BATCH}, {layer * 1e3:.1f} ms a layer; same tokens: {same}\n"
    )
    return same


@torch.inference_mode()
def decode_stock(model: torch.nn.Module, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds per output token of the stock model, decoding greedily, and its tokens."""
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.tensor(prompts)
    chosen = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)
    tokens = [chosen.tolist()]
    start = time.perf_counter()
    while len(tokens) < NEW_TOKENS:
        chosen = model(input_ids=chosen[:, None], past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)
        tokens.append(chosen.tolist())
    return (time.perf_counter() - start) / (NEW_TOKENS - 1), np.array(tokens).T.tolist()


def compare_reads(session: RankSession, pairs: int) -> None:
    """Print the transfer engine's bytes per second ÷ those of plain direct reads."""
    source = DiskSource(session.index)
    engine = TransferEngine(session.backend, source, session.pool)
    wanted = [(number % LAYERS, number % EXPERTS) for number in range(READS)]
    requests = [Request(layer, expert, number % 8) for number, (layer, expert) in enumerate(wanted)]
    reads = [read for layer, expert in wanted for read in session.index.reads[layer][expert]]
    files = {read.path: DirectFile(read.path) for read in reads}
    spans = [files[read.path].span_bytes(read.offset, read.size_bytes) for read in reads]
    buffer = aligned_buffer(max(spans))
    raw, fetched = [], []
    for pair in range(pairs + 1):
        start = time.perf_counter()
        for read in reads:
            files[read.path].read_into(read.offset, read.size_bytes, buffer)
        between = time.perf_counter()
        engine.fetch(requests).wait()
        end = time.perf_counter()
        if pair > 0:
            raw.append(between - start)
            fetched.append(end - between)
    engine.close()
    for file in files.values():
        file.close()
    ratio = paired_ratio(fetched, raw, seed=0)
    rate = READS * session.index.expert_bytes / float(np.median(raw)) / 1e9
    sys.stdout.write(
        f"bandwidth, engine ÷ raw reads: {ratio.ratio:.3f} [{ratio.ci95[0]:.3f}, {ratio.ci95[1]:.3f}], "
        f"experts of {session.index.expert_bytes / 1e6:.1f} MB, raw {rate:.2f} GB/s ({source.mode})\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
