"""What this process may use, as opposed to what the machine has: cgroup limits, CPU masks, lockable memory."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")
# cgroup v1 writes "no limit" as the largest multiple of the page size.
_NO_LIMIT = 1 << 60
_MEMINFO = Path("/proc/meminfo")


def memory_limit_bytes() -> int:
    """The smallest of the machine's memory and the limits of this process's cgroups (v1 or v2)."""
    return min([meminfo_bytes("MemTotal"), *_cgroup_values("memory.max", "memory", "memory.limit_in_bytes")])


def memory_available_bytes() -> int:
    """How much memory can be taken now without swapping or being killed; page cache counts as available."""
    available = meminfo_bytes("MemAvailable")
    for folder in cgroup_folders("memory"):
        limit = _read_int(folder / "memory.max") or _read_int(folder / "memory.limit_in_bytes")
        used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            available = min(available, max(0, limit - used + _reclaimable(folder)))
    return available


def cpus_allowed() -> int:
    """How many CPUs this process may run on, by affinity mask and cgroup quota; at least one."""
    cpus = float(len(os.sched_getaffinity(0)))
    for folder in cgroup_folders("cpu"):
        quota, period = _cpu_quota(folder)
        if quota is not None and period:
            cpus = min(cpus, quota / period)
    return max(1, int(cpus))


def cpu_quota() -> float | None:
    """CPUs' worth of time that the cgroups grant, or None without a quota."""
    quotas = [quota / period for quota, period in map(_cpu_quota, cgroup_folders("cpu")) if quota and period]
    return min(quotas, default=None)


def lockable_memory_bytes() -> int | None:
    """``ulimit -l`` in bytes, or None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache of the first CPU, or None where the system does not tell."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [_cache_size(path) for path in folder.glob("index*/size")]
    return max((size for size in sizes if size), default=None)


def cgroup_folders(controller: str, *, root: Path = _CGROUP_ROOT, proc: Path = _PROC_CGROUP) -> tuple[Path, ...]:
    """Folders of this process's cgroups for ``controller``, from the innermost up to the mount's root."""
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    folders: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
        else:
            continue
        for mount in mounts:
            # Inside a container the path may lie above the mount: what exists is what applies.
            inner = mount / path.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return tuple(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def process_age_seconds() -> float:
    """How long ago this process started; its imports took their time before anything could be measured."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    # proc(5): starttime is field 22 of all, in ticks since boot; two come before the closing parenthesis.
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def meminfo_bytes(name: str) -> int:
    """A line of /proc/meminfo in bytes (proc(5)); 0 where the kernel does not report it."""
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def _cgroup_values(v2_name: str, controller: str, v1_name: str) -> list[int]:
    values = []
    for folder in cgroup_folders(controller):
        for name in (v2_name, v1_name):
            value = _read_int(folder / name)
            if value is not None and value < _NO_LIMIT:
                values.append(value)
    return values


def _reclaimable(folder: Path) -> int:
    """Bytes of clean page cache that the kernel gives back before the limit bites."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    fields = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    text = fields.get("inactive_file") or fields.get("total_inactive_file") or "0"
    return int(text) if text.isdigit() else 0


def _cpu_quota(folder: Path) -> tuple[int | None, int | None]:
    try:
        quota, _, period = (folder / "cpu.max").read_text(encoding="utf-8").strip().partition(" ")
    except OSError:
        v1_quota = _read_int(folder / "cpu.cfs_quota_us")
        return (v1_quota if v1_quota and v1_quota > 0 else None), _read_int(folder / "cpu.cfs_period_us")
    return (int(quota) if quota.isdigit() else None), (int(period) if period.isdigit() else None)


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def _cache_size(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    digits = text.rstrip("KM")
    return int(digits) * scale if digits.isdigit() else None
