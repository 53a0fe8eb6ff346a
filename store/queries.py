"""Reading and writing whole records, on a connection whose transaction the caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from probes.errors import StoreError
from store.codec import digest
from store.entries import Entry, RecordKind
from store.faults import DamagedStoreError
from store.kinds import Kept, rekept
from store.rows import put_together, take_apart
from store.schema import DEPENDENCIES, LINKS, MODELS, RECORDS, SAMPLES

_DAMAGED_HINT = "caee store check looks at all records; caee store delete removes one"

_MAKES = {
    RecordKind.PROBE: "caee probe",
    RecordKind.CALIBRATION: "caee calibrate",
    RecordKind.POLICY: "caee run --max-quality-drop 1%",
    RecordKind.RUN: "caee run",
    RecordKind.SIMULATION: "caee simulate",
}
_NEWEST_FIRST = (RECORDS.c.created_at.desc(), RECORDS.c.sequence.desc())


def insert(connection: sa.Connection, kept: Kept) -> bool:
    """Write a record; False if it is there already. Another record under the same id is a ``StoreError``."""
    if connection.scalar(sa.select(RECORDS.c.kind).where(RECORDS.c.record_id == kept.record_id)) is not None:
        _require_same(connection, kept)
        return False
    for table, rows in take_apart(kept).items():
        if rows:
            connection.execute(sa.insert(table), rows)
    return True


def _require_same(connection: sa.Connection, kept: Kept) -> None:
    (entry,) = _read_entries(connection, _ENTRIES.where(RECORDS.c.record_id == kept.record_id))
    if entry.kind is kept.kind:
        # Read and encoded anew: a record stored before its kind gained a field is the same record.
        found = rekept(entry.kind, entry.record_id, entry.created_at, document(connection, entry.record_id))
        if (found.created_at, found.document) == (kept.created_at, kept.document):
            return
    raise StoreError(
        f"another {entry.kind} is kept under the id {kept.record_id}",
        hint=f"to replace it, first: caee store delete {kept.record_id}",
    )


_ENTRIES = sa.select(RECORDS.c.kind, RECORDS.c.record_id, RECORDS.c.created_at, RECORDS.c.summary, RECORDS.c.size_bytes)


def _read_entries(connection: sa.Connection, statement: sa.Select[Any]) -> list[Entry]:
    return [_entry(**row._asdict()) for row in connection.execute(statement)]


def _entry(*, kind: str, record_id: str, **columns: Any) -> Entry:
    try:
        return Entry(kind=RecordKind(kind), record_id=record_id, **columns)
    except ValueError as error:
        raise DamagedStoreError(f"{record_id} is of an unknown kind, {kind!r}") from error


def entries(
    connection: sa.Connection, kind: RecordKind | None, machine: str | None = None, limit: int | None = None
) -> tuple[Entry, ...]:
    """What is kept, newest first; of one kind, and of one machine by its digest, where they are given."""
    statement = _of(_ENTRIES, kind, machine).order_by(*_NEWEST_FIRST).limit(limit)
    return tuple(_read_entries(connection, statement))


def find(
    connection: sa.Connection, kind: RecordKind | None, record_id: str | None, machine: str | None = None
) -> Entry:
    """The newest record of ``kind``, or the one whose id is, or alone begins with, ``record_id``."""
    wanted = "record" if kind is None else kind.value
    of_machine = "" if machine is None else " of this machine"
    if record_id is None:
        found = entries(connection, kind, machine, limit=1)
        if not found:
            hint = f"{_MAKES[kind]} makes one" if kind else None
            raise StoreError(f"no {wanted}{of_machine} is kept yet", hint=hint)
        return found[0]
    begins = sa.func.substr(RECORDS.c.record_id, 1, len(record_id)) == record_id
    statement = _of(_ENTRIES, kind, machine).where(begins).order_by(RECORDS.c.record_id)
    matches = _read_entries(connection, statement) if record_id else []
    exact = [entry for entry in matches if entry.record_id == record_id]
    if exact or len(matches) == 1:
        return (exact or matches)[0]
    if not matches:
        others = _read_entries(connection, _of(_ENTRIES, None, machine).where(begins)) if record_id else []
        if others:
            alone = "a simulation has a page of its own: give caee report its id alone"
            raise StoreError(
                f"{record_id!r} is the id of a {others[0].kind.value}, and a {wanted} is asked for",
                hint=alone if others[0].kind is RecordKind.SIMULATION else "caee store list shows what is kept",
            )
        raise StoreError(f"no {wanted}{of_machine} has the id {record_id!r}", hint="caee store list shows what is kept")
    named = ", ".join(entry.record_id for entry in matches[:5])
    raise StoreError(
        f"{len(matches)} ids begin with {record_id!r}: {named}{', …' if len(matches) > 5 else ''}",
        hint="write more of the id",
    )


def _of(statement: sa.Select[Any], kind: RecordKind | None, machine: str | None) -> sa.Select[Any]:
    if kind is not None:
        statement = statement.where(RECORDS.c.kind == kind.value)
    if machine is not None:
        statement = statement.where(RECORDS.c.machine == machine)
    return statement


def document(connection: sa.Connection, record_id: str) -> dict[str, Any]:
    """A record's whole document. Raises ``DamagedStoreError`` where it cannot be read, or is not what was saved."""
    (record,) = _rows(connection, RECORDS, RECORDS.c.record_id == record_id)
    try:
        found = put_together(
            record,
            links=_rows(connection, LINKS, LINKS.c.probe_id == record_id, LINKS.c.link),
            samples=_rows(connection, SAMPLES, SAMPLES.c.probe_id == record_id, SAMPLES.c.link, SAMPLES.c.position),
            models=_rows(connection, MODELS, MODELS.c.calibration_id == record_id, MODELS.c.position),
        )
        whole = digest(found) == record["sha256"]
    except (ValueError, TypeError, LookupError) as error:
        raise DamagedStoreError(
            f"{record_id} cannot be read: its rows are damaged ({error})",
            hint=_DAMAGED_HINT,
        ) from error
    if not whole:
        raise DamagedStoreError(f"{record_id} is damaged: its content is not what was saved", hint=_DAMAGED_HINT)
    return found


def _rows(
    connection: sa.Connection, table: sa.Table, where: sa.ColumnElement[bool], *order: sa.Column[Any]
) -> list[dict[str, Any]]:
    return [row._asdict() for row in connection.execute(sa.select(table).where(where).order_by(*order))]


def delete(connection: sa.Connection, record_ids: Sequence[str], *, force: bool) -> tuple[Entry, ...]:
    """Delete records with their rows; where others that stay were made from one, a ``StoreError``, unless ``force``."""
    chosen = {entry.record_id: entry for entry in (find(connection, None, record_id) for record_id in record_ids)}
    if not force:
        _refuse_needed(connection, list(chosen))
    connection.execute(sa.delete(RECORDS).where(RECORDS.c.record_id.in_(chosen)))
    return tuple(chosen.values())


def _refuse_needed(connection: sa.Connection, record_ids: list[str]) -> None:
    needed, by = DEPENDENCIES.c.needed_id, DEPENDENCIES.c.record_id
    statement = sa.select(needed, by).where(needed.in_(record_ids), by.not_in(record_ids)).order_by(needed, by)
    needs = connection.execute(statement).all()
    if needs:
        raise StoreError(
            "; ".join(f"{user} was made from {record_id}" for record_id, user in needs),
            hint="name those too, or add --force to delete without them",
        )
