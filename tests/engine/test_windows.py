"""Experts in more slots than the model's grouped kernel takes at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.experts.stock import window_starts
from runtime.worker import RankSession

PROMPTS = [list(b"Hello there, my"), list(b"And he said, go")]


@given(st.lists(st.integers(0, 5000), max_size=60).map(sorted), st.integers(1, 1500))
def test_windows_cover_all_slots_and_none_is_wider_than_allowed(slots: list[int], size: int) -> None:
    slots_P = np.array(slots, np.int64)
    starts = window_starts(slots_P, size)
    parts = np.split(slots_P, starts[1:])
    assert np.concatenate(parts).tolist() == slots
    assert starts == sorted(set(starts))
    assert all(part[-1] - part[0] < size for part in parts if len(part))
    # Each begins only where the one before could not have reached.
    assert all(later[0] - part[0] >= size for part, later in itertools.pairwise(parts))


@pytest.mark.parametrize(("family", "most"), [("gpt_oss", 3), ("qwen3_moe", 8)])
def test_windows_change_nothing(
    checkpoint: Callable[..., Path],
    open_session: Callable[..., RankSession],
    stock: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    most: int,
) -> None:
    folder = checkpoint(family)
    whole = open_session(folder, cache_experts=12)
    theirs, _ = stock.engine_logits(whole.model, whole.router, PROMPTS, 4)
    monkeypatch.setattr("runtime.experts.stock.MOST_GROUPS", most)
    windowed = open_session(folder, cache_experts=12)
    for kernel in windowed.execution.kernels:
        monkeypatch.setattr(kernel, "_outputs", kernel._windowed)
    ours, _ = stock.engine_logits(windowed.model, windowed.router, PROMPTS, 4)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5)
    for kernel in windowed.execution.kernels:
        assert kernel._module.num_experts == windowed.pool.slots
        assert all(kernel._module._parameters[n] is p for n, p in windowed.pool.parameters.items())
