"""Reading files past the page cache, where the file system allows it, into memory that a device can copy from.

A cached read would hide what a fetch from disk costs. Two ways around the page cache, in this order:

``direct``    O_DIRECT: offset, length and address are multiples of ``alignment``; the kernel copies nothing.
``buffered``  where O_DIRECT is refused, or accepted and ignored (file systems that live in memory): the pages are
              dropped before each read, as far as the kernel agrees. ``reason`` says why.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from probes.errors import DeviceError, InputError
from probes.filesystem import mount_of
from probes.memory import host_zeros
from probes.records import LinkMode

# Covers 512-byte and 4-KiB sectors alike, and is the page size that pinning works in.
ALIGNMENT = 4096
# Fewer pieces of memory for the disk to fill: reads of a megabyte are up to twice as fast into a huge page.
_WORTH_A_HUGE_PAGE = 512 << 10
# One read call moves at most 2 GiB minus a page on Linux.
_MAX_READ_BYTES = 1 << 30
# O_DIRECT opens on all of these, and is then ignored or served from memory.
_WITHOUT_DIRECT_READS = {
    "tmpfs": "tmpfs keeps files in memory",
    "ramfs": "ramfs keeps files in memory",
    "devtmpfs": "devtmpfs keeps files in memory",
    "hugetlbfs": "hugetlbfs keeps files in memory",
    "zfs": "zfs serves direct reads from its own cache",
}


def aligned_buffer(size_bytes: int, *, alignment: int = ALIGNMENT, pinned: bool = False) -> torch.Tensor:
    """Host memory, uint8 [size_bytes], at a multiple of ``alignment``, every page touched.

    ``pinned`` locks the pages for copies by a GPU. Raises ``DeviceError`` when that fails or memory runs out: pageable
    memory is never handed out as pinned.
    """
    try:
        if pinned:
            memory = torch.empty(size_bytes + alignment, dtype=torch.uint8, pin_memory=True)
            start = -memory.data_ptr() % alignment
            buffer = memory[start : start + size_bytes]
        else:
            buffer = host_zeros(size_bytes, alignment=alignment, huge_from=_WORTH_A_HUGE_PAGE)
    except (RuntimeError, MemoryError) as error:
        what = "page-locked host memory" if pinned else "host memory"
        why = str(error).partition("\n")[0] or "no room"
        raise DeviceError(
            f"cannot allocate {size_bytes} bytes of {what}: {why}",
            hint="use smaller sizes or fewer buffers; `caee doctor` shows the limits that apply",
        ) from error
    buffer.zero_()
    if pinned and not buffer.is_pinned():
        raise DeviceError("the memory that was asked to be page-locked is not", hint="run `caee doctor`")
    return buffer


class DirectFile:
    """A file opened for reads that reach the disk. Usable from several threads at once until it is closed.

    ``mode`` is ``LinkMode.DIRECT`` or ``LinkMode.BUFFERED``; ``reason`` says why reads are not direct, else None.
    """

    def __init__(self, path: str | Path, *, direct: bool = True) -> None:
        """Open ``path``. ``direct=False`` asks for buffered reads. Raises ``InputError`` if it cannot be read."""
        self.path = Path(path)
        self.alignment = ALIGNMENT
        self.mode = LinkMode.BUFFERED
        self.reason: str | None = None if direct else "buffered reads were asked for"
        self._fd = -1
        if direct:
            self._fd, self.reason = _open_direct(self.path)
        if self._fd >= 0:
            self.mode = LinkMode.DIRECT
        else:
            self._fd = _open_buffered(self.path)
            # Pages that are still to be written cannot be dropped; readahead would fetch bytes nobody asked for.
            with contextlib.suppress(OSError):
                os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.size_bytes = os.fstat(self._fd).st_size

    def span_bytes(self, offset: int, size_bytes: int) -> int:
        """How large the buffer must be to read ``size_bytes`` at ``offset``: both ends rounded to the alignment."""
        end = offset + size_bytes
        return -(-end // self.alignment) * self.alignment - offset // self.alignment * self.alignment

    def read_into(self, offset: int, size_bytes: int, buffer: torch.Tensor) -> torch.Tensor:
        """Read file bytes [offset, offset + size_bytes) and return the part of ``buffer`` that holds them.

        ``buffer``: uint8, contiguous, host memory, from ``aligned_buffer``, at least ``span_bytes`` long; bytes around
        the returned part are overwritten too. Raises ``InputError`` where the file ends too early and ``DeviceError``
        where the read fails.
        """
        assert buffer.dtype == torch.uint8, f"{buffer.dtype} is not bytes"
        assert buffer.device.type == "cpu", "files are read into host memory"
        lead = self.read_span(offset, size_bytes, buffer.numpy())
        return buffer[lead : lead + size_bytes]

    def read_span(self, offset: int, size_bytes: int, buffer: npt.NDArray[np.uint8]) -> int:
        """As ``read_into``; returns where in ``buffer`` the bytes begin."""
        span = self.span_bytes(offset, size_bytes)
        assert buffer.flags.c_contiguous
        assert len(buffer) >= span, f"a buffer of {len(buffer)} bytes is too small for a span of {span}"
        assert self.mode is not LinkMode.DIRECT or buffer.ctypes.data % self.alignment == 0
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise self._ends_early(offset, size_bytes, self.size_bytes)
        start = offset // self.alignment * self.alignment
        if self.mode is LinkMode.BUFFERED:
            os.posix_fadvise(self._fd, start, span, os.POSIX_FADV_DONTNEED)
        lead = offset - start
        self._fill(start, lead + size_bytes, buffer.data[:span])
        return lead

    def _fill(self, start: int, wanted: int, view: memoryview) -> None:
        """Fill ``view`` from file offset ``start`` until at least ``wanted`` bytes are there."""
        got = 0
        retried = False
        while got < wanted:
            asked = min(len(view) - got, _MAX_READ_BYTES)
            try:
                count = os.preadv(self._fd, [view[got : got + asked]], start + got)
            except OSError as error:
                raise DeviceError(
                    f"reading {self.path} at bytes {start + got} to {start + got + asked} failed: {error.strerror}",
                    hint="check the disk and its cable or network (dmesg), then try again",
                ) from error
            if count == asked or got + count >= wanted:
                got += count
                continue
            if count == 0 or retried:
                raise self._ends_early(start, wanted, start + got + count)
            retried = True
            # What follows a short direct read must start at a multiple of the alignment again.
            got += count // self.alignment * self.alignment

    def _ends_early(self, offset: int, size_bytes: int, end: int) -> InputError:
        return InputError(
            f"{self.path} ends at byte {end}, but bytes {offset} to {offset + size_bytes} were to be read",
            hint="the file is truncated or was changed while it was read: fetch it again",
        )

    def fileno(self) -> int:
        """The open file's descriptor, as files have it."""
        return self._fd

    def close(self) -> None:
        """Close the file; further reads fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _open_buffered(path: Path) -> int:
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from error


def _open_direct(path: Path) -> tuple[int, str | None]:
    """A descriptor whose reads go past the page cache, or −1 and the reason why there is none."""
    mount = mount_of(path)
    if mount is not None and mount.kind in _WITHOUT_DIRECT_READS:
        return -1, _WITHOUT_DIRECT_READS[mount.kind]
    kind = mount.kind if mount is not None else "this file system"
    if not hasattr(os, "O_DIRECT"):
        return -1, "this operating system has no O_DIRECT"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return -1, f"{kind} refuses O_DIRECT: {error.strerror}"
    try:
        # Some file systems open with O_DIRECT and refuse the first read.
        os.preadv(descriptor, [aligned_buffer(ALIGNMENT).numpy().data], 0)
    except OSError as error:
        os.close(descriptor)
        return -1, f"{kind} refuses direct reads: {error.strerror}"
    return descriptor, None
