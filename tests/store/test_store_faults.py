"""A store that cannot be opened, read or written says so, and loses nothing."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import store.database
from probes.errors import StoreError
from store.entries import RecordKind
from store.faults import DamagedStoreError
from store.session import Store, open_store


def test_a_store_that_should_be_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at") as caught:
        open_store(str(tmp_path / "sub" / "none.db"), create=False)
    assert "--store" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder") as caught:
        open_store(str(tmp_path))
    assert str(tmp_path / "caee.db") in str(caught.value.hint)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"cannot be at .*file/caee\.db: a part of that path is a file"):
        open_store(str(tmp_path / "file" / "caee.db"))


@pytest.mark.parametrize("content", [b"not a database at all" * 100, bytes(range(256)) * 64, b"{}"])
def test_a_file_of_another_kind_is_refused_and_left_alone(store_file: Path, content: bytes) -> None:
    store_file.write_bytes(content)
    with pytest.raises(StoreError, match="is not a database"):
        open_store(str(store_file))
    assert store_file.read_bytes() == content


def test_another_programs_database_is_refused_and_left_alone(store_file: Path) -> None:
    connection = sqlite3.connect(store_file)
    connection.executescript("CREATE TABLE schema_migrations (version TEXT); CREATE TABLE users (name TEXT)")
    before = store_file.read_bytes()
    with pytest.raises(StoreError, match="is a database of another program"):
        open_store(str(store_file))
    assert store_file.read_bytes() == before


def test_an_empty_file_becomes_a_store(store_file: Path, records: Any) -> None:
    store_file.touch()
    with open_store(str(store_file)) as store:
        store.save_probe(records.probe())
        assert store.check() == ()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nosuch://host/database", "no driver for nosuch://host/database: nosuch is not installed"),
        ("postgresql+psycopg2://me:secret@host/database", r"no driver for .*me:\*\*\*@host/database: psycopg2"),
        ("mysql+pymysql://me:secret@host/database", r"no driver for .*me:\*\*\*@host/database: pymysql"),
        ("://", "is no database URL"),
        ("sqlite:///a?timeout=x", "cannot be used|is no database URL|failed"),
    ],
)
def test_a_url_that_cannot_be_used(url: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in ("psycopg2", "pymysql"):
        monkeypatch.setitem(sys.modules, driver, None)  # as if not installed, whatever is here
    with pytest.raises(StoreError, match=expected) as caught:
        open_store(url)
    assert "secret" not in caught.value.message


def test_a_locked_store_says_so(full_store: Store, store_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.database, "BUSY_TIMEOUT_SECONDS", 0.05)
    other = sqlite3.connect(store_file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="is in use by another process"):
        full_store.entries()
    other.execute("ROLLBACK")
    assert len(full_store.entries()) == 4


def test_readers_are_not_kept_waiting_by_a_writer_at_work(
    full_store: Store, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.database, "BUSY_TIMEOUT_SECONDS", 0.05)
    other = sqlite3.connect(store_file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    other.execute("DELETE FROM records")
    assert len(full_store.entries()) == 4
    with pytest.raises(StoreError, match="is in use by another process"):
        full_store.delete("run-1")
    other.execute("ROLLBACK")


@pytest.fixture
def few_pages() -> Iterator[Callable[[int], None]]:
    """Lets every new connection's database grow to so many pages, as on a full disk."""
    limit = 0

    def set_limit(connection: Any, _record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {limit}")

    def start(pages: int) -> None:
        nonlocal limit
        limit = pages
        sa.event.listen(sa.Engine, "connect", set_limit)

    yield start
    sa.event.remove(sa.Engine, "connect", set_limit)


def test_a_full_disk_loses_nothing_that_was_there(
    full_store: Store, store_file: Path, records: Any, few_pages: Callable[[int], None]
) -> None:
    few_pages(store_file.stat().st_size // 4096 + 1)
    with pytest.raises(StoreError, match="the disk is full"):
        full_store.save_simulation("big", "2026-03-01T00:00:00Z", {"text": "x" * 100_000})
    assert len(full_store.entries()) == 4
    assert full_store.check() == ()


def test_a_file_size_limit_loses_nothing_that_was_there(full_store: Store, store_file: Path) -> None:
    script = (
        "import resource, signal\n"
        "from store.session import open_store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"with open_store({str(store_file)!r}) as store:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
        "    store.save_simulation('big', '2026-03-01T00:00:00Z', {'text': 'x' * 400_000})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=store_file.parent)
    assert "StoreError" in done.stderr
    assert len(full_store.entries()) == 4
    assert full_store.check() == ()


READ_THEN_WRITE = """
import sys
from probes.errors import StoreError
from store.session import open_store
try:
    with open_store(sys.argv[1]) as store:
        print(len(store.entries()))
        try:
            store.require_writable()
        except StoreError as error:
            print(error.message)
        store.delete("run-1")
except StoreError as error:
    print(error.message)
"""


LIBC = ctypes.CDLL(None)


def _heed_permission_bits() -> None:
    """Permission bits do not hold root back, unless it gives up two capabilities for what it executes next."""
    if os.geteuid() == 0:
        drop_from_bounding_set, dac_override, dac_read_search = 24, 1, 2
        LIBC.prctl(drop_from_bounding_set, dac_override, 0, 0, 0)
        LIBC.prctl(drop_from_bounding_set, dac_read_search, 0, 0, 0)


def _as_somebody_else(file: Path) -> list[str]:
    """Output lines of a reading and then a writing by a process to which permission bits apply."""
    command = [sys.executable, "-c", READ_THEN_WRITE, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", preexec_fn=_heed_permission_bits)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def open_folder(full_store: Store, store_file: Path) -> Iterator[Path]:
    """A copy of the store in a folder of its own, whose permissions a test may take away."""
    folder = store_file.parent / "folder"
    folder.mkdir()
    shutil.copy(store_file, folder / "caee.db")
    yield folder
    folder.chmod(0o700)


def test_a_file_that_may_only_be_read_can_be_read(open_folder: Path) -> None:
    (open_folder / "caee.db").chmod(0o444)
    open_folder.chmod(0o755)
    count, refused, message = _as_somebody_else(open_folder / "caee.db")
    assert count == "4"
    assert "may not be written" in message
    assert refused == message


def test_a_folder_that_may_only_be_read_can_be_read(open_folder: Path) -> None:
    (open_folder / "caee.db").chmod(0o666)
    open_folder.chmod(0o555)
    count, refused, message = _as_somebody_else(open_folder / "caee.db")
    assert count == "4"
    assert refused == message
    assert "may not be written" in message or "cannot be opened" in message


def test_a_file_that_may_not_be_read_says_so(open_folder: Path) -> None:
    (open_folder / "caee.db").chmod(0o000)
    open_folder.chmod(0o755)
    (message,) = _as_somebody_else(open_folder / "caee.db")
    assert "cannot be opened" in message


def test_a_folder_that_may_not_be_written_says_so(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    (message,) = _as_somebody_else(open_folder / "new" / "caee.db")
    assert "cannot be at" in message
    assert "permission denied" in message


def _everything(store: Store) -> dict[str, Any]:
    return {entry.record_id: store.document(entry.record_id) for entry in store.entries()}


def test_damage_anywhere_is_refused_found_or_harmless(full_store: Store, store_file: Path, tmp_path: Path) -> None:
    """Sixty places, each overwritten in a copy: never another error than ours, never a silent change of a record."""
    original = store_file.read_bytes()
    used = [position for position, byte in enumerate(original) if byte]
    expected = {record_id: document for record_id, (_, document) in _everything(full_store).items()}
    chance = random.Random(7)
    outcomes = {"refused": 0, "found": 0, "harmless": 0}
    for _ in range(60):
        damaged = bytearray(original)
        at = chance.choice(used)
        for position in range(at, min(at + 12, len(original))):
            damaged[position] ^= chance.randrange(1, 256)
        file = tmp_path / "damaged.db"
        file.write_bytes(damaged)
        try:
            with open_store(str(file), create=False) as copy:
                if any(problem.damage for problem in copy.check()):
                    outcomes["found"] += 1
                    continue
                found = {record_id: document for record_id, (_, document) in _everything(copy).items()}
        except StoreError:
            outcomes["refused"] += 1
            continue
        assert found == expected, at
        outcomes["harmless"] += 1
    assert outcomes["found"] > 20, outcomes


def test_a_damaged_file_is_read_as_far_as_it_is_whole_but_nothing_is_added(
    full_store: Store, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples' pages are spoilt: runs are whole, and the file as such is not."""
    connection = sqlite3.connect(store_file)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'samples'").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    with store_file.open("r+b") as file:
        file.seek((root - 1) * page_bytes)
        file.write(b"\0")  # what kind of page it is
    with pytest.raises(DamagedStoreError, match="is damaged") as caught:
        open_store(str(store_file))
    assert "caee store export" in str(caught.value.hint)
    with open_store(str(store_file), create=False) as kept:
        assert kept.runs(1)
    monkeypatch.setattr("store.opening.QUICKLY_CHECKED_BYTES", 0)
    open_store(str(store_file)).close()  # a large one is checked when it is asked for


def test_a_record_that_is_not_what_was_saved_is_never_shown(full_store: Store, store_file: Path) -> None:
    connection = sqlite3.connect(store_file)
    connection.execute("UPDATE models SET alpha = 2")
    connection.commit()
    connection.close()
    calibration = next(entry for entry in full_store.entries() if entry.kind is RecordKind.CALIBRATION)
    for read in (lambda: full_store.calibration(), lambda: full_store.document(calibration.record_id)):
        with pytest.raises(DamagedStoreError, match="not what was saved"):
            read()
    assert full_store.runs(1), "the others are whole"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE records SET document = '{' WHERE record_id = 'run-1'", "cannot be read"),
        ("UPDATE records SET document = '[]' WHERE record_id = 'probe-1'", "cannot be read"),
        ("UPDATE records SET document = replace(document, '0.031', '0.013')", "not what was saved"),
        ("UPDATE records SET created_at = '2027-01-01T00:00:00+00:00' WHERE kind = 'run'", "does not fit"),
        ("UPDATE records SET kind = 'song' WHERE kind = 'run'", "unknown kind"),
        ("UPDATE records SET kind = 'run' WHERE kind = 'calibration'", "not what was saved"),
        ("UPDATE samples SET seconds = '[NaN]' WHERE position = 0", "cannot be read"),
        ("UPDATE samples SET size_bytes = 17 WHERE position = 0", "not what was saved"),
        ("DELETE FROM samples", "not what was saved"),
        ("PRAGMA foreign_keys = OFF; DELETE FROM links WHERE link = 0", "cannot be read|belongs to nothing"),
        ("UPDATE links SET bandwidth_median_bytes_per_s = 9e9 WHERE link = 0", "table links"),
        ("UPDATE models SET alpha = 2", "not what was saved"),
        ("UPDATE runs SET gain_tpot = 0.1", "table runs"),
        ("DELETE FROM dependencies", "table dependencies"),
        ("UPDATE records SET document = CAST(x'ff' AS TEXT) WHERE kind = 'run'", "UTF-8|cannot be read"),
        ("DROP TABLE models", "no such table"),
    ],
)
def test_a_change_from_outside_is_found(full_store: Store, store_file: Path, statement: str, expected: str) -> None:
    assert full_store.check() == ()
    connection = sqlite3.connect(store_file)
    connection.executescript(statement)
    connection.commit()
    problems = [problem for problem in full_store.check() if problem.damage]
    assert any(re.search(expected, problem.message) for problem in problems), problems
