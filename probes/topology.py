"""What the GPUs are, how they hang together and how they are doing, joined to torch's devices by UUID."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from probes.nvml import Driver, NvmlGpu, nvlinks, open_driver
from probes.records import Device, Field
from probes.visible import visible_gpus

_MEGA = 10**6
_ECC = {0: "off", 1: "on"}
# nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`.
_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvmlGpuP2PCapsIndex_t; nvidia-ml-py's own constant is a tuple by mistake, which no call accepts.
_P2P_READ = 0
# nvmlGpuP2PStatus_t.
_P2P = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "IOH topology not supported",
    4: "disabled by regkey",
    5: "not supported",
    6: "unknown",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Fields by name: ``gpu0.uuid``, ``gpu0-gpu1.path``."""

    identity: dict[str, Field] = field(default_factory=dict)
    state: dict[str, Field] = field(default_factory=dict)


def gpu_facts(devices: Sequence[Device]) -> GpuFacts:
    """Everything the driver tells about the devices, or about all visible GPUs where the devices are CPU ranks."""
    with open_driver() as driver:
        if isinstance(driver, str):
            return GpuFacts(identity={"driver": Field(value=None, reason=driver)})
        facts = GpuFacts()
        facts.identity["driver"] = driver.ask("nvmlSystemGetDriverVersion")
        facts.identity["driver_cuda"] = driver.ask("nvmlSystemGetCudaDriverVersion", convert=_cuda_version)
        chosen = _chosen(driver, devices, facts)
        for index, gpu in chosen:
            _identify(driver, index, gpu, facts.identity)
            _observe(driver, index, gpu, facts.state)
        _relate(driver, chosen, facts.identity)
        _fall_back(devices, facts.identity)
        return facts


def pcie_while_busy(
    devices: Sequence[Device], busy: Callable[[Device], AbstractContextManager[None]]
) -> dict[str, Field]:
    """PCIe generation and width of each GPU, read while ``busy`` keeps its link to the host at work.

    Idle links fall to generation 1. Empty where there is no driver.
    """
    found: dict[str, Field] = {}
    by_index = {device.index: device for device in devices if device.kind == "cuda"}
    with open_driver() as driver:
        if isinstance(driver, str) or not by_index:
            return found
        for index, gpu in _chosen(driver, devices, GpuFacts()):
            with busy(by_index[index]):
                found[f"gpu{index}.pcie_generation_busy"] = driver.ask("nvmlDeviceGetCurrPcieLinkGeneration", gpu.board)
                found[f"gpu{index}.pcie_width_busy"] = driver.ask("nvmlDeviceGetCurrPcieLinkWidth", gpu.board)
    return found


