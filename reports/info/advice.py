"""What limits a step now, and what is worth trying next."""

from __future__ import annotations

from dataclasses import dataclass

from reports.info.keyfigures import loss_rise
from reports.info.words import percent
from store.records import RunRecord, StepTimes

STEP_PARTS = {
    "fetch_wait": "waiting for expert fetches",
    "experts": "expert compute",
    "exchange": "exchange between devices, waiting for the slowest included",
    "decide": "the decision itself",
    "other": "dense compute and overhead",
}
SHORT_NAMES = {
    "fetch_wait": "fetch wait",
    "experts": "experts",
    "exchange": "exchange",
    "decide": "decision",
    "other": "dense, other",
}
LOSS_BUDGET = 0.01
"""Where the user has set none."""
MOST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimit:
    """The largest part of a decode step. ``floor_seconds``: the step without any fetch wait, which no policy beats."""

    part: str
    name: str
    share: float
    seconds: float
    step_seconds: float
    fetch_share: float
    floor_seconds: float


def step_limit(times: StepTimes) -> StepLimit:
    """The part of ``times`` that takes longest; shares are of the step's total, 0 where nothing was measured."""
    parts = {part: float(getattr(times, part)) for part in STEP_PARTS}
    part = max(parts, key=lambda name: parts[name])
    total = times.total or sum(parts.values())
    return StepLimit(
        part=part,
        name=STEP_PARTS[part],
        share=parts[part] / total if total else 0.0,
        seconds=parts[part],
        step_seconds=total,
        fetch_share=times.fetch_wait / total if total else 0.0,
        floor_seconds=total - times.fetch_wait,
    )


def compares_alike(run: RunRecord) -> bool:
    """Whether both passes of a pair did the same: an A/A comparison, which shows the noise and no policy."""
    return run.policy.name == "router"


def next_steps(run: RunRecord, limit: StepLimit) -> tuple[str, ...]:
    """At most three suggestions that follow from this run's figures, the most pressing first."""
    if compares_alike(run):
        return _about_noise(run)
    found = [*_about_certainty(run), *_about_quality(run), *_about_limit(run, limit)]
    return tuple(found[:MOST_STEPS])


def _about_noise(run: RunRecord) -> tuple[str, ...]:
    if not run.gain_tpot.outside_noise:
        return ()
    return (
        "Equal passes differ by more than their interval: compare policies on a quieter machine, or in more pairs.",
    )


def _about_certainty(run: RunRecord) -> list[str]:
    if len(run.devices) == 1:
        return ["One device has nothing to balance: run on several, where the busiest one sets the pace."]
    if not run.gain_tpot.outside_noise:
        more = max(2 * run.workload.pairs, 8)
        return [
            f"Measure more pairs (caee run --pairs {more}) on a quiet machine: the interval narrows with each pair."
        ]
    return []


def _about_quality(run: RunRecord) -> list[str]:
    if run.quality is None or loss_rise(run.quality) <= _loss_budget(run):
        return []
    theta, found = _theta(run), f"Loss rises by more than {percent(_loss_budget(run))}"
    if theta is not None and theta < 1:
        return [f"{found}: keep more experts with a higher θ than {theta:g}."]
    return [f"{found}: choose a milder setting of this policy, or budget:epsilon=0.005."]


def _loss_budget(run: RunRecord) -> float:
    """The rise of the loss that is allowed, as a share."""
    return LOSS_BUDGET if run.max_quality_drop is None else run.max_quality_drop


def _about_limit(run: RunRecord, limit: StepLimit) -> list[str]:
    if limit.part == "fetch_wait":
        return [*_lower_theta(run), *_larger_cache(run)]
    if limit.part == "experts":
        return ["Expert compute takes longest now: faster expert kernels, or more devices, help more than pruning."]
    if limit.part == "exchange":
        return [
            "Devices wait for each other longest now: fewer devices, a quieter machine or a faster link between them "
            "help more than pruning."
        ]
    if limit.part == "decide":
        return ["The decision takes longest now: fewer devices or layers per decision, or the compiled implementation."]
    return [
        "Dense compute and overhead take longest now, which no expert policy shortens: a larger batch (--batch-size) "
        "shares them over more tokens."
    ]


def _lower_theta(run: RunRecord) -> list[str]:
    theta, quality = _theta(run), run.quality
    if theta is None or quality is None or theta <= 0.1:
        return []
    if run.policy_origin is not None:  # a search has turned it as far as the loss allows
        return []
    if quality.nll_difference_ci95[1] / quality.nll_baseline >= _loss_budget(run):
        return []
    return [f"Quality leaves room: try a lower θ (--theta {round(theta - 0.1, 2):g})."]


def _larger_cache(run: RunRecord) -> list[str]:
    work = run.workload
    if run.tier == "device" or work.cache_experts >= work.experts_per_device:
        return []
    more = min(work.experts_per_device, work.cache_experts + max(work.experts_per_device // 8, 1))
    return [f"Where memory allows, cache more experts per device (--cache-experts {more})."]


def _theta(run: RunRecord) -> float | None:
    theta = run.policy.parameters.get("theta")
    return float(theta) if isinstance(theta, (int, float)) and not isinstance(theta, bool) else None
