"""Which stored calibration holds for what is about to run on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.records import Calibration, Fingerprint
    from store.session import Store

# How many devices are used does not change what one link does; the disk matters only where experts wait on it.
_NEVER_MATTERS = {"devices"}
_DISK_ONLY = {"disk_file_system", "disk_source"}


def calibration_for(store: Store, machine: Fingerprint, tier: str) -> tuple[Calibration | None, str | None]:
    """The newest calibration whose machine is this one; without one None, and a sentence that says why."""
    from store.entries import RecordKind

    entries = store.entries(RecordKind.CALIBRATION)
    if not entries:
        return None, "there is no calibration yet; run `caee probe` and `caee calibrate` for costs and predictions"
    ignored = _NEVER_MATTERS | (set() if tier == "disk" else _DISK_ONLY)
    changed: list[str] = []
    for entry in entries:
        calibration = store.calibration(entry.record_id)
        if calibration.fingerprint is None:
            continue  # imported figures of another machine
        fields = [name for name in calibration.fingerprint.changed_identity(machine) if name not in ignored]
        if not fields:
            return calibration, None
        changed = changed or fields
    why = f"it differs in {', '.join(changed)}" if changed else "those stored were imported from elsewhere"
    return None, f"no stored calibration holds for this machine ({why}); run `caee probe` and `caee calibrate`"
