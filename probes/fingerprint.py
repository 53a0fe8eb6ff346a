"""What this machine is (identity) and how it is just now (state): every field a value, or the reason why not."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from probes import limits
from probes.devices import cpu_name
from probes.filesystem import mount_of
from probes.numa import node_fields
from probes.records import Device, Field, Fingerprint
from probes.topology import gpu_facts

# Raised when a change of the probe's code changes its figures: older cost models are then void.
PROBE_CODE_VERSION = 2
_MASKS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def take_fingerprint(devices: Sequence[Device], disk_folder: Path) -> Fingerprint:
    """Ask the operating system, torch and, where there is one, the NVIDIA driver."""
    gpus = gpu_facts(devices)
    identity = {**_host_identity(devices), **_disk_identity(disk_folder), **gpus.identity}
    return Fingerprint(
        identity=dict(sorted(identity.items())),
        state=dict(sorted({**_host_state(), **gpus.state, **node_fields(devices)}.items())),
    )


def _host_identity(devices: Sequence[Device]) -> dict[str, Field]:
    fields = {
        "probe_code_version": Field(value=PROBE_CODE_VERSION),
        "devices": Field(value=",".join(device.name_on_link for device in devices)),
        "cpu_name": _known(cpu_name(), "the kernel reports no processor name"),
        "cpu_machine": Field(value=platform.machine()),
        "cpus_allowed": Field(value=limits.cpus_allowed()),
        "cpu_affinity": Field(value=_ranges(sorted(os.sched_getaffinity(0)))),
        "cpu_quota": _known(limits.cpu_quota(), "no quota is set"),
        "memory_limit_bytes": Field(value=limits.memory_limit_bytes()),
        "last_level_cache_bytes": _known(limits.last_level_cache_bytes(), "the kernel reports no caches"),
        "numa_nodes": _numa_nodes(),
        "kernel": Field(value=platform.release()),
        "torch": Field(value=str(torch.__version__)),
        "cuda": _known(torch.version.cuda, "torch is built without CUDA"),
    }
    for mask in _MASKS:
        fields[mask.lower()] = _known(os.environ.get(mask), "not set")
    return fields


def _disk_identity(folder: Path) -> dict[str, Field]:
    mount = mount_of(folder)
    unknown = "the kernel does not say what is mounted there"
    return {
        "disk_file_system": _known(mount.kind if mount else None, unknown),
        "disk_source": _known(mount.source if mount else None, unknown),
    }


def _host_state() -> dict[str, Field]:
    lockable = limits.lockable_memory_bytes()
    return {
        "load_1min": Field(value=round(os.getloadavg()[0], 2)),
        "memory_available_bytes": Field(value=limits.memory_available_bytes()),
        "lockable_memory_bytes": _known(lockable, "no limit is set"),
        "cpu_governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
    }


def _numa_nodes() -> Field:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return _known(len(nodes) or None, "the kernel reports no NUMA nodes")


def _read(path: Path) -> Field:
    try:
        return Field(value=path.read_text(encoding="utf-8").strip())
    except OSError as error:
        return Field(value=None, reason=f"{path}: {error.strerror}")


def _known(value: str | int | float | None, reason: str) -> Field:
    return Field(value=value) if value is not None else Field(value=None, reason=reason)


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
