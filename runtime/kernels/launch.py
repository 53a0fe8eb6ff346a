"""One kernel with its arguments: what is launched on a GPU, run by the interpreter, or compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Argument = torch.Tensor | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """``arguments`` are tensors and integers, in the kernel's order; ``constants`` are compiled in."""

    kernel: Any
    programs: int
    warps: int
    arguments: Mapping[str, Argument]
    constants: Mapping[str, int | float | bool]

    def __call__(self) -> None:
        """Launch on the current stream of the tensors' device; nothing waits. No programs: nothing to do."""
        if self.programs:
            with self._on_its_device():
                self.kernel[(self.programs,)](**self.arguments, **self.constants, **self.options)

    def _on_its_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, wherever the tensors are."""
        device = next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))
        return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)

    @property
    def options(self) -> dict[str, Any]:
        """A multiplication and an addition stay two roundings, as in the reference."""
        return {"num_warps": self.warps, "enable_fp_fusion": False}
