"""Where experts are placed: the simple rules, EPLB's balancing, and files."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import InputError, UsageError
from runtime.simulate.batches import plan
from runtime.simulate.eplb import balance
from runtime.simulate.index import index_of
from runtime.simulate.placement import make_placement, warmup_loads


def test_contiguous_and_round_robin() -> None:
    contiguous = make_placement("contiguous", layers=2, experts=7, devices=3)
    assert contiguous.devices_LNR[:, :, 0].tolist() == [[0, 0, 0, 1, 1, 2, 2]] * 2
    dealt = make_placement("round-robin", layers=1, experts=7, devices=3)
    assert dealt.devices_LNR[0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("text", ["contiguous", "round-robin", "balanced", "balanced:redundant=2"])
@pytest.mark.parametrize("devices", [0, 1, 2, 7, 8, 9, 10, 4096])
def test_no_device_is_left_without_an_expert(text: str, devices: int) -> None:
    places = 9 if "redundant" in text else 7
    loads_LN = np.ones((1, 7), np.int64)
    if (text.endswith("=2") and devices == 1) or not 1 <= devices <= places:
        with pytest.raises(UsageError, match="devices"):
            make_placement(text, layers=1, experts=7, devices=devices, loads_LN=loads_LN)
        return
    placement = make_placement(text, layers=1, experts=7, devices=devices, loads_LN=loads_LN)
    assert set(placement.devices_LNR.ravel().tolist()) - {-1} == set(range(devices))


def test_more_copies_than_devices_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="more copies than 3 devices can hold of 4 experts"):
        make_placement("balanced:redundant=999999999", layers=1, experts=4, devices=3, loads_LN=np.ones((1, 4), int))


def test_a_file_may_give_more_devices_than_experts(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text("[[[0, 2, 4], [1, 3]]]")
    assert make_placement(str(path), layers=1, experts=2, devices=5).devices_LNR.tolist() == [[[0, 2, 4], [1, 3, -1]]]


def test_eplb_places_its_own_example_as_published(shared_data: Path) -> None:
    example = json.loads((shared_data / "routing/eplb/readme_example.json").read_text())
    for loads, expected in zip(example["weight"], example["phy2log"], strict=True):
        placed = balance(
            loads,
            devices=example["num_gpus"],
            redundant=example["num_replicas"] - len(loads),
            groups=example["num_groups"],
            nodes=example["num_nodes"],
        )
        assert [expert for device in placed for expert in device] == expected


@given(
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=24),
    devices=st.integers(1, 6),
    redundant=st.integers(0, 8),
)
def test_every_expert_is_placed_and_devices_are_equally_full(loads: list[int], devices: int, redundant: int) -> None:
    placed = balance(loads, devices=devices, redundant=redundant)
    assert sorted({expert for device in placed for expert in device}) == list(range(len(loads)))
    sizes = [len(device) for device in placed]
    assert sum(sizes) == len(loads) + redundant
    assert max(sizes) <= -(-sum(sizes) // devices)


def test_replicas_go_to_the_hottest_experts() -> None:
    placed = balance([100, 10, 10, 60], devices=2, redundant=2)
    count = [sum(device.count(expert) for device in placed) for expert in range(4)]
    assert count == [2, 1, 1, 2]
    load = [sum(Fraction([100, 10, 10, 60][expert], count[expert]) for expert in device) for device in placed]
    assert load == [90, 90]


def test_groups_stay_on_their_node() -> None:
    placed = balance([5, 1, 7, 3, 2, 2, 9, 4], devices=4, groups=4, nodes=2)
    nodes = [set(placed[0] + placed[1]), set(placed[2] + placed[3])]
    for group in range(4):
        assert any({2 * group, 2 * group + 1} <= node for node in nodes)


@pytest.mark.parametrize(
    "arguments",
    [
        {"devices": 4, "groups": 3},
        {"devices": 3, "groups": 4, "nodes": 2},
        {"devices": 4, "groups": 4, "nodes": 2, "redundant": 1},
    ],
)
def test_numbers_that_do_not_divide_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="does not come out even"):
        balance([1] * 8, **arguments)


def test_balanced_looks_at_the_warm_up_steps_only(make_trace: Any, in_memory: Any) -> None:
    trace = make_trace(lengths=(6, 6, 6), layers=2)
    source = in_memory(trace)
    batching = plan(source, index_of(source), 3)
    loads_LN = warmup_loads(batching, 2, 12, 4)
    seen = trace.ids_TLK[trace.token_position_T < 4]
    for layer in range(2):
        np.testing.assert_array_equal(loads_LN[layer], np.bincount(seen[:, layer].ravel(), minlength=12))
    placement = make_placement("balanced:redundant=3", layers=2, experts=12, devices=3, loads_LN=loads_LN)
    assert placement.devices_LNR.shape[:2] == (2, 12)
    assert (placement.devices_LNR[:, :, 0] >= 0).all()


def test_balanced_needs_loads() -> None:
    with pytest.raises(UsageError, match="needs loads") as caught:
        make_placement("balanced", layers=1, experts=4, devices=2)
    assert "--warmup-steps" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["balanced:redundant=x", "balanced:spare=2", "balanced:nodes=0", "balanced:groups"])
def test_a_balanced_placement_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        make_placement(text, layers=1, experts=4, devices=2, loads_LN=np.ones((1, 4), np.int64))


def test_a_file_of_device_lists(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text("[[[1], [0, 1], 2], [[2, 0], [1], [1, 1]]]")
    placement = make_placement(str(path), layers=2, experts=3, devices=3)
    assert placement.devices_LNR.tolist() == [[[1, -1], [0, 1], [2, -1]], [[0, 2], [1, -1], [1, -1]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[[0], [0], [0]]]", "2 layers"),
        ("[[[0], [0]], [[0], [0], [0]]]", "layer 0: a list of 3 experts"),
        ("[[[0], [3], [0]], [[0], [0], [0]]]", "layer 0, expert 1: 3 is no device"),
        ("[[[0], [-1], [0]], [[0], [0], [0]]]", "-1 is no device"),
        ("[[[0], [true], [0]], [[0], [0], [0]]]", "True is no device"),
        ("[[[0], [], [0]], [[0], [0], [0]]]", "on no device"),
        ('{"a": 1}', "2 layers"),
        ("[[", "not JSON"),
        ("nowhere", "cannot read the placement"),
    ],
)
def test_a_placement_file_that_does_not_fit(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    if content != "nowhere":
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        make_placement(str(path), layers=2, experts=3, devices=3)
