"""Records as the JSON documents that other programs build on: times in seconds, sizes in bytes, unknown is null."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from probes.drift import CheckedLink, DriftReport
from probes.records import Calibration, Field, Fingerprint, LinkModel, Probe

PROBE_SCHEMA = "caee.probe/1"
CALIBRATION_SCHEMA = "caee.calibrate/1"
CHECK_SCHEMA = "caee.calibrate.check/1"


def probe_document(probe: Probe) -> dict[str, Any]:
    """What ``caee probe --json`` prints."""
    return {
        "schema": PROBE_SCHEMA,
        "probe_id": probe.probe_id,
        "created_at": probe.created_at,
        "fingerprint": fingerprint_document(probe.fingerprint),
        "devices": [asdict(device) for device in probe.devices],
        "link_groups": [asdict(group) for group in probe.link_groups],
        # Enumerations are strings, and JSON writes them so.
        "links": [asdict(link) for link in probe.links],
        "warnings": list(probe.warnings),
    }


def calibration_document(calibration: Calibration) -> dict[str, Any]:
    """What ``caee calibrate --json`` prints."""
    return {
        "schema": CALIBRATION_SCHEMA,
        "calibration_id": calibration.calibration_id,
        "created_at": calibration.created_at,
        "probe_id": calibration.probe_id,
        "origin": calibration.origin,
        "devices": [asdict(device) for device in calibration.devices],
        "link_groups": [asdict(group) for group in calibration.link_groups],
        "models": [_model(model) for model in calibration.models],
        "layers": [asdict(layer) for layer in calibration.layers],
        "facts": _fields(calibration.facts),
        "warnings": list(calibration.warnings),
    }


def drift_document(report: DriftReport) -> dict[str, Any]:
    """What ``caee calibrate --check --json`` prints."""
    return {
        "schema": CHECK_SCHEMA,
        "calibration_id": report.calibration_id,
        "holds": report.holds,
        "changed_identity": list(report.changed_identity),
        "links": [_checked(link) for link in report.links],
    }


def fingerprint_document(fingerprint: Fingerprint) -> dict[str, Any]:
    """``{"identity": {name: {"value", "reason"}}, "state": {…}}``."""
    return {"identity": _fields(fingerprint.identity), "state": _fields(fingerprint.state)}


def _fields(fields: dict[str, Field]) -> dict[str, Any]:
    return {name: {"value": field.value, "reason": field.reason} for name, field in fields.items()}


def _model(model: LinkModel) -> dict[str, Any]:
    return {**asdict(model), "effective_bandwidth_bytes_per_s": model.bandwidth_bytes_per_s / model.alpha}


def _checked(link: CheckedLink) -> dict[str, Any]:
    return {
        "model_id": link.model.model_id,
        "kind": link.model.kind,
        "source": link.model.source,
        "destination": link.model.destination,
        "mode": link.model.mode,
        "drifted": link.drifted,
        "reason": link.reason,
        "sizes": [{**asdict(size), "outside": size.outside} for size in link.sizes],
    }
