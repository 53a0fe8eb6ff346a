"""The compiled loops around a decision, against plain ones."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.experts.rows import count_by_device, rows_by_place


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
    by_place = sorted(place_of.items(), key=lambda item: item[1])
    experts_E, places_E = np.array(by_place, np.int64).reshape(-1, 2).T
    rows_P, places_P = rows_by_place(ids_TK.reshape(-1), np.array(order, np.int64), experts_E, places_E)
    assert rows_P.tolist() == [row for _, _, row in expected]
    assert places_P.tolist() == [place for place, _, _ in expected]


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
