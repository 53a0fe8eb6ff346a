"""From exact sums to the figures that people compare: times, misses, imbalance, the Pareto front, the cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.policy.types import PICOSECONDS, SHARE_UNIT
from runtime.simulate.records import Counts, LayerFigures, PassFigures, PassSpec, StepTime


def figures_of(plan: PassSpec, counts: Counts, layers: Sequence[int], *, has_scores: bool) -> PassFigures:
    """A pass's figures. ``layers``: the model's numbers of the layers; at least one step counts."""
    times = np.concatenate(counts.step_times)
    steps = len(times)
    histogram = np.trim_zeros(counts.gaps, "b")
    return PassFigures(
        plan=plan,
        steps=steps,
        layer_steps=counts.layer_steps,
        time_per_step=StepTime(
            mean=int(times.sum()) / steps / PICOSECONDS,
            p50=float(np.percentile(times, 50)) / PICOSECONDS,
            p95=float(np.percentile(times, 95)) / PICOSECONDS,
        ),
        misses_per_device=tuple(int(total) for total in counts.after_LD.sum(axis=0)),
        max_device_misses_per_step=counts.max_misses / steps,
        gap_mean=int((counts.gaps * np.arange(len(counts.gaps))).sum()) / counts.layer_steps,
        gap_histogram=tuple(int(number) for number in histogram),
        removed_importance=counts.removed / SHARE_UNIT / counts.tokens if counts.tokens else 0.0,
        rerouted_slots=counts.rerouted_slots,
        layers=tuple(
            LayerFigures(
                layer=layer,
                device_misses_before=tuple(int(total) for total in before_D),
                device_misses_after=tuple(int(total) for total in after_D),
            )
            for layer, before_D, after_D in zip(layers, counts.before_LD, counts.after_LD, strict=True)
        ),
        compensated=has_scores and plan.policy.compensation != "none",
    )


def pareto(passes: Sequence[PassFigures]) -> tuple[int, ...]:
    """Places of the passes that no other beats in predicted time or removed importance without losing in the other,
    fastest first; equals stand side by side."""

    def beats(one: PassFigures, other: PassFigures) -> bool:
        mine, theirs = _point(one), _point(other)
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]

    front = [place for place, each in enumerate(passes) if not any(beats(other, each) for other in passes)]
    return tuple(sorted(front, key=lambda place: (*_point(passes[place]), place)))


def cut_against_router(one: PassFigures, passes: Sequence[PassFigures]) -> float | None:
    """The share of the step time that a policy saves against the ``router`` pass on the same cache, placement and
    machine; None where there is no such pass. (The same-state ``before`` of the policy's own pass would flatter.)"""
    for other in passes:
        is_router = other.plan.policy.name == "router" and _setting(other) == _setting(one)
        if is_router and other.time_per_step.mean > 0:
            return 1 - one.time_per_step.mean / other.time_per_step.mean
    return None


def _setting(one: PassFigures) -> tuple[object, ...]:
    """What two passes must share to be compared: everything but the policy."""
    plan = one.plan
    return plan.cache, plan.cache_experts, plan.placement.name, plan.machine.tier


def _point(one: PassFigures) -> tuple[float, float]:
    return one.time_per_step.mean, one.removed_importance
