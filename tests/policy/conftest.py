"""The helpers of this folder as fixtures: the tests are no package, so nothing is imported by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def page() -> ModuleType:
    """The independent implementation: ``page.outcome(case)``."""
    return _sibling("page")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """Random cases: ``cases.make_case(rng)``, ``cases.make_policy(rng, name, offloading=…)``."""
    return _sibling("cases")


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"policy_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
