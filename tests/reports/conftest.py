"""The builders of ``records.py``, as fixtures: the tests are no package, so nothing is imported by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The module of builders: ``build.make_run(…)``, ``build.make_probe()``, ``build.make_calibration()``."""
    location = Path(__file__).with_name("records.py")
    spec = importlib.util.spec_from_file_location("report_records", location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
