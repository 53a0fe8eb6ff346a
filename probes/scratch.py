"""The file that disk reads are measured on: written for the probe, of known content, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from probes.content import FileContent
from probes.disk import DirectFile
from probes.errors import CaeeError
from probes.records import LinkMode
from probes.units import format_size

# Of the free space, this share may be used for a moment.
_FREE_SHARE = 4
_SMALLEST_BYTES = 32 << 20
_BLOCKS_PER_CHECK = 8


@dataclass(slots=True, kw_only=True)
class ScratchFile:
    """An open file without a name, so that even a killed probe leaves nothing behind.

    ``waived``: why there is none (no room, no permission); ``direct`` may be None alone, with ``not_direct``.
    """

    folder: Path
    content: FileContent | None = None
    direct: DirectFile | None = None
    buffered: DirectFile | None = None
    waived: str | None = None
    not_direct: str | None = None

    def file(self, mode: LinkMode) -> DirectFile | None:
        """The file to read in ``mode``, or None where that cannot be done here."""
        return self.direct if mode is LinkMode.DIRECT else self.buffered

    def close(self) -> None:
        """Give the space back."""
        for file in (self.direct, self.buffered):
            if file is not None:
                file.close()


def make_scratch(folder: Path, *, size_bytes: int, seconds: float, seed: int) -> ScratchFile:
    """Write up to ``size_bytes`` in ``folder`` within ``seconds``; whatever stands in the way becomes ``waived``."""
    try:
        room = shutil.disk_usage(folder).free // _FREE_SHARE
        if room < _SMALLEST_BYTES:
            return ScratchFile(folder=folder, waived=f"only {format_size(room * _FREE_SHARE)} are free in {folder}")
        return _write(folder, min(size_bytes, room), seconds, seed)
    except OSError as error:
        return ScratchFile(folder=folder, waived=f"no file can be written in {folder}: {error.strerror}")
    except CaeeError as error:
        return ScratchFile(folder=folder, waived=error.message)


def _write(folder: Path, size_bytes: int, seconds: float, seed: int) -> ScratchFile:
    deadline = time.monotonic() + seconds
    handle, name = tempfile.mkstemp(dir=folder, prefix=".caee-probe-", suffix=".bin")
    content = FileContent(size_bytes, seed=seed)
    written = 0
    try:
        with os.fdopen(handle, "wb", buffering=0) as stream:
            for number, block in enumerate(content.blocks(), start=1):
                written += stream.write(block.data)
                if number % _BLOCKS_PER_CHECK == 0:
                    # Written as it goes, so that the last sync is short and the deadline means something.
                    os.fdatasync(stream.fileno())
                    if time.monotonic() > deadline and written >= _SMALLEST_BYTES:
                        break
            os.fsync(stream.fileno())
        content.size_bytes = written
        direct = DirectFile(name)
        buffered = DirectFile(name, direct=False)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
    if direct.mode is LinkMode.DIRECT:
        return ScratchFile(folder=folder, content=content, direct=direct, buffered=buffered)
    direct.close()
    return ScratchFile(folder=folder, content=content, buffered=buffered, not_direct=direct.reason)
