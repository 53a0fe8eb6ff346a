"""Cost models of all links of a probe."""

from __future__ import annotations

from probes.errors import InputError
from probes.fit import fit_link
from probes.ids import new_id, now
from probes.records import Calibration, LinkStatus, Probe

ORIGIN_PROBE = "probe"


def calibrate(probe: Probe, *, seed: int = 0) -> Calibration:
    """Fit every measured link. Raises ``InputError`` where the probe holds nothing to fit."""
    models = []
    warnings = list(probe.warnings)
    for link in probe.links:
        model = fit_link(link, seed=seed)
        if model is not None:
            models.append(model)
        elif link.status is LinkStatus.BROKEN:
            warnings.append(
                f"no model of {link.kind} {link.source} → {link.destination}, which is broken: {link.reason}"
            )
        elif link.status is not LinkStatus.WAIVED:
            warnings.append(f"no model of {link.kind} {link.source} → {link.destination}: fewer than three sizes")
    if not models:
        raise InputError(
            f"probe {probe.probe_id} measured no link that a model can be fitted to",
            hint="run `caee probe` again, on a folder that can be written to (--disk-path)",
        )
    return Calibration(
        calibration_id=new_id(),
        created_at=now(),
        probe_id=probe.probe_id,
        origin=ORIGIN_PROBE,
        fingerprint=probe.fingerprint,
        devices=probe.devices,
        models=tuple(models),
        link_groups=probe.link_groups,
        warnings=tuple(warnings),
    )
