"""Predicted step times and intervals, on records made by hand whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.cost import uniform_costs
from runtime.policy.types import GROUP_UNIT, NO_GROUPS, LinkGroups
from runtime.predict import StepCosts, measure_costs, predicted_tpot
from runtime.recording import LayerStep, PassRecord, StepRecord, Timers
from runtime.statistics import estimate, mean_difference_interval, paired_ratio


def costs(*fetch: float, compute: float = 0.0, rest: float = 0.0, groups: LinkGroups = NO_GROUPS) -> StepCosts:
    return StepCosts(fetch_D=fetch, compute=compute, rest=rest, groups=groups)


def counts(*steps: list[list[int]]) -> np.ndarray:
    """[S, L, D]."""
    return np.array(steps, np.int32)


def shared(factor: float, *devices: int) -> LinkGroups:
    return LinkGroups(
        starts_G1=np.array([0, len(devices)]),
        members=np.array(devices),
        factors_G=np.array([round(factor * GROUP_UNIT)]),
    )


def test_a_layer_waits_for_its_slowest_device_and_a_step_for_its_layers() -> None:
    misses = counts([[2, 1], [0, 3]], [[1, 1], [1, 0]])
    # Step 1: max(2·1, 1·2) + max(0, 3·2); step 2: max(1, 2) + max(1, 0); and 0.5 around each.
    assert predicted_tpot(costs(1.0, 2.0, rest=0.5), misses, misses) == pytest.approx((8 + 3) / 2 + 0.5)


def test_hits_are_computed_beside_the_fetches_and_misses_after_them() -> None:
    hidden = predicted_tpot(costs(1.0, compute=0.1), counts([[2]]), counts([[5]]))
    assert hidden == pytest.approx(2 * 1.0 + 2 * 0.1)
    shown = predicted_tpot(costs(0.01, compute=0.1), counts([[2]]), counts([[5]]))
    assert shown == pytest.approx(3 * 0.1 + 2 * 0.1)


def test_a_shared_link_serves_one_after_the_other() -> None:
    misses = counts([[2, 3, 0]])
    alone = predicted_tpot(costs(1.0, 1.0, 1.0), misses, misses)
    serial = predicted_tpot(costs(1.0, 1.0, 1.0, groups=shared(1.0, 0, 1)), misses, misses)
    parallel = predicted_tpot(costs(1.0, 1.0, 1.0, groups=shared(0.5, 0, 1)), misses, misses)
    assert (alone, serial, parallel) == pytest.approx((3.0, 5.0, 3.0))


def a_pass(seconds: float, experts: float, exchange: float, wait: float, dispatched: list[int]) -> PassRecord:
    """One prefill, which must count for nothing, and two decode steps of one layer."""
    layer = LayerStep(
        layer=0,
        misses_before_D=np.zeros(len(dispatched), np.int32),
        misses_after_D=np.zeros(len(dispatched), np.int32),
        dispatched_D=np.array(dispatched, np.int32),
        removed=0,
        rerouted_slots=0,
        importance_highest=0.0,
        importance_lowest=0.0,
        fell_back=False,
    )
    timers = Timers(decide=0.0, fetch_wait=wait, experts=experts, exchange=exchange)
    decode = StepRecord(tokens=1, prefill=False, layers=[layer], timers=timers, seconds=seconds)
    prefill = StepRecord(tokens=9, prefill=True, layers=[layer], timers=Timers(experts=1e3), seconds=1e6)
    return PassRecord(ttft_seconds=1.0, tpot_seconds=seconds, token_ids=[[1, 2, 3]], steps=[prefill, decode, decode])


def test_compute_and_rest_come_from_the_baseline() -> None:
    ranks = [[a_pass(1.0, experts=0.2, exchange=0.3, wait=0.1, dispatched=[4, 2])],
             [a_pass(1.0, experts=0.1, exchange=0.4, wait=0.1, dispatched=[4, 2])]]  # fmt: skip
    found = measure_costs(ranks, uniform_costs(0.5, 2))
    assert found.fetch_D == (0.5, 0.5)
    assert found.compute == pytest.approx((0.2 / 4 + 0.1 / 2) / 2)
    # Rank 0's time around its experts, and the shorter exchange: the longer one waited for the other's work.
    assert found.rest == pytest.approx(1.0 - 0.2 - 0.3 - 0.1 + 0.3)


def test_the_interval_of_a_median_holds_it_and_repeats_itself() -> None:
    samples = [5.0, 1.0, 3.0, 2.0, 4.0]
    found = estimate(samples, seed=1)
    assert found.median == 3.0
    assert found.samples == tuple(samples)
    assert 1.0 <= found.ci95[0] <= 3.0 <= found.ci95[1] <= 5.0
    assert estimate(samples, seed=1) == found


@pytest.mark.parametrize("pairs", [1, 2])
def test_fewer_than_three_samples_have_no_interval_and_show_nothing(pairs: int) -> None:
    """Two alone would give their own range, which is far from a 95 % interval."""
    before, after = [1.0, 1.01][:pairs], [0.5, 0.51][:pairs]
    assert estimate(before, seed=0).ci95 is None
    found = paired_ratio(before, after, seed=0)
    assert found.ratio == pytest.approx(0.5, rel=0.02)
    assert (found.ci95, found.interval, found.outside_noise) == (None, None, False)
    assert paired_ratio([1.0, 1.01, 1.02], [0.5, 0.51, 0.52], seed=0).outside_noise


def test_a_paired_ratio_sees_what_drift_hides() -> None:
    baseline = np.linspace(1.0, 9.0, 15)
    found = paired_ratio(list(baseline), list(baseline * 0.9), seed=0)
    assert found.ratio == pytest.approx(0.9)
    assert found.ci95 == pytest.approx((0.9, 0.9))
    assert found.outside_noise
    noisy = baseline * np.tile([0.8, 1.0, 1.25], 5)
    assert not paired_ratio(list(baseline), list(noisy), seed=0).outside_noise


def test_the_interval_of_a_mean_has_its_coverage() -> None:
    """A 95 % interval misses the true mean in about 1 of 20 cases: 200 of them, with four standard errors to spare."""
    generator = np.random.default_rng(7)
    missed = 0
    for number in range(200):
        low, high = mean_difference_interval(generator.normal(0.3, 1.0, 40), seed=number)
        missed += not low <= 0.3 <= high
    assert missed <= 10 + 4 * np.sqrt(200 * 0.05 * 0.95)
