"""Whether stored cost models still hold: three sizes of every link measured anew, and the machine's identity compared.

A link has drifted when two of three medians lie outside the prediction interval, and do so again when measured again: a
machine that is busy for a second has not changed. Links are measured alone, and both ways at once where they were
fitted so; collectives on all devices, if they were ever timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.backend import TorchBackend
from probes.collectives import KINDS as COLLECTIVES
from probes.collectives import measure_collectives
from probes.devices import devices_text, find_devices
from probes.errors import InputError
from probes.fingerprint import take_fingerprint
from probes.links import measure_link
from probes.plan import BackendFactory, LinkPlan
from probes.probe import ProbeOptions, Progress, prepared
from probes.records import Calibration, Concurrency, Device, LinkMeasurement, LinkModel, Probe, Sample
from probes.sampling import Limits
from probes.text import plural, verb

SIZES = 3
OUTSIDE_TO_DRIFT = 2
ATTEMPTS = 3
# Two robust standard deviations of single timings, and never less than a tenth: medians of other days differ too.
_SIGMAS = 2.0
_LEAST_HALF_WIDTH = 0.10
# Processes that are started anew land on other processors and buffers, which the timings of one start cannot show.
_LEAST_HALF_WIDTH_COLLECTIVES = 0.25
# Where only the model's worst miss is known: an interval that begins below zero would hold every time.
_MOST_HALF_WIDTH = 0.5
_MAD_TO_SIGMA = 1.4826
_SECONDS_PER_LINK = 1.5
_SECONDS_FOR_COLLECTIVES = 3.0
# Measured alone is how an expert moves; with all devices at once is what a link group's factor says.
_CHECKED = (Concurrency.SOLO, Concurrency.BOTH_WAYS)
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
        both = ", both ways" if self.model.concurrency is Concurrency.BOTH_WAYS else ""
        return f"{self.model.kind.replace('_', ' ')} {self.model.source} → {self.model.destination}{mode}{both}"

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
            have = verb(len(drifted), "has", "have")
            return f"{len(drifted)} of {plural(len(self.links), 'link')} {have} drifted: {', '.join(drifted)}"
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
    """Measure three sizes of every link and collective, in the range of ``probe``, its raw measurement.

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
    subjects = [
        _Subject(model, _samples(model, probe))
        for model in calibration.models
        if model.concurrency in _CHECKED or model.kind in COLLECTIVES
    ]
    options = ProbeOptions(
        disk_folder=disk_folder,
        quick=True,
        seed=seed,
        extra_sizes=tuple({size for subject in subjects if not subject.is_collective for size in subject.sizes}),
    )
    checked: dict[str, CheckedLink] = {}
    with prepared(options, devices, make_backend, seconds=len(subjects) * _SECONDS_PER_LINK) as plans:
        for attempt in range(ATTEMPTS):
            todo = [subject for subject in subjects if attempt == 0 or checked[subject.model.model_id].drifted]
            alone = [subject for subject in todo if not subject.is_collective]
            for number, subject in enumerate(alone):
                share = (attempt + number / len(todo)) / ATTEMPTS
                progress(f"checking {subject.model.kind.replace('_', ' ')} {subject.model.mode or ''}".rstrip(), share)
                checked[subject.model.model_id] = subject.against(_measured(subject, plans, seed + attempt))
            if len(alone) < len(todo):
                progress("checking collectives of all devices", (attempt + len(alone) / len(todo)) / ATTEMPTS)
                checked |= _check_collectives([each for each in todo if each.is_collective], devices, seed + attempt)
    progress("done", 1.0)
    return DriftReport(
        calibration_id=calibration.calibration_id,
        changed_identity=changed,
        links=tuple(checked[subject.model.model_id] for subject in subjects),
    )


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model to check, and the timings that it was fitted to (none where they were deleted)."""

    model: LinkModel
    samples: tuple[Sample, ...]

    @property
    def is_collective(self) -> bool:
        return self.model.kind in COLLECTIVES

    @property
    def sizes(self) -> tuple[int, ...]:
        """A small, a middle and a large one of the sizes that were measured, none at the very edge."""
        if len(self.samples) < SIZES:
            return _DEFAULT_SIZES
        ordered = sorted(sample.size_bytes for sample in self.samples)
        return tuple(ordered[len(ordered) * part // 6] for part in (1, 3, 5))

    def against(self, measured: LinkMeasurement | None) -> CheckedLink:
        """The model beside ``measured``; None where no such link is here any more."""
        if measured is None:
            return CheckedLink(model=self.model, sizes=(), reason="there is no such link here any more")
        if not measured.samples:
            return CheckedLink(model=self.model, sizes=(), reason=measured.reason)
        wanted = [sample for sample in measured.samples if sample.size_bytes in self.sizes] or measured.samples
        return CheckedLink(model=self.model, sizes=tuple(map(self._checked, wanted)), reason=None)

    def _checked(self, sample: Sample) -> CheckedSize:
        predicted = self.model.seconds(sample.size_bytes)
        low, high = _prediction_interval(self.model, self.samples, sample.size_bytes)
        return CheckedSize(
            size_bytes=sample.size_bytes,
            predicted_seconds=predicted,
            low_seconds=predicted * low,
            high_seconds=predicted * high,
            measured_seconds=statistics.median(sample.seconds),
        )


def _measured(subject: _Subject, plans: Sequence[LinkPlan], seed: int) -> LinkMeasurement | None:
    plan = next((plan for plan in plans if _path(plan) == _path(subject.model)), None)
    return measure_link(plan, subject.sizes, Limits(seconds=_SECONDS_PER_LINK), seed=seed) if plan else None


def _check_collectives(subjects: Sequence[_Subject], devices: Sequence[Device], seed: int) -> dict[str, CheckedLink]:
    """All of ``subjects`` from one start of the ranks, by their models' ids."""
    sizes = sorted({size for subject in subjects for size in subject.sizes})
    found = measure_collectives(devices, seconds=_SECONDS_FOR_COLLECTIVES, sizes=sizes, seed=seed)
    by_rank = {(link.kind, link.source): link for link in found}
    # What cannot run at all is one entry for each collective, with the reason.
    by_kind = {link.kind: link for link in found}
    return {
        each.model.model_id: each.against(
            by_rank.get((each.model.kind, each.model.source), by_kind.get(each.model.kind))
        )
        for each in subjects
    }


