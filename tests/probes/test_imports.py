"""Cost models from nvbandwidth's outputs, as real machines wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from probes.errors import ImportFormatError, InputError
from probes.imports.detect import import_measurement
from probes.records import Calibration, Concurrency, LinkKind, LinkMode

TEXT = """nvbandwidth Version: v0.8
Device 0: NVIDIA A (00000000:01:00)
Device 1: NVIDIA A (00000000:02:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     25.00     24.00

SUM host_to_device_memcpy_ce 49.00

Running host_to_all_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     12.50     12.00

SUM host_to_all_memcpy_ce 24.50

Running device_to_device_memcpy_write_ce.
memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    100.00
 1    200.00       N/A

SUM device_to_device_memcpy_write_ce 300.00

Waived:
Running device_local_copy.
memcpy local GPU(column) bandwidth (GB/s)
           0         1
 0    500.00    500.00

SUM device_local_copy 1000.00
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "output.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def rates(calibration: Calibration, kind: LinkKind, concurrency: Concurrency = Concurrency.SOLO) -> dict[str, float]:
    return {
        f"{model.source}>{model.destination}": model.bandwidth_bytes_per_s / model.alpha
        for model in calibration.models
        if model.kind is kind and model.concurrency is concurrency
    }


def test_text_becomes_models_by_the_arrows_of_its_titles(write: Write) -> None:
    calibration = import_measurement(write(TEXT))
    assert rates(calibration, LinkKind.HOST_TO_DEVICE) == {"host>cuda:0": 25e9, "host>cuda:1": 24e9}
    assert rates(calibration, LinkKind.HOST_TO_DEVICE, Concurrency.ALL)["host>cuda:1"] == 12e9
    # Row ← column: the bytes come from the column's GPU.
    assert rates(calibration, LinkKind.DEVICE_TO_DEVICE) == {"cuda:1>cuda:0": 100e9, "cuda:0>cuda:1": 200e9}
    # A copy inside one memory reads and writes it.
    assert rates(calibration, LinkKind.DEVICE_MEMORY)["cuda:0>cuda:0"] == 1000e9
    assert [group.factor for group in calibration.link_groups] == [1.0]
    assert {model.mode for model in calibration.models if model.kind is LinkKind.HOST_TO_DEVICE} == {LinkMode.PINNED}
    assert [device.name for device in calibration.devices] == ["NVIDIA A", "NVIDIA A"]
    assert "output.txt" in calibration.origin
    assert calibration.fingerprint is None
    assert any("latency is unknown" in warning for warning in calibration.warnings)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (TEXT.replace(" 0     25.00     24.00", " 0     25.00     23.00"), "add up to 48.00, the output says 49.00"),
        (TEXT.replace("Device 1: NVIDIA A (00000000:02:00)\n", ""), "contradicts the 1 devices"),
        (TEXT.replace(" 1    200.00       N/A", " 1    200.00"), "differ in length"),
        (TEXT.replace(" 0     12.50     12.00\n", " 0     12.50     12.00\n 1     12.50     12.00\n"), "2 hosts"),
        ("nvbandwidth Version: v0.8\n", "holds no copy test"),
        ('{"nvbandwidth": {"testcases": [{"name": "x", "bandwidth_matrix": 5}]}}', "cannot be read"),
        ('{"nvbandwidth": {"testcases": ', "cannot be read"),
        ("hello", "no format that can be imported"),
        ("", "no format that can be imported"),
    ],
)
def test_what_contradicts_itself_is_refused(write: Write, wrong: str, words: str) -> None:
    with pytest.raises(ImportFormatError, match=words):
        import_measurement(write(wrong))


@pytest.mark.parametrize("cell", ["NaN", "Infinity", "-3.0", "fast"])
def test_cells_that_are_no_bandwidth_are_refused(write: Write, cell: str) -> None:
    case = {"name": "host_to_device_memcpy_ce", "bandwidth_matrix": [[cell]], "bandwidth_description": "->"}
    with pytest.raises(ImportFormatError, match="is no bandwidth"):
        import_measurement(write(json.dumps({"nvbandwidth": {"testcases": [case]}})))


def test_a_missing_file_and_a_huge_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        import_measurement(tmp_path / "absent")
    huge = tmp_path / "huge"
    with huge.open("wb") as stream:
        stream.truncate(65 << 20)
    with pytest.raises(ImportFormatError, match="no measuring tool"):
        import_measurement(huge)


def test_every_real_output_is_read_or_refused_with_a_reason(shared_data: Path) -> None:
    refused = {}
    for path in sorted((shared_data / "hw" / "nvbandwidth").glob("*")):
        if path.suffix not in (".txt", ".json"):
            continue
        try:
            calibration = import_measurement(path)
        except ImportFormatError as error:
            refused[path.name] = error.message
            continue
        assert calibration.models
        assert all(1e9 < model.bandwidth_bytes_per_s < 1e13 for model in calibration.models)
    assert list(refused) == ["superbench_gh200_fixture_EDITED.txt"]
    assert "2 × 3" in refused["superbench_gh200_fixture_EDITED.txt"]


def test_log_lines_around_the_json_do_not_matter(shared_data: Path) -> None:
    folder = shared_data / "hw" / "nvbandwidth"
    plain = import_measurement(folder / "dcgm_fixture_1gpu_pcie3_drv565.json")
    noisy = import_measurement(folder / "dcgm_fixture_1gpu_with_warning_prefix.txt")
    for kind in LinkKind:
        assert rates(plain, kind) == rates(noisy, kind)
