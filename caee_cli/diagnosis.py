"""What ``caee doctor`` looks at: the installation, the store and the machine."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from caee_cli.calibrations import ToCheck, calibration_to_check
from caee_cli.guard import installed_in, strangers
from caee_cli.measuring import disk_folder
from probes.advice import gpu_findings
from probes.checkup import Finding, identity_finding, imported_finding, machine_findings
from probes.devices import devices_text, find_devices
from probes.errors import CaeeError
from probes.fingerprint import take_fingerprint
from probes.records import Calibration, Fingerprint
from probes.text import plural
from store.entries import RecordKind
from store.session import open_store


def diagnose(store: str | None, chosen: Path | None) -> tuple[tuple[Finding, ...], Fingerprint]:
    """All findings, and the machine's fingerprint. A store that cannot be opened is a finding, not an error."""
    kept = _store(store)
    folder = chosen if chosen is not None and chosen.is_dir() else kept.folder
    fingerprint = take_fingerprint(find_devices(None), folder)
    findings = (
        _packages(),
        kept.finding,
        *machine_findings(chosen or folder),
        *gpu_findings(fingerprint),
        _cost_models(kept, folder),
    )
    return findings, fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What the store tells. ``folder``: whose disk is looked at where none is chosen; ``newest``: the calibration to
    look at, where one is kept."""

    finding: Finding
    folder: Path
    newest: ToCheck | None = None


def _cost_models(kept: _Kept, folder: Path) -> Finding:
    if kept.newest is not None:
        return _said_of(kept.newest, _newest_cost_models(kept.newest.calibration, folder))
    if kept.finding.status == "fail":
        return Finding(what="cost models", status="note", detail="not known: the store cannot be read")
    return Finding(
        what="cost models",
        status="note",
        detail="none are kept yet: runs are measured, but their costs are not known and nothing is predicted",
        fix="caee probe, then caee calibrate",
    )


def _said_of(newest: ToCheck, finding: Finding) -> Finding:
    """``finding``, with what those models lack, and which newer ones were passed over for them."""
    if newest.lacking is not None and finding.status == "ok":
        fix = "caee probe, then caee calibrate"
        finding = replace(finding, status="note", detail=f"{finding.detail}; {newest.lacking}", fix=fix)
    if newest.passed_over:
        finding = replace(finding, detail=f"{finding.detail}; passed over: {'; '.join(newest.passed_over)}")
    return finding


def _newest_cost_models(calibration: Calibration, folder: Path) -> Finding:
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


def _store(location: str | None) -> _Kept:
    try:
        with open_store(location) as kept:
            folder = disk_folder(kept, None)
            newest = calibration_to_check(kept) if kept.entries(RecordKind.CALIBRATION) else None
            problems = [problem for problem in kept.check() if problem.damage]
            count = len(kept.entries())
    except CaeeError as error:
        finding = Finding(what="store", status="fail", detail=error.message, fix=error.hint)
        return _Kept(finding=finding, folder=Path(tempfile.gettempdir()))
    finding = Finding(what="store", status="ok", detail=f"{kept.location}: {plural(count, 'record')}")
    if problems:
        detail = f"{kept.location}: {len(problems)} damaged, first: {problems[0].message}"
        finding = Finding(what="store", status="fail", detail=detail, fix="caee store check")
    return _Kept(finding=finding, folder=folder, newest=newest)
