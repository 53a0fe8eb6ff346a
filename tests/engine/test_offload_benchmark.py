"""The benchmark against transformers' disk offload says when it compared no reads of a disk."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import probes.disk
from runtime.worker import RankSession

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.mark.parametrize("reason", [None, "tmpfs keeps files in memory"])
def test_reads_that_are_not_direct_are_said_and_fail(
    checkpoint: Callable[..., Path],
    open_session: Callable[..., RankSession],
    stock: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    reason: str | None,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    offload = importlib.import_module("offload")
    monkeypatch.setattr(offload, "RATIO", float("inf"))
    if reason is not None:
        monkeypatch.setattr(probes.disk, "_open_direct", lambda path: (-1, reason))
    folder = checkpoint("qwen3_moe", top_k=4)
    session = open_session(folder, cache_experts=8)
    if reason is None and session.source.reason is not None:
        pytest.skip(f"no direct reads here: {session.source.reason}")
    peer = stock.load(folder, torch.float32)
    assert offload.compare(session, peer, tmp_path, tokens=3) == (reason is not None)
    said = capsys.readouterr().out
    assert "same expectations: True" in said
    assert (f"reads of the checkpoint were buffered, not direct: {reason}" in said) == (reason is not None)
