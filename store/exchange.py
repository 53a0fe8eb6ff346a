"""Moving records between machines, as one JSON document (``caee.export/1``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from probes.errors import InputError, StoreError
from probes.files import written_whole
from store import queries
from store.codec import decode, encode, from_text
from store.entries import Entry, Imported, RecordKind
from store.kinds import Kept, rekept
from store.schema import DEPENDENCIES, RECORDS

SCHEMA = "caee.export/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRecord:
    """One record of an export."""

    kind: RecordKind
    record_id: str
    created_at: str
    document: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The whole file."""

    schema: str
    records: tuple[ExportedRecord, ...]


def export(connection: sa.Connection, record_ids: Sequence[str]) -> dict[str, Any]:
    """The records with those ids, and all that they were made from, each once and before what needs it."""
    chosen: dict[str, Entry] = {}
    waiting = [queries.find(connection, None, record_id) for record_id in record_ids]
    while waiting:
        entry = waiting.pop()
        if entry.record_id not in chosen:
            chosen[entry.record_id] = entry
            waiting += [queries.find(connection, None, needed) for needed in _kept_needs(connection, entry.record_id)]
    order = list(RecordKind)
    entries = sorted(chosen.values(), key=lambda entry: (order.index(entry.kind), entry.created_at, entry.record_id))
    records = tuple(
        ExportedRecord(
            kind=entry.kind,
            record_id=entry.record_id,
            created_at=entry.created_at,
            document=queries.document(connection, entry.record_id),
        )
        for entry in entries
    )
    document: dict[str, Any] = encode(Export(schema=SCHEMA, records=records))
    return document


def _kept_needs(connection: sa.Connection, record_id: str) -> Sequence[str]:
    joined = DEPENDENCIES.join(RECORDS, RECORDS.c.record_id == DEPENDENCIES.c.needed_id)
    statement = sa.select(DEPENDENCIES.c.needed_id).select_from(joined)
    return connection.scalars(statement.where(DEPENDENCIES.c.record_id == record_id)).all()


def import_document(connection: sa.Connection, document: Any) -> Imported:
    """Add the records of an export. Raises ``InputError`` and ``StoreError``; then the caller's transaction ends."""
    added: list[str] = []
    present: list[str] = []
    for kept in _records(document):
        (added if queries.insert(connection, kept) else present).append(kept.record_id)
    return Imported(added=tuple(added), present=tuple(present))


def _records(document: Any) -> list[Kept]:
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise InputError(
            f"this is no export of caee ({SCHEMA}): its schema is {found!r}",
            hint="caee store export writes one; caee calibrate --import reads other tools' measurements",
        )
    try:
        exported = decode(document, Export)
    except StoreError as error:
        raise InputError(f"the export is damaged: {error.message}") from error
    kept = []
    for record in exported.records:
        try:
            kept.append(rekept(record.kind, record.record_id, record.created_at, record.document))
        except StoreError as error:
            raise InputError(f"the export is damaged at {record.kind} {record.record_id}: {error.message}") from error
    return kept


def read_export(path: Path) -> Any:
    """The JSON document in a file. Raises ``InputError`` where it cannot be read or is not JSON."""
    try:
        return from_text(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", hint="name a file that caee store export wrote") from error


def write_export(path: Path, document: dict[str, Any], *, force: bool = False) -> None:
    """Write an export whole or not at all. Raises ``UsageError`` where ``path`` exists and ``force`` is not set."""
    with written_whole(path, force=force) as stream:
        stream.write((json.dumps(document, allow_nan=False, indent=1) + "\n").encode())
