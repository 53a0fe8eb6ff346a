"""Errors of the simulator and of reports, all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import caee_cli.simulating
import probes.errors
import reports.report
import runtime.profiles
import runtime.simulate


def test_every_error_has_a_hint() -> None:
    """Also those that take a damaged file or a race to see: each is raised with what to do next."""
    modules = [*Path(runtime.simulate.__path__[0]).glob("*.py"), Path(runtime.profiles.__file__)]
    modules += [Path(caee_cli.simulating.__file__), Path(reports.report.__file__)]
    raised = [
        (module.name, node.exc)
        for module in modules
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    errors = [
        (name, call)
        for name, call in raised
        if isinstance(call.func, ast.Name) and hasattr(probes.errors, call.func.id)
    ]
    assert len(errors) > 40
    assert not [
        f"{name}:{call.lineno}" for name, call in errors if not any(word.arg == "hint" for word in call.keywords)
    ]
