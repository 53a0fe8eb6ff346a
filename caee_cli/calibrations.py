"""Which stored calibration holds for what is about to run on this machine, and which one a check is about."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
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
    from store.entries import RecordKind

    if not store.entries(RecordKind.CALIBRATION):
        return None, "there is no calibration yet; run `caee probe` and `caee calibrate` for costs and predictions"
    changed: list[str] = []
    lacking = None
    for calibration in _measured_here(store, machine, tier, changed):
        if (lack := _lack(calibration, tier, devices)) is None:
            return calibration, lacking and f"{lacking}; costs are those of calibration {calibration.calibration_id}"
        lacking = lacking or lack
    again = "run `caee probe` and `caee calibrate`"
    if lacking is not None:
        return None, f"{lacking}, nor has an older one of this machine: costs are unknown; {again}"
    why = f"it differs in {', '.join(changed)}" if changed else "those stored were imported from elsewhere"
    return None, f"no stored calibration holds for this machine ({why}); {again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCheck:
    """The calibration that a check is about. ``passed_over``: a sentence for each newer one; ``lacking``: one that says
    what it lacks itself, where every calibration of its machine lacks something."""

    calibration: Calibration
    passed_over: tuple[str, ...] = ()
    lacking: str | None = None


def calibration_to_check(store: Store) -> ToCheck:
    """The newest that was measured and has what runs in any tier need, as ``calibration_for`` would take it.

    Only of the machine of the newest that was measured: that another machine's is void says nothing of this one. Raises
    ``StoreError`` where no calibration is kept.
    """
    newest = next((each for each in _calibrations(store) if each.fingerprint is not None), None)
    if newest is None or newest.fingerprint is None:
        return ToCheck(calibration=store.calibration())
    same_machine = _measured_here(store, newest.fingerprint, "disk", [])
    whole = next((each for each in same_machine if _lack_in_any_tier(each) is None), None)
    chosen = whole or newest
    newer = itertools.takewhile(lambda each: each.calibration_id != chosen.calibration_id, _calibrations(store))
    return ToCheck(
        calibration=chosen,
        passed_over=tuple(map(_why_passed_over, newer)),
        lacking=None if whole else f"{_lack_in_any_tier(newest)}, nor has an older one of that machine",
    )


def _why_passed_over(calibration: Calibration) -> str:
    if calibration.fingerprint is None:
        return f"calibration {calibration.calibration_id} comes from {calibration.origin}, not from a probe"
    lack = _lack_in_any_tier(calibration)
    return lack or f"calibration {calibration.calibration_id} is of another machine, or of another state of this one"


def _lack_in_any_tier(calibration: Calibration) -> str | None:
    from runtime.options import TIERS

    return next(filter(None, (_lack(calibration, tier, calibration.devices) for tier in TIERS)), None)


def _lack(calibration: Calibration, tier: str, devices: Sequence[Device]) -> str | None:
    """The sentence that says what costs of ``tier`` on ``devices`` it has not, None where it has them all."""
    from probes.errors import InputError
    from runtime.cost import cost_table

    try:
        cost_table(calibration, tier, [device.name_on_link for device in devices], 1)
    except InputError as error:
        return error.message
    return None


def _calibrations(store: Store) -> Iterator[Calibration]:
    """All of them, newest first, each read when it is asked for."""
    from store.entries import RecordKind

    return (store.calibration(entry.record_id) for entry in store.entries(RecordKind.CALIBRATION))


def _measured_here(store: Store, machine: Fingerprint, tier: str, changed: list[str]) -> Iterator[Calibration]:
    """Calibrations of this machine, newest first; ``changed`` takes in what the newest other one differs in."""
    ignored = _NEVER_MATTERS | (set() if tier == "disk" else _DISK_ONLY)
    for calibration in _calibrations(store):
        if calibration.fingerprint is None:
            continue  # imported figures of another machine
        fields = [name for name in calibration.fingerprint.changed_identity(machine) if name not in ignored]
        if not fields:
            yield calibration
        elif not changed:
            changed += fields
