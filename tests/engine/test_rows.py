"""The compiled loops around a decision, against plain ones."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.experts.rows import (
    all_finite,
    changed_tokens,
    count_by_device,
    count_layer,
    experts_by_device,
    extremes,
    gates_of,
    of_real_tokens,
    rows_by_place,
)


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Ids [T, K], some of them −1, and the number of experts."""
    experts, tokens, slots = draw(st.integers(1, 300)), draw(st.integers(0, 9)), draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * slots, max_size=tokens * slots))
    return np.array(ids, np.int64).reshape(tokens, slots), experts


@given(routing=routings(), chance=st.randoms(use_true_random=False))
def test_rows_by_place(routing: tuple[np.ndarray, int], chance: random.Random) -> None:
    ids_TK, experts = routing
    here = sorted(chance.sample(range(experts), chance.randint(0, experts)))
    place_of = dict(zip(here, chance.sample(range(1000), len(here)), strict=True))
    order = list(range(ids_TK.size))
    chance.shuffle(order)
    expected = sorted(
        ((place_of[int(ids_TK.flat[row])], at, row) for at, row in enumerate(order) if ids_TK.flat[row] in place_of)
    )
    experts_E, places_E = np.array([*place_of], np.int64), np.array([*place_of.values()], np.int64)
    if chance.random() < 0.5:  # as a slice of all ranks' choices is
        ids_TK = np.asfortranarray(ids_TK)
    found = rows_by_place(ids_TK, np.array(order, np.int64), experts_E, places_E)
    assert found.rows_P.tolist() == [row for _, _, row in expected]
    assert found.tokens_P.tolist() == [row // ids_TK.shape[1] for _, _, row in expected]
    assert found.places_P.tolist() == [place for place, _, _ in expected]
    rows_of = Counter(place for place, _, _ in expected)
    assert found.places_E.tolist() == sorted(place_of.values())
    assert found.sizes_E.tolist() == [rows_of[place] for place in sorted(place_of.values())]
    assert found.segments() == (sorted(rows_of), [rows_of[place] for place in sorted(rows_of)])


@given(routing=routings(), devices=st.integers(1, 8), seed=st.integers(0, 100))
def test_experts_by_device(routing: tuple[np.ndarray, int], devices: int, seed: int) -> None:
    ids_TK, experts = routing
    if seed % 2:
        ids_TK = np.repeat(ids_TK, 2, axis=1)[:, ::2]
    placement_N = np.random.default_rng(seed).integers(0, devices, experts)
    experts_E, starts_D1 = experts_by_device(ids_TK, placement_N, devices)
    used = np.unique(ids_TK[ids_TK >= 0])
    assert len(starts_D1) == devices + 1
    assert starts_D1[-1] == len(experts_E)
    for device in range(devices):
        here = experts_E[starts_D1[device] : starts_D1[device + 1]]
        assert here.tolist() == used[placement_N[used] == device].tolist()


@given(routing=routings(), seed=st.integers(0, 1000))
def test_what_is_asked_of_tokens_and_experts(routing: tuple[np.ndarray, int], seed: int) -> None:
    ids_TK, experts = routing
    chance = np.random.default_rng(seed)
    real_T = chance.random(len(ids_TK)) < 0.7
    own_TK = of_real_tokens(ids_TK, real_T)
    assert own_TK[real_T].tolist() == ids_TK[real_T].tolist()
    assert (own_TK[~real_T] == -1).all()
    assert own_TK is not ids_TK
    assert of_real_tokens(ids_TK.astype(np.int32), real_T).tolist() == own_TK.tolist()

    changed_T, any_changed = changed_tokens(ids_TK, own_TK)
    assert changed_T.tolist() == (ids_TK != own_TK).any(1).tolist()
    assert any_changed == changed_T.any()

    values_TK = chance.choice([0.5, 1.0, np.nan, np.inf], ids_TK.shape, p=[0.6, 0.38, 0.01, 0.01])
    assert all_finite(values_TK, real_T) == np.isfinite(values_TK[real_T]).all()

    values_N, counted_N = chance.integers(0, 1 << 40, experts), chance.random(experts) < 0.2
    counted = values_N[counted_N]
    assert extremes(values_N, counted_N) == ((counted.max(), counted.min()) if len(counted) else (0, 0))


@given(routing=routings(), devices=st.integers(1, 8), seed=st.integers(0, 100))
def test_count_by_device(routing: tuple[np.ndarray, int], devices: int, seed: int) -> None:
    ids_TK, experts = routing
    chance = np.random.default_rng(seed)
    placement_N, resident_N = chance.integers(0, devices, experts), chance.random(experts) < 0.5
    missing_D, dispatched_D = count_by_device(ids_TK, placement_N, resident_N, devices)
    used = {int(expert) for expert in ids_TK.flat if expert >= 0}
    for device in range(devices):
        here = {expert for expert in used if placement_N[expert] == device}
        assert dispatched_D[device] == len(here)
        assert missing_D[device] == len({expert for expert in here if not resident_N[expert]})


@given(routing=routings(), devices=st.integers(1, 8), seed=st.integers(0, 100))
def test_many_at_once_are_as_each_on_its_own(routing: tuple[np.ndarray, int], devices: int, seed: int) -> None:
    own_TK, experts = routing
    chance = np.random.default_rng(seed)
    ids_TK = np.where(chance.random(own_TK.shape) < 0.3, -1, own_TK)
    placement_N, resident_N = chance.integers(0, devices, experts), chance.random(experts) < 0.5
    importance_N, active_N = chance.integers(0, 1 << 40, experts), chance.random(experts) < 0.5
    counts = count_layer(own_TK, ids_TK, placement_N, resident_N, devices, importance_N, active_N)
    before, after = (count_by_device(each, placement_N, resident_N, devices) for each in (own_TK, ids_TK))
    expected = (before[0], *after)
    for found_D, expected_D in zip(counts[:3], expected, strict=True):
        assert found_D.tolist() == expected_D.tolist()
    assert counts[3:] == extremes(importance_N, active_N)

    scores_TN = chance.choice([0.5, 1.0, np.nan], (len(own_TK), experts), p=[0.6, 0.39, 0.01])
    real_T = chance.random(len(own_TK)) < 0.7
    gates_TK = np.full(own_TK.shape, 7.0)
    assert gates_of(scores_TN, own_TK, real_T, gates_TK) == all_finite(gates_TK, real_T)
    for row, slot in np.ndindex(own_TK.shape):
        expected_gate = scores_TN[row, own_TK[row, slot]] if own_TK[row, slot] >= 0 else 0.0
        np.testing.assert_equal(gates_TK[row, slot], expected_gate)
