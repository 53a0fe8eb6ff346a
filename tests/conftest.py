"""Shared by all tests: one torch thread, the shared data folder, the command line, and proof of what is under test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A machine under load is no fault: nothing here is judged by how long it took.
hypothesis.settings.register_profile("caee", deadline=None)
hypothesis.settings.load_profile("caee")

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_sessionstart(session: pytest.Session) -> None:
    """With CAEE_TEST_WHEEL=1 the packages must come from the installed wheel, not from the source folder."""
    # Whoever starts the tests in the background hands down an ignored SIGINT, which processes under test would keep.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("CAEE_TEST_WHEEL") != "1":
        return
    import probes

    if ROOT in Path(probes.__file__).parents and "site-packages" not in Path(probes.__file__).parts:
        raise pytest.UsageError(f"tests run against {probes.__file__}, not against the built wheel")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Two threads under load make small operations 10 to 300 times slower.
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real traces and machine outputs; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return SHARED_DATA


class Done(NamedTuple):
    """What a command that has ended leaves."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line in this process, in a folder and with a store of its own."""
    from caee_cli.main import run_app

    monkeypatch.setenv("CAEE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CAEE_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)

    def run_one(*arguments: object) -> Done:
        return Done(run_app(list(map(str, arguments))), *capsys.readouterr())

    return run_one