def _chosen(driver: Driver, devices: Sequence[Device], facts: GpuFacts) -> list[tuple[int, NvmlGpu]]:
    """Index and driver's view of each GPU in question. CUDA and NVML count differently: only UUIDs join them."""
    cuda = [device for device in devices if device.kind == "cuda"]
    if not cuda:
        shown, remark = visible_gpus(driver.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        facts.identity["gpus_visible"] = Field(value=len(shown), reason=remark)
        return list(enumerate(shown))
    by_uuid = {str(gpu.uuid.value): gpu for gpu in driver.gpus if gpu.uuid.value is not None}
    joined = []
    for device in cuda:
        gpu = by_uuid.get(device.uuid or "")
        if gpu is None:
            reason = f"the driver lists no GPU with the UUID {device.uuid} that CUDA reports"
            facts.identity[f"gpu{device.index}.nvml"] = Field(value=None, reason=reason)
        else:
            joined.append((device.index, gpu))
    return joined


def _identify(driver: Driver, index: int, gpu: NvmlGpu, fields: dict[str, Field]) -> None:
    board = gpu.board
    found = {
        "uuid": gpu.uuid,
        "name": driver.ask("nvmlDeviceGetName", gpu.handle),
        "memory_bytes": driver.ask("nvmlDeviceGetMemoryInfo", gpu.handle, convert=lambda info: int(info.total)),
        "pci_bus_id": driver.ask("nvmlDeviceGetPciInfo", board, convert=lambda info: info.busId),
        "mig": driver.ask("nvmlDeviceGetMigMode", board, convert=lambda modes: bool(modes[0])),
        "ecc": driver.ask("nvmlDeviceGetEccMode", board, convert=lambda modes: _ECC.get(modes[0], str(modes[0]))),
        "compute_capability": driver.ask("nvmlDeviceGetCudaComputeCapability", board, convert=_dotted),
        "pcie_generation_max": driver.ask("nvmlDeviceGetMaxPcieLinkGeneration", board),
        "pcie_width_max": driver.ask("nvmlDeviceGetMaxPcieLinkWidth", board),
        "nvlinks_active": nvlinks(driver, board),
        "numa_node": _numa_node(driver, board),
    }
    fields.update({f"gpu{index}.{name}": value for name, value in found.items()})


def _observe(driver: Driver, index: int, gpu: NvmlGpu, fields: dict[str, Field]) -> None:
    board, nvml = gpu.board, driver.nvml
    found = {
        "pcie_generation_current": driver.ask("nvmlDeviceGetCurrPcieLinkGeneration", board),
        "pcie_width_current": driver.ask("nvmlDeviceGetCurrPcieLinkWidth", board),
        "clock_sm_hz": driver.ask("nvmlDeviceGetClockInfo", board, nvml.NVML_CLOCK_SM, convert=_mega),
        "clock_memory_hz": driver.ask("nvmlDeviceGetClockInfo", board, nvml.NVML_CLOCK_MEM, convert=_mega),
        "temperature_celsius": driver.ask("nvmlDeviceGetTemperature", board, nvml.NVML_TEMPERATURE_GPU),
        "power_watts": driver.ask("nvmlDeviceGetPowerUsage", board, convert=_milli),
        "power_limit_watts": driver.ask("nvmlDeviceGetEnforcedPowerLimit", board, convert=_milli),
        "clock_event_reasons": _clock_event_reasons(driver, board),
        "utilization_percent": driver.ask("nvmlDeviceGetUtilizationRates", board, convert=lambda rates: rates.gpu),
        "processes": driver.ask("nvmlDeviceGetComputeRunningProcesses", board, convert=len),
    }
    fields.update({f"gpu{index}.{name}": value for name, value in found.items()})


def _relate(driver: Driver, chosen: Sequence[tuple[int, NvmlGpu]], fields: dict[str, Field]) -> None:
    for (first, one), (second, other) in itertools.combinations(chosen, 2):
        pair = f"gpu{first}-gpu{second}"
        if one.board is other.board:
            fields[f"{pair}.path"] = Field(value="same GPU")
            continue
        fields[f"{pair}.path"] = driver.ask(
            "nvmlDeviceGetTopologyCommonAncestor", one.board, other.board, convert=lambda at: _LEVELS.get(at, str(at))
        )
        fields[f"{pair}.p2p_read"] = driver.ask(
            "nvmlDeviceGetP2PStatus", one.board, other.board, _P2P_READ, convert=_p2p_status
        )


def _fall_back(devices: Sequence[Device], fields: dict[str, Field]) -> None:
    """Unified-memory parts answer NOT_SUPPORTED for memory: then what torch says counts."""
    for device in devices:
        name = f"gpu{device.index}.memory_bytes"
        if device.kind == "cuda" and device.memory_bytes and fields.get(name, Field(value=None)).value is None:
            fields[name] = Field(value=device.memory_bytes, reason="as torch reports it")


def _numa_node(driver: Driver, board: Any) -> Field:
    node = driver.ask("nvmlDeviceGetNumaNodeId", board)
    return Field(value=None, reason="the driver reports no node (-1)") if node.value == -1 else node


def _clock_event_reasons(driver: Driver, board: Any) -> Field:
    # Drivers before 535 know them as throttle reasons.
    reasons = driver.ask("nvmlDeviceGetCurrentClocksEventReasons", board, convert=hex)
    if reasons.value is not None:
        return reasons
    older = driver.ask("nvmlDeviceGetCurrentClocksThrottleReasons", board, convert=hex)
    return older if older.value is not None else reasons


def _p2p_status(status: int) -> str:
    return _P2P.get(status, str(status))


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _dotted(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))


def _mega(value: int) -> int:
    return value * _MEGA


def _milli(value: int) -> float:
    return value / 1000
