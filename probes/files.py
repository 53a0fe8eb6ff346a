"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from probes.errors import InputError, UsageError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def written_whole(path: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path``; it takes the place of ``path`` only when the block ends well.

    An existing file is refused unless ``force``. Raises ``UsageError`` and ``InputError``.
    """
    handle, temporary = _temporary_beside(path, force=force)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise InputError(
                f"cannot write {path}: {error.strerror}", hint="free some space, or write to another disk"
            ) from error
        raise


def require_writable(path: Path, *, force: bool = False) -> None:
    """Raise now what ``written_whole`` would raise when it begins; nothing is left behind.

    For work that takes long before it writes.
    """
    handle, temporary = _temporary_beside(path, force=force)
    os.close(handle)
    temporary.unlink()


def _temporary_beside(path: Path, *, force: bool) -> tuple[int, Path]:
    """An open file in the folder of ``path``, which a file may be written to."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint="give the name of a file")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is a device or a pipe, not a file", hint="give the name of a file")
        if path.exists() and not force:
            raise UsageError(f"{path} exists already", hint="choose another name, or add --force to replace it")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise InputError(
            f"cannot write in {path.parent}: {error.strerror}", hint="choose a folder that exists and is writable"
        ) from error
    return handle, Path(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
