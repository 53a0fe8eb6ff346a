"""Tiny checkpoints, built once, and engines on them in this process; the tests are no package, so all are fixtures."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from probes.devices import find_devices
from probes.fingerprint import take_fingerprint
from runtime.options import RunOptions
from runtime.parallel import Ranks
from runtime.policy.spec import parse_policy
from runtime.summary import run_record
from runtime.worker import RankSession
from store.records import RunRecord


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The helper module ``checkpoints``."""
    return _sibling("checkpoints")


@pytest.fixture(scope="session")
def stock() -> ModuleType:
    """The helper module ``stock``: what transformers computes itself."""
    return _sibling("stock")


@pytest.fixture(scope="session")
def quantising() -> ModuleType:
    """The helper module ``quantising``: quantised checkpoints and what their bytes mean."""
    return _sibling("quantising")


@pytest.fixture(scope="session")
def checkpoint(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny model of ``family``; ``saving`` goes to save_pretrained, the rest to its config."""
    built: dict[str, Path] = {}

    def build(family: str, *, dtype: Any = None, saving: dict[str, Any] | None = None, **changes: Any) -> Path:
        key = repr((family, dtype, saving, sorted(changes.items())))
        if key not in built:
            folder = tmp_path_factory.mktemp(family)
            config = checkpoints.tiny_config(family, **changes)
            options = {} if dtype is None else {"dtype": dtype}
            built[key] = checkpoints.save_checkpoint(folder, config, **options, **(saving or {}))
        return built[key]

    return build


@pytest.fixture(scope="session")
def quantised(
    checkpoint: Callable[..., Path], quantising: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """The folder of a tiny quantised model, by the name of its form; further arguments are of its config."""
    built: dict[str, Path] = {}

    def build(form: str, *, block: tuple[int, int] = quantising.FP8_BLOCK, **changes: Any) -> Path:
        key = repr((form, block, sorted(changes.items())))
        if key not in built:
            family, method = form.split("-")
            folder = tmp_path_factory.mktemp(form)
            if method == "mxfp4":
                built[key] = quantising.mxfp4_copy(checkpoint(family, hidden_size=64, **changes), folder, seed=1)
            else:
                scales = torch.float32 if family == "deepseek_v3" else torch.bfloat16
                source = checkpoint(family, **changes)
                built[key] = quantising.fp8_copy(source, folder, block=block, scales=scales, seed=1)
        return built[key]

    return build


@pytest.fixture
def open_session() -> Iterator[Callable[..., RankSession]]:
    """An engine of one rank on ``folder``; options as in ``RunOptions``, the policy as text."""
    sessions = []

    def open_one(folder: Path, **options: Any) -> RankSession:
        sessions.append(_open(folder, **options))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


@pytest.fixture(scope="session")
def recorded() -> Callable[..., RunRecord]:
    """The record of a whole run of such an engine."""

    def run(folder: Path, **options: Any) -> RunRecord:
        session = _open(folder, **options)
        try:
            report = session.run()
        finally:
            session.close()
        given = session.options
        return run_record(given, report, take_fingerprint(given.devices, folder), "a tiny model")

    return run


def _open(folder: Path, *, policy: str = "caee", **options: Any) -> RankSession:
    defaults: dict[str, Any] = {
        "tier": "disk",
        "cache": "lfu",
        "prompts": ("Hello there", "And he said"),
        "held_out": None,
        "calibration": None,
        "dtype": "float32",
    }
    given = {**defaults, **options}
    session = RankSession(
        RunOptions(model=folder, devices=find_devices("cpu:1"), policy=parse_policy(policy), **given),
        Ranks(rank=0, world=1),
    )
    torch.set_num_threads(1)  # as for the model of transformers beside it: more threads round otherwise
    return session


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"engine_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
