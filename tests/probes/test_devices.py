"""What ``--devices`` means, and what limits the machine sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from probes import limits
from probes.devices import devices_text, find_devices
from probes.errors import DeviceError, UsageError


class Properties:
    def __init__(self, index: int) -> None:
        self.name = "NVIDIA A"
        self.uuid = f"{index:08x}-1111-2222-3333-444444444444"
        self.total_memory = 80 << 30


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)


def names(text: str | None) -> list[str]:
    return [device.name_on_link for device in find_devices(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:2", ["cuda:0", "cuda:1"]),
        ("cuda:3,1", ["cuda:3", "cuda:1"]),
        ("cuda:1,", ["cuda:1"]),
        ("cpu:3", ["cpu:0", "cpu:1", "cpu:2"]),
        (None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_devices_are_counted_or_listed(text: str | None, expected: list[str]) -> None:
    assert names(text) == expected
    assert names(devices_text(find_devices(text))) == expected


@pytest.mark.usefixtures("four_gpus")
def test_gpus_know_their_uuid() -> None:
    assert find_devices("cuda:3,")[0].uuid == "GPU-00000003-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    "text", ["cpu:0", "cpu:x", "cpu:-1", "cpu:1,2", "tpu", "gpu", "gpu:1", "", "cuda:0,0", "cuda:a", "cuda:0"]
)
@pytest.mark.usefixtures("four_gpus")
def test_what_cannot_be_meant_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        find_devices(text)


@pytest.mark.parametrize("text", ["cuda:5", "cuda:0,4"])
@pytest.mark.usefixtures("four_gpus")
def test_gpus_that_are_not_there(text: str) -> None:
    with pytest.raises(DeviceError, match="there is no GPU 4"):
        find_devices(text)


def test_without_a_gpu_ranks_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cpus, expected in ((1, 2), (2, 2), (3, 3), (64, 4)):
        monkeypatch.setattr("probes.devices.cpus_allowed", lambda cpus=cpus: cpus)
        assert len(find_devices()) == expected
    with pytest.raises(DeviceError, match="no GPU can be used"):
        find_devices("cuda:1")


@pytest.mark.parametrize(
    ("lines", "folders"),
    [
        ("0::/a/b\n", ["a/b", "a", "."]),
        ("5:cpu,cpuacct:/x\n7:memory:/y\n", ["memory/y", "memory"]),
        ("0::/not/visible/here\n", ["."]),
    ],
)
def test_cgroups_of_both_versions(tmp_path: Path, lines: str, folders: list[str]) -> None:
    root = tmp_path / "cgroup"
    for folder in ("a/b", "memory/y", "cpu,cpuacct/x"):
        (root / folder).mkdir(parents=True)
    proc = tmp_path / "proc"
    proc.write_text(lines)
    assert limits.cgroup_folders("memory", root=root, proc=proc) == tuple(root / folder for folder in folders)


def test_the_smallest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, outer = tmp_path / "a" / "b", tmp_path / "a"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (outer / "memory.max").write_text(f"{3 << 20}\n")
    (outer / "memory.current").write_text(f"{2 << 20}\n")
    (outer / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 19}\n")
    (outer / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(limits, "cgroup_folders", lambda controller: (inner, outer))
    assert limits.memory_limit_bytes() == 3 << 20
    assert limits.memory_available_bytes() == (1 << 20) + (1 << 19)
    assert limits.cpu_quota() == 1.5
    assert limits.cpus_allowed() == 1


def test_the_process_has_an_age() -> None:
    age = limits.process_age_seconds()
    assert 0 < age < limits.process_age_seconds() + 1
