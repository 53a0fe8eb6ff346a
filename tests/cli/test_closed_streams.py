"""Commands whose standard streams are closed end quietly, with the exit code that they would have had."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from runtime.trace.chunking import new_chunk
from runtime.trace.records import TraceMeta
from runtime.trace.writer import TraceWriter

COMMANDS = {
    "trace show": ("trace", "show", "t.parquet"),
    "trace show --json": ("trace", "show", "t.parquet", "--json"),
    "trace import": ("trace", "import", "t.parquet", "-o", "o.parquet", "--force", "--json"),
    "simulate": ("simulate", "t.parquet", "--seconds-per-expert", "1", "--batch-size", "1", "--json"),
    "an error": ("trace", "show", "absent.parquet"),
    "wrong usage": ("trace", "show"),
    "--help": ("--help",),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    meta = TraceMeta(model="tiny", num_experts=4, top_k=2, layer_numbers=(0,))
    ids = np.array([[[0, 1]], [[1, 2]], [[2, 3]]], np.int16)
    with TraceWriter(tmp_path / "t.parquet", meta) as writer:
        writer.write(new_chunk(meta, ("a",), np.zeros(3, np.int32), ids, np.full(ids.shape, 0.5, np.float32)))
    return tmp_path


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", COMMANDS)
def test_closed_streams(trace: Path, command: str, closed: str) -> None:
    def caee(redirected: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", f'caee "$@" {redirected}', "sh", *COMMANDS[command]],
            cwd=trace, env={**os.environ, "CAEE_STORE": "store.db"}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    plain, done = caee(""), caee(closed)
    assert done.returncode == plain.returncode, done.stderr
    assert done.stdout == ""
    assert "unexpected" not in done.stderr
    assert len(done.stderr.splitlines()) <= len(plain.stderr.splitlines())
    # Nothing that was printed went into a file that took the stream's place.
    for file in trace.iterdir():
        assert file.read_bytes()[:4] in (b"PAR1", b"SQLi"), file
