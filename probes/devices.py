"""Which devices are meant by ``--devices``, and what this machine offers when nothing is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from probes.errors import DeviceError, UsageError
from probes.limits import cpus_allowed, memory_limit_bytes
from probes.records import Device

MAX_DEFAULT_CPU_DEVICES = 4
MAX_CPU_DEVICES = 64
_HOW = "write for example cpu:4, cuda, cuda:2 (the first two) or cuda:0,3 (these)"


def find_devices(text: str | None = None) -> tuple[Device, ...]:
    """Devices named by ``text``: ``KIND``, ``KIND:COUNT`` or ``KIND:I,J,…``; without it, what the machine offers.

    A list with a single entry is written with a comma (``cuda:1,``). The default is every visible GPU, else two to
    four ranks on the CPU. Raises ``UsageError`` for what cannot be read and ``DeviceError`` for what is not here.
    """
    if text is None:
        return _gpus() or _cpu_ranks(min(MAX_DEFAULT_CPU_DEVICES, max(2, cpus_allowed())))
    kind, _, rest = text.strip().lower().partition(":")
    if kind == "cpu":
        if "," in rest:
            raise UsageError(f"{text!r}: ranks on the CPU are counted, not listed", hint=_HOW)
        return _cpu_ranks(_number(rest, text) if rest else cpus_allowed())
    if kind != "cuda":
        raise UsageError(f"{text!r} does not name devices: their kinds are cpu and cuda", hint=_HOW)
    return _chosen_gpus(rest, text)


def devices_text(devices: Sequence[Device]) -> str:
    """What ``find_devices`` finds ``devices`` again by."""
    if devices[0].kind == "cpu":
        return f"cpu:{len(devices)}"
    return f"{devices[0].kind}:" + "".join(f"{device.index}," for device in devices)


def _cpu_ranks(count: int) -> tuple[Device, ...]:
    if count < 1:
        raise UsageError("at least one device is needed", hint=_HOW)
    if count > MAX_CPU_DEVICES:
        raise UsageError(f"{count} ranks on the CPU are too many", hint=f"use at most {MAX_CPU_DEVICES}")
    name = cpu_name() or "CPU"
    memory = memory_limit_bytes() // count
    return tuple(Device(index=index, kind="cpu", name=name, uuid=None, memory_bytes=memory) for index in range(count))


def _gpus() -> tuple[Device, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        found.append(
            Device(
                index=index,
                kind="cuda",
                name=str(properties.name),
                uuid=None if uuid is None else _gpu_uuid(str(uuid)),
                memory_bytes=int(properties.total_memory),
            )
        )
    return tuple(found)


def _chosen_gpus(rest: str, text: str) -> tuple[Device, ...]:
    here = _gpus()
    if not here:
        raise DeviceError(f"{text!r}: no GPU can be used here", hint="`caee doctor` says why; cpu:2 works anywhere")
    if not rest:
        return here
    if "," in rest:
        wanted = [_number(part, text) for part in rest.split(",") if part]
    else:
        wanted = list(range(_number(rest, text)))
    if not wanted or len(set(wanted)) < len(wanted):
        raise UsageError(f"{text!r} names no device, or one twice", hint=_HOW)
    missing = [index for index in wanted if index >= len(here)]
    if missing:
        raise DeviceError(
            f"{text!r}: there is no GPU {missing[0]}, only {len(here)} can be used",
            hint="`caee doctor` lists them; CUDA_VISIBLE_DEVICES may hide some",
        )
    return tuple(replace(here[index]) for index in wanted)


def _number(part: str, text: str) -> int:
    if not part.strip().isdigit():
        raise UsageError(f"{text!r}: {part!r} is not a number", hint=_HOW)
    return int(part)


def _gpu_uuid(text: str) -> str:
    # NVML writes the prefix, torch leaves it out.
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def why_no_gpu() -> str:
    """Why GPU links are not measured: no GPU that torch can use, or none was chosen."""
    import torch

    if torch.version.cuda is None:
        return f"no GPU can be used: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is visible to torch"
    return "the chosen devices are ranks on the CPU"


def cpu_name() -> str | None:
    """The processor's name as the kernel reports it, or None."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Processor", "cpu model"):
            return value.strip()
    return None
