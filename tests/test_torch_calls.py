"""Every name of torch that is used exists and is public, on paths too that only a GPU takes.

A CPU build of torch has the names of ``torch.cuda`` as well, so that a wrong one is found without a GPU. Public is what
torch itself calls so: no underscore on the way, and listed in ``__all__`` where a module has one.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for pattern in ("probes/**/*.py", "runtime/**/*.py", "caee_cli/**/*.py", "benchmarks/*.py", "tests/policy/gpu_*.py")
    for path in ROOT.glob(pattern)
)
# Modules that are chosen at run time, and the name that one goes by in the file that keeps it.
CHOSEN_AT_RUN_TIME = {"get_device_module": "torch.cuda"}
KEPT = {"backend.py": {"_module": "torch.cuda"}}


def chains(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every use of torch's modules in a file."""
    tree = ast.parse(path.read_text())
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = _dotted(node, aliases, KEPT.get(path.name, {}))
            if name is not None:
                yield node.lineno, name


def _dotted(node: ast.expr, aliases: dict[str, str], kept: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return CHOSEN_AT_RUN_TIME.get(node.func.attr)
    if isinstance(node, ast.Attribute):
        if node.attr in kept:
            return kept[node.attr]
        before = _dotted(node.value, aliases, kept)
        return None if before is None else f"{before}.{node.attr}"
    return None


def why_not(name: str) -> str | None:
    """What is wrong with a dotted name of torch's; what follows an object that is no module is that object's own."""
    value: object = torch
    at = "torch"
    for part in name.split(".")[1:]:
        if not isinstance(value, ModuleType):
            return None
        if part.startswith("_") and not part.startswith("__"):
            return f"{at}.{part} is private"
        if not hasattr(value, part):
            try:
                value = importlib.import_module(f"{at}.{part}")
            except ModuleNotFoundError:
                return f"{at} has no {part}"
        else:
            listed = getattr(value, "__all__", None)
            value = getattr(value, part)
            special = isinstance(value, ModuleType) or part.startswith("__")
            if listed is not None and part not in listed and not special:
                return f"{at}.{part} is not listed as public"
        at = f"{at}.{part}"
    return None


def test_only_public_names_of_torch() -> None:
    found = [(path, line, name) for path in FILES for line, name in chains(path)]
    assert len(found) > 300
    used = {name for _, _, name in found}
    assert {
        "torch.cuda.current_stream",
        "torch.cuda.Event",
        "torch.cuda.CUDAGraph",
        "torch.distributed.all_reduce",
    } <= used
    wrong = [f"{path.relative_to(ROOT)}:{line}: {why_not(name)}" for path, line, name in found if why_not(name)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "words"),
    [("torch.cuda._sleep", "private"), ("torch.cuda.no_such_call", "has no"), ("torch.cuda.Event.no_matter", None)],
)
def test_what_is_not_public_is_seen(name: str, words: str | None) -> None:
    reason = why_not(name)
    assert reason is None if words is None else words in str(reason)


# What asks the driver, after which a fork can use no GPU.
ASKS_THE_DRIVER = ("is_available", "device_count", "init", "current_device", "get_device_properties", "set_device")


@pytest.mark.parametrize("asks", [False, True])
def test_what_ranks_are_forked_from_asks_no_driver(asks: bool) -> None:
    """Ranks are forks of a server that has imported everything: it must not have looked for a GPU. The check sees it
    where one does."""
    code = f"""
import importlib, torch
from runtime.launch import PRELOADED
asked = []
for name in {ASKS_THE_DRIVER}:
    before = getattr(torch.cuda, name)
    setattr(torch.cuda, name, lambda *a, name=name, before=before: asked.append(name) or before(*a))
for module in ("runtime.worker", "runtime.tracerun.session", *PRELOADED):
    importlib.import_module(module)
if {asks}:
    from probes.devices import find_devices
    find_devices()
print(*asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert bool(done.stdout.strip()) is asks
