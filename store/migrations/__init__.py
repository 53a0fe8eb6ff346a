"""The schema's history: numbered steps, each applied once, in order, in the same transaction as its own record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from store.migrations import m0001_records, m0002_replays, m0003_policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """``upgrade`` takes the schema from ``version − 1`` to ``version``; it is never changed once released."""

    version: int
    name: str
    upgrade: Callable[[sa.Connection], None]


MIGRATIONS: tuple[Migration, ...] = (
    Migration(version=1, name="records", upgrade=m0001_records.upgrade),
    Migration(version=2, name="replays", upgrade=m0002_replays.upgrade),
    Migration(version=3, name="policies", upgrade=m0003_policies.upgrade),
)

_APPLIED = sa.Table(
    "schema_migrations",
    sa.MetaData(),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("applied_at", sa.String(64), nullable=False),
)


def latest_version() -> int:
    """The schema version that this code reads and writes."""
    return MIGRATIONS[-1].version


def schema_version(connection: sa.Connection) -> int:
    """The version of the database's schema; 0 for an empty database."""
    if not sa.inspect(connection).has_table(_APPLIED.name):
        return 0
    return connection.scalar(sa.select(sa.func.max(_APPLIED.c.version))) or 0


def touch(connection: sa.Connection) -> None:
    """Change something, for a transaction that is not kept: SQLite writes nothing where a row stays what it was."""
    connection.execute(sa.update(_APPLIED).values(name=_APPLIED.c.name + "~"))


def migrate(connection: sa.Connection) -> None:
    """Apply what is missing, inside the caller's transaction: all of it, or nothing if a step fails."""
    _APPLIED.create(connection, checkfirst=True)
    version = schema_version(connection)
    for migration in MIGRATIONS:
        if migration.version > version:
            migration.upgrade(connection)
            applied_at = datetime.now(UTC).isoformat(timespec="seconds")
            row = {"version": migration.version, "name": migration.name, "applied_at": applied_at}
            connection.execute(sa.insert(_APPLIED).values(row))
