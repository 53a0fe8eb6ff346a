"""Where the time of a run went: TTFT, TPOT, the parts of a step, the steps one by one, and the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from reports.info.advice import SHORT_NAMES, STEP_PARTS
from store.records import Estimate, Ratio, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInfo:
    """One timed phase, with every raw sample, in seconds."""

    name: str
    baseline: Estimate
    with_policy: Estimate
    gain: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One part of the mean decode step, in seconds."""

    name: str
    short_name: str
    baseline: float
    with_policy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesInfo:
    """Decode steps of the last pair, from 1: movements of the busiest device, and share of dispatches that hit."""

    steps: tuple[int, ...]
    movements_baseline: tuple[int, ...]
    movements_policy: tuple[int, ...]
    hit_rate_baseline: tuple[float, ...]
    hit_rate_policy: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedInfo:
    """The calibrated model's TPOT beside the measured one; ``relative_error`` = predicted ÷ measured − 1."""

    name: str
    predicted_seconds: float
    measured_seconds: float
    relative_error: float


def phases_info(run: RunRecord) -> tuple[PhaseInfo, ...]:
    """TPOT, and TTFT where something was generated."""
    before, after = run.baseline.ttft_seconds, run.with_policy.ttft_seconds
    first = (
        [PhaseInfo(name="TTFT", baseline=before, with_policy=after, gain=run.gain_ttft)]
        if before and after and run.gain_ttft
        else []
    )
    return (
        PhaseInfo(
            name="TPOT",
            baseline=run.baseline.tpot_seconds,
            with_policy=run.with_policy.tpot_seconds,
            gain=run.gain_tpot,
        ),
        *first,
    )


def step_parts_info(run: RunRecord) -> tuple[StepPart, ...]:
    """The parts of a step, in the order in which they are stacked."""
    before, after = run.baseline.step_times, run.with_policy.step_times
    return tuple(
        StepPart(
            name=name, short_name=SHORT_NAMES[part], baseline=getattr(before, part), with_policy=getattr(after, part)
        )
        for part, name in STEP_PARTS.items()
    )


def series_info(run: RunRecord) -> SeriesInfo:
    """The last pair's decode steps; both passes run equally many."""
    series = run.series
    return SeriesInfo(
        steps=tuple(range(1, len(series.baseline_max_misses) + 1)),
        movements_baseline=series.baseline_max_misses,
        movements_policy=series.policy_max_misses,
        hit_rate_baseline=series.baseline_hit_rate,
        hit_rate_policy=series.policy_hit_rate,
    )


def running_mean(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Mean over a centred window (odd) of ``values``, narrower towards both ends."""
    reach = window // 2
    sums = list(accumulate(values, initial=0.0))
    means = []
    for at in range(len(values)):
        near = min(reach, at, len(values) - 1 - at)
        means.append((sums[at + near + 1] - sums[at - near]) / (2 * near + 1))
    return tuple(means)


def predicted_info(run: RunRecord) -> tuple[PredictedInfo, ...]:
    """Empty where the run had no calibration to predict from."""
    if run.predicted is None:
        return ()
    return (
        PredictedInfo(
            name="baseline",
            predicted_seconds=run.predicted.baseline_tpot_seconds,
            measured_seconds=run.baseline.tpot_seconds.median,
            relative_error=run.predicted.baseline_relative_error,
        ),
        PredictedInfo(
            name="with policy",
            predicted_seconds=run.predicted.tpot_seconds,
            measured_seconds=run.with_policy.tpot_seconds.median,
            relative_error=run.predicted.relative_error,
        ),
    )
