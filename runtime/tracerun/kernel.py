"""Slots of plain bytes, and the matmuls of the experts in them.

Where a checkpoint stores numbers that the device computes with, an expert's own bytes are multiplied. Quantised ones
are moved as stored, and matrices of the same shape in the computing dtype are multiplied in their place: what a kernel
on dequantised weights reads. Dequantising itself is not part of the time.

Shape legend: P rows (token and slot), H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from probes.limits import last_level_cache_bytes
from runtime.experts.index import Piece
from runtime.experts.memory import Bytes, bytes_for, copy_bytes
from runtime.experts.pool import SlotPool
from runtime.experts.rows import ExpertRows
from runtime.experts.stock import StockKernel
from runtime.models.config import MoeShape

SLOT_ALIGNMENT = 64
STORED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_SETS = 16


def slot_bytes(shape: MoeShape) -> int:
    """Bytes of a slot: an expert as stored, rounded up so that every slot begins where a matmul likes it."""
    return -(-shape.expert_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def stored_dtype(shape: MoeShape) -> torch.dtype | None:
    """The dtype that the checkpoint stores weights in; None where they are quantised."""
    return STORED_DTYPES.get(shape.storage.name)


class BytePool(SlotPool):
    """``slots`` places for experts as stored: ``stored`` [slots, bytes], uint8."""

    def __init__(self, slots: int, size_bytes: int, device: torch.device) -> None:
        super().__init__({"stored": (size_bytes,)}, slots=slots, dtype=torch.uint8, device=device)
        self._slots = [bytes_for(device, slot) for slot in self.stored]

    @property
    def stored(self) -> torch.Tensor:
        return self.parameters["stored"]

    def write(self, slot: int, pieces: Iterable[Piece], data: Bytes, start: int = 0) -> None:
        """Copy an expert's bytes, or those from ``start`` on, into ``slot`` on the current stream."""
        copy_bytes(self._slots[slot][start : start + len(data)], data)


class ExpertWeights:
    """The matrices of every slot, first and second, as views of memory that is there already.

    ``multiplies`` says what they are, in words.
    """

    def __init__(self, shape: MoeShape, pool: BytePool, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.gated = shape.matrices == 3
        rows, hidden = shape.expert_intermediate * (2 if self.gated else 1), shape.hidden
        self._first, self._second = (rows, hidden), (hidden, shape.expert_intermediate)
        name = str(dtype).removeprefix("torch.")
        if stored_dtype(shape) is dtype:
            self._memory = pool.stored.view(dtype)
            self.multiplies = f"the fetched bytes, as {name}"
        else:
            self._memory = _stand_ins(shape, dtype, pool.slots, pool.stored.device)
            self.multiplies = f"{name} matrices of the same shape in place of the fetched {shape.storage.name} bytes"

    def of(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[I or 2·I, H] and [H, I]."""
        flat = self._memory[slot % len(self._memory)]
        cut, end = self._first[0] * self._first[1], self._first[0] * self._first[1] + self._second[0] * self._second[1]
        return flat[:cut].view(self._first), flat[cut:end].view(self._second)


def stand_in_sets(shape: MoeShape, dtype: torch.dtype, slots: int) -> tuple[int, int]:
    """How many sets of matrices stand in for quantised experts, more than the last-level cache holds, none for others;
    and the weights of a set."""
    weights = shape.matrices * shape.hidden * shape.expert_intermediate
    if stored_dtype(shape) is dtype:
        return 0, weights
    cached = -(-2 * (last_level_cache_bytes() or 0) // (weights * dtype.itemsize))
    return max(1, min(slots, _MOST_SETS, cached)), weights


def _stand_ins(shape: MoeShape, dtype: torch.dtype, slots: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    values = torch.empty(stand_in_sets(shape, dtype, slots), dtype=dtype, device=device)
    return values.normal_(0.0, 0.02, generator=generator)


class ReplayKernel(StockKernel):
    """One expert's matmuls after the other, in the order of slots; every row by itself until they are weighted."""

    def __init__(self, weights: ExpertWeights, pool: BytePool) -> None:
        self._one_by_one = False
        self._pool = pool
        self._weights = weights
        self._outputs = self._matmuls

    def _matmuls(self, taken_PH: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """[P, H]."""
        slots, sizes = rows.segments()
        outputs_PH = torch.empty_like(taken_PH)
        for slot, taken, into in zip(
            slots, taken_PH.split_with_sizes(sizes), outputs_PH.split_with_sizes(sizes), strict=True
        ):
            first, second = self._weights.of(slot)
            inner = torch.nn.functional.linear(taken, first)
            into.copy_(torch.nn.functional.linear(self._activated(inner), second))
        return outputs_PH

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        if not self._weights.gated:
            return torch.nn.functional.relu(inner).square()
        gate, up = inner.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
