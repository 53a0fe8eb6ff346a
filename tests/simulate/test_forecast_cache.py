"""The cache ``forecast`` against its definition, and what prefetching must never do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import UsageError
from runtime.cache import CacheBook, CacheSpec, parse_cache
from runtime.policy.inputs import make_groups
from runtime.policy.loads import f_of_loads
from runtime.policy.types import NO_GROUPS, LinkGroups
from runtime.prefetch import prefetch_idle
from runtime.simulate.run import simulate

LAYERS, EXPERTS = 3, 6
Expert = tuple[int, int]
Step = list[tuple[set[int], set[int]]]

SPECS = st.builds(CacheSpec, kind=st.just("forecast"), decay=st.sampled_from([0.5, 0.9, 0.98]), prefetch=st.booleans())
# By layer: what the router chose, and which of that is pruned.
EXPERT_SETS = st.sets(st.integers(0, EXPERTS - 1), max_size=4)
STEPS = st.lists(
    st.lists(st.tuples(EXPERT_SETS, EXPERT_SETS), min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=12
)


@dataclass
class NaiveForecast:
    """The definition, spelled out over sets and dictionaries."""

    decay: float
    slots: int
    counts: dict[Expert, float] = field(default_factory=dict)
    last: dict[Expert, int] = field(default_factory=dict)
    resident: set[Expert] = field(default_factory=set)
    moment: int = 0
    layer: int = 0

    def wait(self, expert: Expert) -> float:
        turn = 1
        while (self.layer + turn) % LAYERS != expert[0]:
            turn += 1
        rate = (1.0 - self.decay) * self.counts.get(expert, 0.0)
        return turn + LAYERS / rate if rate > 0 else math.inf

    def victim(self) -> Expert | None:
        movable = [expert for expert in self.resident if self.last[expert] < self.moment]
        return min(movable, key=lambda expert: (-self.wait(expert), self.last[expert], expert), default=None)

    def dispatch(self, layer: int, demanded: set[int], kept: set[int]) -> list[tuple[int, bool, Expert | None]]:
        self.moment += 1
        self.layer = layer
        for expert in demanded:
            self.counts[layer, expert] = self.counts.get((layer, expert), 0.0) + 1
        for expert in kept:
            self.last[layer, expert] = self.moment
        return [(e, *self.fetch((layer, e))) for e in sorted(kept) if (layer, e) not in self.resident]

    def fetch(self, expert: Expert) -> tuple[bool, Expert | None]:
        victim = None
        if len(self.resident) == self.slots:
            victim = self.victim()
            if victim is None or self.wait(expert) > self.wait(victim):
                return False, None
            self.resident.remove(victim)
        self.resident.add(expert)
        return True, victim

    def exchange(self) -> tuple[Expert, Expert] | None:
        victim = self.victim() if len(self.resident) == self.slots else None
        absent = [expert for expert, count in self.counts.items() if count > 0 and expert not in self.resident]
        coming = min(absent, key=lambda expert: (self.wait(expert), expert), default=None)
        if victim is None or coming is None or not self.wait(coming) < self.wait(victim):
            return None
        self.resident.remove(victim)
        self.resident.add(coming)
        self.last[coming] = self.moment
        return coming, victim


@given(spec=SPECS, slots=st.integers(0, 10), steps=STEPS, exchanges=st.integers(0, 3))
def test_a_book_does_what_the_definition_says(spec: CacheSpec, slots: int, steps: list[Step], exchanges: int) -> None:
    book, naive = CacheBook(spec, slots, LAYERS, EXPERTS), NaiveForecast(spec.decay, slots)
    for step in steps:
        book.start_step()
        naive.counts = {expert: count * spec.decay for expert, count in naive.counts.items()}
        for layer, (demanded, pruned) in enumerate(step):
            kept = demanded - pruned
            fetched = book.dispatch(layer, sorted(kept), sorted(demanded))
            assert [(f.expert, f.slot is not None, f.evicted) for f in fetched] == naive.dispatch(layer, demanded, kept)
            expected = [exchange for _ in range(exchanges) if (exchange := naive.exchange())]
            assert [((each.layer, each.expert), each.evicted) for each in book.prefetch(exchanges)] == expected
            for at in range(LAYERS):
                held = {(at, int(expert)) for expert in np.flatnonzero(book.resident(at))}
                assert held == {expert for expert in naive.resident if expert[0] == at}


def test_pruned_experts_count_as_needed() -> None:
    book = CacheBook(parse_cache("forecast"), 1, 1, 3)
    for _ in range(5):
        book.start_step()
        book.dispatch(0, [0], [0, 1])
        book.dispatch(0, [0], [0, 1])
        book.dispatch(0, [], [1])
    (fetch,) = book.dispatch(0, [1], [1])
    assert fetch.evicted == (0, 0)


@given(spec=SPECS, steps=STEPS, slots=st.integers(1, 4), costs=st.lists(st.integers(0, 5), min_size=3, max_size=3))
@pytest.mark.parametrize("groups", [NO_GROUPS, make_groups([([0, 1], 0.8), ([0, 1, 2], 0.5)], 3)])
def test_prefetching_never_raises_the_cost_of_a_layer_step(
    groups: LinkGroups, spec: CacheSpec, steps: list[Step], slots: int, costs: list[int]
) -> None:
    books = [CacheBook(spec, slots, LAYERS, EXPERTS) for _ in range(3)]
    for step in steps:
        for book in books:
            book.start_step()
        for layer, (demanded, pruned) in enumerate(step):
            moved, used = [], []
            for device, book in enumerate(books):
                here = [expert for expert in sorted(demanded) if expert % 3 == device]
                kept = [expert for expert in here if expert not in pruned]
                moved.append(len(book.dispatch(layer, kept, here)))
                used.append([(layer, expert) for expert in kept if book.slot_of(layer, expert) is not None])
            ahead = prefetch_idle(books, np.array(moved), np.array(costs), groups)
            loads = [cost * number for cost, number in zip(costs, moved, strict=True)]
            more = [load + cost * len(each) for load, cost, each in zip(loads, costs, ahead, strict=True)]
            assert f_of_loads(more, groups) == f_of_loads(loads, groups)
            assert spec.prefetch or not any(ahead)
            for book, each, mine in zip(books, ahead, used, strict=True):
                # Nothing in use goes, and nothing comes and goes again.
                assert not {exchange.evicted for exchange in each} & {*mine, *((e.layer, e.expert) for e in each)}
                assert all(book.slot_of(e.layer, e.expert) == e.slot for e in each)


def test_an_idle_link_brings_what_is_due_next() -> None:
    book = CacheBook(parse_cache("forecast:prefetch=1"), 1, 2, 4)
    for _ in range(20):
        book.start_step()
        book.dispatch(0, [0])
        book.dispatch(1, [1])
    book.start_step()
    book.dispatch(0, [0])
    assert book.slot_of(0, 0) == 0
    book.dispatch(1, [])
    # Layer 0 comes next, and its expert is there; after it has passed, layer 1's is due.
    assert book.prefetch(3) == []
    book.start_step()
    book.dispatch(0, [])
    (exchanged,) = book.prefetch(3)
    assert ((exchanged.layer, exchanged.expert), exchanged.evicted) == ((1, 1), (0, 0))


@pytest.mark.parametrize("cache", ["forecast", "forecast:prefetch=1"])
def test_budget_stays_on_target_with_it(
    cache: str, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(lengths=(160,) * 12, layers=6, experts=24, top_k=3)
    each = make_pass("budget:epsilon=0.02", make_machine([1e-3] * 3), trace, cache=cache, cache_experts=24)
    (figures,) = simulate(in_memory(trace, 512), [each], batch_size=4).passes
    assert figures.removed_importance == pytest.approx(0.02, rel=0.05)


def test_prefetching_pays_in_time(make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any) -> None:
    trace = make_trace(lengths=(160,) * 12, layers=6, experts=24, top_k=3)
    passes = [
        make_pass("router", make_machine([1e-3] * 3), trace, cache=cache, cache_experts=24)
        for cache in ("lfu", "forecast", "forecast:prefetch=1")
    ]
    lfu, plain, ahead = simulate(in_memory(trace, 512), passes, batch_size=4, warmup_steps=20).passes
    assert ahead.max_device_misses_per_step < plain.max_device_misses_per_step < lfu.max_device_misses_per_step
    assert sum(ahead.misses_per_device) > sum(plain.misses_per_device)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("forecast", CacheSpec(kind="forecast", decay=0.98)),
        ("forecast:decay=0.9,prefetch=1", CacheSpec(kind="forecast", decay=0.9, prefetch=True)),
    ],
)
def test_it_is_read_as_it_is_written(text: str, expected: CacheSpec) -> None:
    assert parse_cache(text) == expected
    assert parse_cache(str(expected)) == expected


@pytest.mark.parametrize("text", ["forecast:decay=1", "forecast:admit=1", "lfu:prefetch=1", "forecast:prefetch=2"])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cache(text)
