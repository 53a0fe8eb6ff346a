"""Ctrl-C while a command imports large libraries, which may swallow it: the command ends all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from store.session import open_store

# The libraries that take a while, and what some of them do with an interrupt.
PROGRAM = """
import importlib.abc, os, signal, sys

LIBRARY = sys.argv[1]

class Swallowing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == LIBRARY:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    pass
            except BaseException:
                pass
        return None

sys.meta_path.insert(0, Swallowing())
import caee_cli.main
sys.argv = ["caee", *sys.argv[2:]]
caee_cli.main.main()
"""

COMMANDS = {
    "probe": ["probe", "--quick"],
    "calibrate": ["calibrate"],
    "calibrate --check": ["calibrate", "--check"],
    "run": ["run", "--devices", "cpu:1"],
    "run --trace": ["run", "--trace", "absent.parquet", "--shape", "absent.json"],
    "report": ["report"],
    "doctor": ["doctor"],
    "trace record": ["trace", "record", "-o", "out.parquet", "--devices", "cpu:1"],
    "trace import": ["trace", "import", "absent.jsonl", "-o", "out.parquet"],
    "trace show": ["trace", "show", "absent.parquet"],
    "trace synth": ["trace", "synth", "--like", "absent.parquet", "-o", "out.parquet"],
}
LIBRARIES = {
    "probe": ["numpy", "sqlalchemy", "torch"],
    "calibrate": ["numpy", "sqlalchemy"],
    "calibrate --check": ["sqlalchemy"],
    "run": ["sqlalchemy", "torch", "transformers"],
    "run --trace": ["sqlalchemy"],
    "report": ["sqlalchemy"],
    "doctor": ["sqlalchemy", "torch"],
    "trace record": ["torch", "pyarrow.parquet"],
    "trace import": ["numpy", "pyarrow.parquet"],
    "trace show": ["numpy", "pyarrow.parquet"],
    "trace synth": ["numpy", "pyarrow.parquet"],
}


@pytest.mark.parametrize(("command", "library"), [(name, each) for name in COMMANDS for each in LIBRARIES[name]])
def test_an_interrupt_that_an_import_swallows(command: str, library: str, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "caee.db")):
        pass
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, library, *COMMANDS[command]],
        env={"PATH": "/usr/bin:/bin", "CAEE_STORE": str(tmp_path / "caee.db"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (130, "caee: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["caee.db"]
