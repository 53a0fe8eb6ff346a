"""The simulation as a whole: figures by hand, policies that need full scores, stopping, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from probes.errors import TraceError, UsageError
from runtime.simulate.document import simulation_document
from runtime.simulate.figures import cut_against_router, pareto
from runtime.simulate.records import Simulation
from runtime.simulate.run import simulate
from runtime.simulate.scenario import Scenario, half_of, make_plan
from runtime.trace.chunking import new_chunk
from runtime.trace.records import IdSpace, LoadProfile, Phase, RoutingTrace, TraceMeta


def by_hand() -> RoutingTrace:
    """One sequence, one layer, four experts, top-2: four steps."""
    ids = np.array([[[0, 2]], [[0, 1]], [[2, 3]], [[0, 2]]], np.int16)
    gates = np.array([[[0.75, 0.25]], [[0.5, 0.5]], [[0.9, 0.1]], [[0.75, 0.25]]], np.float32)
    meta = TraceMeta(model="by hand", num_experts=4, top_k=2, layer_numbers=(7,))
    return new_chunk(meta, ("a",), np.zeros(4, np.int32), ids, gates, position=np.arange(4), phase=Phase.DECODE)


def test_figures_by_hand(make_machine: Any, make_pass: Any, in_memory: Any) -> None:
    trace = by_hand()
    # Experts 0 and 1 are on device 0, 2 and 3 on device 1; each device caches one.
    machine = make_machine([0.1, 0.3], expert_compute_seconds=0.01, dense_seconds=1.0, groups=[([0, 1], 0.9)])
    each = make_pass("router", machine, trace, cache="lru", cache_experts=1)
    simulation = simulate(in_memory(trace), [each], batch_size=1, warmup_steps=1)
    (figures,) = simulation.passes
    # Step 1: 0 hits and 1 is fetched, without room. Step 2: 2 hits, 3 is fetched. Step 3: both hit.
    assert figures.steps == figures.layer_steps == 3
    assert figures.misses_per_device == (1, 1)
    assert figures.max_device_misses_per_step == 2 / 3
    assert figures.gap_histogram == (1, 2)
    assert figures.gap_mean == 2 / 3
    times = [1.0 + 0.1 + 0.02, 1.0 + 0.3 + 0.02, 1.0 + 0.01]
    assert figures.time_per_step.mean == pytest.approx(sum(times) / 3)
    assert figures.time_per_step.p50 == pytest.approx(times[0])
    assert figures.time_per_step.p95 == pytest.approx(times[0] + 0.9 * (times[1] - times[0]))
    assert figures.layers[0].layer == 7
    assert figures.removed_importance == 0


def test_the_first_step_pays_for_both_devices_on_a_shared_link(
    make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = by_hand()
    shared = make_machine([0.1, 0.3], groups=[([0, 1], 1.0)])
    alone = make_machine([0.1, 0.3])
    passes = [make_pass("router", machine, trace, cache_experts=4) for machine in (shared, alone)]
    first, second = simulate(in_memory(trace), passes, batch_size=1).passes
    # Step 0 fetches 0 and 2 at once, step 1 fetches 1, step 2 fetches 3.
    assert first.time_per_step.mean == pytest.approx((0.4 + 0.1 + 0.3) / 4)
    assert second.time_per_step.mean == pytest.approx((0.3 + 0.1 + 0.3) / 4)


def test_overlap_takes_the_longer_of_movement_and_compute(make_machine: Any, make_pass: Any, in_memory: Any) -> None:
    trace = by_hand()
    machine = make_machine([0.1, 0.3], expert_compute_seconds=0.2, overlap=True)
    each = make_pass("router", machine, trace, cache_experts=4)
    (figures,) = simulate(in_memory(trace), [each], batch_size=1).passes
    # Compute: one expert a device but in step 1 (two on device 0) and step 2 (two on device 1).
    assert figures.time_per_step.mean == pytest.approx((0.3 + 0.4 + 0.4 + 0.2) / 4)


def test_staged_compute_waits_for_what_was_moved(make_machine: Any, make_pass: Any, in_memory: Any) -> None:
    trace = by_hand()
    times = []
    for groups in ((), [([0, 1], 1.0)]):
        machine = make_machine([0.1, 0.3], groups=groups, expert_compute_seconds=0.2, staged=True)
        each = make_pass("router", machine, trace, cache_experts=4)
        (figures,) = simulate(in_memory(trace), [each], batch_size=1).passes
        times.append(figures.time_per_step.mean)
    # Step 0 moves one expert to each device, 1 and 2 one to where another is there already, step 3 none.
    assert times[0] == pytest.approx(((0.3 + 0.2) + (0.2 + 0.2) + (0.3 + 0.2) + 0.2) / 4)
    assert times[1] == pytest.approx(((0.4 + 0.2) + (0.2 + 0.2) + (0.3 + 0.2) + 0.2) / 4)


def test_removed_importance_by_hand(make_machine: Any, make_pass: Any, in_memory: Any) -> None:
    trace = by_hand()
    each = make_pass("top-k:k0=1", make_machine(), trace)
    (figures,) = simulate(in_memory(trace), [each], batch_size=1).passes
    assert figures.removed_importance == pytest.approx((0.25 + 0.5 + 0.1 + 0.25) / 4, abs=1e-8)


NEED_SCORES = ["xshare:budget=5", "lynx:keep=4", "max-rank:m=6", "cache-prior:lambda=0.5", "random:theta=0.6"]


@pytest.mark.parametrize(
    "policy",
    [*NEED_SCORES, "caee:theta=0.5,compensation=resident", "caee:theta=0.5,reselect=all"],
)
def test_policies_that_reroute_freely(
    policy: str, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(scores=True, lengths=(8, 8, 8))
    passes = [make_pass(each, make_machine(), trace, cache_experts=8) for each in ("router", policy)]
    simulation = simulate(in_memory(trace), passes, batch_size=3)
    router, rerouting = simulation.passes
    assert rerouting.steps == router.steps == 8
    assert sum(rerouting.misses_per_device) <= sum(router.misses_per_device)
    assert rerouting.removed_importance > 0
    assert any("not compiled" in note for note in simulation.notes)


@pytest.mark.parametrize("policy", NEED_SCORES)
def test_policies_that_need_scores_are_refused_without(policy: str, make_trace: Any, in_memory: Any) -> None:
    with pytest.raises(UsageError, match="needs full scores"):
        make_plan(Scenario(policies=(policy,)), in_memory(make_trace()), _no_machine)


def _no_machine(tier: str) -> Any:
    raise AssertionError("the policy is refused before anything else")


def test_without_scores_lost_slots_stay_empty_and_the_output_says_so(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    for scores, compensated in ((False, False), (True, True)):
        trace = make_trace(scores=scores)
        passes = [make_pass(each, make_machine(), trace) for each in ("router", "caee:theta=0.4")]
        simulation = simulate(in_memory(trace), passes, batch_size=2)
        assert any("compensation acts as none" in note for note in simulation.notes) is not compensated
        assert [each.compensated for each in simulation.passes] == [compensated, compensated]
        assert (simulation.passes[1].rerouted_slots > 0) is compensated


def simulation_of(make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any, **how: Any) -> Simulation:
    trace = make_trace(lengths=(40, 40, 40))
    machine = make_machine()
    passes = [
        make_pass(policy, machine, trace, cache=cache)
        for policy in ("router", "caee:theta=0.7", "importance:theta=0.7")
        for cache in ("lfu", "lru")
    ]
    return simulate(in_memory(trace), passes, batch_size=3, **how)


def test_the_pareto_front_holds_what_nothing_beats(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    passes = simulation_of(make_trace, make_machine, make_pass, in_memory).passes
    front = pareto(passes)
    points = [(each.time_per_step.mean, each.removed_importance) for each in passes]
    for place, point in enumerate(points):
        beaten = any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in points)
        assert (place in front) is not beaten
    assert [points[place] for place in front] == sorted(points[place] for place in front)


def test_a_cut_is_against_the_router_on_the_same_cache(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    passes = simulation_of(make_trace, make_machine, make_pass, in_memory).passes
    mean = {(each.plan.policy.name, each.plan.cache.kind): each.time_per_step.mean for each in passes}
    for each in passes:
        expected = 1 - each.time_per_step.mean / mean["router", each.plan.cache.kind]
        assert cut_against_router(each, passes) == pytest.approx(expected)
    assert cut_against_router(passes[2], passes[2:]) is None


def test_stopping_keeps_the_steps_that_are_complete(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulation_of(make_trace, make_machine, make_pass, in_memory)
    monkeypatch.setattr("runtime.simulate.run.MAX_BLOCK_STEPS", 10)
    done = []
    stopped = simulation_of(
        make_trace,
        make_machine,
        make_pass,
        in_memory,
        warmup_steps=5,
        progress=lambda steps, of: done.append((steps, of)),
        stop=lambda: len(done) == 2,
    )
    assert done == [(10, 40), (20, 40)]
    assert stopped.interrupted
    assert not whole.interrupted
    assert {each.steps for each in stopped.passes} == {15}
    assert stopped.planned_steps == 40


def test_blocks_change_nothing(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulation_of(make_trace, make_machine, make_pass, in_memory, warmup_steps=7)
    monkeypatch.setattr("runtime.simulate.run.MAX_BLOCK_STEPS", 3)
    pieces = simulation_of(make_trace, make_machine, make_pass, in_memory, warmup_steps=7)
    for one, other in zip(whole.passes, pieces.passes, strict=True):
        for field in ("steps", "time_per_step", "layers", "gap_histogram", "removed_importance"):
            assert getattr(one, field) == getattr(other, field)


@pytest.mark.parametrize("warmup_steps", [9, 50])
def test_a_warm_up_that_leaves_nothing(
    warmup_steps: int, make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(lengths=(9,))
    each = make_pass("router", make_machine(), trace)
    with pytest.raises(UsageError, match="no step is left"):
        simulate(in_memory(trace), [each], batch_size=1, warmup_steps=warmup_steps)


def test_one_token_one_expert(make_machine: Any, make_pass: Any, in_memory: Any) -> None:
    meta = TraceMeta(model=None, num_experts=1, top_k=1, layer_numbers=(0,))
    trace = new_chunk(
        meta, ("a",), np.zeros(1, np.int32), np.zeros((1, 1, 1), np.int16), np.ones((1, 1, 1), np.float32), phase=1
    )
    for policy in ("router", "caee", "budget"):
        each = make_pass(policy, make_machine([0.5]), trace, cache_experts=1)
        (figures,) = simulate(in_memory(trace), [each], batch_size=1).passes
        assert figures.time_per_step.mean == 0.5
        assert figures.removed_importance == 0


def test_tokens_without_any_expert_cost_nothing(
    make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(lengths=(4, 4))
    nothing = dataclasses.replace(
        trace, ids_TLK=np.full_like(trace.ids_TLK, -1), gates_TLK=np.zeros_like(trace.gates_TLK)
    )
    for policy in ("router", "caee", "caee:rule=score", "budget", "skip:beta=0.5"):
        each = make_pass(policy, make_machine(), nothing)
        (figures,) = simulate(in_memory(nothing), [each], batch_size=2).passes
        assert figures.time_per_step.mean == 0
        assert figures.misses_per_device == (0, 0)


def test_physical_ids_are_refused(make_trace: Any, in_memory: Any) -> None:
    trace = make_trace()
    meta = dataclasses.replace(trace.meta, id_space=IdSpace.PHYSICAL)
    with pytest.raises(TraceError, match="physical"):
        simulate(in_memory(dataclasses.replace(trace, meta=meta)), [], batch_size=1)


def test_a_scenario_makes_every_combination_in_the_order_given(
    make_trace: Any, make_machine: Any, in_memory: Any
) -> None:
    scenario = Scenario(
        policies=("router", "caee:theta=0.7"),
        caches=("lru", "lfu"),
        cache_experts=(3, 5),
        tiers=("host", "device"),
        batch_size="2",
    )
    plan = make_plan(scenario, in_memory(make_trace()), lambda tier: make_machine(tier=tier))
    listed = [
        (each.machine.tier, each.policy.name, None if each.cache is None else each.cache.kind, each.cache_experts)
        for each in plan.passes
    ]
    offloading = itertools.product(["host"], ["router", "caee"], ["lru", "lfu"], [3, 5])
    assert listed == [*offloading, ("device", "router", None, None), ("device", "caee", None, None)]
    # The rule follows the tier: by token where experts are cached, by score where they are not.
    assert [each.policy.parameters.get("rule") for each in plan.passes[-1:]] == ["score"]


def test_half_of_a_devices_experts_by_default(make_trace: Any, make_machine: Any, in_memory: Any) -> None:
    plan = make_plan(Scenario(), in_memory(make_trace()), lambda tier: make_machine([1.0] * 5, tier=tier))
    # 3 layers × 12 experts on 5 devices: the fullest holds 3 of each layer.
    assert {each.cache_experts for each in plan.passes} == {4}
    assert half_of(plan.passes[0].placement, 5) == 4


def test_recorded_steps_are_the_default_where_there_are_any(make_trace: Any, make_machine: Any, in_memory: Any) -> None:
    recorded = in_memory(make_trace(interleaved=True))
    assert make_plan(Scenario(), recorded, lambda tier: make_machine(tier=tier)).batch_size is None
    free = in_memory(make_trace(lengths=(5, 5, 5)))
    assert make_plan(Scenario(), free, lambda tier: make_machine(tier=tier)).batch_size == 3


def test_loads_from_a_profile(make_trace: Any, make_machine: Any, in_memory: Any) -> None:
    trace = make_trace()
    profile = LoadProfile(meta=trace.meta, counts_LN=np.tile(np.arange(12.0), (3, 1)), tokens=None)
    scenario = Scenario(placements=("balanced",))
    plan = make_plan(scenario, in_memory(trace), lambda tier: make_machine([1.0] * 3, tier=tier), profile)
    load_D = np.zeros(3)
    np.add.at(load_D, plan.passes[0].placement.devices_LNR[0, :, 0], np.arange(12))
    assert load_D.max() - load_D.min() <= 2
    wrong = dataclasses.replace(profile, counts_LN=np.ones((3, 13)))
    with pytest.raises(UsageError, match="3 layers of 13 experts"):
        make_plan(scenario, in_memory(trace), lambda tier: make_machine([1.0] * 3, tier=tier), wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tiers": ("moon",)}, "unknown tier"),
        ({"cache_experts": (-1,)}, "fewer than 0"),
        ({"warmup_steps": -1}, "below 0"),
        ({"policies": ("best",)}, "unknown policy"),
        ({"caches": ("mru",)}, "unknown cache"),
        ({"batch_size": "many"}, "neither a number"),
        ({"policies": ("caee:theta=1.5",)}, "out of range"),
        ({"policies": ("caee:compensation=resident",), "tiers": ("device",)}, "needs expert caches"),
    ],
)
def test_a_scenario_that_cannot_be(
    arguments: dict[str, Any], message: str, make_trace: Any, make_machine: Any, in_memory: Any
) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(Scenario(**arguments), in_memory(make_trace()), lambda tier: make_machine(tier=tier))


def test_the_document_holds_every_figure(make_trace: Any, make_machine: Any, make_pass: Any, in_memory: Any) -> None:
    simulation = simulation_of(make_trace, make_machine, make_pass, in_memory)
    document = simulation_document(
        simulation, simulation_id="x", created_at="now", trace="t.parquet", expert_bytes=None
    )
    assert document["schema"] == "caee.simulate/1"
    assert document["machine"]["cost"] == [{"device": d, "seconds_per_expert": 1e-3} for d in (0, 1)]
    for entry, figures in zip(document["policies"], simulation.passes, strict=True):
        assert entry["name"] == figures.plan.policy.name
        assert entry["misses_per_device"] == [
            sum(layer["device_misses_after"][device] for layer in entry["layers"]) for device in range(2)
        ]
        assert sum(entry["gap"]["histogram"]) == entry["layer_steps"] == 3 * entry["steps"]
    assert document["policies"][2]["parameters"] == {"rule": "cir", "theta": 0.7}
