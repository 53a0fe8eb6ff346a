"""The fingerprint of GPUs that are not here: the real nvidia-ml-py over a library built by this test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from probes.nvml import NvmlGpu, guarded
from probes.records import Field
from probes.visible import visible_gpus

# One process asks many machines in turn: the library reads the environment at every call.
SCRIPT = """
import json, os, sys
from probes.records import Device
from probes.topology import gpu_facts

for line in sys.stdin:
    case = json.loads(line)
    for name in ("FAKE_NVML", "FAKE_NVML_BROKEN", "FAKE_NVML_CODE", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    os.environ.update(case["environment"])
    facts = gpu_facts([Device(**device) for device in case["devices"]])
    found = {**facts.identity, **facts.state}
    print(json.dumps({name: [field.value, field.reason] for name, field in found.items()}), flush=True)
"""
UUIDS = [f"GPU-{0x10 * (index + 1):08x}-1111-2222-3333-{index:012x}" for index in range(8)]
SLICES = [f"MIG-{0xABC0 + number:08x}-aaaa-5555-8888-{0:012x}" for number in (1, 2)]
BREAKABLE = [
    *("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetCount_v2"),
    *("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"),
    *("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetEccMode"),
    *("nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"),
    *("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetPowerUsage"),
    *("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetClockInfo"),
    *("nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTopologyCommonAncestor"),
    *("nvmlDeviceGetP2PStatus", "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetCurrentClocksEventReasons"),
    "nvmlDeviceGetComputeRunningProcesses_v3",
]
Facts = dict[str, tuple[Any, str | None]]


class Machine:
    """A process that sees the made-up library."""

    def __init__(self, folder: Path, *flags: str) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler to build the made-up NVML with")
        source = Path(__file__).with_name("fake_nvml.c")
        library = folder / "libnvidia-ml.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-w", *flags, "-o", library, source], check=True)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        )

    def ask(self, machine: str, *devices: dict[str, Any], **environment: str) -> Facts:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        case = {"environment": {"FAKE_NVML": machine, **environment}, "devices": devices}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer: dict[str, list[Any]] = json.loads(self._process.stdout.readline())
        facts = {name: (value, reason) for name, (value, reason) in answer.items()}
        assert all(value is not None or reason for value, reason in facts.values())
        return facts

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    machine = Machine(tmp_path_factory.mktemp("nvml"))
    yield machine
    machine.close()


def gpu(index: int, uuid: str, memory_bytes: int | None = None) -> dict[str, Any]:
    return {"index": index, "kind": "cuda", "name": "GPU", "uuid": uuid, "memory_bytes": memory_bytes}


def uuids(facts: Facts) -> list[Any]:
    return [facts[f"gpu{index}.uuid"][0] for index in range(8) if f"gpu{index}.uuid" in facts]


def test_eight_h100(driver: Machine) -> None:
    facts = driver.ask("h100x8")
    assert uuids(facts) == UUIDS
    assert facts["driver"] == ("575.57.08", None)
    assert facts["driver_cuda"] == ("12.9", None)
    expected = {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 80 << 30,
        "pci_bus_id": "00000000:15:00.0",
        "mig": False,
        "ecc": "on",
        "compute_capability": "9.0",
        "pcie_generation_max": 5,
        "pcie_generation_current": 1,
        "pcie_width_max": 16,
        "nvlinks_active": 18,
        "numa_node": 1,
        "clock_sm_hz": 1_980_000_000,
        "power_watts": 71.5,
        "power_limit_watts": 700.0,
        "clock_event_reasons": "0x1",
        "processes": 0,
    }
    assert {name: facts[f"gpu5.{name}"][0] for name in expected} == expected
    assert facts["gpu0-gpu3.path"][0] == "NODE"
    assert facts["gpu0-gpu4.path"][0] == "SYS"
    assert facts["gpu6-gpu7.p2p_read"][0] == "ok"


def test_devices_are_joined_by_uuid_not_by_number(driver: Machine) -> None:
    facts = driver.ask("h100x8", gpu(0, UUIDS[6]), gpu(1, UUIDS[2]))
    assert facts["gpu0.pci_bus_id"][0] == "00000000:16:00.0"
    assert facts["gpu1.pci_bus_id"][0] == "00000000:12:00.0"
    assert facts["gpu0-gpu1.path"][0] == "SYS"
    assert "gpu2.uuid" not in facts


def test_a_uuid_that_the_driver_does_not_know(driver: Machine) -> None:
    facts = driver.ask("jetson", gpu(0, "GPU-ffffffff-0000-0000-0000-000000000000"))
    value, reason = facts["gpu0.nvml"]
    assert value is None
    assert reason is not None
    assert "GPU-ffffffff" in reason


def test_mig_slices(driver: Machine) -> None:
    facts = driver.ask("mig", CUDA_VISIBLE_DEVICES=",".join(SLICES))
    assert uuids(facts) == SLICES
    assert facts["gpu1.name"][0] == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert facts["gpu0.memory_bytes"][0] == 42 << 30
    # What a slice is not asked for, the board it lies on is.
    assert facts["gpu1.pci_bus_id"][0] == "00000000:10:00.0"
    assert facts["gpu0-gpu1.path"][0] == "same GPU"
    assert uuids(driver.ask("mig")) == SLICES[:1]
    assert driver.ask("mig", gpu(0, SLICES[1]))["gpu0.memory_bytes"][0] == 42 << 30


def test_unified_memory_is_what_torch_says(driver: Machine) -> None:
    facts = driver.ask("gh200", gpu(0, UUIDS[0], memory_bytes=96 << 30))
    assert facts["gpu0.memory_bytes"] == (96 << 30, "as torch reports it")
    assert facts["gpu0.numa_node"] == (None, "the driver reports no node (-1)")
    assert facts["gpu0.mig"][0] is None
    assert driver.ask("gh200")["gpu0.memory_bytes"][0] is None


@pytest.mark.parametrize("code", ["3", "4", "15", "999", "77"])
def test_one_broken_field_leaves_the_others_alone(driver: Machine, code: str) -> None:
    whole = driver.ask("h100x8")
    for function in BREAKABLE:
        broken = driver.ask("h100x8", FAKE_NVML_BROKEN=function, FAKE_NVML_CODE=code)
        lost = {name for name in whole if name not in broken or broken[name][0] != whole[name][0]}
        assert lost or function == "nvmlDeviceGetMaxMigDeviceCount", function
        if function not in ("nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"):
            fields = {name.partition(".")[2] or name for name in lost}
            assert len(fields) <= 2, (function, fields)
            assert all(broken[name][1] for name in lost)


def test_no_driver_is_a_reason(driver: Machine) -> None:
    facts = driver.ask("none")
    assert facts.keys() == {"driver"}
    assert "DriverNotLoaded" in str(facts["driver"][1]) or "Driver Not Loaded" in str(facts["driver"][1])


def test_a_name_that_is_no_text(driver: Machine) -> None:
    value, reason = driver.ask("odd_name")["gpu0.name"]
    assert value is None
    assert reason is not None
    assert "UnicodeDecodeError" in reason


def test_a_library_without_newer_symbols(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "-DOLD_LIBRARY")
    facts = machine.ask("h100x8")
    machine.close()
    assert uuids(facts) == UUIDS
    assert facts["gpu0.clock_event_reasons"] == ("0x4", None)
    for missing, error in (("numa_node", "FunctionNotFound"), ("processes", "NVMLLibraryMismatchError")):
        assert facts[f"gpu0.{missing}"][0] is None
        assert error in str(facts[f"gpu0.{missing}"][1])


@pytest.mark.parametrize(
    ("mask", "shown", "remark"),
    [
        ("0,1", [0, 1], None),
        ("7, 3", [7, 3], None),
        (f"{UUIDS[4]},{UUIDS[1]}", [4, 1], None),
        ("GPU-00000030", [2], None),
        ("", [], "empty"),
        ("0,0", [], "named twice"),
        (f"2,{UUIDS[2]}", [], "named twice"),
        ("1,9,2", [1], "'9' names no GPU"),
        ("1,GPU-,2", [1], "'GPU-' names no GPU"),
        ("-1", [], "'-1' names no GPU"),
        ("1,MIG-0000", [1], "'MIG-0000' names no GPU"),
        ("all", [], "'all' names no GPU"),
    ],
)
def test_masks(driver: Machine, mask: str, shown: list[int], remark: str | None) -> None:
    facts = driver.ask("h100x8", CUDA_VISIBLE_DEVICES=mask)
    assert uuids(facts) == [UUIDS[index] for index in shown]
    value, reason = facts["gpus_visible"]
    assert value == len(shown)
    assert reason is None if remark is None else remark in str(reason)


def test_masks_of_slices_by_id() -> None:
    board = object()
    whole = NvmlGpu(index=0, uuid=Field(value=UUIDS[0]), handle=board, board=board)
    parts = [NvmlGpu(index=0, uuid=Field(value=uuid), handle=object(), board=board) for uuid in SLICES]
    everything = [whole, *parts]
    assert visible_gpus(everything, "MIG-0000abc2") == ((parts[1],), None)
    assert visible_gpus(everything, f"{SLICES[1]},{SLICES[0]}") == ((parts[1], parts[0]), None)
    shown, remark = visible_gpus(everything, "MIG-0000abc")
    assert shown == ()
    assert remark is not None


def test_bytes_and_foreign_errors_are_guarded() -> None:
    class NVMLLibraryMismatchError(Exception):
        pass

    def mismatch() -> str:
        raise NVMLLibraryMismatchError("Unversioned function called")

    assert guarded(lambda: b"NVIDIA A100") == Field(value="NVIDIA A100")
    assert guarded(mismatch) == Field(value=None, reason="NVMLLibraryMismatchError: Unversioned function called")
    assert guarded(lambda: object().missing).reason is not None  # type: ignore[attr-defined]  # that is the test
