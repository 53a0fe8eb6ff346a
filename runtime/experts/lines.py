"""Host memory at a chosen place within a cache line.

How the operands of a small matmul lie shows in the last bit of its result. transformers computes on tensors mapped from
the checkpoint's file, which lie as the file has them; copies that lie alike give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from probes.memory import host_zeros

CACHE_LINE_BYTES = 64


def placed_zeros(shape: Sequence[int], dtype: torch.dtype, lead_bytes: int) -> torch.Tensor:
    """Zeros that begin ``lead_bytes`` into a cache line, or at the number's own multiple before it."""
    lead = lead_bytes // dtype.itemsize * dtype.itemsize % CACHE_LINE_BYTES
    memory = host_zeros(math.prod(shape) * dtype.itemsize, alignment=CACHE_LINE_BYTES, lead_bytes=lead)
    return memory.view(dtype).view(torch.Size(shape))


def zeros_on(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on ``device``: on a CPU from the beginning of a cache line."""
    if device.type == "cpu":
        return placed_zeros(shape, dtype, 0)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)
