"""What a fingerprint's facts about GPUs mean for moving experts, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from probes.checkup import Finding
from probes.records import Field, Fingerprint
from probes.text import plural, verb

# nvmlClocksEventReasons: what lowers the clocks against the user's will.
_SLOWED = {
    0x04: ("the power cap", "raise it (nvidia-smi -pl) or expect slower layers"),
    0x08: ("a hardware slowdown (heat or power)", "check cooling and power supply"),
    0x20: ("heat (software)", "check cooling"),
    0x40: ("heat (hardware)", "check cooling"),
    0x80: ("the power supply's brake", "check the power supply"),
}
_GPU = re.compile(r"^gpu(\d+)\.")
_PAIR = re.compile(r"^(gpu\d+-gpu\d+)\.p2p_read$")


def gpu_findings(fingerprint: Fingerprint) -> tuple[Finding, ...]:
    """Narrow links, lowered clocks, slices, pairs without peer access; nothing where all is as it should be."""
    facts = {**fingerprint.identity, **fingerprint.state}
    gpus = sorted({int(match[1]) for name in facts if (match := _GPU.match(name))})
    found = [finding for gpu in gpus for finding in _one_gpu(f"gpu{gpu}", facts)]
    return (*found, *_pairs(facts))


def _one_gpu(gpu: str, facts: Mapping[str, Field]) -> Iterator[Finding]:
    width, widest = (_value(facts, f"{gpu}.pcie_width_{which}") for which in ("current", "max"))
    if isinstance(width, int) and isinstance(widest, int) and width < widest:
        yield Finding(
            what=f"{gpu} PCIe",
            status="note",
            detail=f"{width} of {widest} lanes: experts arrive at {width / widest:.0%} of the speed they could",
            fix="put the card in a full-width slot, or check the riser and the slot's setting in the BIOS",
        )
    # Idle links fall to generation 1: only what was read during a transfer tells.
    busy, best = (_value(facts, f"{gpu}.pcie_generation_{which}") for which in ("busy", "max"))
    if isinstance(busy, int) and isinstance(best, int) and busy < best:
        yield Finding(
            what=f"{gpu} PCIe",
            status="note",
            detail=f"generation {busy} during a transfer, {best} would be possible",
            fix="check the slot's generation in the BIOS, the riser, and power management (ASPM)",
        )
    reasons = _value(facts, f"{gpu}.clock_event_reasons")
    bits = int(reasons, 16) if isinstance(reasons, str) and re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
    for bit, (cause, fix) in _SLOWED.items():
        if bits & bit:
            yield Finding(what=f"{gpu} clocks", status="note", detail=f"lowered by {cause}", fix=fix)
    if _value(facts, f"{gpu}.mig") is True:
        yield Finding(
            what=f"{gpu} MIG",
            status="note",
            detail="the GPU is cut into slices, which share its link to the host and have no peer access",
            fix="measure all slices at once, or switch MIG off (nvidia-smi -mig 0)",
        )


def _pairs(facts: Mapping[str, Field]) -> Iterator[Finding]:
    without = {match[1]: str(field.value) for name, field in facts.items() if (match := _PAIR.match(name))}
    refused = {pair: status for pair, status in without.items() if status not in ("ok", "None")}
    if refused:
        pair, status = next(iter(refused.items()))
        pairs, copy = plural(len(without), "pair"), verb(len(refused), "copies", "copy")
        yield Finding(
            what="peer access",
            status="note",
            detail=f"{len(refused)} of {pairs} {copy} through host memory, first {pair}: {status}",
            fix="the `staged` figures of `caee probe` hold for them; check IOMMU and ACS settings",
        )


def _value(facts: Mapping[str, Field], name: str) -> str | int | float | bool | None:
    field = facts.get(name)
    return None if field is None else field.value
