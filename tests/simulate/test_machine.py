"""What an expert costs: from calibrations, from data sheets, as given."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from probes.errors import InputError, UsageError
from probes.records import (
    Calibration,
    Concurrency,
    Device,
    LinkGroup,
    LinkKind,
    LinkMode,
    LinkModel,
    ModelForm,
)
from runtime.cost import cost_table
from runtime.profiles import PROFILES
from runtime.simulate.machine import MachineRequest, machine_for, parse_machine_seconds

MB = 10**6


def model(kind: LinkKind, source: str, destination: str, rate: float, **changes: Any) -> LinkModel:
    about: dict[str, Any] = {
        "model_id": f"{kind}-{source}-{destination}",
        "kind": kind,
        "source": source,
        "destination": destination,
        "mode": None,
        "concurrency": Concurrency.SOLO,
        "form": ModelForm.AFFINE,
        "alpha": 2.0,
        "bandwidth_bytes_per_s": rate,
        "beta_seconds": 1e-4,
        "n_half_bytes": 1e-4 * rate / 2,
        "segments": None,
        "ci95": None,
        "holdout_mape": None,
        "max_relative_error": None,
        "status": "ok",
    }
    return LinkModel(**about | changes)


def calibration(devices: list[str], models: list[LinkModel], groups: tuple[LinkGroup, ...] = ()) -> Calibration:
    return Calibration(
        calibration_id="abc",
        created_at="2026-01-01T00:00:00+00:00",
        probe_id=None,
        origin="probe",
        fingerprint=None,
        devices=tuple(
            Device(index=int(name[-1]), kind=name.split(":", maxsplit=1)[0], name=name, uuid=None, memory_bytes=None)
            for name in devices
        ),
        models=tuple(models),
        link_groups=groups,
    )


GPUS = calibration(
    ["cuda:0", "cuda:1"],
    [
        model(LinkKind.HOST_TO_DEVICE, "host", "cuda:0", 20e9, mode=LinkMode.PAGEABLE),
        model(LinkKind.HOST_TO_DEVICE, "host", "cuda:0", 40e9, mode=LinkMode.PINNED),
        model(LinkKind.HOST_TO_DEVICE, "host", "cuda:0", 10e9, mode=LinkMode.PINNED, concurrency=Concurrency.ALL),
        model(LinkKind.HOST_TO_DEVICE, "host", "cuda:1", 50e9, mode=LinkMode.PINNED),
        model(LinkKind.DEVICE_MEMORY, "cuda:0", "cuda:0", 2e12),
        model(LinkKind.DEVICE_MEMORY, "cuda:1", "cuda:1", 2e12),
        model(LinkKind.DISK_TO_HOST, "disk", "host", 2e9, mode=LinkMode.BUFFERED),
        model(LinkKind.DISK_TO_HOST, "disk", "host", 4e9, mode=LinkMode.DIRECT),
    ],
    (
        LinkGroup(kind=LinkKind.DISK_TO_HOST, devices=(0, 1), factor=1.0),
        LinkGroup(kind=LinkKind.HOST_TO_DEVICE, devices=(0, 1), factor=0.75),
    ),
)


def test_each_tier_takes_its_links_alone_and_in_the_preferred_mode() -> None:
    size = 40 * MB
    beta = 1e-4
    assert cost_table(GPUS, "host", ["cuda:0", "cuda:1"], size).seconds_per_expert == pytest.approx(
        (2 * size / 40e9 + beta, 2 * size / 50e9 + beta)
    )
    assert cost_table(GPUS, "device", ["cuda:0"], size).seconds_per_expert == pytest.approx((2 * size / 2e12 + beta,))
    # From disk an expert crosses the host: both links are paid for.
    assert cost_table(GPUS, "disk", ["cuda:1"], size).seconds_per_expert == pytest.approx(
        (2 * size / 4e9 + beta + 2 * size / 50e9 + beta,)
    )


def test_ranks_on_the_cpu_read_host_memory() -> None:
    ranks = calibration(["cpu:0"], [model(LinkKind.HOST_MEMORY, "cpu:0", "cpu:0", 10e9)])
    # A fetch within one memory reads and writes the expert; using it where it is only reads.
    assert cost_table(ranks, "host", ["cpu:0"], MB).seconds_per_expert == pytest.approx((2 * 2e-4 + 1e-4,))
    assert cost_table(ranks, "device", ["cpu:0"], MB).seconds_per_expert == pytest.approx((2e-4 + 1e-4,))


def test_only_the_links_on_the_way_are_shared() -> None:
    table = cost_table(GPUS, "host", ["cuda:0", "cuda:1"], MB)
    assert [(list(members), factor) for members, factor in table.groups] == [([0, 1], 768)]
    assert not list(cost_table(GPUS, "device", ["cuda:0", "cuda:1"], MB).groups)


def test_a_missing_link_is_named() -> None:
    ranks = calibration(["cpu:0"], [model(LinkKind.HOST_MEMORY, "cpu:0", "cpu:0", 10e9)])
    with pytest.raises(InputError, match="no cost model for disk_to_host"):
        cost_table(ranks, "disk", ["cpu:0"], MB)


def test_picoseconds_round_half_to_even() -> None:
    request = MachineRequest(seconds_per_expert=(0.5e-12, 1.5e-12, 2.5e-12))
    np.testing.assert_array_equal(machine_for(request, _none, "host").costs.picoseconds, [0, 2, 2])


def _none(calibration_id: str) -> Calibration:
    raise AssertionError(f"no calibration was asked for: {calibration_id}")


def test_one_number_is_for_all_devices() -> None:
    machine = machine_for(MachineRequest(devices=3, seconds_per_expert=(0.25,)), _none, "host")
    assert machine.costs.seconds_per_expert == (0.25, 0.25, 0.25)


def test_a_calibration_gives_as_many_devices_as_it_measured() -> None:
    request = MachineRequest(machine="abc", expert_bytes=40 * MB)
    machine = machine_for(request, lambda _: GPUS, "host")
    expected = cost_table(GPUS, "host", ["cuda:0", "cuda:1"], 40 * MB)
    assert machine.costs.seconds_per_expert == expected.seconds_per_expert
    assert machine.origin == "calibration abc"


def test_more_devices_than_were_measured_are_like_the_first_and_said_to_be() -> None:
    request = MachineRequest(machine="abc", expert_bytes=MB, devices=4)
    machine = machine_for(request, lambda _: GPUS, "host")
    first, second = cost_table(GPUS, "host", ["cuda:0", "cuda:1"], MB).seconds_per_expert
    assert machine.costs.seconds_per_expert == (first, second, first, second)
    assert [list(members) for members, _ in machine.costs.groups] == [[0, 1, 2, 3]]
    assert "measured 2 of 4" in machine.origin


def test_a_profile_moves_experts_at_its_data_sheets_rate() -> None:
    request = MachineRequest(machine="h100-sxm", expert_bytes=64 * MB)
    assert machine_for(request, _none, "host").costs.seconds_per_expert == pytest.approx((1e-3,) * 8)
    assert machine_for(request, _none, "device").costs.seconds_per_expert == pytest.approx((64 * MB / 3.35e12,) * 8)
    with pytest.raises(UsageError, match="nothing of disks"):
        machine_for(request, _none, "disk")


def test_profiles_are_plausible_and_say_where_they_are_from() -> None:
    for name, profile in PROFILES.items():
        assert 1e11 < profile.memory_bandwidth < 1e13, name
        assert 1e10 < profile.host_bandwidth < profile.memory_bandwidth, name
        assert "data sheet" in profile.source, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "not described"),
        ({"seconds_per_expert": (1.0,), "machine": "l4", "expert_bytes": 1}, "two machines"),
        ({"machine": "l4"}, "depends on its size"),
        ({"seconds_per_expert": (-1.0,)}, "not between 0"),
        ({"seconds_per_expert": (float("nan"),)}, "not between 0"),
        ({"seconds_per_expert": (1.0,), "devices": 0}, "not between 1 and 4096"),
        ({"seconds_per_expert": (1.0,), "devices": 999_999_999}, "not between 1 and 4096"),
        ({"seconds_per_expert": (1.0,), "dense_seconds": float("inf")}, "dense-seconds inf"),
        ({"seconds_per_expert": (1.0,), "expert_compute_seconds": -1.0}, "expert-compute-seconds -1"),
    ],
)
def test_a_machine_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MachineRequest(**arguments)


@pytest.mark.parametrize("text", ["-1", "-1e-9", "1e6", "1e300", "1e999", "9" * 40, "nan", "inf", "soon", "", "1 h"])
def test_a_time_that_no_machine_takes_is_told_the_range(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape("is not a time between 0 and 1e+06 seconds")):
        parse_machine_seconds(text)


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("412us", 0.000412), ("999999", 999999.0), ("1e-30", 1e-30)])
def test_any_other_time_is_read(text: str, seconds: float) -> None:
    assert parse_machine_seconds(text) == seconds


def test_by_default_no_device_is_without_an_expert() -> None:
    for request in (
        MachineRequest(seconds_per_expert=(1.0,)),
        MachineRequest(machine="l4", expert_bytes=MB),
        MachineRequest(machine="four", expert_bytes=MB),
    ):
        machine = machine_for(request, lambda _: GPUS, "host", experts=1)
        assert machine.devices == 1
    asked = machine_for(MachineRequest(seconds_per_expert=(1.0,), devices=3), _none, "host", experts=1)
    assert asked.devices == 3, "what was asked for is the placement's to refuse"


def test_as_many_costs_as_devices() -> None:
    with pytest.raises(UsageError, match="2 values"):
        machine_for(MachineRequest(devices=3, seconds_per_expert=(0.1, 0.2)), _none, "host")
