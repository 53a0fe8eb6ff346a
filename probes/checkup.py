"""What this machine can and cannot do for probing and running, each with the reason and the fix."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from probes import limits
from probes.disk import ALIGNMENT
from probes.filesystem import mount_of
from probes.nvml import open_driver
from probes.records import Calibration, Fingerprint
from probes.scratch import make_scratch
from probes.text import plural
from probes.units import format_size

Status = Literal["ok", "note", "fail"]
# What the optional groups of the package add.
EXTRAS = {
    "triton": "the decision kernel on GPUs",
    "lm_eval": "accuracy tasks before and after pruning",
    "vllm": "running inside that engine",
}
_LITTLE_MEMORY_BYTES = 2 << 30
_LITTLE_DISK_BYTES = 2 << 30
_SCRATCH_SECONDS = 5.0
_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. ``note``: it works, but differently or not as well; ``fail``: it does not."""

    what: str
    status: Status
    detail: str
    fix: str | None = None


def machine_findings(disk_folder: Path) -> tuple[Finding, ...]:
    """GPUs and driver, processors, memory, disk, collectives, optional packages."""
    return (
        _torch_gpus(),
        _driver(),
        _processors(),
        _memory(),
        _locked_memory(),
        *_disk(disk_folder),
        _collectives(),
        *_extras(),
    )


def imported_finding(calibration: Calibration) -> Finding:
    """All cost models that are kept are figures from elsewhere; ``calibration`` is the newest."""
    return Finding(
        what="cost models",
        status="note",
        detail=f"calibration {calibration.calibration_id} comes from {calibration.origin}: good for `caee simulate`, "
        "never taken for this machine",
        fix="caee probe, then caee calibrate, before caee run",
    )


def identity_finding(stored: Fingerprint, present: Fingerprint, calibration_id: str) -> Finding:
    """Whether cost models were measured on this machine as it is now."""
    changed = stored.changed_identity(present)
    if not changed:
        return Finding(what="cost models", status="ok", detail=f"calibration {calibration_id} is of this machine")
    return Finding(
        what="cost models",
        status="fail",
        detail=f"calibration {calibration_id} is void: changed since: {', '.join(changed)}",
        fix="caee probe, then caee calibrate",
    )


def _torch_gpus() -> Finding:
    version = torch.__version__
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
        return Finding(
            what="GPUs", status="ok", detail=f"torch {version} sees {torch.cuda.device_count()}: {', '.join(names)}"
        )
    if torch.version.cuda is None:
        return Finding(
            what="GPUs",
            status="note",
            detail=f"torch {version} is built without CUDA: ranks on the CPU are the devices",
            fix="with an NVIDIA GPU, install the CUDA build of torch (pytorch.org/get-started)",
        )
    return Finding(
        what="GPUs",
        status="note",
        detail=f"torch {version} (CUDA {torch.version.cuda}) sees none: ranks on the CPU are the devices",
        fix="check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all",
    )


def _driver() -> Finding:
    with open_driver() as driver:
        if isinstance(driver, str):
            return Finding(
                what="NVIDIA driver",
                status="note",
                detail=driver,
                fix="needed for GPUs only: install the driver, or mount libnvidia-ml.so.1 in the container",
            )
        version = driver.ask("nvmlSystemGetDriverVersion")
        count = sum(not gpu.is_slice for gpu in driver.gpus)
    if version.value is None:
        return Finding(what="NVIDIA driver", status="note", detail=f"version unknown: {version.reason}")
    if count and not torch.cuda.is_available():
        return Finding(
            what="NVIDIA driver",
            status="fail",
            detail=f"driver {version.value} lists {plural(count, 'GPU')}, but torch can use none of them",
            fix="install a CUDA build of torch that this driver supports; check CUDA_VISIBLE_DEVICES",
        )
    return Finding(what="NVIDIA driver", status="ok", detail=f"{version.value}, {plural(count, 'GPU')}")


