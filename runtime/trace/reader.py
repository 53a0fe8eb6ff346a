"""Reading traces of the project's own format: a Parquet file, or the pieces of an interrupted recording."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from probes.errors import TraceError
from runtime.trace.check import check_chunk
from runtime.trace.chunking import SequenceTable, join
from runtime.trace.columns import from_table, schema_of, token_columns, tokens_from_table
from runtime.trace.metadata import LOAD_PROFILE, METADATA_KEY, meta_from_json
from runtime.trace.records import RoutingTrace, TraceMeta


def partial_folder(path: Path) -> Path:
    """Where the pieces of a recording to ``path`` lie until it is closed."""
    return path.parent / f"{path.name}.partial"


def recorded_file(folder: Path) -> Path:
    """The file that the pieces in ``folder`` were to become."""
    return folder.parent / folder.name.removesuffix(".partial")


def holds_pieces(folder: Path) -> bool:
    """Whether ``folder`` is a recording: one that is absent, or that no piece was written into, is none."""
    return folder.is_dir() and any(_piece_number(entry.name) is not None for entry in folder.iterdir())


def in_the_way(folder: Path) -> bool:
    """Whether ``folder`` is no folder, or holds anything but pieces and what was left of one that was being written."""
    if not folder.is_dir():
        return folder.exists()
    names = [entry.name for entry in folder.iterdir()]
    return any(_piece_number(name) is None and not (name[0] == "." and name.endswith(".part")) for name in names)


class TraceReader:
    """A routing trace of the project's own format, as a stream of chunks, one per row group (a ``TraceSource``).

    ``path``: the Parquet file, or a recording's ``.partial`` folder; of a recording that was interrupted the folder is
    read where the file is missing, up to the first piece that is missing or damaged. ``left_out`` says what that
    leaves out, and is None where all was read. Raises ``TraceError``.
    """

    def __init__(self, path: Path) -> None:
        folder = partial_folder(path)
        self._notes: tuple[str, ...] = ()
        if not path.exists() and holds_pieces(folder):
            path = folder
        self.left_out: str | None = None
        self._pieces: tuple[Path, ...] = (path,)
        if path.is_dir():
            self._pieces, self.left_out = complete_pieces(path)
            left_out = (self.left_out,) if self.left_out else ()
            self._notes = (f"{path} is an interrupted recording: read up to its last complete piece", *left_out)
        self.meta, self.tokens = _agreed(self._pieces)
        self._read = 0

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    @property
    def fraction_read(self) -> float:
        return self._read / self.tokens if self.tokens else 1.0

    def chunks(self) -> Iterator[RoutingTrace]:
        """The trace's chunks in file order, each checked."""
        sequences = SequenceTable()
        self._read = 0
        for piece in self._pieces:
            with open_parquet(piece) as parquet:
                for group in range(parquet.num_row_groups):
                    where = f"{piece}, row group {group}"
                    chunk = from_table(read_group(parquet, group, where), self.meta, sequences, where)
                    check_chunk(chunk, first_token=self._read)
                    self._read += chunk.tokens
                    yield chunk

    def token_chunks(self) -> Iterator[RoutingTrace]:
        """What the tokens are, without their routing (no layer): a quick look before a plan is made."""
        sequences = SequenceTable()
        for piece in self._pieces:
            with open_parquet(piece) as parquet:
                for group in range(parquet.num_row_groups):
                    table = read_group(parquet, group, f"{piece}, row group {group}", token_columns())
                    yield tokens_from_table(table, self.meta, sequences)


def read_trace(path: Path) -> RoutingTrace:
    """The whole trace in memory (6 bytes per choice). Raises ``TraceError``, also where it holds no token."""
    chunks = list(TraceReader(path).chunks())
    if not chunks:
        raise TraceError(f"{path} holds no token")
    return join(chunks)


def open_parquet(path: Path) -> Any:
    """The ``pyarrow.parquet.ParquetFile``, or ``TraceError`` that says why not."""
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise TraceError(f"{path} does not exist", hint="check the path") from error
    except (OSError, pa.ArrowException) as error:
        raise TraceError(
            f"{path} is not a complete Parquet file ({_first_line(error)})",
            hint="it was cut off or damaged; copy, record or import it again",
        ) from error


