"""Host memory at a chosen place within a cache line.

How the operands of a small matmul lie shows in the last bit of its result. transformers computes on tensors mapped from
the checkpoint's file, which lie as the file has them; copies that lie alike give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

CACHE_LINE_BYTES = 64


def placed_zeros(shape: Sequence[int], dtype: torch.dtype, lead_bytes: int) -> torch.Tensor:
    """Zeros that begin ``lead_bytes`` into a cache line, or at the number's own multiple before it."""
    size = math.prod(shape) * dtype.itemsize
    memory = torch.zeros(size + 2 * CACHE_LINE_BYTES, dtype=torch.uint8)
    start = (lead_bytes // dtype.itemsize * dtype.itemsize - memory.data_ptr()) % CACHE_LINE_BYTES
    return memory[start : start + size].view(dtype).view(torch.Size(shape))
