"""``docs/cli-reference.md`` says what the command line says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRINT_REFERENCE = """
import runpy, sys
sys.stdout.write(runpy.run_path(sys.argv[1])["reference"]())
"""


def _reference(folder: Path, **environment: str) -> str:
    command = [sys.executable, "-c", PRINT_REFERENCE, str(ROOT / "tools" / "command_reference.py")]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=folder, env=os.environ | environment
    ).stdout


def test_the_reference_is_current(tmp_path: Path) -> None:
    written = (ROOT / "docs" / "cli-reference.md").read_text(encoding="utf-8")
    assert written == _reference(tmp_path), "write it anew: python tools/command_reference.py"


@pytest.mark.parametrize("environment", [{"COLUMNS": "40", "NO_COLOR": "1"}, {"COLUMNS": "300", "FORCE_COLOR": "1"}])
def test_the_reference_depends_on_no_terminal_and_no_setting(environment: dict[str, str], tmp_path: Path) -> None:
    settings = {"CAEE_STORE": "/somewhere/else.db", "LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}
    assert _reference(tmp_path, **environment, **settings) == _reference(tmp_path)


def test_the_reference_has_every_command(tmp_path: Path) -> None:
    reference = _reference(tmp_path)
    for name in (
        *("probe", "calibrate", "simulate", "run", "report", "explain", "doctor"),
        *(f"trace {name}" for name in ("record", "import", "show", "synth")),
        *(f"store {name}" for name in ("list", "show", "export", "import", "delete", "check")),
    ):
        assert f"\n{'#' * (2 + len(name.split()))} caee {name}\n" in reference, name
