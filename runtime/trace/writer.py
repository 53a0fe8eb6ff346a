"""Writing traces: whole or not at all, or, while a model runs, piece by piece so that a crash loses little.

A Parquet file's index stands at its end, so a file that is being written cannot be read. A recording therefore goes
into a folder ``NAME.partial`` of small complete Parquet files, each with the metadata, each renamed into place when it
is on the disk, after so many tokens or so long a time; closing it joins them into ``NAME``. After a crash the folder
is a trace that holds everything up to the last complete piece: ``TraceReader`` opens it as it is, ``recover`` turns it
into a file. Where a piece is damaged or missing both read what comes before it, and say what is left out.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pyarrow.parquet as pq

from probes.errors import InputError, TraceError, UsageError
from probes.files import require_writable, written_whole
from runtime.trace.check import check_chunk, check_meta
from runtime.trace.chunking import ChunkBuffer, tokens_per_chunk
from runtime.trace.columns import encodings, schema_of, to_table
from runtime.trace.metadata import METADATA_KEY, ROUTING, meta_to_json
from runtime.trace.reader import (
    TraceReader,
    holds_pieces,
    in_the_way,
    partial_folder,
    piece_name,
    recorded_file,
)
from runtime.trace.records import RoutingTrace, TraceMeta, TraceSource

PIECE_SECONDS = 2.0


class TraceWriter:
    """Writes a trace to ``path``, which appears only if the ``with`` block ends well.

    ``write`` takes chunks of any size, checks them (``TraceError``) and writes row groups of bounded size. An existing
    file is refused unless ``force``.
    """

    def __init__(self, path: Path, meta: TraceMeta, *, force: bool = False) -> None:
        check_meta(meta)
        self._path = path
        self._force = force
        self._rows = _RowGroups(path, meta)
        self._stack = ExitStack()
        self.tokens = 0

    def __enter__(self) -> Self:
        stream = self._stack.enter_context(written_whole(self._path, force=self._force))
        self._rows.open(stream)
        return self

    def write(self, chunk: RoutingTrace) -> None:
        """Append the chunk's tokens."""
        check_chunk(chunk, first_token=self.tokens)
        self._rows.add(chunk)
        self.tokens += chunk.tokens

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._rows.close()
            except BaseException as failure:
                self._stack.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._stack.__exit__(kind, error, traceback)


