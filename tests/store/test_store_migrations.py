"""Older stores are brought up to date, newer ones are refused, and a migration is whole or not at all."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from probes.errors import StoreError
from store import migrations
from store.migrations import MIGRATIONS, Migration
from store.schema import METADATA
from store.session import Store, open_store

ASSETS = Path(__file__).parent / "assets"


def _next(upgrade: Any) -> tuple[Migration, ...]:
    return (*MIGRATIONS, Migration(version=len(MIGRATIONS) + 1, name="next", upgrade=upgrade))


def _add_note(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE records ADD COLUMN note TEXT")
    connection.exec_driver_sql("UPDATE records SET note = 'from ' || kind")


def _fail_half_way(connection: sa.Connection) -> None:
    _add_note(connection)
    connection.exec_driver_sql("DELETE FROM runs")
    connection.exec_driver_sql("ALTER TABLE absent ADD COLUMN note TEXT")


def test_versions_are_numbered_from_one_without_a_gap() -> None:
    assert [migration.version for migration in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_a_store_of_every_version_is_opened_and_read(version: int, tmp_path: Path) -> None:
    """The files in `assets` were written when their version was the latest; beside each lies what it holds."""
    shutil.copy(ASSETS / f"schema-{version}.sqlite", tmp_path / "old.db")
    expected = json.loads((ASSETS / f"schema-{version}.json").read_text())
    with open_store(str(tmp_path / "old.db")) as store:
        assert store.check() == ()
        assert store.export(*(entry.record_id for entry in store.entries())) == expected
        assert len(store.runs(1)) == 1
        assert store.calibration().probe_id == store.probe().probe_id


def test_the_migrations_lead_to_the_schema_that_the_code_uses(store_file: Path, store: Store, tmp_path: Path) -> None:
    fresh = sa.create_engine(f"sqlite:///{tmp_path / 'fresh.db'}")
    METADATA.create_all(fresh)
    statements = "SELECT name, sql FROM sqlite_master WHERE name != 'schema_migrations' ORDER BY name"
    migrated = sqlite3.connect(store_file).execute(statements).fetchall()
    assert [row for row in migrated if row[0] != "sqlite_autoindex_schema_migrations_1"] == (
        sqlite3.connect(tmp_path / "fresh.db").execute(statements).fetchall()
    )


def test_an_older_store_is_brought_up_to_date_once(
    full_store: Store, store_file: Path, monkeypatch: pytest.MonkeyPatch, records: Any
) -> None:
    monkeypatch.setattr(migrations, "MIGRATIONS", _next(_add_note))
    for _ in range(2):
        with open_store(str(store_file)) as store:
            assert store.run() == records.run()
            assert store.check() == ()
    connection = sqlite3.connect(store_file)
    assert connection.execute("SELECT note FROM records WHERE kind = 'run'").fetchall() == [("from run",)]
    applied = connection.execute("SELECT version, name FROM schema_migrations ORDER BY version").fetchall()
    assert applied == [*((each.version, each.name) for each in MIGRATIONS), (len(MIGRATIONS) + 1, "next")]


def test_a_migration_that_fails_changes_nothing(
    full_store: Store, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(sqlite3.connect(store_file).iterdump())
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", _next(_fail_half_way))
        with pytest.raises(StoreError, match="no such table: absent"):
            open_store(str(store_file))
    assert list(sqlite3.connect(store_file).iterdump()) == before
    assert full_store.check() == ()


def test_a_newer_store_is_refused_and_left_alone(
    full_store: Store, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", _next(_add_note))
        open_store(str(store_file)).close()
    before = store_file.read_bytes()
    latest = len(MIGRATIONS)
    with pytest.raises(StoreError, match=f"has schema {latest + 1}; this version of caee knows {latest}") as caught:
        open_store(str(store_file))
    assert "update caee" in str(caught.value.hint)
    assert store_file.read_bytes() == before
