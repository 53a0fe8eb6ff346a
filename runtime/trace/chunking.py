"""Cutting and joining chunks of a trace, and building one from what a source happens to know.

Shape legend: T tokens, L layers, K slots, N experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.trace.records import Bools, Float32s, Int16s, Int32s, Int64s, Phase, RoutingTrace, TokenKind, TraceMeta

# A chunk holds about this many choices (6 bytes each in memory), or this many full scores (4 bytes each).
CHOICES_PER_CHUNK = 1 << 20
SCORES_PER_CHUNK = 1 << 23


def tokens_per_chunk(meta: TraceMeta) -> int:
    """How many tokens make a chunk, so that memory stays bounded whatever the model's shape; at least 1."""
    limit = CHOICES_PER_CHUNK // max(1, meta.moe_layers * meta.top_k)
    if meta.scores_recorded or meta.selection_recorded:
        limit = min(limit, SCORES_PER_CHUNK // max(1, meta.moe_layers * meta.num_experts))
    return max(1, limit)


def new_chunk(
    meta: TraceMeta,
    names: tuple[str, ...],
    sequence_T: Int32s,
    ids_TLK: Int16s,
    gates_TLK: Float32s,
    *,
    position: npt.ArrayLike = -1,
    step: npt.ArrayLike = -1,
    phase: npt.ArrayLike = Phase.UNKNOWN,
    kind: npt.ArrayLike = TokenKind.REAL,
    rank: npt.ArrayLike = 0,
    scores_TLN: Float32s | None = None,
    selection_TLN: Float32s | None = None,
) -> RoutingTrace:
    """A chunk from per-token values or one value for all of them; what is not given is unknown (−1) or real."""
    tokens = len(sequence_T)

    def column(value: npt.ArrayLike, dtype: type[np.signedinteger]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype=dtype), (tokens,)))

    return RoutingTrace(
        meta=meta,
        sequence_names=names,
        token_sequence_T=sequence_T.astype(np.int32, copy=False),
        token_position_T=column(position, np.int32),
        token_step_T=column(step, np.int64),
        token_phase_T=column(phase, np.int8),
        token_kind_T=column(kind, np.int8),
        token_rank_T=column(rank, np.int16),
        ids_TLK=ids_TLK.astype(np.int16, copy=False),
        gates_TLK=gates_TLK.astype(np.float32, copy=False),
        scores_TLN=scores_TLN,
        selection_TLN=selection_TLN,
    )


def equal_shares(ids_TLK: Int16s) -> Float32s:
    """Gate weights where none were recorded: 1/(slots in use) each, 0 in empty slots."""
    used = ids_TLK >= 0
    count = used.sum(axis=-1, keepdims=True)
    return np.where(used, 1.0 / np.maximum(count, 1), 0.0).astype(np.float32)


def cut(chunk: RoutingTrace, start: int, stop: int) -> RoutingTrace:
    """Tokens ``start`` to ``stop`` of a chunk (views, nothing is copied)."""
    return _with_arrays(chunk, lambda name: getattr(chunk, name)[start:stop])


def select(chunk: RoutingTrace, tokens: Bools | Int64s) -> RoutingTrace:
    """The tokens that a mask marks, or those at the given places, in that order."""
    if tokens.dtype == np.bool_ and tokens.all():
        return chunk
    return _with_arrays(chunk, lambda name: getattr(chunk, name)[tokens])


def join(chunks: list[RoutingTrace]) -> RoutingTrace:
    """One chunk from several of the same trace, in the order given."""
    if len(chunks) == 1:
        return chunks[0]
    return _with_arrays(chunks[-1], lambda name: np.concatenate([getattr(chunk, name) for chunk in chunks]))


class ChunkBuffer:
    """Collects chunks of any size and gives them back in chunks of ``tokens`` tokens, the last one shorter."""

    def __init__(self, tokens: int) -> None:
        self._size = tokens
        self._held: list[RoutingTrace] = []
        self._tokens = 0

    def add(self, chunk: RoutingTrace) -> Iterator[RoutingTrace]:
        """Take in a chunk; yields every chunk that is now full."""
        start = 0
        while chunk.tokens - start >= self._size - self._tokens:
            stop = start + self._size - self._tokens
            self._held.append(cut(chunk, start, stop))
            start = stop
            yield from self.rest()
        if start < chunk.tokens:
            self._held.append(cut(chunk, start, chunk.tokens))
            self._tokens += chunk.tokens - start

    def rest(self) -> Iterator[RoutingTrace]:
        """What is held, however short; nothing where nothing is held."""
        held, self._held, self._tokens = self._held, [], 0
        if held:
            yield join(held)


def rechunk(chunks: Iterable[RoutingTrace], tokens: int) -> Iterator[RoutingTrace]:
    """The same trace in chunks of ``tokens`` tokens, the last one shorter."""
    buffer = ChunkBuffer(tokens)
    for chunk in chunks:
        yield from buffer.add(chunk)
    yield from buffer.rest()


class SequenceTable:
    """Numbers sequences by name in the order in which they first appear."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: tuple[str, ...] = ()

    def number(self, name: str) -> int:
        """The sequence's number, a new one if the name is new."""
        return self._numbers.setdefault(name, len(self._numbers))

    @property
    def names(self) -> tuple[str, ...]:
        """Names by number, as far as they are known."""
        if len(self._names) != len(self._numbers):
            self._names = tuple(self._numbers)
        return self._names


def _with_arrays(chunk: RoutingTrace, make: Callable[[str], npt.NDArray[Any]]) -> RoutingTrace:
    names = [field.name for field in dataclasses.fields(chunk) if field.name not in ("meta", "sequence_names")]
    changes: dict[str, Any] = {name: make(name) for name in names if getattr(chunk, name) is not None}
    return dataclasses.replace(chunk, **changes)
