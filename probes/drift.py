"""Whether stored cost models still hold: three sizes of every link measured anew, and the machine's identity compared.

A link has drifted when two of three medians lie outside the prediction interval, and do so again when measured again: a
machine that is busy for a second has not changed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.backend import TorchBackend
from probes.devices import devices_text, find_devices
from probes.errors import InputError
from probes.fingerprint import take_fingerprint
from probes.links import measure_link
from probes.plan import BackendFactory, LinkPlan
from probes.probe import ProbeOptions, Progress, prepared
from probes.records import Calibration, Concurrency, LinkModel, Probe, Sample
from probes.sampling import Limits

SIZES = 3
OUTSIDE_TO_DRIFT = 2
ATTEMPTS = 3
# Two robust standard deviations of single timings, and never less than a tenth: medians of other days differ too.
_SIGMAS = 2.0
_LEAST_HALF_WIDTH = 0.10
_MAD_TO_SIGMA = 1.4826
_SECONDS_PER_LINK = 1.5
_DEFAULT_SIZES = (64 << 10, 1 << 20, 8 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSize:
    """One size: what the model says, within which limits a median is expected, and what was measured."""

    size_bytes: int
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    measured_seconds: float

    @property
    def outside(self) -> bool:
        return not self.low_seconds <= self.measured_seconds <= self.high_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedLink:
    """One model against new measurements. ``reason``: why it could not be measured (then ``sizes`` is empty)."""

    model: LinkModel
    sizes: tuple[CheckedSize, ...]
    reason: str | None

    @property
    def name(self) -> str:
        mode = f" ({self.model.mode})" if self.model.mode else ""
        return f"{self.model.kind.replace('_', ' ')} {self.model.source} → {self.model.destination}{mode}"

    @property
    def drifted(self) -> bool:
        return sum(size.outside for size in self.sizes) >= OUTSIDE_TO_DRIFT


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """``changed_identity``: fields of the fingerprint that differ; any of them voids the models."""

    calibration_id: str
    changed_identity: tuple[str, ...]
    links: tuple[CheckedLink, ...]

    @property
    def holds(self) -> bool:
        return not self.changed_identity and not any(link.drifted for link in self.links)

    @property
    def summary(self) -> str:
        """What the check found, in a sentence."""
        if self.changed_identity:
            return f"the machine has changed, which voids the cost models: {', '.join(self.changed_identity)}"
        drifted = [link.name for link in self.links if link.drifted]
        if drifted:
            return f"{len(drifted)} of {len(self.links)} links have drifted: {', '.join(drifted)}"
        return f"the cost models of calibration {self.calibration_id} hold"


def check_drift(
    calibration: Calibration,
    probe: Probe | None,
    *,
    disk_folder: Path,
    make_backend: BackendFactory = TorchBackend,
    seed: int = 0,
    progress: Progress = lambda what, share: None,
) -> DriftReport:
    """Measure three sizes of every link that was fitted alone, in the range of ``probe``, its raw measurement.

    Raises ``InputError`` for a calibration that was not measured on a machine, ``DeviceError`` where its devices are
    not here.
    """
    if calibration.fingerprint is None:
        raise InputError(
            f"calibration {calibration.calibration_id} comes from {calibration.origin}, not from a probe: there is no "
            "machine to check it on",
            hint="check a measured one: `caee probe`, `caee calibrate`, then `caee calibrate --check`",
        )
    devices = find_devices(devices_text(calibration.devices))
    changed = calibration.fingerprint.changed_identity(take_fingerprint(devices, disk_folder))
    models = [model for model in calibration.models if model.concurrency is Concurrency.SOLO]
    samples = {model.model_id: _samples(model, probe) for model in models}
    sizes = {model.model_id: _sizes(samples[model.model_id]) for model in models}
    options = ProbeOptions(
        disk_folder=disk_folder,
        quick=True,
        seed=seed,
        extra_sizes=tuple({size for of in sizes.values() for size in of}),
    )
    checked: dict[str, CheckedLink] = {}
    with prepared(options, devices, make_backend, seconds=len(models) * _SECONDS_PER_LINK) as plans:
        for attempt in range(ATTEMPTS):
            todo = [model for model in models if attempt == 0 or checked[model.model_id].drifted]
            for number, model in enumerate(todo):
                share = (attempt + number / len(todo)) / ATTEMPTS
                progress(f"checking {model.kind.replace('_', ' ')} {model.mode or ''}".rstrip(), share)
                of = model.model_id
                checked[of] = _check(model, samples[of], sizes[of], _plan(model, plans), seed + attempt)
    progress("done", 1.0)
    return DriftReport(
        calibration_id=calibration.calibration_id,
        changed_identity=changed,
        links=tuple(checked[model.model_id] for model in models),
    )


def _check(
    model: LinkModel, samples: Sequence[Sample], sizes: Sequence[int], plan: LinkPlan | None, seed: int
) -> CheckedLink:
    if plan is None:
        return CheckedLink(model=model, sizes=(), reason="there is no such link here any more")
    measured = measure_link(plan, sizes, Limits(seconds=_SECONDS_PER_LINK), seed=seed)
    if not measured.samples:
        return CheckedLink(model=model, sizes=(), reason=measured.reason)
    found = []
    for sample in measured.samples:
        predicted = model.seconds(sample.size_bytes)
        low, high = _prediction_interval(model, samples, sample.size_bytes)
        found.append(
            CheckedSize(
                size_bytes=sample.size_bytes,
                predicted_seconds=predicted,
                low_seconds=predicted * low,
                high_seconds=predicted * high,
                measured_seconds=statistics.median(sample.seconds),
            )
        )
    return CheckedLink(model=model, sizes=tuple(found), reason=None)


def _prediction_interval(model: LinkModel, samples: Sequence[Sample], size_bytes: int) -> tuple[float, float]:
    """Limits ÷ prediction: the probe's own timings at that size about the model, robustly."""
    at_size = [sample for sample in samples if sample.size_bytes == size_bytes]
    if not at_size:
        half_width = max(_LEAST_HALF_WIDTH, model.max_relative_error or 0.0)
        return 1.0 - half_width, 1.0 + half_width
    relative = [seconds / model.seconds(size_bytes) for seconds in at_size[0].seconds]
    median = statistics.median(relative)
    spread = _SIGMAS * _MAD_TO_SIGMA * statistics.median([abs(value - median) for value in relative]) / median
    # As a factor both ways: times cannot be negative.
    return min(1.0 - _LEAST_HALF_WIDTH, median / (1.0 + spread)), max(1.0 + _LEAST_HALF_WIDTH, median * (1.0 + spread))


def _plan(model: LinkModel, plans: Sequence[LinkPlan]) -> LinkPlan | None:
    for plan in plans:
        if (plan.kind, plan.source, plan.destination, plan.mode, plan.concurrency) == (
            model.kind,
            model.source,
            model.destination,
            model.mode,
            model.concurrency,
        ):
            return plan
    return None


def _samples(model: LinkModel, probe: Probe | None) -> tuple[Sample, ...]:
    for link in probe.links if probe is not None else ():
        if (link.kind, link.source, link.destination, link.mode, link.concurrency) == (
            model.kind,
            model.source,
            model.destination,
            model.mode,
            model.concurrency,
        ):
            return link.samples
    return ()


def _sizes(samples: Sequence[Sample]) -> tuple[int, ...]:
    """A small, a middle and a large one of the sizes that were measured, none at the very edge."""
    if len(samples) < SIZES:
        return _DEFAULT_SIZES
    ordered = sorted(sample.size_bytes for sample in samples)
    return tuple(ordered[len(ordered) * part // 6] for part in (1, 3, 5))
