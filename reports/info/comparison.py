"""Several runs side by side: differences with intervals, and what else differs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.errors import InputError
from reports.info.keyfigures import loss_rise
from reports.info.naming import RunName, differing, run_names
from reports.info.pareto import pareto_front
from reports.info.verdict import Outcome, outcome_of
from store.records import FEWEST_PAIRS, Estimate, Quality, Ratio, RunRecord

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its 95 % interval, None where there are too few samples for one."""

    value: float
    ci95: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of several; ``loss_rise`` is a share of the baseline's loss.

    ``label``, ``series``, ``knob`` and ``knob_value``: see ``RunName``.

    ``tpot_against_first`` and ``ttft_against_first``: with-policy medians, this run's ÷ the first's; None for the
    first, and TTFT where nothing is generated. ``baseline_against_first``: the same of the baseline's TPOT.
    """

    run_id: str
    label: str
    model: str
    policy: str
    series: str
    knob: str | None
    knob_value: float | None
    tpot_baseline: Estimate
    tpot_policy: Estimate
    ttft_baseline: Estimate | None
    ttft_policy: Estimate | None
    gain_tpot: Ratio
    gain_ttft: Ratio | None
    outcome: Outcome
    movements_baseline: float
    movements_policy: float
    hit_rate_policy: float | None
    removed_importance: float
    loss_rise: Interval | None
    top1_agreement: float | None
    tpot_against_first: Ratio | None
    baseline_against_first: Ratio | None
    ttft_against_first: Ratio | None
    busiest_by_layer: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Runs that differ in their knob alone, by its value."""

    knob: str
    series: str
    runs: tuple[ComparedRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonInfo:
    """``unlike_hosts``: identity fields in which a run's machine differs from the first's; ``differing``: settings."""

    runs: tuple[ComparedRun, ...]
    tier: str
    unlike_hosts: tuple[str, ...]
    differing: tuple[str, ...]

    @property
    def series(self) -> tuple[tuple[ComparedRun, ...], ...]:
        """Runs by series, each by the value of its knob."""
        names = dict.fromkeys(run.series for run in self.runs)
        return tuple(
            tuple(sorted((run for run in self.runs if run.series == name), key=lambda run: run.knob_value or 0.0))
            for name in names
        )

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        """Series with two values of their knob or more."""
        found = []
        for runs in self.series:
            knob, values = runs[0].knob, {run.knob_value for run in runs}
            if knob is not None and len(values) > 1:
                found.append(Sweep(knob=knob, series=runs[0].series, runs=runs))
        return tuple(found)

    @property
    def unsteady(self) -> tuple[ComparedRun, ...]:
        """Runs in which the router's own choice took another time than in the first, though only policies differ: then
        the machine itself was not equally fast."""
        if set(self.differing) - {"policy"} or self.unlike_hosts:
            return ()
        return tuple(
            run for run in self.runs if run.baseline_against_first and run.baseline_against_first.outside_noise
        )

    @property
    def front_by_importance(self) -> tuple[ComparedRun, ...]:
        """Runs that no other beats in both TPOT ratio and removed importance; empty where more than policies differ."""
        return self._front([(run, run.removed_importance) for run in self.runs])

    @property
    def front_by_loss(self) -> tuple[ComparedRun, ...]:
        """The same with the rise of held-out loss, of the runs in which it was measured."""
        return self._front([(run, run.loss_rise.value) for run in self.runs if run.loss_rise])

    def _front(self, given_up: Sequence[tuple[ComparedRun, float]]) -> tuple[ComparedRun, ...]:
        if set(self.differing) - {"policy"}:
            return ()
        # The router's own choice, which gains and gives up nothing, is a choice too.
        points = [(1.0, 0.0), *((run.gain_tpot.ratio, cost) for run, cost in given_up)]
        chosen = [(cost, run) for (run, cost), best in zip(given_up, pareto_front(points)[1:], strict=True) if best]
        return tuple(run for _, run in sorted(chosen, key=lambda each: each[0]))


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
    return ComparisonInfo(
        runs=tuple(
            _compared(run, name, None if run is first else first)
            for run, name in zip(runs, run_names(runs), strict=True)
        ),
        tier=first.tier,
        unlike_hosts=unlike,
        differing=differing(runs),
    )


def median_ratio(samples: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Ratio of medians with a 95 % bootstrap interval; the samples of two runs are not paired.

    Percentile bootstrap (Efron & Tibshirani, 1993, ch. 13); the generator's seed is fixed, so that the same samples
    give the same interval. Of fewer than ``FEWEST_PAIRS`` samples there is none.
    """
    ratio = float(np.median(samples) / np.median(reference))
    if min(len(samples), len(reference)) < FEWEST_PAIRS:
        return Ratio(ratio=ratio, ci95=None)
    draw = np.random.default_rng(0)

    def medians(values: Sequence[float]) -> npt.NDArray[np.float64]:
        resampled = draw.choice(np.asarray(values, dtype=np.float64), size=(RESAMPLES, len(values)))
        return np.asarray(np.median(resampled, axis=1))

    low, high = np.quantile(medians(samples) / medians(reference), (0.025, 0.975))
    return Ratio(ratio=ratio, ci95=(float(low), float(high)))


def _compared(run: RunRecord, name: RunName, first: RunRecord | None) -> ComparedRun:
    def against_first(phase: str, passes: str = "with_policy") -> Ratio | None:
        if first is None:
            return None
        own: Estimate | None = getattr(getattr(run, passes), phase)
        other: Estimate | None = getattr(getattr(first, passes), phase)
        return median_ratio(own.samples, other.samples) if own and other else None

    return ComparedRun(
        run_id=run.run_id,
        label=name.label,
        series=name.series,
        knob=name.knob,
        knob_value=name.value,
        model=run.model,
        policy=str(run.policy),
        tpot_baseline=run.baseline.tpot_seconds,
        tpot_policy=run.with_policy.tpot_seconds,
        ttft_baseline=run.baseline.ttft_seconds,
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
        baseline_against_first=against_first("tpot_seconds", "baseline"),
        ttft_against_first=against_first("ttft_seconds"),
        busiest_by_layer=tuple(
            (layer.layer, max(layer.device_misses_before, default=0.0), max(layer.device_misses_after, default=0.0))
            for layer in sorted(run.layers, key=lambda layer: layer.layer)
        ),
    )


def _loss_rise(quality: Quality) -> Interval:
    low, high = quality.nll_difference_ci95
    return Interval(value=loss_rise(quality), ci95=(low / quality.nll_baseline, high / quality.nll_baseline))


def _unlike_hosts(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(sorted({name for run in runs for name in runs[0].fingerprint.changed_identity(run.fingerprint)}))


def _described(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    def values(name: str) -> str:
        found = dict.fromkeys(
            str(run.fingerprint.identity[name].value) if name in run.fingerprint.identity else "unknown" for run in runs
        )
        return " against ".join(found)

    return "; ".join(f"{name} ({values(name)})" for name in names)
