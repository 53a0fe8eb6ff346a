"""What happens when a store is opened: whose is it, how old is it, bring it up to date."""

from __future__ import annotations

import sqlalchemy as sa

from probes.errors import StoreError
from store import migrations
from store.database import Database

# Says to SQLite (and to `file`) whose database this is: "caee" in ASCII.
APPLICATION_ID = 0x63616565


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


def _refuse_foreign(connection: sa.Connection, location: str) -> None:
    application_id = connection.exec_driver_sql("PRAGMA application_id").scalar()
    if application_id != APPLICATION_ID and (application_id != 0 or sa.inspect(connection).get_table_names()):
        raise StoreError(f"{location} is a database of another program", hint="name another file with --store PATH")
