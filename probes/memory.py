"""Host memory that bytes are read and copied into.

Large pieces ask for huge pages: a page of 2 MiB has one entry where 512 small ones thrash the processor's table of
translations, and a direct read names 512 times fewer pages to the disk.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20


def host_zeros(
    size_bytes: int, *, alignment: int, lead_bytes: int = 0, huge_from: int = HUGE_PAGE_BYTES
) -> torch.Tensor:
    """Zeros, uint8 [size_bytes], that begin ``lead_bytes`` after a multiple of ``alignment``, a power of two.

    From ``huge_from`` bytes on they begin so after a huge page, and lie on huge pages as far as the system has any.
    Pages are given when they are first written. Raises ``MemoryError`` or ``RuntimeError`` where there is no room.
    """
    is_large = size_bytes >= huge_from and hasattr(mmap, "MADV_HUGEPAGE")
    step = max(alignment, HUGE_PAGE_BYTES) if is_large else alignment
    room = -(-(lead_bytes + size_bytes) // step) * step + step
    memory = torch.frombuffer(_mapped(room), dtype=torch.uint8) if is_large else torch.zeros(room, dtype=torch.uint8)
    start = -memory.data_ptr() % step + lead_bytes
    return memory[start : start + size_bytes]


def _mapped(size_bytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
