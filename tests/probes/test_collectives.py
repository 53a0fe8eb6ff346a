"""Collectives between real processes on the CPU, and what happens when they go wrong."""

from __future__ import annotations

import importlib
from multiprocessing import Pipe
from pathlib import Path

import pytest

from probes import collectives
from probes.calibration import calibrate
from probes.collectives import KINDS, measure_collectives
from probes.devices import find_devices
from probes.probe import ProbeOptions, probe
from probes.records import Concurrency, LinkKind, LinkStatus


def test_every_rank_times_every_collective() -> None:
    devices = find_devices("cpu:2")
    links = measure_collectives(devices, seconds=0.5, sizes=(1000, 64 << 10))
    assert {(link.kind, link.source) for link in links} == {(kind, f"cpu:{rank}") for kind in KINDS for rank in (0, 1)}
    for link in links:
        assert (link.concurrency, link.destination) == (Concurrency.ALL, "ranks")
        assert link.status in (LinkStatus.OK, LinkStatus.UNSTABLE)
        assert [sample.size_bytes for sample in link.samples] == [1008, 64 << 10], "whole words for every peer"
        assert all(seconds > 0 for sample in link.samples for seconds in sample.seconds)
    counts = {link.kind: {len(sample.seconds) for sample in link.samples} for link in links}
    assert all(min(found) >= 1 for found in counts.values())


def test_one_device_has_no_one_to_talk_to() -> None:
    links = measure_collectives(find_devices("cpu:1"), seconds=0.1)
    assert [link.kind for link in links] == list(KINDS)
    assert {(link.status, link.reason) for link in links} == {
        (LinkStatus.WAIVED, "there is only one device: it has no one to talk to")
    }


def test_the_first_rank_that_fails_ends_the_waiting() -> None:
    """The others wait for it in a barrier and would send nothing for a minute."""
    silent, failed = Pipe(duplex=False), Pipe(duplex=False)
    failed[1].send("rank 1: no network")
    assert collectives._outcomes([silent[0], failed[0]], 1.0, lambda share: None) == ["rank 1: no network"]


def test_a_rank_that_dies_is_named() -> None:
    silent, dead = Pipe(duplex=False), Pipe(duplex=False)
    dead[1].close()
    assert collectives._outcomes([silent[0], dead[0]], 1.0, lambda share: None) == [
        "rank 1 died while it was measuring"
    ]


def test_why_ranks_failed_is_why_they_are_waived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_run", lambda *_: ["rank 1: no network"])
    links = measure_collectives(find_devices("cpu:2"), seconds=0.1)
    assert [(link.status, link.reason) for link in links] == [(LinkStatus.WAIVED, "rank 1: no network")] * len(KINDS)


def test_wrong_bytes_are_broken_and_have_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    # By a name that the ranks can import too: the tests' own package is not on their path.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(collectives, "serve", importlib.import_module("corrupting_rank").serve)
    links = measure_collectives(find_devices("cpu:2"), seconds=0.1, sizes=(1024,))
    broken = [link for link in links if link.status is LinkStatus.BROKEN]
    assert {link.kind for link in broken} == {LinkKind.ALL_REDUCE}
    assert all(link.bandwidth_bytes_per_s is None and not link.samples for link in broken)
    assert all(link.reason == "1024 bytes arrived wrong" for link in broken)


def test_a_probe_keeps_them_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def measured(devices: object, *, seconds: float, **_: object) -> tuple[object, ...]:
        asked.append(seconds)
        return measure_collectives(find_devices("cpu:1"), seconds=seconds)

    monkeypatch.setattr("probes.probe.measure_collectives", measured)
    options = {"disk_folder": tmp_path, "devices": "cpu:1", "quick": True, "seconds": 0.5}
    assert not [link for link in probe(ProbeOptions(**options)).links if link.kind in KINDS]  # type: ignore[arg-type]  # mixed values
    found = probe(ProbeOptions(collectives=True, **options))  # type: ignore[arg-type]  # mixed values
    assert [link.kind for link in found.links if link.kind in KINDS] == list(KINDS)
    assert len(asked) == 1
    assert not [model for model in calibrate(found).models if model.kind in KINDS], "what is waived has no model"
