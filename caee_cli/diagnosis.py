"""What ``caee doctor`` looks at: the installation, the store and the machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from caee_cli.guard import installed_in, strangers
from caee_cli.measuring import disk_folder
from probes.advice import gpu_findings
from probes.checkup import Finding, identity_finding, imported_finding, machine_findings
from probes.devices import devices_text, find_devices
from probes.errors import CaeeError
from probes.fingerprint import take_fingerprint
from probes.records import Calibration, Fingerprint
from store.entries import RecordKind
from store.session import open_store


def diagnose(store: str | None, chosen: Path | None) -> tuple[tuple[Finding, ...], Fingerprint]:
    """All findings, and the machine's fingerprint. A store that cannot be opened is a finding, not an error."""
    kept, calibration, folder = _store(store, chosen)
    devices = find_devices(None)
    fingerprint = take_fingerprint(devices, folder)
    findings = [_packages(), kept, *machine_findings(folder), *gpu_findings(fingerprint)]
    findings.append(_no_cost_models() if calibration is None else _cost_models(calibration, folder))
    return tuple(findings), fingerprint


def _no_cost_models() -> Finding:
    return Finding(
        what="cost models",
        status="note",
        detail="none are kept yet: runs are measured, but their costs are not known and nothing is predicted",
        fix="caee probe, then caee calibrate",
    )


def _cost_models(calibration: Calibration, folder: Path) -> Finding:
    if calibration.fingerprint is None:
        return imported_finding(calibration)
    try:
        present = take_fingerprint(find_devices(devices_text(calibration.devices)), folder)
    except CaeeError as error:
        return Finding(
            what="cost models",
            status="fail",
            detail=f"the devices of calibration {calibration.calibration_id} are not here: {error.message}",
            fix="caee probe, then caee calibrate",
        )
    return identity_finding(calibration.fingerprint, present, calibration.calibration_id)


def _packages() -> Finding:
    found = strangers()
    if not found:
        return Finding(what="installation", status="ok", detail=f"all packages lie side by side in {installed_in()}")
    names = ", ".join(f"{stranger.name} ({stranger.path or 'not found'})" for stranger in found)
    return Finding(
        what="installation",
        status="fail",
        detail=f"not from {installed_in()}: {names}",
        fix="install caee in an environment of its own, or start from another folder",
    )


def _store(location: str | None, chosen: Path | None) -> tuple[Finding, Calibration | None, Path]:
    try:
        with open_store(location) as kept:
            folder = disk_folder(kept, chosen)
            calibration = kept.calibration() if kept.entries(RecordKind.CALIBRATION) else None
            problems = [problem for problem in kept.check() if problem.damage]
            count = len(kept.entries())
    except CaeeError as error:
        fallback = chosen if chosen is not None and chosen.is_dir() else Path(tempfile.gettempdir())
        return Finding(what="store", status="fail", detail=error.message, fix=error.hint), None, fallback
    if problems:
        detail = f"{kept.location}: {len(problems)} damaged, first: {problems[0].message}"
        return Finding(what="store", status="fail", detail=detail, fix="caee store check"), calibration, folder
    return Finding(what="store", status="ok", detail=f"{kept.location}: {count} records"), calibration, folder