def _prediction_interval(model: LinkModel, samples: Sequence[Sample], size_bytes: int) -> tuple[float, float]:
    """Limits ÷ prediction: the probe's own timings at that size about the model, robustly."""
    at_size = [sample for sample in samples if sample.size_bytes == size_bytes]
    least = _LEAST_HALF_WIDTH_COLLECTIVES if model.kind in COLLECTIVES else _LEAST_HALF_WIDTH
    if not at_size:
        half_width = min(max(least, model.max_relative_error or 0.0), _MOST_HALF_WIDTH)
        return 1.0 - half_width, 1.0 + half_width
    relative = [seconds / model.seconds(size_bytes) for seconds in at_size[0].seconds]
    median = statistics.median(relative)
    spread = _SIGMAS * _MAD_TO_SIGMA * statistics.median([abs(value - median) for value in relative]) / median
    # As a factor both ways: times cannot be negative.
    return min(1.0 - least, median / (1.0 + spread)), max(1.0 + least, median * (1.0 + spread))


def _samples(model: LinkModel, probe: Probe | None) -> tuple[Sample, ...]:
    links = probe.links if probe is not None else ()
    return next((link.samples for link in links if _path(link) == _path(model)), ())


def _path(link: LinkModel | LinkMeasurement | LinkPlan) -> tuple[str, str, str, str | None, str]:
    return link.kind, link.source, link.destination, link.mode, link.concurrency