def _processors() -> Finding:
    quota = limits.cpu_quota()
    granted = "no quota" if quota is None else f"a quota of {quota:g} CPUs"
    return Finding(what="processors", status="ok", detail=f"{limits.cpus_allowed()} usable, {granted}")


def _memory() -> Finding:
    limit, machine = limits.memory_limit_bytes(), limits.meminfo_bytes("MemTotal")
    available = limits.memory_available_bytes()
    detail = f"{format_size(available)} available of {format_size(limit)}"
    if limit < machine:
        detail += f" (a cgroup limit; the machine has {format_size(machine)})"
    if available < _LITTLE_MEMORY_BYTES:
        return Finding(what="memory", status="note", detail=detail, fix="close other programs or raise the limit")
    return Finding(what="memory", status="ok", detail=detail)


def _locked_memory() -> Finding:
    limit = limits.lockable_memory_bytes()
    if limit is None:
        return Finding(what="lockable memory", status="ok", detail="no limit (ulimit -l)")
    return Finding(
        what="lockable memory",
        status="note",
        detail=f"{format_size(limit)} (ulimit -l); CUDA pins memory through its driver, outside this limit",
        fix="only for RDMA or mlock by other software: raise memlock in /etc/security/limits.conf",
    )


def _disk(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        fix = "name a folder on the disk that the experts lie on"
        yield Finding(what="disk", status="fail", detail=f"{folder} is no folder", fix=fix)
        return
    mount = mount_of(folder)
    where = f"{folder} ({mount.kind})" if mount else str(folder)
    scratch = make_scratch(folder, size_bytes=_SCRATCH_BYTES, seconds=_SCRATCH_SECONDS, seed=0)
    try:
        if scratch.waived is not None:
            fix = "choose another folder with --disk-path, or free some space"
            yield Finding(what="disk", status="fail", detail=scratch.waived, fix=fix)
            return
        if scratch.direct is not None:
            detail = f"direct reads work on {where}, in multiples of {ALIGNMENT} bytes"
            yield Finding(what="disk", status="ok", detail=detail)
        else:
            yield Finding(
                what="disk",
                status="note",
                detail=f"reads on {where} go through the page cache: {scratch.not_direct}",
                fix="choose a folder on a local disk with --disk-path to learn what a fetch from disk costs",
            )
    finally:
        scratch.close()
    free = shutil.disk_usage(folder).free
    if free < _LITTLE_DISK_BYTES:
        yield Finding(what="disk space", status="note", detail=f"only {format_size(free)} free", fix="free some space")


def _collectives() -> Finding:
    import torch.distributed as dist

    what = "collectives"
    if not dist.is_available():
        return Finding(
            what=what,
            status="fail",
            detail=f"torch {torch.__version__} is built without torch.distributed: no run on several devices",
            fix="install torch from pytorch.org/get-started",
        )
    usable = [name for name, there in (("gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())) if there]
    if torch.cuda.is_available() and "NCCL" not in usable:
        return Finding(
            what=what,
            status="fail",
            detail="there are GPUs, but torch is built without NCCL, which they exchange tokens with",
            fix="install a CUDA build of torch (pytorch.org/get-started)",
        )
    detail = f"{' and '.join(usable)}; `caee probe --collectives` times them"
    return Finding(what=what, status="ok", detail=detail)


def _extras() -> Sequence[Finding]:
    found = []
    for module, purpose in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            detail = f"not installed; needed only for {purpose}"
            found.append(Finding(what=module, status="note", detail=detail, fix=_how_to_install(module)))
        else:
            found.append(Finding(what=module, status="ok", detail=f"{_version(module)}: {purpose}"))
    return found


def _how_to_install(module: str) -> str:
    return (
        "see vllm.ai for the build that fits"
        if module == "vllm"
        else f"in a clone of caee: pip install '.[{module.replace('_', '-')}]'"
    )


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"
