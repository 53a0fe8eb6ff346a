"""The compiled pass equals the plain one in every figure, whatever the policy, cache, placement and machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from runtime.simulate.batches import plan
from runtime.simulate.compiled import CompiledPass
from runtime.simulate.index import index_of
from runtime.simulate.lookahead import next_uses
from runtime.simulate.prepare import prepare
from runtime.simulate.records import Counts, PassSpec, Placement
from runtime.simulate.reference import PolicyPass
from runtime.trace.records import TraceSource

POLICIES = [
    "router",
    "caee",
    "caee:theta=0.5",
    "caee:theta=1",
    "caee:rule=score,theta=0.9",
    "caee:rule=score,theta=50",
    "caee:theta=0.3,ceiling=0.2",
    "importance:theta=0.6",
    "importance:rule=score,theta=0.4",
    "budget:price=0.7",
    "budget:price=0",
    "budget:epsilon=0.02",
    "budget:price=0.2,ceiling=0.4",
    "budget:price=0.7,reuse=0.5",
    "budget:epsilon=0.02,reuse=0.2",
    "oea:k0=1",
    "oea:k0=2",
    "top-k:k0=2",
    "skip:beta=0.4",
    "caee:theta=0.6,compensation=none",
]
CACHES = [
    "lfu",
    "lru",
    "belady",
    "lfu:decay=0.6",
    "lfu:admit=1",
    "lfu:decay=0.9,admit=1",
    "forecast:decay=0.7",
    "forecast:decay=0.9,prefetch=1",
]


def both(source: TraceSource, each: PassSpec, batch_size: int | None, warmup_steps: int = 3) -> tuple[Counts, Counts]:
    """The counts of the compiled and of the plain pass over the same batches."""
    meta = source.meta
    batching = plan(source, index_of(source), batch_size)
    fast = CompiledPass(each, top_k=meta.top_k, has_scores=meta.scores_recorded)
    plain = PolicyPass(each, compiled=False)
    blocks = list(batching.blocks())
    prepared = [
        prepare(block.offsets_S1, block.rows.ids_RLK, block.rows.gates_RLK, meta.num_experts) for block in blocks
    ]
    ahead = each.cache is not None and each.cache.kind == "belady"
    future = next_uses(prepared, meta.num_experts) if ahead else None
    done = 0
    for block, ready in zip(blocks, prepared, strict=True):
        upcoming = None if future is None else next(future)
        for one in (fast, plain):
            one.run(block, ready, upcoming, min(block.steps, max(0, warmup_steps - done)))
        done += block.steps
    return fast.counts(), plain.counts()


def assert_equal(fast: Counts, plain: Counts) -> None:
    for field in dataclasses.fields(Counts):
        got, expected = getattr(fast, field.name), getattr(plain, field.name)
        if field.name == "step_times":
            got, expected = np.concatenate(got), np.concatenate(expected)
        np.testing.assert_array_equal(got, expected, err_msg=field.name)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_on_every_cache(
    policy: str, cache: str, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    seed = POLICIES.index(policy) * len(CACHES) + CACHES.index(cache)
    trace = make_trace(seed=seed)
    machine = make_machine([1e-3, 2e-3, 0.0005])
    each = make_pass(policy, machine, trace, cache=cache, cache_experts=4 + seed % 4)
    assert_equal(*both(in_memory(trace), each, 2))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scores", [False, True])
def test_shared_links_compute_and_scores(
    policy: str, scores: bool, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(seed=3, scores=scores, experts=17, top_k=4, layers=2, empty_slots=True)
    cache = "forecast:decay=0.9,prefetch=1" if scores else "lfu"
    for staged in (False, True):
        machine = make_machine(
            [1e-3, 1.1e-3, 0.9e-3, 1e-3],
            groups=[([0, 1], 0.9), ([0, 1, 2, 3], 0.31)],
            expert_compute_seconds=4e-4,
            dense_seconds=2.5e-3,
            overlap=scores and not staged,
            staged=staged,
        )
        each = make_pass(policy, machine, trace, cache=cache, cache_experts=5, placement="round-robin")
        assert_equal(*both(in_memory(trace), each, 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_experts_in_device_memory(
    policy: str, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(seed=5, interleaved=True)
    machine = make_machine([1e-5, 2e-5, 1e-5], tier="device")
    assert_equal(*both(in_memory(trace), make_pass(policy, machine, trace), None))


@pytest.mark.parametrize("cache", [*CACHES, None])
@pytest.mark.parametrize(
    "policy", ["router", "caee:theta=0.6", "budget:price=0.5", "budget:price=0.5,reuse=0.4", "oea:k0=1"]
)
def test_replicated_experts(
    policy: str, cache: str | None, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(seed=8, lengths=(12, 15, 11, 14))
    rng = np.random.default_rng(1)
    devices_LNR = np.full((3, 12, 2), -1, np.int32)
    for place in np.ndindex(3, 12):
        held = np.sort(rng.choice(3, size=rng.integers(1, 3), replace=False))
        devices_LNR[place][: len(held)] = held
    machine = make_machine([1e-3, 1e-3, 2e-3], tier="host" if cache else "device")
    each = make_pass(
        policy, machine, trace, cache=cache or "lfu", placement=Placement(name="drawn", devices_LNR=devices_LNR)
    )
    assert_equal(*both(in_memory(trace), each, 4))


@pytest.mark.parametrize("cache_experts", [0, 1, 2, 36])
def test_caches_of_any_size(
    cache_experts: int, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(seed=9)
    for cache in CACHES:
        each = make_pass("caee", make_machine(), trace, cache=cache, cache_experts=cache_experts)
        assert_equal(*both(in_memory(trace), each, 3))


def test_more_experts_than_insertion_sort_handles(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(seed=2, experts=150, top_k=8, lengths=[6] * 30, layers=2)
    for policy in ("caee:theta=0.7", "budget:epsilon=0.01"):
        each = make_pass(policy, make_machine([1e-3] * 4), trace, cache_experts=40)
        assert_equal(*both(in_memory(trace, 64), each, 25))


def test_counts_that_decay_until_they_are_equal(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    # A decay this strong takes counts through the denormal numbers to 0, where only the last use tells them apart.
    trace = make_trace(seed=4, lengths=(150, 150, 150), layers=2, experts=16, top_k=2)
    each = make_pass("router", make_machine(), trace, cache="lfu:decay=0.00001", cache_experts=7)
    assert_equal(*both(in_memory(trace), each, 2))
