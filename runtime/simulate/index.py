"""What a trace holds, from one pass over its token columns: enough to plan batches before any routing is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from probes.errors import TraceError
from runtime.trace.records import Bools, Int32s, Int64s, Phase, RoutingTrace, TokenKind, TraceSource

NO_STEPS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceIndex:
    """``decode_tokens_S``: real decode tokens of each sequence. ``steps``: recorded steps with a real token.

    ``steps_in_order``: step ids never fall in file order, so that recorded steps can be streamed.
    ``unknown_phase``: tokens whose phase was not recorded; they count as decode. ``left_out``: padding and dummies.
    """

    tokens: int
    decode_tokens_S: Int64s
    steps: int
    steps_in_order: bool
    unknown_phase: int
    without_step: int
    left_out: int


def index_of(source: TraceSource) -> TraceIndex:
    """Read what the tokens of ``source`` are, without their routing where it can be told apart.

    Raises ``TraceError`` for a trace without a real token, and where a sequence's decode tokens repeat or go back.
    """
    counts = _Counts()
    token_chunks = getattr(source, "token_chunks", source.chunks)
    for chunk in token_chunks():
        counts.add(chunk)
    if counts.tokens == counts.left_out:
        what = "holds only padding and dummy tokens" if counts.tokens else "holds no token"
        raise TraceError(f"the trace {what}", hint="record or import one with real tokens")
    return TraceIndex(
        tokens=counts.tokens,
        decode_tokens_S=counts.decode_tokens,
        steps=len(np.unique(np.concatenate([*counts.steps, NO_STEPS]))),
        steps_in_order=counts.in_order,
        unknown_phase=counts.unknown_phase,
        without_step=counts.without_step,
        left_out=counts.left_out,
    )


def is_decode(chunk: RoutingTrace) -> Bools:
    """[T] real tokens of the decode phase; a token whose phase was not recorded counts as one."""
    real_T: Bools = chunk.token_kind_T == TokenKind.REAL
    decode_T: Bools = chunk.token_phase_T != Phase.PREFILL
    return real_T & decode_T


@dataclass(slots=True)
class _Counts:
    """Running totals over the chunks."""

    tokens: int = 0
    left_out: int = 0
    unknown_phase: int = 0
    without_step: int = 0
    in_order: bool = True
    decode_tokens: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    last_position: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    steps: list[Int64s] = field(default_factory=list)

    def add(self, chunk: RoutingTrace) -> None:
        real_T = chunk.token_kind_T == TokenKind.REAL
        decode_T = is_decode(chunk)
        self.tokens += chunk.tokens
        self.left_out += chunk.tokens - int(real_T.sum())
        self.unknown_phase += int((real_T & (chunk.token_phase_T == Phase.UNKNOWN)).sum())
        self._add_steps(chunk.token_step_T[real_T])
        self._add_decode(chunk, chunk.token_sequence_T[decode_T], chunk.token_position_T[decode_T])

    def _add_steps(self, steps: Int64s) -> None:
        known = steps[steps >= 0]
        self.without_step += len(steps) - len(known)
        if not len(known):
            return
        if (np.diff(known) < 0).any() or (self.steps and known[0] < self.steps[-1][-1]):
            self.in_order = False
        self.steps.append(np.unique(known))

    def _add_decode(self, chunk: RoutingTrace, sequence: Int32s, position: Int32s) -> None:
        grown = len(chunk.sequence_names) - len(self.decode_tokens)
        self.decode_tokens = np.pad(self.decode_tokens, (0, grown))
        self.last_position = np.pad(self.last_position, (0, grown), constant_values=-1)
        self.decode_tokens += np.bincount(sequence, minlength=len(self.decode_tokens))
        known = position >= 0
        by_sequence = np.argsort(sequence[known], kind="stable")
        ordered, places = sequence[known][by_sequence], position[known][by_sequence].astype(np.int64)
        if not len(ordered):
            return
        first = np.r_[True, ordered[1:] != ordered[:-1]]
        before = np.where(first, self.last_position[ordered], np.r_[-1, places[:-1]])
        wrong = np.flatnonzero(places <= before)
        if len(wrong):
            name = chunk.sequence_names[ordered[wrong[0]]]
            raise TraceError(
                f"sequence {name!r}: position {places[wrong[0]]} comes after position {before[wrong[0]]}: a decode "
                "token is there twice, or two sequences share a name",
                hint="give every sequence a name of its own, or replay the recorded steps with --batch-size recorded",
            )
        self.last_position[ordered] = places
