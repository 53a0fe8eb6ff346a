"""Slots on a device that hold experts: compact versions of a model's fused expert parameters.

The cache *is* the parameter that the model's own kernel reads: slot s of ``gate_up_proj`` [S, …] holds whichever expert
was last written there, so no family's arithmetic is repeated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from probes.errors import CheckpointError
from runtime.experts.index import Piece

TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class SlotPool:
    """``slots`` places for experts of one shape; ``parameters[name]`` is [slots, …] in the dtype that computes."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = slots
        self.parameters = {
            # Zeros: a slot that was never written must not turn 0 × garbage into NaN.
            name: torch.nn.Parameter(torch.zeros((slots, *shape), dtype=dtype, device=device), requires_grad=False)
            for name, shape in shapes.items()
        }

    def check(self, pieces: Iterable[Piece]) -> None:
        """Every piece fits its part of its parameter. Raises ``CheckpointError`` naming the one that does not."""
        for piece in pieces:
            parameter = self.parameters.get(piece.parameter)
            if parameter is None:
                raise CheckpointError(f"the model has no expert parameter {piece.parameter} that the checkpoint holds")
            expected = self._part(parameter, 0, piece).shape
            if expected != piece.shape:
                raise CheckpointError(
                    f"{piece.parameter} is stored as {list(piece.shape)} where the config makes it {list(expected)}",
                    hint="config.json and the safetensors files are of different models",
                )

    def write(self, slot: int, pieces: Iterable[Piece], data: torch.Tensor) -> None:
        """Copy an expert's stored bytes (uint8, host, at its read's start) into ``slot`` on the current stream."""
        for piece in pieces:
            stored = data[piece.start : piece.start + piece.size_bytes].view(TORCH_DTYPES[piece.dtype])
            target = self._part(self.parameters[piece.parameter], slot, piece)
            if stored.dtype != target.dtype and target.device.type != "cpu":
                # Bytes travel as stored and are converted on the device: a converting copy would leave pinned memory.
                stored = stored.to(target.device, non_blocking=True)
            target.copy_(stored.view(target.shape), non_blocking=True)

    @staticmethod
    def _part(parameter: torch.Tensor, slot: int, piece: Piece) -> torch.Tensor:
        expert = parameter[slot]
        if piece.parts == 1:
            return expert
        rows = expert.shape[0] // piece.parts
        return expert[piece.part * rows : (piece.part + 1) * rows]
