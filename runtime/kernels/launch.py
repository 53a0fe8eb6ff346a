"""One kernel with its arguments: what is launched on a GPU, run by the interpreter, or compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
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
        """Launch on the current stream; nothing waits. No programs: nothing to do."""
        if self.programs:
            self.kernel[(self.programs,)](**self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """A multiplication and an addition stay two roundings, as in the reference."""
        return {"num_warps": self.warps, "enable_fp_fusion": False}