class TraceRecorder:
    """Writes a live recording to ``path`` so that a crash loses little: a piece is written once ``piece_tokens`` tokens
    are held, or ``piece_seconds`` have passed since the last one.

    ``piece_tokens`` defaults to a full row group (about a million choices); fewer are safer and cost file size.

    ``write`` costs little: it keeps the chunk until a piece is ``due``, which it finds out itself; whoever collects
    before writing asks. ``close`` (or the end of the ``with`` block) joins the pieces into ``path``; an error or an
    interrupt does so too, except that before the first token it leaves nothing. ``tokens``: handed over; once it is
    closed, in ``path``. One thread may use it. ``clock`` gives seconds.
    """

    def __init__(
        self,
        path: Path,
        meta: TraceMeta,
        *,
        piece_tokens: int | None = None,
        piece_seconds: float = PIECE_SECONDS,
        force: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_meta(meta)
        self._path = path
        self._folder = partial_folder(path)
        self._meta = meta
        self._force = force
        self._buffer = ChunkBuffer(min(piece_tokens or tokens_per_chunk(meta), tokens_per_chunk(meta)))
        self._pieces = 0
        # Whether all that was handed over is in a piece or held: an interrupted write may have lost some between.
        self._whole = True
        self._closed = False
        self.tokens = 0
        refuse_existing(path, force=force)
        drop_pieces(path)
        try:
            self._folder.mkdir()
        except OSError as error:
            raise InputError(
                f"cannot write in {path.parent}: {error.strerror}", hint="choose a writable folder"
            ) from error
        self._piece_seconds = piece_seconds
        self._clock = clock
        self._last_piece = clock()

    def __enter__(self) -> Self:
        return self

    @property
    def due(self) -> bool:
        """Whether what is held should be written now, however little it is."""
        return self._clock() - self._last_piece >= self._piece_seconds

    def write(self, chunk: RoutingTrace) -> None:
        """Append the chunk's tokens; the arrays must not be changed afterwards."""
        check_chunk(chunk, first_token=self.tokens)
        self._whole = False
        self.tokens += chunk.tokens
        for full in self._buffer.add(chunk):
            self._write_piece(full)
        if self.due:
            self._write_rest()
        self._whole = True

    def close(self, *, keep_empty: bool = True) -> None:
        """Write what is held and join the pieces into ``path``; further calls do nothing.

        ``keep_empty``: a recording without a token becomes an empty trace; else it leaves nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._whole:
            self._write_rest()
        if holds_pieces(self._folder):
            reader = TraceReader(self._folder)
            if reader.left_out:
                raise TraceError(
                    f"{self._folder} was damaged while it was written; {reader.left_out}",
                    hint=f"keep what is whole with: caee trace import {self._folder} -o OTHER.parquet",
                )
            self.tokens = write_trace(self._path, reader, force=self._force)
        else:
            self.tokens = 0
            if keep_empty:
                with TraceWriter(self._path, self._meta, force=self._force):
                    pass
        drop_pieces(self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(keep_empty=kind is None)

    def _write_rest(self) -> None:
        for rest in self._buffer.rest():
            self._write_piece(rest)

    def _write_piece(self, chunk: RoutingTrace) -> None:
        with written_whole(self._folder / piece_name(self._pieces)) as stream:
            rows = _RowGroups(self._folder, self._meta)
            rows.open(stream)
            rows.add(chunk)
            rows.close()
        self._pieces += 1
        self._last_piece = self._clock()


class _RowGroups:
    """The Parquet side of both writers: row groups of bounded size in one stream."""

    def __init__(self, path: Path, meta: TraceMeta) -> None:
        self._path = path
        self._schema = schema_of(meta, {METADATA_KEY: meta_to_json(meta, ROUTING)})
        self._buffer = ChunkBuffer(tokens_per_chunk(meta))
        self._writer: Any = None
        self._stream: IO[bytes] | None = None

    def open(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def add(self, chunk: RoutingTrace) -> None:
        for full in self._buffer.add(chunk):
            self._write(full)

    def close(self) -> None:
        for last in self._buffer.rest():
            self._write(last)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._stream, self._schema)
        self._writer.close()

    def _write(self, chunk: RoutingTrace) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._stream, self._schema, **encodings(chunk))
        table = to_table(chunk, self._schema)
        try:
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        except OSError as error:
            self._writer.is_open = False  # or it would write its end into a closed file when it is collected
            raise InputError(
                f"cannot write {self._path}: {error.strerror or error}",
                hint="free some disk space, or write elsewhere",
            ) from error


def write_trace(
    path: Path, source: TraceSource, *, force: bool = False, on_progress: Callable[[float], None] | None = None
) -> int:
    """Stream a trace into a file of its own; returns how many tokens it holds.

    ``on_progress`` is told the fraction of the source that was read. Raises ``TraceError``, ``UsageError``.
    """
    with TraceWriter(path, source.meta, force=force) as writer:
        for chunk in source.chunks():
            writer.write(chunk)
            if on_progress is not None:
                on_progress(source.fraction_read)
    return writer.tokens


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise where a recording to ``path`` cannot be written, or where it would replace a file or the pieces of another
    and ``force`` is not set: ``UsageError``, ``InputError``.

    ``TraceRecorder`` asks this itself; whoever loads a model first wants to know before.
    """
    require_writable(path, force=force)
    folder = partial_folder(path)
    if in_the_way(folder):
        raise UsageError(
            f"{folder}, where the recording's pieces go, is there already and holds something else",
            hint="move it away, or choose another name",
        )
    if holds_pieces(folder) and not force:
        raise UsageError(
            f"{folder} holds an interrupted recording",
            hint=f"keep it with: caee trace import {folder} -o OTHER.parquet; or add --force to drop it",
        )


def drop_pieces(path: Path) -> None:
    """Remove what a recording to ``path`` has left beside it, if anything."""
    if partial_folder(path).is_dir():
        shutil.rmtree(partial_folder(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """How many tokens were saved, and what was not, as ``TraceReader.left_out`` says it."""

    tokens: int
    left_out: str | None


def recover(path: Path, *, force: bool = False) -> Recovered:
    """Turn the interrupted recording of ``path`` into ``path``.

    ``path`` is the file that was to be written, or its ``.partial`` folder. The folder goes once the file is complete,
    unless something in it was left out. Raises ``TraceError`` where there is nothing to recover.
    """
    folder = path if path.is_dir() else partial_folder(path)
    reader = TraceReader(folder)
    tokens = write_trace(recorded_file(folder), reader, force=force)
    if reader.left_out is None:
        drop_pieces(recorded_file(folder))
    return Recovered(tokens=tokens, left_out=reader.left_out)
