"""Where the stand-ins for experts wait: a scratch file on the disk, or host memory.

Both hold at most so many distinct experts as there is room for; experts beyond them share their bytes. Which one an
expert of this device has: ``unit = (layer · own experts + place among them) mod units``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from probes.backend import Backend
from probes.disk import ALIGNMENT, DirectFile
from probes.errors import RunError
from probes.limits import memory_available_bytes
from probes.records import LinkMode
from probes.units import format_size
from runtime.experts.memory import Bytes, Staging, bytes_for
from runtime.experts.transfer import DISK_READERS, MEMORY_READERS, Deliver, parts_of
from runtime.policy.types import Ints
from runtime.tracerun.content import ExpertContent

MOST_SCRATCH_BYTES = 2 << 30
"""Of all ranks of a host together: enough to be far from any cache of the disk's own, written within seconds."""
_SHARE_OF_FREE = 4
SYNC_BYTES = 256 << 20
"""Ranks wait for each other whenever so much is written, so that none waits for longer than an exchange may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Which of ``count`` stand-ins an expert of this device has. ``own``: the device's experts of a layer, which are
    neighbours."""

    count: int
    own: Ints

    def of(self, layer: int, expert: int) -> int:
        return (layer * len(self.own) + expert - int(self.own[0])) % self.count


def how_many_units(wanted: int, unit_bytes: int, room: int, where: str) -> int:
    """As many of ``wanted`` distinct experts as fit ``room``. Raises ``RunError`` where not even one does."""
    if room < unit_bytes:
        raise RunError(
            f"an expert of {format_size(unit_bytes)} does not fit {where}: {format_size(room)} may be used there",
            hint="free some space, or choose another folder with --disk-path"
            if "disk" in where
            else "close other programs, or choose --tier disk",
        )
    return min(wanted, room // unit_bytes)


def disk_room(folder: Path, ranks_here: int) -> int:
    """Bytes that one rank may write in ``folder``. Raises ``RunError`` where that is no folder."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RunError(f"cannot write in {folder}: {error.strerror}", hint="choose another --disk-path") from error
    return min(MOST_SCRATCH_BYTES, free // _SHARE_OF_FREE) // ranks_here


def memory_room(taken_bytes: int, ranks_here: int) -> int:
    """Host memory that one rank may keep stand-ins in, half of what is left beside ``taken_bytes`` of its own."""
    return max(0, memory_available_bytes() // ranks_here - taken_bytes) // 2


class ScratchSource:
    """Stand-ins in a file in ``folder``, read past the page cache where that is possible.

    The file has no name any more once this is made: even a killed run leaves nothing behind. ``in_step`` is called
    each time a further part is on the disk, equally often on all ranks with equally many units. Raises ``RunError``
    where the file cannot be written.
    """

    cpu_readers = DISK_READERS

    def __init__(
        self,
        folder: Path,
        content: ExpertContent,
        units: Units,
        *,
        in_step: Callable[[], None],
        part_bytes: int | None = None,
    ) -> None:
        """``part_bytes`` as in ``DiskSource``."""
        self._units = units
        self._part_bytes = part_bytes
        self._size = content.size_bytes
        self._stride = -(-content.size_bytes // ALIGNMENT) * ALIGNMENT
        name: str | None = None
        try:
            handle, name = tempfile.mkstemp(dir=folder, prefix=".caee-run-", suffix=".bin")
            self._write(handle, content, in_step)
            self._file = DirectFile(name)
        except OSError as error:
            raise RunError(
                f"writing {format_size(units.count * self._stride)} in {folder} failed: {error.strerror}",
                hint="free some space, or choose another folder with --disk-path",
            ) from error
        finally:
            if name is not None:
                with contextlib.suppress(FileNotFoundError):
                    Path(name).unlink()
        self.mode: LinkMode | None = self._file.mode
        self.reason = self._file.reason

    def _write(self, handle: int, content: ExpertContent, in_step: Callable[[], None]) -> None:
        per_sync = max(1, SYNC_BYTES // self._stride)
        with os.fdopen(handle, "wb", buffering=0) as stream:
            for unit in range(self._units.count):
                stream.seek(unit * self._stride)
                view = content.unit(unit).view(np.uint8).data
                while len(view):
                    view = view[stream.write(view) :]
                if (unit + 1) % per_sync == 0 or unit + 1 == self._units.count:
                    os.fdatasync(stream.fileno())
                    # Pages that stay would be counted against the memory that slots need.
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    in_step()
            stream.truncate(self._units.count * self._stride)

    def deliver(self, layer: int, expert: int, staging: Staging | None, deliver: Deliver) -> None:
        assert staging is not None
        offset = self._units.of(layer, expert) * self._stride
        for start, size in parts_of(offset, self._size, self._part_bytes):
            lead = self._file.read_span(offset + start, size, staging.filled)
            deliver((), staging.given[lead : lead + size], start)

    def staging_bytes(self) -> int:
        return self._stride if self._part_bytes is None else min(self._stride, self._part_bytes)

    def close(self) -> None:
        self._file.close()


class MemorySource:
    """Stand-ins in (pinned) host memory, of which experts take turns."""

    cpu_readers = MEMORY_READERS

    def __init__(self, content: ExpertContent, units: Units, backend: Backend, *, in_step: Callable[[], None]) -> None:
        self._units = units
        self._buffers: list[Bytes] = []
        per_sync = max(1, SYNC_BYTES // content.size_bytes)
        for unit in range(units.count):
            buffer = backend.host_buffer(content.size_bytes, pinned=True)
            buffer.copy_(torch.from_numpy(content.unit(unit)).view(torch.uint8))
            self._buffers.append(bytes_for(backend.device, buffer))
            if (unit + 1) % per_sync == 0 or unit + 1 == units.count:
                in_step()
        self.mode: LinkMode | None = None if backend.device.type == "cpu" else LinkMode.PINNED
        self.reason: str | None = None

    def deliver(self, layer: int, expert: int, staging: Staging | None, deliver: Deliver) -> None:
        deliver((), self._buffers[self._units.of(layer, expert)], 0)

    def staging_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._buffers.clear()
