"""Which stored calibration holds for what is about to run on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from probes.records import Calibration, Device, Fingerprint
    from store.session import Store

# How many devices are used does not change what one link does; the disk matters only where experts wait on it.
_NEVER_MATTERS = {"devices"}
_DISK_ONLY = {"disk_file_system", "disk_source"}


def calibration_for(
    store: Store, machine: Fingerprint, tier: str, devices: Sequence[Device]
) -> tuple[Calibration | None, str | None]:
    """The newest calibration whose machine is this one and that has what ``tier`` costs on ``devices``.

    With it a sentence where a newer one lacks that, without one (None) the sentence that says why.
    """
    from probes.errors import InputError
    from runtime.cost import cost_table
    from store.entries import RecordKind

    if not store.entries(RecordKind.CALIBRATION):
        return None, "there is no calibration yet; run `caee probe` and `caee calibrate` for costs and predictions"
    changed: list[str] = []
    lacking = None
    for calibration in _measured_here(store, machine, tier, changed):
        try:
            cost_table(calibration, tier, [device.name_on_link for device in devices], 1)
        except InputError as error:
            lacking = lacking or error.message
            continue
        return calibration, lacking and f"{lacking}; costs are those of calibration {calibration.calibration_id}"
    again = "run `caee probe` and `caee calibrate`"
    if lacking is not None:
        return None, f"{lacking}, nor has an older one of this machine: costs are unknown; {again}"
    why = f"it differs in {', '.join(changed)}" if changed else "those stored were imported from elsewhere"
    return None, f"no stored calibration holds for this machine ({why}); {again}"


def _measured_here(store: Store, machine: Fingerprint, tier: str, changed: list[str]) -> Iterator[Calibration]:
    """Calibrations of this machine, newest first; ``changed`` takes in what the newest other one differs in."""
    from store.entries import RecordKind

    ignored = _NEVER_MATTERS | (set() if tier == "disk" else _DISK_ONLY)
    for entry in store.entries(RecordKind.CALIBRATION):
        calibration = store.calibration(entry.record_id)
        if calibration.fingerprint is None:
            continue  # imported figures of another machine
        fields = [name for name in calibration.fingerprint.changed_identity(machine) if name not in ignored]
        if not fields:
            yield calibration
        elif not changed:
            changed += fields
