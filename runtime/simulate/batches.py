"""Batches: which tokens pass through the model together, step by step, streamed in blocks of steps.

Shape legend: S steps of a block, R rows (real tokens, step by step), L MoE layers, K slots, N experts.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from probes.errors import TraceError, UsageError
from probes.text import plural
from runtime.simulate.index import TraceIndex, is_decode
from runtime.trace.records import Float32s, Int16s, Int64s, RoutingTrace, TokenKind, TraceMeta, TraceSource

# A block holds about this many bytes: large enough to hide per-block overhead, small enough to stop within a second.
BLOCK_BYTES = 4 << 20
MAX_BLOCK_STEPS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The routing of some tokens: the router's ids and gate weights, and full scores where recorded."""

    ids_RLK: Int16s
    gates_RLK: Float32s
    scores_RLN: Float32s | None
    selection_RLN: Float32s | None

    def pick(self, choose: Callable[[Any], Any]) -> Rows:
        """``choose`` applied to every array that is there."""
        return Rows(
            ids_RLK=choose(self.ids_RLK),
            gates_RLK=choose(self.gates_RLK),
            scores_RLN=None if self.scores_RLN is None else choose(self.scores_RLN),
            selection_RLN=None if self.selection_RLN is None else choose(self.selection_RLN),
        )

    def cut(self, start: int, stop: int | None) -> Rows:
        """Rows ``start`` to ``stop``, as views."""
        return self.pick(lambda array: array[start:stop])

    def put(self, where: slice, values: Rows) -> None:
        """Overwrite the rows ``where`` with ``values``, of the same shape."""
        self.ids_RLK[where] = values.ids_RLK
        self.gates_RLK[where] = values.gates_RLK
        if self.scores_RLN is not None:
            self.scores_RLN[where] = values.scores_RLN
        if self.selection_RLN is not None:
            self.selection_RLN[where] = values.selection_RLN

    def __len__(self) -> int:
        return len(self.ids_RLK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive steps: step s of the block holds rows ``offsets_S1[s]`` to ``offsets_S1[s + 1]``."""

    offsets_S1: Int64s
    rows: Rows

    @property
    def steps(self) -> int:
        return len(self.offsets_S1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """A plan: how many steps there are, and (by ``blocks``) what is in them, any number of times."""

    steps: int
    source: TraceSource
    batch_size: int | None
    segments: tuple[Segment, ...]
    in_order: bool

    def blocks(self, max_steps: int = MAX_BLOCK_STEPS) -> Iterator[Block]:
        """The steps in blocks of at most ``max_steps``, from one read of the trace."""
        if self.batch_size is None:
            return _first_steps(_recorded(self.source, self.in_order, max_steps), self.steps)
        return _advance(self.source, self.batch_size, self.segments, self.steps, max_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A sequence in a batch slot: its token j passes at step ``first_step`` + j."""

    slot: int
    sequence: int
    first_step: int
    last_step: int


def plan(source: TraceSource, index: TraceIndex, batch_size: int | None, *, most_steps: int | None = None) -> Batching:
    """Batches of ``batch_size`` sequences in file order, one decode token each per step; None: as recorded.

    A sequence that ends is replaced at the next step by the next unused one; the run ends when a slot cannot be
    filled. Sequences without a decode token do not count. ``most_steps``: end after so many steps at the latest.
    Raises ``UsageError`` where that yields no step.
    """
    if batch_size is None:
        if not index.steps:
            raise UsageError(
                "the trace has no recorded steps", hint="choose how many sequences run together: --batch-size 8"
            )
        return Batching(
            steps=_at_most(index.steps, most_steps),
            source=source,
            batch_size=None,
            segments=(),
            in_order=index.steps_in_order,
        )
    if batch_size < 1:
        raise UsageError(f"batch size {batch_size} is below 1", hint="use --batch-size 1 or more, or recorded")
    segments, steps = _fill_slots(index.decode_tokens_S, batch_size)
    steps = _at_most(steps, most_steps)
    return Batching(
        steps=steps,
        source=source,
        batch_size=batch_size,
        segments=tuple(segment for segment in segments if segment.first_step < steps),
        in_order=True,
    )


def _at_most(steps: int, most_steps: int | None) -> int:
    return steps if most_steps is None else min(steps, most_steps)


def _fill_slots(decode_tokens_S: Int64s, batch_size: int) -> tuple[tuple[Segment, ...], int]:
    waiting = [(int(number), int(decode_tokens_S[number])) for number in np.flatnonzero(decode_tokens_S)]
    if len(waiting) < batch_size:
        raise UsageError(
            f"a batch of {batch_size} needs {plural(batch_size, 'sequence')} with decode tokens, the trace "
            f"has {len(waiting)}",
            hint=f"use --batch-size {len(waiting)} or less"
            if waiting
            else "the trace has no decode phase; replay the recorded steps with --batch-size recorded",
        )
    ends = [(0, slot) for slot in range(batch_size)]
    segments = []
    for number, tokens in waiting:
        step, slot = heapq.heappop(ends)
        segments.append(Segment(slot=slot, sequence=number, first_step=step, last_step=step + tokens - 1))
        heapq.heappush(ends, (step + tokens, slot))
    steps = ends[0][0]
    return tuple(segment for segment in segments if segment.first_step < steps), steps


def _advance(
    source: TraceSource, batch_size: int, segments: tuple[Segment, ...], steps: int, max_steps: int
) -> Iterator[Block]:
    supply = _Supply(source, {segment.sequence for segment in segments})
    block_steps = min(max_steps, _block_steps(source.meta, batch_size))
    waiting = deque(segments)
    running: list[Segment] = []
    for start in range(0, steps, block_steps):
        stop = min(start + block_steps, steps)
        running = [segment for segment in running if segment.last_step >= start]
        while waiting and waiting[0].first_step < stop:
            running.append(waiting.popleft())
        rows = empty_rows(source.meta, (stop - start) * batch_size)
        for segment in running:
            low, high = max(start, segment.first_step), min(stop, segment.last_step + 1)
            first, last = (low - start) * batch_size, (high - start) * batch_size
            rows.put(slice(first + segment.slot, last, batch_size), supply.take(segment.sequence, high - low))
        yield Block(offsets_S1=np.arange(stop - start + 1) * batch_size, rows=rows)


class _Supply:
    """Decode tokens by sequence, read from the source no further than asked for, and dropped once taken."""

    def __init__(self, source: TraceSource, wanted: set[int]) -> None:
        self._chunks = source.chunks()
        self._layers = main_layers(source.meta)
        self._parts: dict[int, list[Rows]] = {number: [] for number in wanted}
        self._ready = dict.fromkeys(wanted, 0)

    def take(self, sequence: int, count: int) -> Rows:
        """The next ``count`` tokens of a sequence."""
        while self._ready[sequence] < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise TraceError(
                    "the trace became shorter while it was read", hint="replay it once nothing writes to it any more"
                )
            self._hold(chunk)
        self._ready[sequence] -= count
        taken = []
        parts = self._parts[sequence]
        while count:
            part = parts.pop(0)
            if len(part) > count:
                parts.insert(0, part.cut(count, None))
            taken.append(part.cut(0, count))
            count -= len(taken[-1])
        return join_rows(taken)

    def _hold(self, chunk: RoutingTrace) -> None:
        decode = np.flatnonzero(is_decode(chunk))
        of = chunk.token_sequence_T[decode]
        order = np.argsort(of, kind="stable")
        cuts = np.flatnonzero(np.diff(of[order])) + 1
        for group in np.split(order, cuts) if len(order) else ():
            sequence = int(of[group[0]])
            if sequence in self._parts:
                self._parts[sequence].append(rows_of(chunk, decode[group], self._layers))
                self._ready[sequence] += len(group)


def _recorded(source: TraceSource, in_order: bool, max_steps: int) -> Iterator[Block]:
    """Blocks of whole steps. Where steps are not in file order, the whole trace is held and sorted."""
    layers = main_layers(source.meta)
    held: list[Rows] = []
    steps: list[Int64s] = []
    for chunk in source.chunks():
        which = np.flatnonzero((chunk.token_kind_T == TokenKind.REAL) & (chunk.token_step_T >= 0))
        if not len(which):
            continue
        held.append(rows_of(chunk, which, layers))
        steps.append(chunk.token_step_T[which])
        if in_order and steps[0][0] != steps[-1][-1]:
            rows, step = join_rows(held), np.concatenate(steps)
            whole = int(np.searchsorted(step, step[-1]))
            yield from _cut_steps(rows.cut(0, whole), step[:whole], source.meta, max_steps)
            held, steps = [rows.cut(whole, None).pick(np.copy)], [step[whole:]]
    if held:
        rows, step = join_rows(held), np.concatenate(steps)
        order = np.argsort(step, kind="stable")
        yield from _cut_steps(rows.pick(lambda array: array[order]), step[order], source.meta, max_steps)


def _first_steps(blocks: Iterator[Block], steps: int) -> Iterator[Block]:
    """The first ``steps`` steps of ``blocks``."""
    left = steps
    for block in blocks:
        if block.steps >= left:
            yield Block(offsets_S1=block.offsets_S1[: left + 1], rows=block.rows.cut(0, int(block.offsets_S1[left])))
            return
        left -= block.steps
        yield block


def _cut_steps(rows: Rows, step: Int64s, meta: TraceMeta, max_steps: int) -> Iterator[Block]:
    offsets = np.r_[0, np.flatnonzero(np.diff(step)) + 1, len(step)]
    per_block = min(max_steps, _block_steps(meta, -(-len(step) // (len(offsets) - 1))))
    for start in range(0, len(offsets) - 1, per_block):
        part = offsets[start : start + per_block + 1]
        first, last = int(part[0]), int(part[-1])
        yield Block(offsets_S1=part - first, rows=rows.cut(first, last))


def main_layers(meta: TraceMeta) -> Int64s:
    """Indices of the recorded layers that belong to the model itself, not to a draft head."""
    return np.flatnonzero(~np.isin(meta.layer_numbers, meta.draft_layers))


def rows_of(chunk: RoutingTrace, which: Int64s, layers: Int64s) -> Rows:
    """Copies of the chunk's rows ``which``, of the layers ``layers``."""

    def choose(array: Any) -> Any:
        return array[which] if len(layers) == array.shape[1] else array[np.ix_(which, layers)]

    return Rows(
        ids_RLK=chunk.ids_TLK,
        gates_RLK=chunk.gates_TLK,
        scores_RLN=chunk.scores_TLN,
        selection_RLN=chunk.selection_TLN,
    ).pick(choose)


def empty_rows(meta: TraceMeta, rows: int) -> Rows:
    """Uninitialised rows of the trace's shape."""
    layers = len(main_layers(meta))
    full = (rows, layers, meta.num_experts)
    return Rows(
        ids_RLK=np.empty((rows, layers, meta.top_k), np.int16),
        gates_RLK=np.empty((rows, layers, meta.top_k), np.float32),
        scores_RLN=np.empty(full, np.float32) if meta.scores_recorded else None,
        selection_RLN=np.empty(full, np.float32) if meta.selection_recorded else None,
    )


def join_rows(parts: list[Rows]) -> Rows:
    """One after the other; all of the same trace."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    return Rows(**{field.name: joined(field.name) for field in dataclasses.fields(Rows)})


def _block_steps(meta: TraceMeta, rows_per_step: int) -> int:
    scores = meta.num_experts * (meta.scores_recorded + meta.selection_recorded)
    row_bytes = len(meta.layer_numbers) * (meta.top_k * 6 + scores * 4)
    return max(1, BLOCK_BYTES // max(1, row_bytes * rows_per_step))
