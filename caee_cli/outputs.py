"""What is asked of an output before any work is done for it: that it can be written, and that nothing goes by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path


def check_output(
    output: Path | None, *, force: bool, inputs: Iterable[Path | None] = (), store: str | None = None
) -> None:
    """Raise now what writing the file ``output`` would raise later, and what ``refuse_overwriting`` raises.

    ``output`` None: nothing is written. Raises ``UsageError`` and ``InputError``.
    """
    from probes.files import require_writable

    if output is not None:
        refuse_overwriting(output, inputs=inputs, store=store)
        require_writable(output, force=force)


def refuse_overwriting(output: Path, *, inputs: Iterable[Path | None] = (), store: str | None = None) -> None:
    """Raise ``UsageError`` where ``output`` is a file that the command reads, or the store, by whatever name or link.

    ``inputs``: files, or folders that stand for the files in them; None: not given. ``store``: as ``--store`` takes
    it; None: the one that is used without.
    """
    from probes.errors import UsageError

    with contextlib.suppress(OSError):  # what cannot be looked at is refused when it is read or written
        for given in inputs:
            for file in _files(given):
                if _same(file, output):
                    named = "" if file == output else f" ({file})"
                    raise UsageError(f"{output} is what the command reads{named}", hint="choose another name")
        for file in _store_files(store):
            if _same(file, output):
                raise UsageError(f"{output} is the store's own file", hint="choose another name")


def _files(given: Path | None) -> Iterator[Path]:
    if given is None or not given.exists():
        return
    yield from (file for file in given.iterdir() if file.exists()) if given.is_dir() else (given,)


def _store_files(store: str | None) -> Iterator[Path]:
    """SQLite keeps what was written last in files beside the database."""
    from probes.errors import StoreError
    from store.location import resolve, sqlite_file

    file = None
    with contextlib.suppress(StoreError):  # which is said when the store is opened
        file = sqlite_file(resolve(store))
    if file is not None:
        yield from (file.parent / (file.name + ending) for ending in ("", "-wal", "-shm", "-journal"))


def _same(file: Path, output: Path) -> bool:
    """Also of what is not there yet: where SQLite will look for a journal, nothing else may lie."""
    there = file.exists() and output.exists()
    return file.samefile(output) if there else file.resolve() == output.resolve()
