"""What recording costs: time per output token with and without it, in interleaved pairs, on layers of 5 ms and more.

    python benchmarks/trace_record.py [--pairs N] [--full-scores] [--work FOLDER]

Builds a random Mixture-of-Experts checkpoint whose layers read enough weights, keeps all experts in memory, and decodes
the same prompts with the recorder attached and without it. Exit code 1 where layers take less than 5 ms, or where
recording itself (its own clock) takes more than 2 % of the time per token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from probes.devices import find_devices
from runtime.options import RunOptions
from runtime.parallel import Ranks
from runtime.policy.spec import parse_policy
from runtime.recording import PassRecord
from runtime.statistics import paired_ratio
from runtime.trace.chunking import join
from runtime.trace.live import NoObserver, RecordingObserver
from runtime.trace.reader import read_trace
from runtime.trace.records import TraceMeta
from runtime.trace.writer import TraceRecorder
from runtime.trace_recording import PIECE_TOKENS
from runtime.worker import RankSession

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 3, 32, 4, 768, 768
BATCH, NEW_TOKENS = 8, 24
LAYER_SECONDS = 5e-3
LIMIT = 0.02


def build_checkpoint(folder: Path) -> None:
    """A model of family qwen3_moe with random weights, and a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    config = Qwen3MoeConfig(
        vocab_size=len(letters) + 1,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=len(letters),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)


def open_session(folder: Path) -> RankSession:
    """All experts in memory, so that nothing but reading them takes the time."""
    options = RunOptions(
        model=folder,
        devices=find_devices("cpu:1"),
        tier="device",
        policy=parse_policy("router"),
        cache="lfu",
        prompts=tuple("ABCDEFGH"[n] * 16 for n in range(BATCH)),
        held_out=None,
        calibration=None,
        batch_size=BATCH,
        max_new_tokens=NEW_TOKENS,
    )
    return RankSession(options, Ranks(rank=0, world=1))


def recorded(session: RankSession, meta: TraceMeta, output: Path) -> tuple[PassRecord, float]:
    """One pass while recording, and the seconds that recording took of it, by its own clock."""
    prompts = session.encoded_prompts()
    with TraceRecorder(output, meta, piece_tokens=PIECE_TOKENS, force=True) as recorder:
        observer = RecordingObserver(recorder, meta)
        observer.start_batch([f"prompt {number}" for number in range(len(prompts))])
        session.execution.observer = observer
        done = session.run_pass(prompts, session.router)
    session.execution.observer = NoObserver()
    return done, observer.seconds


def piece_seconds_per_token(output: Path) -> float:
    """What writing a full piece to the disk takes, by token: a short pass writes none while it runs."""
    trace = read_trace(output)
    piece = join([trace] * -(-PIECE_TOKENS // trace.tokens))
    with TraceRecorder(output, trace.meta, piece_tokens=PIECE_TOKENS, force=True) as recorder:
        start = time.perf_counter()
        recorder.write(piece)
        return (time.perf_counter() - start) / PIECE_TOKENS


def measure(session: RankSession, output: Path, *, pairs: int, full_scores: bool) -> bool:
    """Print what it costs; whether layers are slow enough and recording is within its limit."""
    prompts = session.encoded_prompts()
    session.execution.fill_caches()
    session.run_pass(prompts, session.router)
    meta = TraceMeta(
        model=None,
        num_experts=EXPERTS,
        top_k=TOP_K,
        layer_numbers=session.index.layer_numbers,
        scores_recorded=full_scores,
    )
    recorded(session, meta, output)
    without: list[float] = []
    with_it: list[float] = []
    own: list[float] = []
    for pair in range(pairs):
        for recording in (False, True) if pair % 2 == 0 else (True, False):
            if recording:
                done, seconds = recorded(session, meta, output)
                with_it.append(done.tpot_seconds)
                own.append(seconds / NEW_TOKENS / done.tpot_seconds)
            else:
                without.append(session.run_pass(prompts, session.router).tpot_seconds)
    piece = piece_seconds_per_token(output) * BATCH / statistics.median(without)
    share = statistics.fmean(own) + piece
    ratio = paired_ratio(without, with_it, seed=0)
    layer = min(without) / LAYERS
    print(f"time per token {min(without) * 1e3:.1f} ms at best, {layer * 1e3:.1f} ms per layer, {pairs} pairs")
    print(f"with recording ÷ without: {ratio.ratio:.4f}, 95 % interval {ratio.ci95[0]:.4f} to {ratio.ci95[1]:.4f}")
    print(f"recording's own clock: {share:.2%} of the time per token, of which {piece:.2%} writes pieces to the disk")
    return layer >= LAYER_SECONDS and share <= LIMIT


def main() -> int:
    """Measure in a temporary folder, or in one that is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--full-scores", action="store_true")
    parser.add_argument("--work", type=Path, help="Keep the checkpoint here (400 MB).")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.work or Path(temporary)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            build_checkpoint(folder)
        session = open_session(folder)
        try:
            good = measure(session, folder / "trace.parquet", pairs=given.pairs, full_scores=given.full_scores)
        finally:
            session.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
