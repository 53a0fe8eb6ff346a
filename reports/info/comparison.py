"""Several runs side by side: differences with intervals, and what else differs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from probes.errors import InputError
from reports.info.keyfigures import loss_rise
from reports.info.verdict import Outcome, outcome_of
from store.records import Estimate, Quality, Ratio, RunRecord

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of several. ``label`` is short and unlike the others'; ``loss_rise`` is a share of the baseline's loss.

    ``tpot_against_first`` and ``ttft_against_first``: with-policy medians, this run's ÷ the first's; None for the
    first.
    """

    run_id: str
    label: str
    model: str
    policy: str
    theta: float | None
    tpot_baseline: Estimate
    tpot_policy: Estimate
    ttft_policy: Estimate
    gain_tpot: Ratio
    gain_ttft: Ratio
    outcome: Outcome
    movements_baseline: float
    movements_policy: float
    hit_rate_policy: float | None
    removed_importance: float
    loss_rise: Interval | None
    top1_agreement: float | None
    tpot_against_first: Ratio | None
    ttft_against_first: Ratio | None
    busiest_by_layer: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonInfo:
    """``unlike_hosts``: identity fields in which a run's machine differs from the first's; ``differing``: settings."""

    runs: tuple[ComparedRun, ...]
    tier: str
    unlike_hosts: tuple[str, ...]
    differing: tuple[str, ...]

    @property
    def sweep(self) -> tuple[ComparedRun, ...]:
        """Runs that differ in θ alone, by θ; empty where there are no two or anything else differs."""
        known = [run for run in self.runs if run.theta is not None]
        thetas = {run.theta for run in known}
        alike = len({(run.model, run.policy.partition(":")[0]) for run in known}) == 1
        if len(known) < 2 or len(thetas) < len(known) or not alike or set(self.differing) - {"policy"}:
            return ()
        return tuple(sorted(known, key=lambda run: run.theta or 0.0))


def comparison_info(runs: Sequence[RunRecord], *, allow_unlike_hosts: bool = False) -> ComparisonInfo:
    """Compare ``runs`` with the first of them.

    Raises ``InputError`` where they were measured on unlike hosts, naming the fields, unless ``allow_unlike_hosts``.
    """
    first = runs[0]
    unlike = _unlike_hosts(runs)
    if unlike and not allow_unlike_hosts:
        raise InputError(
            f"these runs were measured on unlike hosts: {_described(runs, unlike)}",
            hint="compare runs of one machine, or add --allow-unlike-hosts",
        )
    labels = _labels(runs)
    return ComparisonInfo(
        runs=tuple(
            _compared(run, label, None if run is first else first) for run, label in zip(runs, labels, strict=True)
        ),
        tier=first.tier,
        unlike_hosts=unlike,
        differing=_differing(runs),
    )


def median_ratio(samples: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Ratio of medians with a 95 % bootstrap interval; the samples of two runs are not paired.

    Percentile bootstrap (Efron & Tibshirani, 1993, ch. 13); the generator's seed is fixed, so that the same samples
    give the same interval.
    """
    draw = np.random.default_rng(0)

    def medians(values: Sequence[float]) -> npt.NDArray[np.float64]:
        resampled = draw.choice(np.asarray(values, dtype=np.float64), size=(RESAMPLES, len(values)))
        return np.asarray(np.median(resampled, axis=1))

    low, high = np.quantile(medians(samples) / medians(reference), (0.025, 0.975))
    return Ratio(ratio=float(np.median(samples) / np.median(reference)), ci95=(float(low), float(high)))


def _compared(run: RunRecord, label: str, first: RunRecord | None) -> ComparedRun:
    def against_first(phase: str) -> Ratio | None:
        if first is None:
            return None
        own: Estimate = getattr(run.with_policy, phase)
        other: Estimate = getattr(first.with_policy, phase)
        return median_ratio(own.samples, other.samples)

    theta = run.policy.parameters.get("theta")
    return ComparedRun(
        run_id=run.run_id,
        label=label,
        model=run.model,
        policy=str(run.policy),
        theta=float(theta) if isinstance(theta, (int, float)) else None,
        tpot_baseline=run.baseline.tpot_seconds,
        tpot_policy=run.with_policy.tpot_seconds,
        ttft_policy=run.with_policy.ttft_seconds,
        gain_tpot=run.gain_tpot,
        gain_ttft=run.gain_ttft,
        outcome=outcome_of(run.gain_tpot),
        movements_baseline=run.baseline.max_device_misses_per_step,
        movements_policy=run.with_policy.max_device_misses_per_step,
        hit_rate_policy=run.with_policy.hit_rate,
        removed_importance=run.with_policy.removed_importance,
        loss_rise=_loss_rise(run.quality) if run.quality else None,
        top1_agreement=run.quality.top1_agreement if run.quality else None,
        tpot_against_first=against_first("tpot_seconds"),
        ttft_against_first=against_first("ttft_seconds"),
        busiest_by_layer=tuple(
            (layer.layer, max(layer.device_misses_before, default=0.0), max(layer.device_misses_after, default=0.0))
            for layer in sorted(run.layers, key=lambda layer: layer.layer)
        ),
    )


def _loss_rise(quality: Quality) -> Interval:
    low, high = quality.nll_difference_ci95
    return Interval(value=loss_rise(quality), ci95=(low / quality.nll_baseline, high / quality.nll_baseline))


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Policy and θ where that tells the runs apart, else with the run's id."""
    short = []
    for run in runs:
        theta = run.policy.parameters.get("theta")
        short.append(f"{run.policy.name} θ={theta}" if theta is not None else run.policy.name)
    if len(set(short)) == len(short):
        return short
    return [f"{label} · {run.run_id}" for label, run in zip(short, runs, strict=True)]


def _unlike_hosts(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(sorted({name for run in runs for name in runs[0].fingerprint.changed_identity(run.fingerprint)}))


def _described(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    def values(name: str) -> str:
        found = dict.fromkeys(
            str(run.fingerprint.identity[name].value) if name in run.fingerprint.identity else "unknown" for run in runs
        )
        return " against ".join(found)

    return "; ".join(f"{name} ({values(name)})" for name in names)


def _differing(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    first = runs[0]
    found = {
        "model": any(run.model != first.model for run in runs),
        "tier": any(run.tier != first.tier for run in runs),
        "devices": any(len(run.devices) != len(first.devices) for run in runs),
        "policy": any(run.policy != first.policy for run in runs),
    }
    for field in fields(first.workload):
        values = {getattr(run.workload, field.name) for run in runs}
        found[field.name.replace("_", " ")] = len(values) > 1
    # The number of pairs changes how sure a figure is, not what it measures.
    return tuple(name for name, differs in found.items() if differs and name != "pairs")
