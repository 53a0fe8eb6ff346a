"""The store: dataclasses in, dataclasses out, each save whole or not at all."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, cast

from probes.errors import StoreError
from probes.records import Calibration, Fingerprint, Probe
from store import checking, exchange, migrations, queries
from store.database import Database
from store.documents import say_tokens_per_step
from store.entries import Checked, Entry, Imported, Problem, RecordKind
from store.faults import DamagedStoreError
from store.kinds import Record, kept, kept_simulation, machine_digest, revive
from store.location import default_location, prepare_file, resolve, shown, sqlite_file
from store.opening import bring_up_to_date, refuse_damaged
from store.records import PolicyRecord, RunRecord

__all__ = ["Store", "check_store", "default_location", "open_store"]


def open_store(location: str | None = None, *, create: bool = True) -> Store:
    """The store at a path or SQLAlchemy URL; None: at ``CAEE_STORE``, else at ``default_location()``.

    A new one is made, with its folders, unless ``create`` is False; an older schema is brought up to date. With
    ``create`` something will be added, and a damaged file is refused (a small one is checked); without, what is whole
    can still be read. Raises ``StoreError`` where it cannot be opened, is no store of ours, or is newer than this
    version of caee.
    """
    url = resolve(location)
    file = sqlite_file(url)
    if file is not None:
        prepare_file(file, create=create)
    database = Database(url)
    bring_up_to_date(database)
    if create:
        refuse_damaged(database)
    return Store(database)


def check_store(location: str | None = None) -> Checked:
    """Whether the store is sound, also where the damage is such that it cannot be opened. Raises ``StoreError``."""
    try:
        with open_store(location, create=False) as store:
            return Checked(location=store.location, problems=store.check())
    except DamagedStoreError as error:
        damage = Problem(record_id=None, message=error.message, damage=True)
        return Checked(location=shown(resolve(location)), problems=(damage,))


class Store:
    """An open store. Every method is one transaction; any number of processes may hold the same store open.

    Where an id is asked for, the beginning of one is enough if no other begins so, and None means the newest.
    All methods raise ``StoreError`` where the database does not do what is asked.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def location(self) -> str:
        """The path of an SQLite file; else the URL, without its password."""
        return self._database.location

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def require_writable(self) -> None:
        """Write something and take it back: raises what saving a record would raise, where none can be saved."""
        with self._database.transaction(writes=True) as connection:
            migrations.touch(connection)
            transaction = connection.get_transaction()
            assert transaction is not None
            transaction.rollback()

    def save_probe(self, probe: Probe) -> None:
        """Saving the same record twice changes nothing; another record under the same id is refused."""
        with self._database.transaction(writes=True) as connection:
            queries.insert(connection, kept(probe))

    def probe(self, probe_id: str | None = None) -> Probe:
        return cast(Probe, self._record(RecordKind.PROBE, probe_id))

    def save_calibration(self, calibration: Calibration) -> None:
        with self._database.transaction(writes=True) as connection:
            queries.insert(connection, kept(calibration))

    def calibration(self, calibration_id: str | None = None, *, machine: Fingerprint | None = None) -> Calibration:
        """With ``machine``: only those made on a machine of the same identity, whatever was imported since."""
        digest = None if machine is None else machine_digest(machine)
        return cast(Calibration, self._record(RecordKind.CALIBRATION, calibration_id, digest))

    def save_policy(self, policy: PolicyRecord) -> None:
        with self._database.transaction(writes=True) as connection:
            queries.insert(connection, kept(policy))

    def policy(self, policy_id: str | None = None) -> PolicyRecord:
        return cast(PolicyRecord, self._record(RecordKind.POLICY, policy_id))

    def policies(self) -> tuple[PolicyRecord, ...]:
        """All of them, newest first."""
        return cast(tuple[PolicyRecord, ...], self._newest(RecordKind.POLICY))

    def save_run(self, run: RunRecord) -> None:
        with self._database.transaction(writes=True) as connection:
            queries.insert(connection, kept(run))

    def run(self, run_id: str | None = None) -> RunRecord:
        return cast(RunRecord, self._record(RecordKind.RUN, run_id))

    def runs(self, last: int) -> tuple[RunRecord, ...]:
        """The ``last`` newest runs, newest first."""
        return cast(tuple[RunRecord, ...], self._newest(RecordKind.RUN, last))

    def save_simulation(self, simulation_id: str, created_at: str, document: dict[str, Any]) -> None:
        """``document`` as ``caee simulate --json`` prints it."""
        with self._database.transaction(writes=True) as connection:
            queries.insert(connection, kept_simulation(simulation_id, created_at, document))

    def simulation(self, simulation_id: str | None = None) -> dict[str, Any]:
        with self._database.transaction() as connection:
            entry = queries.find(connection, RecordKind.SIMULATION, simulation_id)
            return queries.document(connection, entry.record_id)

    def entries(self, kind: RecordKind | None = None) -> tuple[Entry, ...]:
        """What is kept, newest first."""
        with self._database.transaction() as connection:
            return queries.entries(connection, kind)

    def document(self, record_id: str) -> tuple[Entry, dict[str, Any]]:
        """A record of any kind as its JSON document; a run's says what its batch size was as ``run_document`` does."""
        with self._database.transaction() as connection:
            entry = queries.find(connection, None, record_id)
            document = queries.document(connection, entry.record_id)
        if entry.kind is RecordKind.RUN:
            say_tokens_per_step(document)
        return entry, document

    def delete(self, *record_ids: str, force: bool = False) -> tuple[Entry, ...]:
        """Delete records of any kind; where others that stay were made from one, all stay, unless ``force``."""
        with self._database.transaction(writes=True) as connection:
            return queries.delete(connection, record_ids, force=force)

    def check(self) -> tuple[Problem, ...]:
        """Whether the database is sound and every record in it whole: empty if so."""
        return checking.check(self._database)

    def export(self, *record_ids: str) -> dict[str, Any]:
        """The records, and what they were made from, as one document for ``import_document`` on another machine."""
        with self._database.transaction() as connection:
            return exchange.export(connection, record_ids)

    def import_document(self, document: Any) -> Imported:
        """Add the records of an export, all or none; those that are here already with the same content stay."""
        with self._database.transaction(writes=True) as connection:
            return exchange.import_document(connection, document)

    def _newest(self, kind: RecordKind, limit: int | None = None) -> tuple[Record, ...]:
        with self._database.transaction() as connection:
            entries = queries.entries(connection, kind, limit=limit)
            found = [(entry, queries.document(connection, entry.record_id)) for entry in entries]
        return tuple(_revive(entry, document) for entry, document in found)

    def _record(self, kind: RecordKind, record_id: str | None, machine: str | None = None) -> Record:
        with self._database.transaction() as connection:
            entry = queries.find(connection, kind, record_id, machine)
            document = queries.document(connection, entry.record_id)
        return _revive(entry, document)


def _revive(entry: Entry, document: dict[str, Any]) -> Record:
    try:
        return revive(entry.kind, document)
    except StoreError as error:
        raise StoreError(
            f"{entry.kind} {entry.record_id} cannot be read: {error.message}",
            hint="caee store check looks at all records",
        ) from error
