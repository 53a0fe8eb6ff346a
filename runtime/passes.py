"""Figures of passes, one kind at a time: what a live run and a trace-driven one report alike.

Shape legend: S steps, L MoE layers, D devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.cost import CostTable
from runtime.policy.types import SHARE_UNIT
from runtime.predict import StepCosts, predicted_tpot
from runtime.recording import Counts, PassRecord, StepRecord
from runtime.statistics import estimate, paired_ratio
from store.records import (
    Estimate,
    LayerCost,
    PassStatistics,
    Prediction,
    Ratio,
    StepSeries,
    StepTimes,
)


@dataclass(slots=True)
class Pruned:
    """What was removed of all tokens' importance. ``shares``: real tokens × MoE layers, over all steps."""

    removed: int = 0
    shares: int = 0

    @classmethod
    def of(cls, steps: Iterable[StepRecord]) -> Pruned:
        """Of all ``steps`` together."""
        pruned = cls()
        for step in steps:
            pruned.add(step)
        return pruned

    def add(self, record: StepRecord) -> None:
        self.removed += sum(layer.removed for layer in record.layers)
        self.shares += record.tokens * len(record.layers)

    @property
    def importance(self) -> float:
        """Per real token and layer."""
        return self.removed / SHARE_UNIT / max(1, self.shares)


def gains(baseline: Sequence[PassRecord], treated: Sequence[PassRecord], *, seed: int) -> tuple[Ratio | None, Ratio]:
    """TTFT and TPOT with the policy ÷ baseline, over pairs; TTFT None where nothing is generated."""
    first = None
    if (ours := _ttft(treated)) and (theirs := _ttft(baseline)):
        first = paired_ratio(theirs, ours, seed=seed)
    rest = paired_ratio([p.tpot_seconds for p in baseline], [p.tpot_seconds for p in treated], seed=seed)
    return first, rest


def _ttft(passes: Sequence[PassRecord]) -> list[float]:
    return [record.ttft_seconds for record in passes if record.ttft_seconds is not None]


def _ttft_estimate(passes: Sequence[PassRecord], seed: int) -> Estimate | None:
    seconds = _ttft(passes)
    return estimate(seconds, seed=seed) if seconds else None


def pass_statistics(by_rank: Sequence[Sequence[PassRecord]], costs: StepCosts | None, seed: int) -> PassStatistics:
    """``by_rank``: passes by rank and pair, of which rank 0's times count."""
    passes = by_rank[0]
    misses = np.concatenate([record.decode_misses() for record in passes])
    dispatched = np.concatenate([record.decode_dispatched() for record in passes])
    steps = _decode_steps(passes)
    return PassStatistics(
        ttft_seconds=_ttft_estimate(passes, seed),
        tpot_seconds=estimate([record.tpot_seconds for record in passes], seed=seed),
        tokens=sum(len(ids) for ids in passes[0].token_ids),
        steps=len(steps),
        misses_per_device=tuple(int(n) for n in misses.sum((0, 1))),
        max_device_misses_per_step=float(misses.max(-1).sum(-1).mean()),
        hit_rate=float(1 - misses.sum() / max(1, dispatched.sum())),
        removed_importance=Pruned.of(steps).importance,
        rerouted_slots=sum(layer.rerouted_slots for step in steps for layer in step.layers),
        step_times=_step_times(by_rank),
        output_digest=_digest(passes),
        dispatches=int(dispatched.sum()),
        predicted_tpot_seconds=None if costs is None else predicted_tpot(costs, misses, dispatched),
    )


def _decode_steps(passes: Sequence[PassRecord]) -> list[StepRecord]:
    return [step for record in passes for step in record.decode_steps()]


def _digest(passes: Sequence[PassRecord]) -> str:
    """Over all generated token ids: two runs with the same digest wrote the same text. Empty where there is none."""
    if not any(record.token_ids for record in passes):
        return ""
    return hashlib.sha256(repr([record.token_ids for record in passes]).encode()).hexdigest()[:16]


