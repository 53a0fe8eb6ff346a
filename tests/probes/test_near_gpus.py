"""What a GPU's facts lead to: buffers near it, its link read while busy, advice."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from probes import topology
from probes.advice import gpu_findings
from probes.contention import busy
from probes.errors import DeviceError
from probes.fingerprint import take_fingerprint
from probes.numa import near, near_cpus, node_fields
from probes.nvml import Driver, NvmlGpu
from probes.plan import host_copies
from probes.records import Device, Field, Fingerprint
from probes.simulated import SimulatedBackend, SimulatedLink

GPU = torch.device("cuda:0")
SLOT = "0000:3b:00.0"
MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /sys with one GPU on node 1, which has this process's last CPU and one that it may not use."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    slot = tmp_path / "bus/pci/devices" / SLOT
    node = tmp_path / "devices/system/node/node1"
    for folder in (slot, node):
        folder.mkdir(parents=True)
    (slot / "numa_node").write_text("1\n")
    (node / "cpulist").write_text(f"{max(os.sched_getaffinity(0))},4000-4001\n")
    return tmp_path


def test_buffers_are_touched_by_the_gpus_own_node(machine: Path) -> None:
    before = os.sched_getaffinity(0)
    with near(GPU, sys=machine):
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        (f"bus/pci/devices/{SLOT}/numa_node", "-1", "unknown .-1."),
        (f"bus/pci/devices/{SLOT}/numa_node", "", "does not say"),
        ("devices/system/node/node1/cpulist", "", "has no CPUs"),
        ("devices/system/node/node1/cpulist", "4000-4001", "may use no CPU"),
    ],
)
def test_where_the_node_is_no_help_nothing_changes_and_it_is_recorded(
    machine: Path, file: str, text: str, why: str
) -> None:
    (machine / file).write_text(text)
    before = os.sched_getaffinity(0)
    with near(GPU, sys=machine):
        assert os.sched_getaffinity(0) == before
    gpu = Device(index=0, kind="cuda", name="GPU", uuid=None, memory_bytes=None)
    (field,) = node_fields([gpu], sys=machine).values()
    assert field.value is None
    assert re.search(why, field.reason)


def test_ranks_on_the_cpu_stay_where_they_are(tmp_path: Path) -> None:
    assert isinstance(near_cpus(torch.device("cpu")), str)
    rank = Device(index=0, kind="cpu", name="CPU", uuid=None, memory_bytes=None)
    assert not [name for name in take_fingerprint([rank], tmp_path).state if "host_buffers" in name]


def test_the_pcie_generation_is_read_while_the_link_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is at generation 1 but for the time in which a copy runs."""
    backend = SimulatedBackend(SimulatedLink.affine(alpha=1, bandwidth_bytes_per_s=1e9, beta_seconds=0))
    at_work: list[bool] = []

    nvml = SimpleNamespace(
        nvmlDeviceGetCurrPcieLinkGeneration=lambda board: 5 if at_work else 1,
        nvmlDeviceGetCurrPcieLinkWidth=lambda board: 16,
    )
    gpu = NvmlGpu(index=0, uuid=Field(value="GPU-1"), handle="h", board="h")
    driver = Driver(nvml=nvml, gpus=(gpu,))
    monkeypatch.setattr(topology, "open_driver", lambda: contextlib.nullcontext(driver))
    device = Device(index=0, kind="cuda", name="GPU", uuid="GPU-1", memory_bytes=None)

    @contextlib.contextmanager
    def copying(of: Device) -> Iterator[None]:
        with busy(host_copies(of, size_bytes=MIB, make_backend=lambda _: backend), MIB):
            at_work.append(True)
            yield
        at_work.clear()

    found = topology.pcie_while_busy([device], copying)
    assert found == {"gpu0.pcie_generation_busy": Field(value=5), "gpu0.pcie_width_busy": Field(value=16)}


def test_a_link_that_cannot_be_kept_busy_says_so() -> None:
    def no_memory() -> Any:
        raise DeviceError("no room")

    with pytest.raises(DeviceError), busy(no_memory, MIB):
        raise AssertionError("not reached")


HEALTHY = {
    "gpu0.pcie_width_current": 16,
    "gpu0.pcie_width_max": 16,
    "gpu0.pcie_generation_current": 1,
    "gpu0.pcie_generation_busy": 5,
    "gpu0.pcie_generation_max": 5,
    "gpu0.clock_event_reasons": "0x1",
    "gpu0.mig": False,
    "gpu0-gpu1.p2p_read": "ok",
}


def fingerprint(**changed: Any) -> Fingerprint:
    values = {**HEALTHY, **{name.replace("__", "."): value for name, value in changed.items()}}
    return Fingerprint(identity={}, state={name: Field(value=value) for name, value in values.items()})


def test_no_advice_where_all_is_well_or_unknown() -> None:
    assert gpu_findings(fingerprint()) == ()
    unknown = {name: Field(value=None, reason="NOT_SUPPORTED") for name in HEALTHY}
    assert gpu_findings(Fingerprint(identity=unknown, state={})) == ()


@pytest.mark.parametrize(
    ("changed", "what", "words"),
    [
        ({"gpu0__pcie_width_current": 8}, "gpu0 PCIe", "8 of 16 lanes: experts arrive at 50%"),
        ({"gpu0__pcie_generation_busy": 3}, "gpu0 PCIe", "generation 3 during a transfer, 5 would"),
        ({"gpu0__clock_event_reasons": "0x40"}, "gpu0 clocks", "lowered by heat"),
        ({"gpu0__clock_event_reasons": "0x4"}, "gpu0 clocks", "power cap"),
        ({"gpu0__mig": True}, "gpu0 MIG", "cut into slices"),
        ({"gpu0-gpu1__p2p_read": "chipset not supported"}, "peer access", "1 of 1 pair copies.*chipset"),
    ],
)
def test_each_trouble_is_named_with_its_fix(changed: dict[str, Any], what: str, words: str) -> None:
    (finding,) = gpu_findings(fingerprint(**changed))
    assert finding.what == what
    assert finding.status == "note"
    assert re.search(words, finding.detail)
    assert finding.fix
