"""Machines by name, from their makers' data sheets: what a device could reach at best, where nothing was measured.

Bandwidths count one direction. Host links are PCI Express x16 of the generation that the data sheet names, at its raw
rate (PCI-SIG: 32, 64 and 128 GB/s one way for generations 4, 5 and 6).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from probes.errors import UsageError
from runtime.cost import CostTable, uniform_costs

PCIE4_X16 = 32e9
PCIE5_X16 = 64e9
PCIE6_X16 = 128e9
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """One device. ``memory_bandwidth`` and ``host_bandwidth`` (from host memory to the device) in bytes/s."""

    memory_bandwidth: float
    host_bandwidth: float
    memory_bytes: int
    source: str


def _nvidia(memory: float, host: float, gib: float, sheet: str) -> MachineProfile:
    return MachineProfile(
        memory_bandwidth=memory, host_bandwidth=host, memory_bytes=int(gib * GIB), source=f"NVIDIA {sheet} data sheet"
    )


PROFILES: dict[str, MachineProfile] = {
    "a100-pcie": _nvidia(1.935e12, PCIE4_X16, 80, "A100 80GB PCIe"),
    "a100-sxm": _nvidia(2.039e12, PCIE4_X16, 80, "A100 80GB SXM"),
    "a30": _nvidia(933e9, PCIE4_X16, 24, "A30"),
    "b200-sxm": _nvidia(7.7e12, PCIE6_X16, 180, "Blackwell (HGX B200)"),
    "b300-sxm": _nvidia(7.75e12, PCIE6_X16, 268, "Blackwell Ultra (HGX B300)"),
    "gb200": _nvidia(8e12, PCIE5_X16, 185, "Blackwell (GB200 NVL72)"),
    "gb300": _nvidia(8e12, PCIE5_X16, 277, "Blackwell Ultra (GB300 NVL72)"),
    "h100-pcie": _nvidia(2e12, PCIE5_X16, 80, "H100 PCIe"),
    "h100-sxm": _nvidia(3.35e12, PCIE5_X16, 80, "H100 SXM"),
    "h200-sxm": _nvidia(4.8e12, PCIE5_X16, 141, "H200 SXM"),
    "l4": _nvidia(300e9, PCIE4_X16, 24, "L4"),
    "l40s": _nvidia(864e9, PCIE4_X16, 45, "L40S"),
    "rtx-pro-6000": _nvidia(1.792e12, PCIE5_X16, 96, "RTX PRO 6000 Blackwell Server Edition"),
    "b60": MachineProfile(
        memory_bandwidth=456e9,
        host_bandwidth=PCIE5_X16 / 2,
        memory_bytes=24 * GIB,
        source="Intel Arc Pro B60 data sheet",
    ),
}


def machine_choices(name: str) -> str:
    """A hint for a machine that is not known: the profiles most like ``name``, then what there is."""
    close = difflib.get_close_matches(name.lower(), PROFILES, n=2)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{meant}profiles: {', '.join(PROFILES)}; or the id of a calibration (caee store list)"


def profile_costs(name: str, tier: str, devices: int, expert_bytes: int) -> CostTable:
    """Seconds to move an expert at the data sheet's rate (α = 1, β = 0): a bound, not a prediction.

    Raises ``UsageError`` for an unknown name, and for a tier that no data sheet speaks of.
    """
    profile = PROFILES.get(name)
    if profile is None:
        raise UsageError(f"unknown machine profile {name!r}", hint=machine_choices(name))
    if tier == "disk":
        raise UsageError(
            f"profile {name} says nothing of disks",
            hint="calibrate a machine (caee probe, caee calibrate), or give --seconds-per-expert",
        )
    bandwidth = profile.host_bandwidth if tier == "host" else profile.memory_bandwidth
    return uniform_costs(expert_bytes / bandwidth, devices)
