"""Is the store sound? The database as such, then every record in it, then what they refer to."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from probes.errors import StoreError
from store import queries
from store.database import Database
from store.entries import Problem
from store.faults import DamagedStoreError
from store.kinds import Kept, rekept
from store.rows import take_apart
from store.schema import DEPENDENCIES, LINKS, POLICIES, RECORDS, RUNS

_MOST_FINDINGS = 20
_COPIES = (
    (DEPENDENCIES, DEPENDENCIES.c.record_id, ("needed_id",)),
    (LINKS, LINKS.c.probe_id, ("bandwidth_median_bytes_per_s",)),
    (POLICIES, POLICIES.c.policy_id, tuple(column.name for column in POLICIES.columns)),
    (RUNS, RUNS.c.run_id, tuple(column.name for column in RUNS.columns)),
)


def check(database: Database) -> tuple[Problem, ...]:
    """All problems found. Raises ``StoreError`` only where the store cannot be looked at (locked, no permission)."""
    problems: list[Problem] = []
    try:
        with database.transaction() as connection:
            if connection.dialect.name == "sqlite":
                problems += _sqlite_problems(connection)
            record_ids = connection.scalars(sa.select(RECORDS.c.record_id).order_by(RECORDS.c.sequence)).all()
        for record_id in record_ids:
            problems += _record_problems(database, record_id)
        with database.transaction() as connection:
            problems += _dangling(connection)
    except DamagedStoreError as error:
        problems.append(Problem(record_id=None, message=error.message, damage=True))
    return tuple(problems)


def _sqlite_problems(connection: sa.Connection) -> Iterator[Problem]:
    for (finding,) in connection.exec_driver_sql(f"PRAGMA integrity_check({_MOST_FINDINGS})"):
        if finding != "ok":
            yield Problem(record_id=None, message=f"SQLite's integrity check: {finding}", damage=True)
    for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_MOST_FINDINGS):
        yield Problem(record_id=None, message=f"row {row} of {table} belongs to nothing in {parent}", damage=True)


def _record_problems(database: Database, record_id: str) -> list[Problem]:
    """A transaction for each record: a damaged page may spoil one and leave the others readable."""
    try:
        with database.transaction() as connection:
            message = _record_fault(connection, record_id)
    except DamagedStoreError as error:
        message = error.message
    return [] if message is None else [Problem(record_id=record_id, message=message, damage=True)]


def _record_fault(connection: sa.Connection, record_id: str) -> str | None:
    if connection.scalar(sa.select(RECORDS.c.record_id).where(RECORDS.c.record_id == record_id)) is None:
        return None  # another process has deleted it since
    entry = queries.find(connection, None, record_id)
    document = queries.document(connection, record_id)
    try:
        kept = rekept(entry.kind, record_id, entry.created_at, document)
    except StoreError as error:
        return f"its document does not fit: {error.message}"
    return _copies_fault(connection, kept)


def _copies_fault(connection: sa.Connection, kept: Kept) -> str | None:
    """Columns that repeat what the document says must say the same."""
    expected = take_apart(kept)
    for table, owner, names in _COPIES:
        statement = sa.select(*(table.c[name] for name in names)).where(owner == kept.record_id)
        found = connection.execute(statement.order_by(*table.primary_key.columns)).all()
        if [tuple(row) for row in found] != [tuple(row[name] for name in names) for row in expected[table]]:
            return f"its rows in the table {table.name} do not agree with its document"
    return None


def _dangling(connection: sa.Connection) -> Iterator[Problem]:
    statement = (
        sa.select(DEPENDENCIES.c.record_id, DEPENDENCIES.c.needed_id)
        .outerjoin(RECORDS, RECORDS.c.record_id == DEPENDENCIES.c.needed_id)
        .where(RECORDS.c.record_id.is_(None))
        .order_by(DEPENDENCIES.c.record_id)
    )
    for record_id, needed_id in connection.execute(statement):
        message = f"it was made from {needed_id}, which is not kept here"
        yield Problem(record_id=record_id, message=message, damage=False)
