"""Slots that hold experts as a quantised checkpoint stores them, dequantised when they compute.

A slot takes an expert's stored bytes, no more. Beside the slots there are a few places in the type that computes:
experts are dequantised into them just before the model's own kernel runs over them. So a fetch moves the stored bytes,
a cache of a given size holds two to seven times as many experts, and every use of an expert dequantises it once more.
The places cost ``PLACES`` experts in the computing type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from probes.errors import CheckpointError
from runtime.experts.dequantise import dequantise_fp8, dequantise_mxfp4
from runtime.experts.formats import MXFP4_GROUP, Fp8Blocks, Mxfp4, Plain
from runtime.experts.headers import TensorEntry
from runtime.experts.index import ExpertIndex, Piece
from runtime.experts.lines import zeros_on
from runtime.experts.memory import Bytes, bytes_for, copy_shared
from runtime.experts.pool import TORCH_DTYPES, SlotPool

PLACES = {"cpu": 1}
"""Experts dequantised at a time: one after the other leaves a CPU's caches warm; elsewhere they share launches."""
PLACES_ELSEWHERE = 4

_STORED_DTYPES = TORCH_DTYPES | {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}

_Key = tuple[str, int, bool]
"""Parameter, part, whether scales."""


def make_pool(
    index: ExpertIndex, shapes: Mapping[str, tuple[int, ...]], *, slots: int, dtype: torch.dtype, device: torch.device
) -> SlotPool:
    """Slots for the experts of ``index``, checked to fit them. Raises ``CheckpointError``."""
    pool = (
        SlotPool(shapes, slots=slots, dtype=dtype, device=device)
        if isinstance(index.stored_as, Plain)
        else QuantisedPool(index, shapes, slots=slots, dtype=dtype, device=device)
    )
    pool.check(index)
    pool.lie_as(index.fused)
    return pool


class QuantisedPool(SlotPool):
    """``slots`` that hold experts as stored; ``parameters`` have room for a few dequantised ones."""

    def __init__(
        self,
        index: ExpertIndex,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert not isinstance(index.stored_as, Plain)
        places = min(PLACES.get(device.type, PLACES_ELSEWHERE), index.num_experts)
        super().__init__(shapes, slots=slots, dtype=dtype, device=device, places=places)
        self._stored_as: Fp8Blocks | Mxfp4 = index.stored_as
        self._pieces = {_key(piece): piece for read in index.reads[0][0] for piece in read.pieces}
        self._stored = {
            key: zeros_on(device, (slots, piece.size_bytes), torch.uint8) for key, piece in self._pieces.items()
        }
        self._filled = {key: [bytes_for(device, slot) for slot in stored] for key, stored in self._stored.items()}

    @property
    def slot_bytes(self) -> int:
        """What one slot holds, as stored."""
        return sum(stored.shape[1] for stored in self._stored.values())

    def lie_as(self, stored: Mapping[str, TensorEntry]) -> None:
        """Nothing to do: transformers, too, dequantises into memory of its own."""

    def check(self, index: ExpertIndex) -> None:
        """Every expert of ``index`` fills a slot, all in one form. Raises ``CheckpointError`` naming the odd one."""
        super().check(index)
        for number, layer in zip(index.layer_numbers, index.reads, strict=True):
            for expert, reads in enumerate(layer):
                for piece in (piece for read in reads for piece in read.pieces):
                    usual = self._pieces.get(_key(piece))
                    if usual is None or (piece.dtype, piece.shape) != (usual.dtype, usual.shape):
                        raise CheckpointError(
                            f"{reads[0].path.parent}: expert {expert} of layer {number} stores {piece.parameter} as "
                            f"{piece.dtype} {list(piece.shape)}, which the first expert does not",
                            hint="mixed precisions are not supported; use a checkpoint that stores its experts alike",
                        )

    def _matrix_shape(self, piece: Piece) -> tuple[int, ...]:
        """As in the computing type; the scales' own shape was checked against their values'."""
        values = self._pieces.get((piece.parameter, piece.part, False), piece) if piece.scales else piece
        if isinstance(self._stored_as, Mxfp4) and values.dtype == "U8":
            return values.shape[1] * MXFP4_GROUP, values.shape[0]
        return values.shape

    def takes_parts(self, index: ExpertIndex) -> bool:
        return True

    def write(self, slot: int, pieces: tuple[Piece, ...], data: Bytes, start: int = 0) -> None:
        """As ``SlotPool.write``; every piece to its own place."""
        for piece in pieces:
            copy_shared(self._filled[_key(piece)][slot], piece.start, data, start)

    def placed(self, slot_of: dict[int, int]) -> Iterator[dict[int, int]]:
        """As ``SlotPool.placed``; the places are filled on the current stream, which then computes with them."""
        experts = list(slot_of)
        for at in range(0, len(experts), self.places):
            group = experts[at : at + self.places]
            self._dequantise([slot_of[expert] for expert in group])
            yield {expert: place for place, expert in enumerate(group)}

    def _dequantise(self, slots: list[int]) -> None:
        for (parameter, part, scales), piece in self._pieces.items():
            if scales:
                continue
            values = self._taken((parameter, part, False), slots)
            target = self._parts(self.parameters[parameter][: len(slots)], piece)
            if (parameter, part, True) not in self._pieces:
                target.copy_(values)
            elif isinstance(self._stored_as, Fp8Blocks):
                block = (self._stored_as.rows, self._stored_as.columns)
                dequantise_fp8(values, self._taken((parameter, part, True), slots), block, target)
            else:
                dequantise_mxfp4(values, self._taken((parameter, part, True), slots), target)

    def _taken(self, key: _Key, slots: list[int]) -> torch.Tensor:
        """[slots, …] what these slots hold of one tensor."""
        stored, piece = self._stored[key], self._pieces[key]
        if len(slots) == 1:
            taken = stored[slots[0] : slots[0] + 1]
        else:
            # Not by an index, which would have to be copied to the device first.
            taken = torch.stack([stored[slot] for slot in slots])
        return taken.view(_STORED_DTYPES[piece.dtype]).view(len(slots), *piece.shape)

    @staticmethod
    def _parts(experts: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The rows of every expert that ``piece`` fills."""
        rows = experts.shape[1] // piece.parts
        return experts[:, piece.part * rows : (piece.part + 1) * rows]


def _key(piece: Piece) -> _Key:
    return piece.parameter, piece.part, piece.scales