def read_group(parquet: Any, group: int, where: str, columns: list[str] | None = None) -> Any:
    """One row group as a ``pyarrow.Table``, all ``columns`` or some, or ``TraceError`` naming ``where``."""
    try:
        return parquet.read_row_group(group, columns)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{where}: damaged ({_first_line(error)})", hint="copy, record or import it again") from error


def metadata_of(parquet: Any, path: Path) -> tuple[str, TraceMeta, dict[str, Any]]:
    """Kind of trace, metadata and further keys of an open file. Raises ``TraceError``."""
    text = (parquet.schema_arrow.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise TraceError(
            f"{path} is a Parquet file, but not a routing trace (no {METADATA_KEY.decode()} metadata)",
            hint="make one with caee trace import or caee trace record",
        )
    return meta_from_json(text, str(path))


def _agreed(pieces: tuple[Path, ...]) -> tuple[TraceMeta, int]:
    """The metadata that all pieces share, and how many tokens they hold."""
    first: TraceMeta | None = None
    rows = 0
    for piece in pieces:
        with open_parquet(piece) as parquet:
            kind, meta, _ = metadata_of(parquet, piece)
            if kind == LOAD_PROFILE:
                raise TraceError(
                    f"{piece} is a load profile: it has counts, but no tokens",
                    hint="caee trace show FILE shows it; for tokens, make a trace with caee trace synth --profile FILE",
                )
            _check_columns(parquet.schema_arrow, meta, piece)
            rows += parquet.metadata.num_rows
        if first is not None and meta != first:
            raise TraceError(f"{piece} belongs to another recording: its metadata differs from {pieces[0]}")
        first = meta
    assert first is not None
    return first, rows // first.moe_layers


def _check_columns(schema: pa.Schema, meta: TraceMeta, path: Path) -> None:
    for field in schema_of(meta, {}):
        if field.name not in schema.names or not schema.field(field.name).type.equals(field.type):
            raise TraceError(
                f"{path}: column {field.name!r} ({field.type}) is missing or of another type",
                hint="the file was written by another program, or changed; import the original again",
            )


def piece_name(number: int) -> str:
    """File name of a recording's piece, from 0 on."""
    return f"{number:08d}.parquet"


def complete_pieces(folder: Path) -> tuple[tuple[Path, ...], str | None]:
    """A recording's pieces up to the first that is missing or damaged, and a sentence on what that leaves out.

    What follows a gap is left out even where it is whole: a sequence would go on without the tokens between. Every
    piece is read once. Raises ``TraceError`` where there is no complete piece to begin with.
    """
    found = sorted(number for name in folder.iterdir() if (number := _piece_number(name.name)) is not None)
    complete: list[Path] = []
    fault = None
    for number in range(found[-1] + 1 if found else 0):
        piece = folder / piece_name(number)
        fault = _damage(piece) if number in found else "is missing"
        if fault:
            break
        complete.append(piece)
    if not complete:
        reason = f": {piece_name(0)} {fault}" if fault else ""
        raise TraceError(
            f"{folder} holds no complete piece of a recording{reason}", hint="nothing can be recovered from it"
        )
    if not fault:
        return tuple(complete), None
    broken = len(complete)
    after = sum(number > broken for number in found)
    rest = f"; the {after} after it {'is' if after == 1 else 'are'} left out with it" if after else ""
    return tuple(complete), f"left out: {piece_name(broken)}, which {fault}{rest}"


def _piece_number(name: str) -> int | None:
    digits = name.removesuffix(".parquet")
    return int(digits) if digits.isascii() and digits.isdigit() and piece_name(int(digits)) == name else None


def _damage(piece: Path) -> str | None:
    """What is wrong with a piece, or None: all of it is read, as a whole index says nothing of the pages."""
    try:
        with open_parquet(piece) as parquet:
            _, meta, _ = metadata_of(parquet, piece)
            _check_columns(parquet.schema_arrow, meta, piece)
            for group in range(parquet.num_row_groups):
                where = f"{piece}, row group {group}"
                check_chunk(from_table(read_group(parquet, group, where), meta, SequenceTable(), where))
    except TraceError as error:
        return f"is damaged ({error.message.removeprefix(str(piece)).lstrip(' ,:').removeprefix('is ')})"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
