"""The connection to the database: transactions that are whole or not at all, and errors that say what to do."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import sqlalchemy as sa
import sqlalchemy.exc

from probes.errors import StoreError
from store.faults import explain
from store.location import shown, sqlite_file

# Long enough for another process to finish writing a run; then the user is told.
BUSY_TIMEOUT_SECONDS = 30.0


class Database:
    """The database at ``url``, opened anew for each transaction. Raises ``StoreError`` where its driver is missing."""

    def __init__(self, url: sa.URL) -> None:
        self.location = shown(url)
        self._engine = _engine(url)

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def transaction(self, *, writes: bool = False) -> Iterator[sa.Connection]:
        """A transaction, rolled back on any error; the driver's errors become ``StoreError``."""
        try:
            with self._engine.connect() as connection:
                connection.execution_options(caee_writes=writes)
                with connection.begin():
                    yield connection
        except (sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OverflowError, UnicodeError) as error:
            raise explain(error, self.location) from error


def _engine(url: sa.URL) -> sa.Engine:
    arguments = {}
    if sqlite_file(url) is not None:
        # A file is cheap to open, and a connection kept open would be inherited by forked ranks.
        arguments = {"poolclass": sa.NullPool}
    try:
        engine = sa.create_engine(url, **arguments)
    except (sqlalchemy.exc.NoSuchModuleError, ModuleNotFoundError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else url.drivername
        raise StoreError(
            f"no driver for {shown(url)}: {missing} is not installed here",
            hint="install the driver's package beside caee, or use a file: --store PATH",
        ) from error
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise StoreError(f"{shown(url)} cannot be used: {error}") from error
    if url.get_backend_name() == "sqlite":
        sa.event.listen(engine, "connect", _set_up_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: object, _record: object) -> None:
    """SQLite's rollback journal, fully synchronised: a process that dies leaves the last whole state.

    Not WAL: that keeps a shared-memory file beside the database, which neither a read-only medium nor a network file
    system allows. Writes are rare and short, so that readers hardly ever wait, and then at most for the busy timeout.
    """
    assert isinstance(connection, sqlite3.Connection)
    # The driver's own transactions start too late (not before DDL, not before SELECT): `_begin_sqlite` starts them.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_SECONDS * 1000)}")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(connection: sa.Connection) -> None:
    # A writer takes the lock at once: two that began as readers would both wait for the other in vain.
    writes = connection.get_execution_options().get("caee_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
