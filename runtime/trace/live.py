"""Recording the routing of a model while it runs: what the engine tells, step by step, and what becomes of it.

Shape legend: T rows of a step (B sequences of S positions each, padding included), L MoE layers, K slots, N experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from runtime.policy.types import Bools, Tokens
from runtime.trace.chunking import new_chunk
from runtime.trace.records import Float32s, Int32s, Phase, TokenKind, TraceMeta

if TYPE_CHECKING:
    from runtime.trace.writer import TraceRecorder

# Checking and handing over a chunk costs about the same for one step as for fifty.
HELD_TOKENS = 512


class RoutingObserver(Protocol):
    """Is told of every forward pass and of every MoE layer in it, in order, before the layer's experts run.

    ``see`` gets the router's own choice and scores; the arrays are not to be changed. Errors end the forward pass.
    """

    def start_step(self, real_T: Bools, *, prefill: bool) -> None: ...

    def see(self, layer: int, tokens: Tokens) -> None: ...


class NoObserver:
    """Looks away."""

    def start_step(self, real_T: Bools, *, prefill: bool) -> None:
        """Does nothing."""

    def see(self, layer: int, tokens: Tokens) -> None:
        """Does nothing."""


class SelectionObserver:
    """Finds out whether a model's routers rank by other scores than they weigh by."""

    def __init__(self) -> None:
        self.ranks_apart = False

    def start_step(self, real_T: Bools, *, prefill: bool) -> None:
        """Does nothing."""

    def see(self, layer: int, tokens: Tokens) -> None:
        self.ranks_apart |= tokens.selection_scores_TN is not tokens.scores_TN


class RecordingObserver:
    """Writes every row of every step to ``recorder``, whose ``meta`` decides whether full scores are kept.

    A gate weight is the score of a chosen expert as the router computed it, before weights are normalised and scaled:
    what policies decide on. Rows with a score that is not a number are marked as padding and counted in ``unsound``.
    Steps are handed over many at a time, or as soon as a piece is due; the last ones by ``finish``. ``seconds``: spent
    here.
    """

    def __init__(self, recorder: TraceRecorder, meta: TraceMeta) -> None:
        self._recorder = recorder
        self._meta = meta
        self._names: tuple[str, ...] = ()
        self._batch: slice = slice(0, 0)
        self._length_B: Int32s = np.zeros(0, np.int32)
        self._step: _Step | None = None
        self._held: list[_Step] = []
        self._held_tokens = 0
        self.steps = 0
        self.tokens = 0
        self.unsound = 0
        self.seconds = 0.0

    def start_batch(self, names: Sequence[str]) -> None:
        """The steps that follow advance sequences of these names, in this order, each from its beginning."""
        self.finish()
        self._batch = slice(len(self._names), len(self._names) + len(names))
        self._names += tuple(names)
        self._length_B = np.zeros(len(names), np.int32)

    def start_step(self, real_T: Bools, *, prefill: bool) -> None:
        start = time.perf_counter()
        self._step = _Step(self._meta, real_T, prefill=prefill)
        self.seconds += time.perf_counter() - start

    def see(self, layer: int, tokens: Tokens) -> None:
        start = time.perf_counter()
        assert self._step is not None, "start_step comes first"
        self._step.put(layer, tokens)
        if layer == self._meta.moe_layers - 1:
            self._held.append(self._step)
            self._held_tokens += len(self._step.real_T)
            self.steps += 1
            if self._held_tokens >= HELD_TOKENS or self._recorder.due:
                self._write()
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Hand over what is held; a step that was broken off is left out."""
        start = time.perf_counter()
        self._write()
        self.seconds += time.perf_counter() - start

    def _write(self) -> None:
        if not self._held:
            return
        steps, self._held, self._held_tokens = self._held, [], 0
        first = self.steps - len(steps)
        rows = [len(step.real_T) for step in steps]
        real_T = np.concatenate([step.real_T for step in steps])
        gates_TLK = np.concatenate([step.gates_TLK for step in steps])
        scores_TLN = _joined([step.scores_TLN for step in steps])
        selection_TLN = _joined([step.selection_TLN for step in steps])
        sound_T = _sound(gates_TLK, scores_TLN, selection_TLN)
        self.unsound += int((real_T & ~sound_T).sum())
        self.tokens += int((real_T & sound_T).sum())
        self._recorder.write(
            new_chunk(
                self._meta,
                self._names,
                np.concatenate([self._sequences(len(step.real_T)) for step in steps]),
                np.concatenate([step.ids_TLK for step in steps]),
                gates_TLK,
                position=np.concatenate([self._positions(step.real_T) for step in steps]),
                step=np.repeat(np.arange(first, self.steps), rows),
                phase=np.repeat([Phase.PREFILL if step.prefill else Phase.DECODE for step in steps], rows),
                kind=np.where(real_T & sound_T, TokenKind.REAL, TokenKind.PADDING),
                scores_TLN=scores_TLN,
                selection_TLN=selection_TLN,
            )
        )

    def _sequences(self, rows: int) -> Int32s:
        """[T] the sequence that each row of a step advances."""
        numbers = np.arange(self._batch.start, self._batch.stop, dtype=np.int32)
        return np.repeat(numbers, rows // len(numbers))

    def _positions(self, real_T: Bools) -> Int32s:
        """[T] each row's place in its sequence, −1 for padding; the sequences are longer afterwards."""
        real_BS = real_T.reshape(len(self._length_B), -1)
        position_BS = np.where(real_BS, self._length_B[:, None] + real_BS.cumsum(axis=1, dtype=np.int32) - 1, -1)
        self._length_B += real_BS.sum(axis=1, dtype=np.int32)
        position_T: Int32s = position_BS.reshape(-1).astype(np.int32)
        return position_T


def _joined(arrays: Sequence[Float32s | None]) -> Float32s | None:
    """One array of all steps, or None where scores are not recorded."""
    there = [array for array in arrays if array is not None]
    return np.concatenate(there) if there else None


def _sound(*recorded: Float32s | None) -> Bools:
    """[T] rows that hold numbers only."""
    sound_T: Bools = np.logical_and.reduce(
        [np.isfinite(array_TLN).all(axis=(1, 2)) for array_TLN in recorded if array_TLN is not None]
    )
    return sound_T


class _Step:
    """The routing of one forward pass, filled layer by layer."""

    def __init__(self, meta: TraceMeta, real_T: Bools, *, prefill: bool) -> None:
        slots = (len(real_T), meta.moe_layers, meta.top_k)
        experts = (len(real_T), meta.moe_layers, meta.num_experts)
        self.real_T = real_T
        self.prefill = prefill
        self.ids_TLK = np.empty(slots, np.int16)
        self.gates_TLK = np.empty(slots, np.float32)
        self.scores_TLN: Float32s | None = np.empty(experts, np.float32) if meta.scores_recorded else None
        self.selection_TLN: Float32s | None = np.empty(experts, np.float32) if meta.selection_recorded else None

    def put(self, layer: int, tokens: Tokens) -> None:
        self.ids_TLK[:, layer] = tokens.topk_ids_TK
        self.gates_TLK[:, layer] = tokens.gates_TK
        if self.scores_TLN is not None:
            self.scores_TLN[:, layer] = tokens.scores_TN
        if self.selection_TLN is not None:
            self.selection_TLN[:, layer] = tokens.selection_scores_TN
