"""What recording costs: time per output token with and without it, in pairs of decode steps, on layers of some 5 ms.

    python benchmarks/trace_record.py [--passes N] [--full-scores] [--work FOLDER]

Builds a random Mixture-of-Experts checkpoint whose layers read enough weights, keeps all experts in memory, and decodes
with the recorder attached to one of every two neighbouring steps, chosen by chance: what else goes on in the machine
meets both alike. Exit code 1 where layers take less than 5 ms, or where recording takes more than 2 % of the time per
token: by the pairs, or by the recorder's own clock where the pairs' interval holds both answers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import Shape, open_session, write_checkpoint

from probes.sampling import median_interval
from runtime.policy.types import Bools, Tokens
from runtime.trace.chunking import join
from runtime.trace.live import NoObserver, RecordingObserver, RoutingObserver
from runtime.trace.reader import read_trace
from runtime.trace.records import TraceMeta
from runtime.trace.writer import TraceRecorder
from runtime.trace_recording import PIECE_TOKENS
from runtime.worker import RankSession

LAYERS, EXPERTS, TOP_K = 4, 16, 4
SHAPE = Shape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=320, intermediate=320)
BATCH, NEW_TOKENS = 8, 300
PROMPTS = tuple("ABCDEFGH"[n] * 16 for n in range(BATCH))
LAYER_SECONDS = 5e-3
LIMIT = 0.02


class EveryOther:
    """Records one of every two decode steps."""

    def __init__(self, recording: RecordingObserver, seed: int) -> None:
        self._recording = recording
        self._now: RoutingObserver = recording
        self._chance = random.Random(seed)
        self._second: RoutingObserver | None = None
        self.recorded: list[bool] = []

    def start_step(self, real_T: Bools, *, prefill: bool) -> None:
        """Choose for the first of two, the other for the second."""
        if prefill:
            self._now, self._second = self._recording, None
        elif self._second is None:
            both: list[RoutingObserver] = [self._recording, NoObserver()]
            self._chance.shuffle(both)
            self._now, self._second = both
        else:
            self._now, self._second = self._second, None
        if not prefill:
            self.recorded.append(self._now is self._recording)
        self._now.start_step(real_T, prefill=prefill)

    def see(self, layer: int, tokens: Tokens) -> None:
        """As chosen."""
        self._now.see(layer, tokens)


@dataclass(slots=True)
class Measured:
    """Seconds of the decode steps, pair by pair, and what recording took by its own clock."""

    without: list[float] = field(default_factory=list)
    with_it: list[float] = field(default_factory=list)
    own: float = 0.0


def decode(session: RankSession, meta: TraceMeta, output: Path, measured: Measured, seed: int) -> None:
    """One pass, half of whose decode steps are recorded."""
    prompts = session.encoded_prompts()
    with TraceRecorder(output, meta, piece_tokens=PIECE_TOKENS, force=True) as recorder:
        recording = RecordingObserver(recorder, meta)
        recording.start_batch([f"prompt {number}" for number in range(len(prompts))])
        every_other = EveryOther(recording, seed)
        session.execution.observer = every_other
        done = session.run_pass(prompts, session.router)
        session.execution.observer = NoObserver()
        recording.finish()
    # The two steps of a pair come one after the other; a step without its other is left out.
    steps = list(zip([step.seconds for step in done.decode_steps()], every_other.recorded, strict=True))
    for pair in zip(steps[0::2], steps[1::2], strict=False):
        for seconds, recorded in pair:
            (measured.with_it if recorded else measured.without).append(seconds)
    measured.own += recording.seconds


def piece_seconds_per_token(output: Path) -> float:
    """What writing a full piece to the disk takes, by token: a short pass writes none while it runs."""
    trace = read_trace(output)
    piece = join([trace] * -(-PIECE_TOKENS // trace.tokens))
    with TraceRecorder(output, trace.meta, piece_tokens=PIECE_TOKENS, force=True) as recorder:
        start = time.perf_counter()
        recorder.write(piece)
        return (time.perf_counter() - start) / PIECE_TOKENS


def measure(session: RankSession, output: Path, *, passes: int, full_scores: bool) -> bool:
    """Print what it costs; whether layers are slow enough and recording is within its limit."""
    prompts = session.encoded_prompts()
    session.execution.fill_caches()
    session.run_pass(prompts, session.router, new_tokens=8)
    meta = TraceMeta(
        model=None,
        num_experts=EXPERTS,
        top_k=TOP_K,
        layer_numbers=session.index.layer_numbers,
        scores_recorded=full_scores,
    )
    decode(session, meta, output, Measured(), seed=0)
    measured = Measured()
    for number in range(passes):
        decode(session, meta, output, measured, seed=number + 1)
    without = statistics.median(measured.without)
    piece = piece_seconds_per_token(output) * BATCH / without
    own = measured.own / len(measured.with_it) / without + piece
    # By pair: later steps see a longer context and take longer, which is no difference between the two.
    ratios = [recorded / plain for plain, recorded in zip(measured.without, measured.with_it, strict=True)]
    interval = median_interval(ratios)
    assert interval is not None, "at least six pairs"
    low, high = (end - 1.0 + piece for end in interval)
    layer = without / LAYERS
    print(f"{layer * 1e3:.1f} ms per layer, {LAYERS} layers; {len(measured.without)} pairs of decode steps")
    print(f"with recording: {statistics.median(ratios) - 1.0 + piece:+.2%}, 95 % interval {low:+.2%} to {high:+.2%}")
    print(f"recording's own clock: {own:.2%} of the time per token, of which {piece:.2%} writes pieces to the disk")
    known = high <= LIMIT or low > LIMIT
    share = statistics.median(ratios) - 1.0 + piece if known else own
    print(f"judged by {'the pairs' if known else 'its own clock, the interval holds the limit'}: {share:+.2%}")
    return layer >= LAYER_SECONDS and share <= LIMIT


def main() -> int:
    """Measure in a temporary folder, or in one that is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--full-scores", action="store_true")
    parser.add_argument("--work", type=Path, help="Keep the checkpoint here (60 MB).")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.work or Path(temporary)
        if not (folder / "config.json").exists():
            write_checkpoint(folder, SHAPE)
        # All experts in memory, so that nothing but reading them takes the time.
        session = open_session(folder, tier="device", prompts=PROMPTS, batch_size=BATCH, max_new_tokens=NEW_TOKENS)
        try:
            good = measure(session, folder / "trace.parquet", passes=given.passes, full_scores=given.full_scores)
        finally:
            session.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
