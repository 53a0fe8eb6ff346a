"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from probes.errors import InputError, UsageError


@contextlib.contextmanager
def written_whole(path: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path``; it takes the place of ``path`` only when the block ends well.

    An existing file is refused unless ``force``. Raises ``UsageError`` and ``InputError``.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give the name of a file")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already", hint="choose another name, or add --force to replace it")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise InputError(
            f"cannot write in {path.parent}: {error.strerror}", hint="choose a folder that exists and is writable"
        ) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
