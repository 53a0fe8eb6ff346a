"""Everything that the page of one run shows, as numbers and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probes.records import Calibration, Probe
from reports.info.balance import BalanceInfo, GapInfo, ImportanceInfo, balance_info, gap_info, importance_info
from reports.info.costmodels import CostModelInfo, cost_models_info
from reports.info.drift import LinkDrift, drift_info
from reports.info.machine import Fact, fingerprint_info, parameters_info
from reports.info.roofline import RooflineInfo, roofline_info
from reports.info.timing import (
    PhaseInfo,
    PredictedInfo,
    SeriesInfo,
    StepPart,
    phases_info,
    predicted_info,
    series_info,
    step_parts_info,
)
from reports.info.verdict import VerdictInfo, verdict_info
from store.records import BrakeStatistics, PolicyOrigin, Quality, RunRecord, SampleText, TaskResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFigures:
    """Totals of one kind of pass. ``removed_importance`` per real token and layer."""

    tokens: int
    steps: int
    max_device_movements_per_step: float
    movements_per_device: tuple[int, ...]
    hit_rate: float | None
    removed_importance: float
    rerouted_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The page of one run."""

    run_id: str
    created_at: str
    model: str
    policy: str
    tier: str
    devices: tuple[str, ...]
    verdict: VerdictInfo
    baseline: PassFigures
    with_policy: PassFigures
    phases: tuple[PhaseInfo, ...]
    step_parts: tuple[StepPart, ...]
    balance: BalanceInfo
    gaps: GapInfo
    importance: ImportanceInfo | None
    roofline: RooflineInfo | None
    series: SeriesInfo
    quality: Quality | None
    tasks: tuple[TaskResult, ...]
    brake: BrakeStatistics | None
    max_quality_drop: float | None
    policy_origin: PolicyOrigin | None
    predicted: tuple[PredictedInfo, ...]
    cost_models: tuple[CostModelInfo, ...]
    drift: tuple[LinkDrift, ...]
    fingerprint: tuple[Fact, ...]
    parameters: tuple[Fact, ...]
    samples: tuple[SampleText, ...]
    warnings: tuple[str, ...]


def run_info(
    run: RunRecord,
    calibration: Calibration | None = None,
    probe: Probe | None = None,
    history: Sequence[Calibration] = (),
) -> RunInfo:
    """Gather the numbers of ``run``.

    ``calibration`` and ``probe`` are those it was predicted from, where kept; ``history`` all calibrations kept.
    """
    return RunInfo(
        run_id=run.run_id,
        created_at=run.created_at,
        model=run.model,
        policy=str(run.policy),
        tier=run.tier,
        devices=tuple(device.name_on_link for device in run.devices),
        verdict=verdict_info(run),
        baseline=_pass_figures(run, with_policy=False),
        with_policy=_pass_figures(run, with_policy=True),
        phases=phases_info(run),
        step_parts=step_parts_info(run),
        balance=balance_info(run),
        gaps=gap_info(run),
        importance=importance_info(run),
        roofline=roofline_info(run),
        series=series_info(run),
        quality=run.quality,
        tasks=run.tasks,
        brake=run.brake,
        max_quality_drop=run.max_quality_drop,
        policy_origin=run.policy_origin,
        predicted=predicted_info(run),
        cost_models=cost_models_info(calibration, probe),
        drift=drift_info(history, calibration),
        fingerprint=fingerprint_info(run.fingerprint),
        parameters=parameters_info(run),
        samples=run.samples,
        warnings=_warnings(run, calibration),
    )


def _pass_figures(run: RunRecord, *, with_policy: bool) -> PassFigures:
    kind = run.with_policy if with_policy else run.baseline
    return PassFigures(
        tokens=kind.tokens,
        steps=kind.steps,
        max_device_movements_per_step=kind.max_device_misses_per_step,
        movements_per_device=kind.misses_per_device,
        hit_rate=kind.hit_rate,
        removed_importance=kind.removed_importance,
        rerouted_slots=kind.rerouted_slots,
    )


def _warnings(run: RunRecord, calibration: Calibration | None) -> tuple[str, ...]:
    found = list(run.warnings)
    if run.predicted is None:
        found.append("No calibration was at hand, so nothing was predicted: run caee probe, then caee calibrate.")
    elif calibration is None:
        found.append(f"Calibration {run.predicted.calibration_id} is no longer in the store: its fits are not shown.")
    if calibration is not None and calibration.fingerprint is not None:
        changed = calibration.fingerprint.changed_identity(run.fingerprint)
        if changed:
            found.append(f"The machine has changed since its calibration ({', '.join(changed)}): run caee calibrate.")
    return tuple(found)
