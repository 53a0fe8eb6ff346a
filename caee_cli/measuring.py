"""What ``caee probe``, ``calibrate`` and ``doctor`` do around the measuring: where, with which sizes, what is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from caee_cli.interrupts import ended_by_interrupts
from probes.text import plural

if TYPE_CHECKING:
    from probes.drift import DriftReport
    from probes.records import Calibration, Probe
    from store.session import Store

# Promised: 30 and 15 seconds in all; storing and showing the result take the rest, on a busy machine too.
_FULL_TOTAL_SECONDS = 25.0
_QUICK_TOTAL_SECONDS = 10.5
_LEAST_SECONDS = 4.0


def measure_and_store(
    store: Store,
    *,
    devices: str | None,
    quick: bool,
    sizes: str | None,
    collectives: bool,
    folder: Path,
    seed: int,
) -> Probe:
    """Probe and keep the result; after Ctrl-C what is complete is kept, and the error says so."""
    from probes.errors import Interrupted

    with ended_by_interrupts():
        from probes.probe import ProbeInterrupted, ProbeOptions, probe

    options = ProbeOptions(
        disk_folder=folder,
        devices=devices,
        quick=quick,
        extra_sizes=(*_expert_sizes(), *_sizes(sizes)),
        seconds=_seconds_left(quick),
        seed=seed,
        collectives=collectives,
    )
    try:
        with progress_bar() as progress:
            measured = probe(options, progress=progress)
    except ProbeInterrupted as stopped:
        if stopped.probe is None:
            raise Interrupted("interrupted; no link was complete, nothing was kept") from stopped
        store.save_probe(stopped.probe)
        complete = plural(sum(bool(link.samples) for link in stopped.probe.links), "complete link")
        raise Interrupted(
            f"interrupted; {complete} kept as probe {stopped.probe.probe_id}",
            hint="`caee calibrate` takes the newest probe that is complete; run `caee probe` again for all links",
        ) from stopped
    store.save_probe(measured)
    return measured


def fit_and_store(store: Store, probe_id: str | None, file: Path | None, seed: int) -> Calibration:
    """Fit a stored probe, by default the newest that was not interrupted, or import a measurement; keep the models."""
    with ended_by_interrupts():
        from probes.calibration import calibrate
        from probes.imports.detect import import_measurement

    calibration = import_measurement(file) if file is not None else calibrate(_to_fit(store, probe_id), seed=seed)
    store.save_calibration(calibration)
    return calibration


def _to_fit(store: Store, probe_id: str | None) -> Probe:
    """The probe with that id; None: the newest that was not interrupted, or where all were, the newest. Says which it
    left out, and what an interrupted one lacks."""
    from caee_cli.output import note, warn
    from store.entries import RecordKind

    kept = store.entries(RecordKind.PROBE) if probe_id is None else ()
    for at, entry in enumerate(kept):
        probe = store.probe(entry.record_id)
        if not probe.interrupted:
            for name in (newer.record_id for newer in kept[:at]):
                note(f"Left out the newer probe {name}, which was interrupted; --probe {name} fits it all the same")
            return probe
    chosen = store.probe(probe_id)
    if chosen.interrupted:
        warn(
            f"probe {chosen.probe_id} was interrupted: the links that it did not measure have no cost model, and a run "
            "that needs one has no costs; `caee probe` measures them all"
        )
    return chosen


def check_stored(store: Store, folder: Path | None, seed: int) -> DriftReport:
    """Whether the newest calibration that has what runs need still holds on this machine. Says which it passed over,
    and what the one that is checked lacks."""
    from caee_cli.calibrations import calibration_to_check
    from caee_cli.output import note, warn
    from probes.errors import StoreError

    with ended_by_interrupts():
        from probes.drift import check_drift

    chosen = calibration_to_check(store)
    calibration = chosen.calibration
    for why in chosen.passed_over:
        note(f"Passed over: {why}; what is checked is calibration {calibration.calibration_id}")
    if chosen.lacking is not None:
        warn(f"{chosen.lacking}: what it has is checked")
    measured = None
    if calibration.probe_id is not None:
        # The raw samples narrow the intervals; without them (deleted since) the check is coarser.
        with contextlib.suppress(StoreError):
            measured = store.probe(calibration.probe_id)
    with progress_bar() as progress:
        return check_drift(calibration, measured, disk_folder=disk_folder(store, folder), seed=seed, progress=progress)


def disk_folder(store: Store, chosen: Path | None) -> Path:
    """The folder whose disk is measured: the chosen one, else the store's, else the user's data folder."""
    from probes.errors import InputError
    from store.location import default_location

    if chosen is not None:
        if not chosen.is_dir():
            raise InputError(f"{chosen} is no folder", hint="name a folder on the disk that the experts lie on")
        return chosen
    beside = Path(store.location).parent
    if "://" not in store.location and beside.is_dir():
        return beside
    fallback = Path(default_location()).parent
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error that is told what is going on and the share of the work that is done."""
    from caee_cli.output import progress

    with progress() as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _seconds_left(quick: bool) -> float:
    """Time for measuring: the promised total less what starting took and storing will take."""
    from probes.limits import process_age_seconds
    from probes.probe import FULL_SECONDS, QUICK_SECONDS

    usual, promised = (QUICK_SECONDS, _QUICK_TOTAL_SECONDS) if quick else (FULL_SECONDS, _FULL_TOTAL_SECONDS)
    return max(_LEAST_SECONDS, min(usual, promised - process_age_seconds()))


def _expert_sizes() -> tuple[int, ...]:
    """Bytes of one expert of the model that ships with the package."""
    from probes.errors import CheckpointError
    from runtime.demo import model_path
    from runtime.experts.index import expert_bytes

    try:
        return (expert_bytes(model_path()),)
    except CheckpointError:
        return ()


def _sizes(text: str | None) -> tuple[int, ...]:
    from probes.units import parse_size

    return tuple(parse_size(part) for part in text.split(",")) if text else ()
