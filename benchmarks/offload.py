"""Decoding from disk against transformers' own disk offload, on one 3 GB checkpoint, token by token in turn.

    python benchmarks/offload.py [--tokens N] [--work FOLDER]      needs accelerate: pip install 'caee[bench]'

10 layers of 64 experts of 4.7 MB, top-8, one sequence, nothing pruned. Half of the experts are in memory on both sides:
as 320 cached experts here; as five layers' experts with transformers, which moves a layer's experts as a whole. Neither
has the page cache's help: reads here go past it, and the other side's files are dropped from it before every token.
Both read the same text, whose letters are drawn by chance: what a model of random weights writes itself soon repeats
one letter, whose experts are all cached. Prints seconds and bytes read per token; exit code 1 where the ratio of the
times is above a third, where the two expect different letters, or where reads here could not go past the page cache,
which then is no comparison of reads of a disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoints import Shape, open_session, write_checkpoint

from probes.records import LinkMode
from probes.sampling import median_interval

SHAPE = Shape(layers=10, experts=64, top_k=8, hidden=1024, intermediate=384)
PROMPT_TOKENS = 64
RATIO = 1 / 3
WARMUP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=14, help="timed ones; two more before")
    parser.add_argument("--work", type=Path, help="keep checkpoint and offloaded weights here (5 GB)")
    given = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None:
        raise SystemExit("transformers offloads through accelerate, which is not here: pip install 'caee[bench]'")
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        folder = work / "model"
        if not (folder / "config.json").exists():
            write_checkpoint(folder, SHAPE)
        peer = load_offloaded(folder, work / "offloaded")
        resident = SHAPE.layers * SHAPE.experts // 2
        session = open_session(folder, tier="disk", prompts=("",), batch_size=1, cache_experts=resident)
        try:
            return compare(session, peer, work / "offloaded", given.tokens)
        finally:
            session.close()


def load_offloaded(folder: Path, offloaded: Path) -> Any:
    """The stock model with every other layer's experts on disk."""
    from transformers import AutoModelForCausalLM

    where: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    where["lm_head"] = "cpu"
    for layer in range(SHAPE.layers):
        prefix = f"model.layers.{layer}"
        parts = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate")
        where |= {f"{prefix}.{part}": "cpu" for part in parts}
        where[f"{prefix}.mlp.experts"] = "disk" if layer % 2 else "cpu"
    offloaded.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=where, offload_folder=str(offloaded)
    )
    return model.eval()


class Decoded:
    """One side's decoding: the likeliest tokens after each step, and what the steps took."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forward = forward
        self.seconds: list[float] = []
        self.bytes_read: list[int] = []
        self.tokens: list[int] = []

    def step(self, ids: list[int], before: Callable[[], None]) -> None:
        """Feed ``ids``; ``before``: what precedes, untimed."""
        before()
        with reads() as counted:
            start = time.perf_counter()
            logits = self._forward(torch.tensor([ids]))
            self.tokens.append(int(logits[0].argmax()))
            self.seconds.append(time.perf_counter() - start)
        self.bytes_read.append(counted[0])


@torch.inference_mode()
def compare(session: Any, peer: Any, offloaded: Path, tokens: int) -> int:
    ours, theirs = Decoded(our_forward(session)), Decoded(their_forward(peer))
    drawn = random.Random(0).choices(range(256), k=PROMPT_TOKENS + WARMUP + tokens)
    steps = [drawn[:PROMPT_TOKENS], *([token] for token in drawn[PROMPT_TOKENS:])]
    for number, ids in enumerate(steps):
        sides = [(ours, lambda: None), (theirs, lambda: drop_pages(offloaded))]
        for side, before in sides if number % 2 else sides[::-1]:
            side.step(ids, before)
    timed = slice(1 + WARMUP, None)
    for name, side in (("caee, disk", ours), ("transformers, disk offload", theirs)):
        read = statistics.mean(side.bytes_read[timed])
        print(f"{name}: {statistics.median(side.seconds[timed]) * 1e3:.0f} ms and {read / 1e9:.2f} GB read per token")
    ratios = [our / their for our, their in zip(ours.seconds[timed], theirs.seconds[timed], strict=True)]
    ratio, interval = statistics.median(ratios), median_interval(ratios)
    shown = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    same = ours.tokens == theirs.tokens
    needed = SHAPE.layers * SHAPE.top_k * SHAPE.expert_bytes / 1e9
    print(f"a token's experts: {needed:.2f} GB, of which half of all experts are in memory")
    print(f"time per token, caee ÷ transformers: {ratio:.2f}{shown} over {tokens} tokens; same expectations: {same}")
    direct = session.source.mode is LinkMode.DIRECT
    if not direct:
        print(f"reads of the checkpoint were {session.source.mode}, not direct: {session.source.reason}")
        print("so this compares no reads of a disk: give --work a folder on a file system with direct reads")
    return int(ratio > RATIO or not same or not direct)


def our_forward(session: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    key_values = session.model.begin()
    length = 0

    def forward(ids: torch.Tensor) -> torch.Tensor:
        nonlocal length
        prefill, length = length == 0, length + ids.shape[1]
        mask = torch.ones((1, length), dtype=torch.int64)
        logits: torch.Tensor = session.model.step(ids, mask, key_values, session.router, prefill=prefill)[0]
        return logits

    return forward


def their_forward(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers import DynamicCache

    # Newer families of transformers call it `cache`.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kept = {name: DynamicCache()}

    def forward(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, logits_to_keep=1, **kept).logits[:, -1]
        return logits

    return forward


def drop_pages(folder: Path) -> None:
    """Put every file of ``folder`` out of the page cache; what was not written yet is written first."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def reads() -> Iterator[list[int]]:
    """Bytes that this process had the disk read within the block."""
    counted = [0]
    before = _bytes_read()
    yield counted
    counted[0] = _bytes_read() - before


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


if __name__ == "__main__":
    sys.exit(main())
