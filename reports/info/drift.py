"""How the fitted cost models of one machine moved from calibration to calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probes.records import Calibration
from reports.info.costmodels import link_name


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftPoint:
    """One link at one calibration; ``ci95`` is None where the fit gave no interval."""

    calibration_id: str
    created_at: str
    bandwidth_bytes_per_s: float
    ci95: tuple[float, float] | None
    beta_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDrift:
    """One link over time, the oldest calibration first."""

    name: str
    points: tuple[DriftPoint, ...]


def drift_info(calibrations: Sequence[Calibration], of: Calibration | None) -> tuple[LinkDrift, ...]:
    """Links fitted at least twice on the machine that ``of`` was fitted on; empty without it."""
    if of is None or of.fingerprint is None:
        return ()
    alike = [
        calibration
        for calibration in calibrations
        if calibration.fingerprint is not None and not of.fingerprint.changed_identity(calibration.fingerprint)
    ]
    links: dict[str, list[DriftPoint]] = {}
    for calibration in sorted(alike, key=lambda each: (each.created_at, each.calibration_id)):
        for model in calibration.models:
            point = DriftPoint(
                calibration_id=calibration.calibration_id,
                created_at=calibration.created_at,
                bandwidth_bytes_per_s=model.bandwidth_bytes_per_s / model.alpha,
                ci95=model.ci95.effective_bandwidth_bytes_per_s if model.ci95 else None,
                beta_seconds=model.beta_seconds,
            )
            links.setdefault(link_name(model), []).append(point)
    return tuple(LinkDrift(name=name, points=tuple(points)) for name, points in links.items() if len(points) > 1)
