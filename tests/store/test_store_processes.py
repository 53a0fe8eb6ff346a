"""Several processes at one store, and processes that die in it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from store.session import open_store

WRITER = """
import sys
from store.session import open_store

with open_store(sys.argv[1]) as store:
    for number in range(int(sys.argv[3])):
        name = f"{sys.argv[2]}-{number}"
        store.save_simulation(name, "2026-03-01T00:00:00Z", {"policies": list(range(20_000))})
        print(name, flush=True)
"""

# Dies at the last moment before a transaction is complete, with more changed pages than the cache holds: the file on
# disk is then half new, half old.
DIES_AT_COMMIT = """
import os, signal, sys
import sqlalchemy as sa
from store.session import open_store

with open_store(sys.argv[1]) as store:
    @sa.event.listens_for(sa.Engine, "connect")
    def small_cache(connection, record):
        connection.execute("PRAGMA cache_size = 2")

    @sa.event.listens_for(sa.Engine, "commit")
    def die(connection):
        os.kill(os.getpid(), signal.SIGKILL)

    store.save_simulation("half", "2026-03-01T00:00:00Z", {"policies": list(range(100_000))})
"""


def _start(script: str, file: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(file), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=file.parent)


def test_three_processes_open_a_new_store_and_write_at_once_while_one_reads(store_file: Path) -> None:
    writers = [_start(WRITER, store_file, name, "8") for name in ("a", "b", "c")]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if store_file.exists():
            with open_store(str(store_file)) as store:
                count = len(store.entries())
            assert count >= seen
            seen = count
        time.sleep(0.02)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    with open_store(str(store_file)) as store:
        assert {entry.record_id for entry in store.entries()} == {f"{w}-{n}" for w in "abc" for n in range(8)}
        assert store.check() == ()
    for writer in writers:
        writer.communicate()


def test_a_process_killed_in_the_middle_of_a_save_leaves_the_state_before_it(
    store_file: Path, full_store: Any, records: Any
) -> None:
    before = store_file.read_bytes()
    victim = _start(DIES_AT_COMMIT, store_file)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert store_file.read_bytes() != before, "nothing had reached the file yet: the test tests nothing"
    with open_store(str(store_file)) as store:
        assert len(store.entries()) == 4
        assert store.check() == ()
        assert store.run() == records.run()


def test_a_process_killed_at_any_moment_loses_nothing_that_was_saved(store_file: Path) -> None:
    saved: set[str] = set()
    for attempt, lines in enumerate((1, 2, 5)):
        victim = _start(WRITER, store_file, f"w{attempt}", "1000")
        assert victim.stdout is not None
        for _ in range(lines):
            saved.add(victim.stdout.readline().strip())
        time.sleep(0.003 * attempt)
        victim.kill()
        saved.update(victim.communicate()[0].split())
        with open_store(str(store_file)) as store:
            assert store.check() == ()
            # One more may be there: saved, and not yet said so.
            found = {entry.record_id for entry in store.entries()}
            assert saved <= found
            assert len(found) <= len(saved) + attempt + 1