def _step_times(by_rank: Sequence[Sequence[PassRecord]]) -> StepTimes:
    """Of the slowest rank: the one that waits least for the others."""
    ranks = [_decode_steps(passes) for passes in by_rank]
    slowest = min(ranks, key=lambda steps: sum(step.timers.exchange for step in steps))
    total = _mean(slowest, lambda step: step.seconds)
    parts = {
        "fetch_wait": _mean(slowest, lambda step: step.timers.fetch_wait),
        "experts": _mean(slowest, lambda step: step.timers.experts),
        "exchange": _mean(slowest, lambda step: step.timers.exchange),
        "decide": _mean(slowest, lambda step: step.timers.decide),
    }
    return StepTimes(total=total, other=total - sum(parts.values()), **parts)


def _mean(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float:
    return float(np.mean([value(step) for step in steps]))


def layer_costs(
    treated: Sequence[PassRecord], layer_numbers: Sequence[int], costs: CostTable | None
) -> tuple[LayerCost, ...]:
    """Both layers' costs of the policy's passes; in seconds 0 without ``costs``."""
    before = np.concatenate([record.decode_misses(before=True) for record in treated])
    after = np.concatenate([record.decode_misses() for record in treated])
    steps = _decode_steps(treated)
    seconds = np.asarray(costs.seconds_per_expert if costs else (0.0,) * before.shape[-1])
    return tuple(
        LayerCost(
            layer=number,
            device_cost_before=_floats(before[:, layer].mean(0) * seconds),
            device_cost_after=_floats(after[:, layer].mean(0) * seconds),
            device_misses_before=_floats(before[:, layer].mean(0)),
            device_misses_after=_floats(after[:, layer].mean(0)),
            gap_histogram_before=_gaps(before[:, layer]),
            gap_histogram_after=_gaps(after[:, layer]),
            importance_highest=_mean(steps, lambda step: step.layers[layer].importance_highest),  # noqa: B023  # used at once
            importance_lowest=_mean(steps, lambda step: step.layers[layer].importance_lowest),  # noqa: B023  # used at once
        )
        for layer, number in enumerate(layer_numbers)
    )


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _gaps(misses_SD: Counts) -> tuple[int, ...]:
    return tuple(int(n) for n in np.bincount(misses_SD.max(-1) - misses_SD.min(-1)))


def step_series(baseline: PassRecord, treated: PassRecord) -> StepSeries:
    """The steps of one pair."""
    return StepSeries(
        baseline_max_misses=_max_misses(baseline),
        policy_max_misses=_max_misses(treated),
        baseline_hit_rate=_hit_rates(baseline),
        policy_hit_rate=_hit_rates(treated),
    )


def _max_misses(record: PassRecord) -> tuple[int, ...]:
    return tuple(int(n) for n in record.decode_misses().max(-1).sum(-1))


def _hit_rates(record: PassRecord) -> tuple[float, ...]:
    misses, dispatched = record.decode_misses().sum((1, 2)), record.decode_dispatched().sum((1, 2))
    return _floats(1 - misses / np.maximum(1, dispatched))


def prediction(
    calibration_id: str | None, costs: CostTable | None, baseline: PassStatistics, treated: PassStatistics
) -> Prediction | None:
    """What the calibration predicted, beside what was measured; None without one."""
    expected, expected_before = treated.predicted_tpot_seconds, baseline.predicted_tpot_seconds
    if calibration_id is None or costs is None or expected is None or expected_before is None:
        return None
    return Prediction(
        tpot_seconds=expected,
        relative_error=expected / treated.tpot_seconds.median - 1,
        baseline_tpot_seconds=expected_before,
        baseline_relative_error=expected_before / baseline.tpot_seconds.median - 1,
        calibration_id=calibration_id,
        seconds_per_expert=costs.seconds_per_expert,
    )
