"""The cache books against a naive cache, and what a live engine relies on: slots, snapshots, clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import UsageError
from runtime.cache import NEVER, CacheBook, CacheSpec, parse_cache

LAYERS, EXPERTS = 3, 6
Expert = tuple[int, int]


SPECS = st.sampled_from(
    [parse_cache(text) for text in ("lfu", "lru", "lfu:decay=0.5", "lfu:decay=0.97,admit=1", "lfu:admit=1")]
)
# A step: the experts dispatched in each layer.
STEPS = st.lists(st.lists(st.sets(st.integers(0, EXPERTS - 1)), min_size=LAYERS, max_size=LAYERS), max_size=25)


@given(spec=SPECS, slots=st.integers(0, 10), steps=STEPS)
def test_book_equals_the_definition(spec: CacheSpec, slots: int, steps: list[list[set[int]]], plain: Any) -> None:
    naive = plain.NaiveCache(kind=spec.kind, slots=slots, decay=spec.decay, admit=spec.admit)
    book = CacheBook(spec, slots, LAYERS, EXPERTS)
    for step in steps:
        naive.start_step()
        book.start_step()
        for layer, experts in enumerate(step):
            expected = naive.dispatch(layer, sorted(experts))
            got = book.dispatch(layer, sorted(experts))
            assert [(fetch.expert, fetch.slot is not None, fetch.evicted) for fetch in got] == expected
            for other in range(LAYERS):
                here = {expert for at, expert in naive.resident if at == other}
                assert set(np.flatnonzero(book.resident(other))) == here


@given(slots=st.integers(1, 8), steps=STEPS)
def test_belady_evicts_what_is_needed_last(slots: int, steps: list[list[set[int]]], plain: Any) -> None:
    moments = [(layer, experts) for step in steps for layer, experts in enumerate(step)]
    next_use_LN = np.full((LAYERS, EXPERTS), NEVER)
    naive = plain.NaiveCache(kind="belady", slots=slots)
    book = CacheBook(parse_cache("belady"), slots, LAYERS, EXPERTS, next_use_LN=next_use_LN)
    for now, (layer, experts) in enumerate(moments):
        for at in range(LAYERS):
            for expert in range(EXPERTS):
                later = [m for m in range(now + 1, len(moments)) if moments[m][0] == at and expert in moments[m][1]]
                next_use_LN[at, expert] = later[0] if later else NEVER
                naive.next_use[at, expert] = later[0] if later else float("inf")
        expected = naive.dispatch(layer, sorted(experts))
        got = book.dispatch(layer, sorted(experts))
        assert [(fetch.expert, fetch.slot is not None, fetch.evicted) for fetch in got] == expected


@given(spec=SPECS, slots=st.integers(0, 10), steps=STEPS)
def test_an_expert_keeps_its_slot_and_no_slot_is_shared(
    spec: CacheSpec, slots: int, steps: list[list[set[int]]]
) -> None:
    book = CacheBook(spec, slots, LAYERS, EXPERTS)
    held: dict[Expert, int] = {}
    for step in steps:
        book.start_step()
        for layer, experts in enumerate(step):
            for fetch in book.dispatch(layer, sorted(experts)):
                if fetch.evicted is not None:
                    assert held.pop(fetch.evicted) == fetch.slot
                if fetch.slot is not None:
                    assert 0 <= fetch.slot < slots
                    held[layer, fetch.expert] = fetch.slot
            assert len(set(held.values())) == len(held)
            for (at, expert), slot in held.items():
                assert book.slot_of(at, expert) == slot
    assert sum(int(book.resident(layer).sum()) for layer in range(LAYERS)) == len(held)


@given(spec=SPECS, slots=st.integers(0, 10), before=STEPS, after=STEPS)
def test_a_restored_book_goes_on_as_if_nothing_had_happened(
    spec: CacheSpec, slots: int, before: list[list[set[int]]], after: list[list[set[int]]]
) -> None:
    def play(book: CacheBook, steps: list[list[set[int]]]) -> list[object]:
        fetches: list[object] = []
        for step in steps:
            book.start_step()
            fetches += [book.dispatch(layer, sorted(experts)) for layer, experts in enumerate(step)]
        return fetches

    book = CacheBook(spec, slots, LAYERS, EXPERTS)
    play(book, before)
    snapshot = book.snapshot()
    first = play(book, after)
    book.restore(snapshot)
    assert play(book, after) == first


def test_a_fetch_that_finds_no_room_still_counts() -> None:
    book = CacheBook(parse_cache("lfu"), 1, 1, 4)
    first, second = book.dispatch(0, [1, 2])
    assert (first.slot, second.slot) == (0, None)
    assert book.slot_of(0, 2) is None


def test_a_snapshot_of_another_size_is_refused() -> None:
    snapshot = CacheBook(parse_cache("lfu"), 2, 1, 4).snapshot()
    with pytest.raises(UsageError, match="another size"):
        CacheBook(parse_cache("lfu"), 3, 1, 4).restore(snapshot)


def test_a_live_book_cannot_look_ahead() -> None:
    with pytest.raises(UsageError, match="looks ahead"):
        CacheBook(parse_cache("belady"), 2, 1, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lfu", CacheSpec(kind="lfu")),
        ("lru", CacheSpec(kind="lru")),
        ("belady", CacheSpec(kind="belady")),
        ("lfu:decay=0.97,admit=1", CacheSpec(kind="lfu", decay=0.97, admit=True)),
        (" lfu : decay = 0.5 ", CacheSpec(kind="lfu", decay=0.5)),
    ],
)
def test_a_cache_is_read_as_it_is_written(text: str, expected: CacheSpec) -> None:
    assert parse_cache(text) == expected
    assert parse_cache(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mru",
        "lru:decay=0.9",
        "belady:admit=1",
        "lfu:decay=0",
        "lfu:decay=1.5",
        "lfu:decay=nan",
        "lfu:decay=x",
        "lfu:admit=yes",
        "lfu:admit",
        "lfu:size=3",
        "lfu:decay=0.9,decay=0.8",
    ],
)
def test_a_wrong_cache_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cache(text)


@given(steps=STEPS, decay=st.sampled_from([1.0, 0.5, 0.97]))
def test_a_rate_is_the_share_of_steps_that_used_an_expert(steps: list[list[set[int]]], decay: float) -> None:
    book = CacheBook(CacheSpec(kind="lfu", decay=decay), 4, LAYERS, EXPERTS)
    used_LN = np.zeros((LAYERS, EXPERTS))
    for number, step in enumerate(steps):
        book.start_step()
        used_LN *= decay
        for layer, experts in enumerate(step):
            rate_N = book.rate(layer)
            over = number + 1 if decay == 1 else 1 / (1 - decay)
            assert np.allclose(rate_N, used_LN[layer] / over, rtol=1e-12)
            assert (rate_N >= 0).all()
            assert (rate_N <= 1).all()
            book.dispatch(layer, sorted(experts))
            used_LN[layer, sorted(experts)] += 1
