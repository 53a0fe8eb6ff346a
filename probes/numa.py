"""Host memory near a GPU: buffers are first touched by a CPU of the NUMA node that its PCIe slot belongs to.

Linux places a page on the node of the CPU that touches it first. Best effort: where the node is unknown (−1), has no
CPUs or none that this process may use, buffers lie where the system puts them, and the fingerprint says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from probes.records import Device, Field

_SYS = Path("/sys")


@contextlib.contextmanager
def near(device: torch.device, *, sys: Path = _SYS) -> Iterator[None]:
    """Keep this thread on the CPUs near ``device`` within the block, where that is known and allowed."""
    chosen = near_cpus(device, sys=sys)
    if isinstance(chosen, str):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def near_cpus(device: torch.device, *, sys: Path = _SYS) -> set[int] | str:
    """CPUs of the device's node that this process may use, or why there are none to choose."""
    node = _node(device, sys)
    if isinstance(node, str):
        return node
    listed = _read(sys / f"devices/system/node/node{node}/cpulist")
    cpus = _numbers(listed or "")
    if not cpus:
        return f"NUMA node {node} has no CPUs"
    allowed = cpus & os.sched_getaffinity(0)
    return allowed or f"this process may use no CPU of NUMA node {node}"


def node_fields(devices: Sequence[Device], *, sys: Path = _SYS) -> dict[str, Field]:
    """Where host buffers of each GPU are placed: ``gpu0.host_buffers_cpus``."""
    found = {}
    for device in devices:
        if device.kind != "cpu":
            chosen = near_cpus(torch.device(device.name_on_link), sys=sys)
            known = not isinstance(chosen, str)
            found[f"gpu{device.index}.host_buffers_cpus"] = Field(
                value=",".join(map(str, sorted(chosen))) if known else None, reason=None if known else str(chosen)
            )
    return found


def _node(device: torch.device, sys: Path) -> int | str:
    if device.type != "cuda":
        return "only a GPU lies on a NUMA node of its own"
    # Older versions of torch lack the fields.
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        slot = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return "this torch does not tell where on the PCIe bus the GPU is"
    text = _read(sys / "bus/pci/devices" / slot / "numa_node")
    if text is None or not text.lstrip("-").isdigit():
        return f"the kernel does not say which NUMA node {slot} is on"
    return int(text) if int(text) >= 0 else f"the NUMA node of {slot} is unknown (-1)"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _numbers(ranges: str) -> set[int]:
    """``0-3,8`` as 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            found |= set(range(int(first), int(last or first) + 1))
    return found
