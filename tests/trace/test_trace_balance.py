"""Load balance: hand-worked cases of every formula, and properties that hold for any load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.trace.balance import FORMULAS, balance, device_loads, device_of_expert


def test_balance_is_taken_within_layers() -> None:
    # Two layers in which rank 1 has twice rank 0's tokens: 150 ÷ 200 in both. Taking the means and the maxima over
    # layers instead of over ranks gives 1.0.
    figures = balance([[100, 200], [100, 200]])
    assert figures.mean_over_max == 0.75
    assert figures.sum_of_means_over_sum_of_maxima == 0.75
    assert figures.max_over_mean == pytest.approx(4 / 3)
    assert figures.excess_over_mean == pytest.approx(1 / 3)
    # |100 − 200| for 2 of the 4 ordered pairs: 50 on average, ÷ (2 · 150).
    assert figures.gini == pytest.approx(50 / 300)
    # Idle devices that change from layer to layer do not cancel out.
    assert balance([[100, 200], [200, 100]]).mean_over_max == 0.75


def test_experts_that_are_not_used_count() -> None:
    loads = np.zeros((1, 64))
    loads[0, [3, 40]] = 10
    figures = balance(loads)
    assert figures.max_over_mean == 32
    assert figures.excess_over_mean == 31
    assert figures.mean_over_max == 1 / 32
    assert figures.gini == pytest.approx(62 / 64)


def test_the_two_averages_over_layers_differ() -> None:
    # 1.0 in a layer of 4, 0.5 in a layer of 400.
    figures = balance([[2, 2], [400, 0]])
    assert figures.mean_over_max == 0.75
    assert figures.sum_of_means_over_sum_of_maxima == (2 + 200) / (2 + 400)


def test_a_layer_without_load_is_left_out() -> None:
    figures = balance([[0, 0], [100, 200]])
    assert figures.layers[0].mean_over_max is None
    assert figures.mean_over_max == 0.75
    nothing = balance([[0, 0]])
    assert [getattr(nothing, name) for name in FORMULAS] == [None] * len(FORMULAS)


def test_contiguous_devices() -> None:
    assert device_of_expert(5, 2).tolist() == [0, 0, 0, 1, 1]
    loads = device_loads([[1, 2, 4, 8, 16], [1, 1, 1, 1, 1]], device_of_expert(5, 2), 3)
    assert loads.tolist() == [[7, 24, 0], [3, 2, 0]]


LOADS = st.lists(st.lists(st.integers(0, 1000), min_size=4, max_size=4), min_size=1, max_size=5)


@given(loads=LOADS, scale=st.integers(1, 50), order=st.permutations(range(4)))
def test_properties(loads: list[list[int]], scale: int, order: list[int]) -> None:
    figures = balance(loads)
    other = balance(np.array(loads)[:, order] * scale)
    for name in FORMULAS:
        assert getattr(other, name) == pytest.approx(getattr(figures, name))
    for layer, load in zip(figures.layers, loads, strict=True):
        if layer.gini is None or layer.max_over_mean is None or layer.mean_over_max is None:
            assert not any(load)
            continue
        plain = sum(abs(a - b) for a in load for b in load) / (2 * len(load) * sum(load))
        assert layer.gini == pytest.approx(plain)
        assert layer.max_over_mean == pytest.approx(1 / layer.mean_over_max)
        assert 1 <= layer.max_over_mean <= len(load) + 1e-9
