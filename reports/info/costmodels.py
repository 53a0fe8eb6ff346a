"""Fitted cost models beside the raw samples they were fitted to."""

from __future__ import annotations

from dataclasses import dataclass

from probes.records import Calibration, LinkMeasurement, LinkModel, Probe

_TOGETHER = {"solo": "", "all": ", all at once", "both_ways": ", both ways at once"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSample:
    """One raw timing; ``residual`` = measured ÷ fitted − 1."""

    size_bytes: int
    seconds: float
    fitted_seconds: float
    residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelInfo:
    """One link's model. ``samples`` is empty where the measurement is not in the store (an import, a deleted probe)."""

    name: str
    kind: str
    concurrency: str
    form: str
    status: str
    effective_bandwidth_bytes_per_s: float
    bandwidth_ci95: tuple[float, float] | None
    beta_seconds: float
    beta_ci95: tuple[float, float] | None
    n_half_bytes: float
    holdout_mape: float | None
    max_relative_error: float | None
    samples: tuple[FittedSample, ...]
    curve: tuple[tuple[float, float], ...]
    warnings: tuple[str, ...]


def cost_models_info(calibration: Calibration | None, probe: Probe | None) -> tuple[CostModelInfo, ...]:
    """Every model of ``calibration`` with its samples from ``probe``; empty without a calibration."""
    if calibration is None:
        return ()
    measured = {_key(link): link for link in probe.links} if probe else {}
    return tuple(_model(model, measured.get(_key(model))) for model in calibration.models)


def link_name(link: LinkMeasurement | LinkModel) -> str:
    """``disk → cpu:0, direct, all at once``."""
    mode = f", {link.mode}" if link.mode else ""
    together = _TOGETHER.get(link.concurrency, f", {link.concurrency}")
    ends = link.source if link.source == link.destination else f"{link.source} → {link.destination}"
    return f"{ends}{mode}{together}"


def _key(link: LinkMeasurement | LinkModel) -> tuple[str, str, str, str | None, str]:
    return link.kind, link.source, link.destination, link.mode, link.concurrency


def _model(model: LinkModel, link: LinkMeasurement | None) -> CostModelInfo:
    samples = tuple(
        _sample(model, sample.size_bytes, seconds)
        for sample in (link.samples if link else ())
        for seconds in sample.seconds
    )
    return CostModelInfo(
        name=link_name(model),
        kind=model.kind,
        concurrency=model.concurrency,
        form=model.form,
        status=model.status,
        effective_bandwidth_bytes_per_s=model.bandwidth_bytes_per_s / model.alpha,
        bandwidth_ci95=model.ci95.effective_bandwidth_bytes_per_s if model.ci95 else None,
        beta_seconds=model.beta_seconds,
        beta_ci95=model.ci95.beta_seconds if model.ci95 else None,
        n_half_bytes=model.n_half_bytes,
        holdout_mape=model.holdout_mape,
        max_relative_error=model.max_relative_error,
        samples=samples,
        curve=_curve(model, [sample.size_bytes for sample in samples]),
        warnings=model.warnings,
    )


def _sample(model: LinkModel, size_bytes: int, seconds: float) -> FittedSample:
    fitted = model.seconds(size_bytes)
    return FittedSample(
        size_bytes=size_bytes, seconds=seconds, fitted_seconds=fitted, residual=seconds / fitted - 1 if fitted else 0.0
    )


def _curve(model: LinkModel, sizes: list[int], points: int = 33) -> tuple[tuple[float, float], ...]:
    """The model at sizes evenly spread on a logarithmic axis, over the samples' range or 4 KiB to 64 MiB."""
    low, high = (min(sizes), max(sizes)) if sizes else (4096, 64 * 2**20)
    steps = [low * (high / low) ** (at / (points - 1)) for at in range(points)]
    return tuple((size, model.seconds(size)) for size in steps)
