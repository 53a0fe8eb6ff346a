"""Slots on a device that hold experts: compact versions of a model's fused expert parameters.

The cache *is* the parameter that the model's own kernel reads: slot s of ``gate_up_proj`` [S, …] holds whichever expert
was last written there, so no family's arithmetic is repeated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from probes.errors import CheckpointError
from runtime.experts.headers import TensorEntry
from runtime.experts.index import ExpertIndex, Piece
from runtime.experts.lines import placed_zeros, zeros_on
from runtime.experts.memory import Bytes, bytes_for, copy_shared, tensor_of

TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``size_bytes`` from ``start`` of a read to ``offset`` of a slot's part of ``parameter``, both in bytes."""

    start: int
    size_bytes: int
    parameter: str
    offset: int


class SlotPool:
    """``slots`` for experts of one shape; ``parameters[name]`` is [places, …] in the dtype that computes.

    Here a slot is a place. Where slots hold experts in another form, there are fewer places than slots.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        places: int | None = None,
    ) -> None:
        self.slots = slots
        self._device = device
        self.places = slots if places is None else places
        # Zeros: a slot that was never written must not turn 0 × garbage into NaN.
        self.parameters = {
            name: _frozen(zeros_on(device, (self.places, *shape), dtype)) for name, shape in shapes.items()
        }
        self._moves_of: dict[int, tuple[tuple[Piece, ...], tuple[Move, ...] | None]] = {}
        self._alike: dict[tuple[Move, ...] | None, tuple[Move, ...] | None] = {}
        self._targets: dict[tuple[int, int], list[Bytes]] = {}

    @property
    def slot_bytes(self) -> int:
        """What one slot holds, as it is moved."""
        return sum(parameter[0].nbytes for parameter in self.parameters.values())

    def placed(self, slot_of: dict[int, int]) -> Iterator[dict[int, int]]:
        """The experts of ``slot_of`` in groups, each with their places, which hold until the next group is asked for.

        What is computed with a group must be queued on the current stream before that.
        """
        yield slot_of

    def lie_as(self, stored: Mapping[str, TensorEntry]) -> None:
        """Place parameters on a CPU within their cache lines as their fused tensors lie in the checkpoint's files."""
        for name, entry in stored.items():
            parameter = self.parameters[name]
            if parameter.device.type == "cpu" and parameter.dtype is TORCH_DTYPES[entry.dtype]:
                shape, dtype = parameter.shape, parameter.dtype
                # The memory that it has goes first: the cache is most of what a device holds.
                self.parameters[name] = parameter = _frozen(torch.zeros(0))
                self.parameters[name] = _frozen(placed_zeros(shape, dtype, entry.offset))
        self._targets.clear()

    def check(self, index: ExpertIndex) -> None:
        """Every expert of ``index`` fills a slot. Raises ``CheckpointError`` naming the one that does not."""
        for number, layer in zip(index.layer_numbers, index.reads, strict=True):
            for expert, reads in enumerate(layer):
                pieces = [piece for read in reads for piece in read.pieces]
                for piece in pieces:
                    self._check_piece(piece, f"{reads[0].path.parent}: expert {expert} of layer {number}")
                absent = self.parameters.keys() - {piece.parameter for piece in pieces}
                if absent:
                    raise CheckpointError(
                        f"{reads[0].path.parent}: expert {expert} of layer {number} lacks {sorted(absent)[0]}",
                        hint="download the missing shards, or the model again",
                    )

    def _check_piece(self, piece: Piece, whose: str) -> None:
        hint = "config.json and the safetensors files are of different models"
        parameter = self.parameters.get(piece.parameter)
        if parameter is None:
            raise CheckpointError(f"{whose} has {piece.parameter}, which the model of its config has not", hint=hint)
        expected = self._part(parameter, 0, piece).shape
        shape = self._matrix_shape(piece)
        if expected != shape:
            raise CheckpointError(
                f"{whose}: {piece.parameter} is stored as {list(shape)} where the config makes it {list(expected)}",
                hint=hint,
            )

    def _matrix_shape(self, piece: Piece) -> tuple[int, ...]:
        """Of what ``piece`` fills."""
        return piece.shape

    def takes_parts(self, index: ExpertIndex) -> bool:
        """Whether ``write`` takes a span of any expert of ``index`` in parts."""
        return all(self._moves(read.pieces) is not None for layer in index.reads for expert in layer for read in expert)

    def write(self, slot: int, pieces: tuple[Piece, ...], data: Bytes, start: int = 0) -> None:
        """Copy an expert's stored bytes into ``slot`` on the current stream.

        ``data``: memory of the host as ``bytes_for`` this device, from ``start`` of its read on; all of the read, or a
        part where ``takes_parts``.
        """
        moves = self._moves(pieces)
        if moves is None:
            for piece in pieces:
                self._convert(slot, piece, tensor_of(data[piece.start : piece.start + piece.size_bytes]))
            return
        targets = self._targets.get((slot, id(moves)))
        if targets is None:
            targets = self._targets[slot, id(moves)] = [
                bytes_for(self._device, _as_bytes(self.parameters[move.parameter][slot]))[
                    move.offset : move.offset + move.size_bytes
                ]
                for move in moves
            ]
        for move, target in zip(moves, targets, strict=True):
            copy_shared(target, move.start, data, start)

    def _moves(self, pieces: tuple[Piece, ...]) -> tuple[Move, ...] | None:
        """``pieces`` as copies of bytes, as few as there can be; None where they are stored in another type.

        A copy costs the host some microseconds, as much as a link needs for a tenth of a megabyte: so what lies
        together on both sides is moved together, and what is known is kept.
        """
        known = self._moves_of.get(id(pieces))
        if known is not None and known[0] is pieces:
            return known[1]
        moves: tuple[Move, ...] | None = None
        if all(TORCH_DTYPES[piece.dtype] is self.parameters[piece.parameter].dtype for piece in pieces):
            moves = tuple(_joined([self._move(piece) for piece in pieces]))
        # Experts that are stored alike share one list.
        moves = self._alike.setdefault(moves, moves)
        self._moves_of[id(pieces)] = (pieces, moves)
        return moves

    def _move(self, piece: Piece) -> Move:
        size = self.parameters[piece.parameter][0].nbytes // piece.parts
        assert size == piece.size_bytes, "check comes first"
        return Move(start=piece.start, size_bytes=size, parameter=piece.parameter, offset=piece.part * size)

    def _convert(self, slot: int, piece: Piece, stored: torch.Tensor) -> None:
        """Fill a part of ``slot`` from numbers of another type."""
        target = self._part(self.parameters[piece.parameter], slot, piece)
        if target.device.type != "cpu":
            # Bytes travel as stored, and become numbers on the device: on the host they would leave pinned memory.
            stored = stored.to(target.device, non_blocking=True)
        target.copy_(_as_stored(stored, TORCH_DTYPES[piece.dtype]).view(target.shape), non_blocking=True)

    @staticmethod
    def _part(parameter: torch.Tensor, slot: int, piece: Piece) -> torch.Tensor:
        expert = parameter[slot]
        if piece.parts == 1:
            return expert
        rows = expert.shape[0] // piece.parts
        return expert[piece.part * rows : (piece.part + 1) * rows]


def _joined(moves: Iterable[Move]) -> list[Move]:
    """Neighbours on both sides as one."""
    joined: list[Move] = []
    for move in moves:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.parameter == move.parameter
            and last.start + last.size_bytes == move.start
            and last.offset + last.size_bytes == move.offset
        ):
            joined[-1] = replace(last, size_bytes=last.size_bytes + move.size_bytes)
        else:
            joined.append(move)
    return joined


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _as_stored(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``data`` (uint8) as numbers; the format does not promise that they begin at a multiple of their size."""
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)
