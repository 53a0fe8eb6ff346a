"""The program of one rank that records a live model's routing: load, warm up, run every prompt, write the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import transformers

from probes.errors import CheckpointError, Interrupted
from probes.text import plural
from runtime.options import RunOptions
from runtime.parallel import Ranks, join, leave
from runtime.policy.spec import policy_as_mapping
from runtime.policy.types import Policy
from runtime.recording import PassRecord
from runtime.trace.live import NoObserver, RecordingObserver, SelectionObserver
from runtime.trace.records import ScoreFunction, TraceMeta
from runtime.trace.writer import TraceRecorder, refuse_existing
from runtime.worker import RankSession

PIECE_TOKENS = 2048
"""Held until a piece is written, where its time does not come before; fewer would show in the time per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """``run``: the live run to record, with the policy that decides meanwhile. ``model_name``: for the metadata."""

    run: RunOptions
    output: Path
    model_name: str
    full_scores: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordReport:
    """What was recorded. ``tokens``: real ones; ``unsound``: rows marked as padding since a score was no number.

    ``device_misses``: [L][D] expert fetches while recording, from empty caches on.
    """

    meta: TraceMeta
    tokens: int
    sequences: int
    steps: int
    unsound: int
    size_bytes: int
    tpot_seconds: float
    device_misses: tuple[tuple[int, ...], ...]


def record_rank(options: RecordOptions) -> RecordReport | None:
    """Join the other ranks and record; the report comes from rank 0. Raises a ``CaeeError``.

    Where Ctrl-C is a ``KeyboardInterrupt``, all steps that were complete are kept, and ``Interrupted`` says so. Where
    it ends the process, the pieces stay, and are the parent's to join.
    """
    refuse_existing(options.output, force=options.force)
    ranks = join(options.run.device_kind)
    session = ranks.all_or_none(lambda: RankSession(options.run, ranks))
    try:
        return _record(session, options, ranks)
    finally:
        session.close()
        leave(ranks)


def _record(session: RankSession, options: RecordOptions, ranks: Ranks) -> RecordReport | None:
    prompts = session.encoded_prompts()
    size = options.run.batch_size
    batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    if not options.run.offloading:
        session.execution.fill_caches()
    empty = session.execution.snapshot()
    selection_apart = _warm_up(session, batches[0])
    session.execution.restore(empty)
    if not session.execution.weight_rule().is_known:
        raise CheckpointError(
            f"how the router of {session.loaded.family} makes its weights is not known, so no scores can be recorded",
            hint="`caee run` works with this family: its own weights say what an expert contributes",
        )
    policy = session.asked_policy()
    meta = _meta(session, options, policy, selection_apart=selection_apart)
    session.progress.expect(len(batches))
    passes = []
    with _recording(session, options, meta, ranks) as observer:
        first = 1
        for batch in batches:
            if observer is not None:
                observer.start_batch([f"prompt {first + n}" for n in range(len(batch))])
            first += len(batch)
            passes.append(session.run_pass(batch, policy))
            session.progress.advance()
    if observer is None:
        return None
    return RecordReport(
        meta=meta,
        tokens=observer.tokens,
        sequences=len(prompts),
        steps=observer.steps,
        unsound=observer.unsound,
        size_bytes=options.output.stat().st_size,
        tpot_seconds=float(np.mean([each.tpot_seconds for each in passes])),
        device_misses=_misses(passes),
    )


def _warm_up(session: RankSession, batch: Sequence[Sequence[int]]) -> bool:
    """A short pass, after which the router's rule is known; whether it ranks by other scores than it weighs by."""
    observer = SelectionObserver()
    session.execution.observer = observer
    session.run_pass(batch, session.router, new_tokens=2)
    session.execution.observer = NoObserver()
    return observer.ranks_apart


@contextlib.contextmanager
def _recording(
    session: RankSession, options: RecordOptions, meta: TraceMeta, ranks: Ranks
) -> Iterator[RecordingObserver | None]:
    """Rank 0 writes: every rank sees all tokens."""
    if ranks.rank != 0:
        yield None
        return
    recorder = TraceRecorder(options.output, meta, piece_tokens=PIECE_TOKENS, force=options.force)
    try:
        with recorder:
            observer = RecordingObserver(recorder, meta)
            session.execution.observer = observer
            try:
                yield observer
            finally:
                # An interrupted recording keeps every step that was complete.
                observer.finish()
    except KeyboardInterrupt as error:
        raise interrupted(options.output, recorder.tokens) from error


def interrupted(output: Path, tokens: int, left_out: str | None = None) -> Interrupted:
    """What to say of a recording of which ``tokens`` tokens are in ``output``."""
    if not tokens:
        return Interrupted("interrupted before anything was recorded; nothing was kept")
    kept = f"{plural(tokens, 'token')} recorded so far, kept in {output}"
    return Interrupted("; ".join(filter(None, ["interrupted", kept, left_out])))


def _meta(session: RankSession, options: RecordOptions, policy: Policy, *, selection_apart: bool) -> TraceMeta:
    rule = session.execution.weight_rule()
    run = options.run
    return TraceMeta(
        model=options.model_name,
        num_experts=session.index.num_experts,
        top_k=session.execution.top_k,
        layer_numbers=session.index.layer_numbers,
        score_function=ScoreFunction(rule.function),
        normalised=False,
        routed_scaling_factor=rule.scaling,
        engine="transformers",
        engine_version=transformers.__version__,
        scores_recorded=options.full_scores,
        selection_recorded=options.full_scores and selection_apart,
        parameters={
            "family": session.loaded.family,
            "dtype": str(session.dtype).removeprefix("torch."),
            "gates": "scores of the chosen experts, before normalising and scaling",
            "renormalize": rule.renormalize,
            "policy": policy_as_mapping(policy.spec),
            "devices": session.layout.devices,
            "tier": run.tier,
            "cache": run.cache,
            "cache_experts": session.layout.cache_slots if run.offloading else None,
            "batch_size": run.batch_size,
            "max_new_tokens": run.max_new_tokens,
        },
    )


def _misses(passes: Sequence[PassRecord]) -> tuple[tuple[int, ...], ...]:
    """[L][D] over all steps of all passes."""
    steps = [step for each in passes for step in each.steps]
    totals_LD = np.array([[layer.misses_after_D for layer in step.layers] for step in steps], np.int64).sum(axis=0)
    return tuple(tuple(int(count) for count in row) for row in totals_LD)
