"""Warm-up dummies: engines route thousands of identical made-up tokens before the first request, and log them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from runtime.trace.chunking import cut, join
from runtime.trace.records import Bools, RoutingTrace, TokenKind

# Real text does not give so many rows in a row that agree in every id and every bit of every weight.
DUMMY_RUN = 256


class DummyMarker:
    """Marks every run of at least ``DUMMY_RUN`` identical real tokens as dummies, in a stream of chunks.

    ``marked``: how many so far. Holds back at most ``DUMMY_RUN`` tokens.
    """

    def __init__(self) -> None:
        self.marked = 0
        self._held: RoutingTrace | None = None
        self._dummy: RoutingTrace | None = None

    def mark(self, chunks: Iterator[RoutingTrace]) -> Iterator[RoutingTrace]:
        """The same tokens in the same order, dummies marked."""
        for chunk in chunks:
            yield from self._feed(chunk)
        if self._held is not None:
            yield self._held

    def _feed(self, chunk: RoutingTrace) -> Iterator[RoutingTrace]:
        if self._held is not None:
            chunk, self._held = join([self._held, chunk]), None
        if not chunk.tokens:
            return
        starts = np.flatnonzero(np.concatenate([[True], ~_repeats_previous(chunk)]))
        lengths = np.diff(starts, append=chunk.tokens)
        is_dummy = lengths >= DUMMY_RUN
        is_dummy[0] |= self._dummy is not None and _same_row(self._dummy, chunk)
        kept = chunk.tokens if is_dummy[-1] else int(starts[-1])
        dummy_T = np.repeat(is_dummy, lengths)
        self.marked += int(dummy_T.sum())
        kind = np.where(dummy_T, TokenKind.DUMMY, chunk.token_kind_T).astype(np.int8)
        self._dummy = cut(chunk, chunk.tokens - 1, chunk.tokens) if is_dummy[-1] else None
        if kept < chunk.tokens:
            self._held = cut(chunk, kept, chunk.tokens)
        if kept:
            yield cut(dataclasses.replace(chunk, token_kind_T=kind), 0, kept)


def _repeats_previous(chunk: RoutingTrace) -> Bools:
    """[T−1]: token t+1 has the ids and weights of token t."""
    ids, gates = chunk.ids_TLK, chunk.gates_TLK
    same: Bools = (ids[1:] == ids[:-1]).all(axis=(1, 2)) & (gates[1:] == gates[:-1]).all(axis=(1, 2))
    return same


def _same_row(one: RoutingTrace, chunk: RoutingTrace) -> bool:
    return np.array_equal(one.ids_TLK[0], chunk.ids_TLK[0]) and np.array_equal(one.gates_TLK[0], chunk.gates_TLK[0])
