"""What happens when a store is opened: whose is it, how old is it, bring it up to date."""

from __future__ import annotations

import sqlalchemy as sa

from probes.errors import StoreError
from store import migrations
from store.database import Database
from store.faults import DamagedStoreError

# Says to SQLite (and to `file`) whose database this is: "caee" in ASCII.
APPLICATION_ID = 0x63616565
# Looking at all pages takes some tens of milliseconds at this size: larger stores are checked when that is asked for.
QUICKLY_CHECKED_BYTES = 32 << 20


def bring_up_to_date(database: Database) -> None:
    """Apply the migrations that are missing. Raises ``StoreError`` where the schema is newer, or another program's."""
    with database.transaction() as connection:
        if connection.dialect.name == "sqlite":
            _refuse_foreign(connection, database.location)
        version = migrations.schema_version(connection)
    latest = migrations.latest_version()
    if version > latest:
        raise StoreError(
            f"the store {database.location} has schema {version}; this version of caee knows {latest}",
            hint="update caee, or keep another store with --store PATH",
        )
    if version < latest:
        with database.transaction(writes=True) as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
            migrations.migrate(connection)


def refuse_damaged(database: Database) -> None:
    """Raise ``DamagedStoreError`` where a small SQLite file's pages are not sound: before anything is added to them."""
    with database.transaction() as connection:
        if connection.dialect.name != "sqlite":
            return
        pages, page_bytes = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("page_count", "page_size")
        )
        if (pages or 0) * (page_bytes or 0) > QUICKLY_CHECKED_BYTES:
            return
        finding = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if finding != "ok":
        raise DamagedStoreError(
            f"the store {database.location} is damaged ({' '.join(str(finding).split())})",
            hint="caee store check says what is affected; caee store export saves what is whole; restore the file from "
            "a copy, or keep another with --store PATH",
        )


def _refuse_foreign(connection: sa.Connection, location: str) -> None:
    application_id = connection.exec_driver_sql("PRAGMA application_id").scalar()
    if application_id != APPLICATION_ID and (application_id != 0 or sa.inspect(connection).get_table_names()):
        raise StoreError(f"{location} is a database of another program", hint="name another file with --store PATH")
