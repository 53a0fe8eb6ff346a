"""A whole probe, its cost models, and whether they still hold."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from probes.calibration import calibrate
from probes.documents import calibration_document, drift_document, probe_document
from probes.drift import DriftReport, check_drift
from probes.errors import InputError, UsageError
from probes.groups import contention_factor, link_groups
from probes.links import measure_link
from probes.plan import BackendFactory
from probes.probe import ProbeInterrupted, ProbeOptions, prepared, probe
from probes.records import Concurrency, Device, Field, LinkKind, LinkMeasurement, LinkStatus, Probe, Sample
from probes.sampling import Limits
from probes.simulated import Regime, SimulatedBackend, SimulatedLink


def simulated(*, slower: float = 1.0, corrupt_copy: int | None = None) -> BackendFactory:
    def make(device: torch.device) -> SimulatedBackend:
        regime = Regime(from_bytes=0, slope_seconds_per_byte=slower * 1e-10, beta_seconds=slower * 1e-5)
        link = SimulatedLink(regime, noise=0.03, seed=int(slower * 100))
        return SimulatedBackend(link, corrupt_copy=corrupt_copy)

    return make


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.plan.last_level_cache_bytes", lambda: 8 << 20)


@pytest.fixture
def no_disk(tmp_path: Path) -> Path:
    """A folder that nothing can be written in: the disk is waived, and only simulated links are left."""
    return tmp_path / "absent"


def options(folder: Path, **fields: Any) -> ProbeOptions:
    return ProbeOptions(disk_folder=folder, devices="cpu:2", quick=True, **{"seconds": 4.0, **fields})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("probes.plan.last_level_cache_bytes", lambda: 8 << 20)
        return probe(options(tmp_path_factory.mktemp("nothing") / "absent"), make_backend=simulated())


def test_a_probe_of_this_machine_keeps_to_its_time_and_its_document(tmp_path: Path) -> None:
    told: list[float] = []
    start = time.monotonic()
    found = probe(options(tmp_path, extra_sizes=(73_728,)), progress=lambda what, share: told.append(share))
    assert time.monotonic() - start < 15.0
    assert told == sorted(told)
    assert told[-1] == 1.0
    document = json.loads(json.dumps(probe_document(found), allow_nan=False))
    assert document["schema"] == "caee.probe/1"
    links = {(link["kind"], link["mode"], link["concurrency"]): link for link in document["links"]}
    assert len(links) == len(document["links"])
    memory = links["host_memory", None, "solo"]
    assert memory["status"] in ("ok", "unstable")
    assert 73_728 in [sample["size_bytes"] for sample in memory["samples"]]
    assert memory["bandwidth_bytes_per_s"]["median"] > 0
    disk = [link for key, link in links.items() if key[0] == "disk_to_host" and key[1] == "direct"]
    assert all(link["status"] in ("ok", "unstable") or link["reason"] for link in disk)
    for link in document["links"]:
        if link["kind"] in ("host_to_device", "device_to_host", "device_to_device", "device_memory"):
            assert link["status"] == "waived"
            assert link["reason"]
    assert list(tmp_path.iterdir()) == []


def test_fingerprint_fields_are_values_or_reasons(measured: Probe) -> None:
    for fields in (measured.fingerprint.identity, measured.fingerprint.state):
        assert fields
        assert all(field.value is not None or field.reason for field in fields.values())
    assert measured.fingerprint.identity["cpus_allowed"].value


def test_the_models_of_a_probe(measured: Probe) -> None:
    calibration = calibrate(measured)
    document = json.loads(json.dumps(calibration_document(calibration), allow_nan=False))
    model = next(m for m in document["models"] if m["kind"] == "host_memory" and m["concurrency"] == "solo")
    # In one memory a copy of n bytes counts 2n: half the slope.
    assert model["alpha"] / model["bandwidth_bytes_per_s"] == pytest.approx(0.5e-10, rel=0.05)
    assert model["beta_seconds"] == pytest.approx(1e-5, rel=0.1)
    assert model["status"] == "ok"
    assert document["probe_id"] == measured.probe_id
    assert calibration.fingerprint == measured.fingerprint


def test_a_broken_link_has_no_model_and_is_named(no_disk: Path) -> None:
    found = probe(options(no_disk), make_backend=simulated(corrupt_copy=100))
    memory = {link.concurrency: link for link in found.links if link.kind is LinkKind.HOST_MEMORY}
    assert memory[Concurrency.SOLO].status is LinkStatus.BROKEN
    calibration = calibrate(found)
    assert [model.concurrency for model in calibration.models] == [Concurrency.ALL]
    assert any("broken" in warning for warning in calibration.warnings)
    with pytest.raises(InputError, match="no link that a model can be fitted to"):
        calibrate(replace(found, links=(memory[Concurrency.SOLO],)))


def check(measured: Probe, folder: Path, make_backend: BackendFactory) -> DriftReport:
    return check_drift(calibrate(measured), measured, disk_folder=folder, make_backend=make_backend)


def test_models_hold_right_after_calibrating(measured: Probe, no_disk: Path) -> None:
    report = check(measured, no_disk, simulated())
    assert report.holds
    assert json.loads(json.dumps(drift_document(report), allow_nan=False))["holds"] is True


@pytest.mark.parametrize("slower", [1.2, 1 / 1.2, 2.0])
def test_a_change_by_a_fifth_is_drift_and_is_named(measured: Probe, no_disk: Path, slower: float) -> None:
    report = check(measured, no_disk, simulated(slower=slower))
    assert not report.holds
    assert "host memory" in report.summary
    assert [link.drifted for link in report.links] == [True]


def test_a_busy_moment_is_no_drift(measured: Probe, no_disk: Path) -> None:
    made = 0

    def busy_at_first(device: torch.device) -> SimulatedBackend:
        backend = simulated()(device)
        assert isinstance(backend, SimulatedBackend)
        genuine, begun = backend.link.seconds, time.monotonic()

        def seconds(size_bytes: int) -> float:
            nonlocal made
            made += 1
            return genuine(size_bytes) * (3.0 if made < 300 else 1.0)

        backend.link.seconds = seconds  # type: ignore[method-assign]  # the machine is busy for the first copies
        assert begun
        return backend

    assert check(measured, no_disk, busy_at_first).holds
    assert made > 300


def test_a_throttled_disk_has_drifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probes.disk import DirectFile

    monkeypatch.setattr("probes.drift._SECONDS_PER_LINK", 2.0)
    healthy = probe(options(tmp_path, seconds=6.0), make_backend=simulated())
    genuine = DirectFile.read_span

    def throttled(file: DirectFile, offset: int, size_bytes: int, buffer: npt.NDArray[np.uint8]) -> int:
        time.sleep(0.01 + size_bytes / 200e6)
        return genuine(file, offset, size_bytes, buffer)

    monkeypatch.setattr(DirectFile, "read_span", throttled)
    report = check(healthy, tmp_path, simulated())
    drifted = {link.model.kind for link in report.links if link.drifted}
    assert drifted == {LinkKind.DISK_TO_HOST}
    assert "disk to host" in report.summary


GPUS = tuple(Device(index=at, kind="cuda", name="GPU", uuid=None, memory_bytes=None) for at in range(2))


def both_ways(measured: Probe, folder: Path) -> Probe:
    """Two simulated GPUs, measured from one to the other while bytes come the opposite way."""
    with prepared(options(folder), GPUS, simulated(), seconds=1.0) as plans:
        links = tuple(
            measure_link(plan, (4096, 16384, 65536), Limits(seconds=0.8))
            for plan in plans
            if plan.concurrency is Concurrency.BOTH_WAYS
        )
    assert {(link.source, link.destination) for link in links} == {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")}
    return replace(measured, devices=GPUS, links=links)


def test_links_measured_both_ways_are_checked(measured: Probe, no_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = both_ways(measured, no_disk)
    monkeypatch.setattr("probes.drift.find_devices", lambda text: GPUS)
    monkeypatch.setattr("probes.drift.take_fingerprint", lambda devices, folder: healthy.fingerprint)
    monkeypatch.setattr("probes.drift._SECONDS_PER_LINK", 0.8)
    report = check(healthy, no_disk, simulated(slower=1.2))
    assert [(len(link.sizes), link.drifted) for link in report.links] == [(3, True)] * 2
    assert "cuda:0 → cuda:1, both ways" in report.summary


def collectives(measured: Probe, *, slower: float = 1.0, waived: str | None = None) -> tuple[LinkMeasurement, ...]:
    sizes = (4096, 16384, 65536, 262144, 1 << 20)
    samples = tuple(
        Sample(size_bytes=s, seconds=tuple(slower * (1e-4 + s * 1e-9) * (1 + k / 500) for k in range(9))) for s in sizes
    )
    return tuple(
        replace(
            measured.links[0],
            kind=kind,
            source=device.name_on_link,
            destination="ranks",
            mode=None,
            concurrency=Concurrency.ALL,
            status=LinkStatus.WAIVED if waived else LinkStatus.OK,
            reason=waived,
            samples=() if waived else samples,
        )
        for kind in (LinkKind.ALL_TO_ALL_DISPATCH, LinkKind.ALL_REDUCE)
        for device in measured.devices[: 1 if waived else None]
    )


@pytest.mark.parametrize(("slower", "holds"), [(1.0, True), (1.15, True), (1.5, False)])
def test_collectives_are_checked_on_every_rank(
    measured: Probe, no_disk: Path, monkeypatch: pytest.MonkeyPatch, slower: float, holds: bool
) -> None:
    starts: list[tuple[int, ...]] = []

    def measure(devices: object, *, sizes: tuple[int, ...], **_: object) -> tuple[LinkMeasurement, ...]:
        starts.append(tuple(sizes))
        return collectives(measured, slower=slower)

    monkeypatch.setattr("probes.drift.measure_collectives", measure)
    whole = replace(measured, links=(*measured.links, *collectives(measured)))
    report = check(whole, no_disk, simulated())
    checked = {link.name: link for link in report.links if link.model.destination == "ranks"}
    assert len(checked) == 4, "two collectives on two ranks"
    assert all(len(link.sizes) == 3 for link in checked.values())
    assert starts == [(4096, 65536, 1 << 20)] * (1 if holds else 3), (
        "one start for all, and again only where it drifted"
    )
    assert report.holds is holds
    assert all(link.drifted is not holds for link in checked.values())
    assert ("all reduce cpu:1 → ranks" in report.summary) is not holds


def test_collectives_that_no_longer_run_are_not_checked(
    measured: Probe, no_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.drift.measure_collectives", lambda *_, **__: collectives(measured, waived="no network"))
    whole = replace(measured, links=(*measured.links, *collectives(measured)))
    report = check(whole, no_disk, simulated())
    assert [link.reason for link in report.links if link.model.destination == "ranks"] == ["no network"] * 4
    assert report.holds


def test_without_the_probes_timings_an_interval_still_excludes_something(measured: Probe, no_disk: Path) -> None:
    """The raw samples may have been deleted: the model's own worst miss decides then, but never everything."""
    calibration = calibrate(measured)
    poor = replace(calibration, models=tuple(replace(m, max_relative_error=3.0) for m in calibration.models))
    report = check_drift(poor, None, disk_folder=no_disk, make_backend=simulated(slower=2.0))
    assert not report.holds


def test_another_machine_voids_the_models(measured: Probe, no_disk: Path) -> None:
    identity = {**measured.fingerprint.identity, "kernel": Field(value="0.0.1")}
    elsewhere = replace(measured, fingerprint=replace(measured.fingerprint, identity=identity))
    report = check(elsewhere, no_disk, simulated())
    assert report.changed_identity == ("kernel",)
    assert not report.holds
    assert "kernel" in report.summary


def test_imported_models_have_no_machine_to_be_checked_on(measured: Probe, no_disk: Path) -> None:
    imported = replace(calibrate(measured), fingerprint=None, origin="nvbandwidth output x.txt")
    with pytest.raises(InputError, match=r"x\.txt, not from a probe"):
        check_drift(imported, None, disk_folder=no_disk)


def test_what_is_complete_survives_an_interruption(no_disk: Path) -> None:
    seen: set[str] = set()

    def stop_at_the_second(what: str, share: float) -> None:
        seen.add(what)
        if "all at once" in what:
            raise KeyboardInterrupt

    with pytest.raises(ProbeInterrupted) as stopped:
        probe(options(no_disk), make_backend=simulated(), progress=stop_at_the_second)
    assert stopped.value.probe is not None
    assert [link.kind for link in stopped.value.probe.links] == [LinkKind.HOST_MEMORY]
    assert "interrupted" in stopped.value.probe.warnings[0]


@pytest.mark.parametrize("wrong", [{"extra_sizes": (0,)}, {"extra_sizes": (-5,)}, {"seconds": 0.0}])
def test_impossible_options(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        options(tmp_path, **wrong)


DEVICES = tuple(Device(index=at, kind="cpu", name="CPU", uuid=None, memory_bytes=None) for at in range(4))


def shared_link(slowdown: float, sizes: tuple[int, ...] = (65536, 1 << 20)) -> list[LinkMeasurement]:
    return [
        LinkMeasurement(
            kind=LinkKind.DISK_TO_HOST,
            source="disk",
            destination="host",
            mode=None,
            concurrency=concurrency,
            status=LinkStatus.OK,
            samples=tuple(Sample(size_bytes=size, seconds=(size * 1e-9 * factor,) * 6) for size in sizes),
        )
        for concurrency, factor in ((Concurrency.SOLO, 1.0), (Concurrency.ALL, slowdown))
    ]


@pytest.mark.parametrize(
    ("slowdown", "factor"), [(1.0, None), (1.05, None), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0), (9.0, 1.0)]
)
def test_contended_times_imply_the_factor(slowdown: float, factor: float | None) -> None:
    groups = link_groups(shared_link(slowdown), DEVICES)
    if factor is None:
        assert groups == ()
    else:
        assert len(groups) == 1
        assert groups[0].devices == (0, 1, 2, 3)
        assert math.isclose(groups[0].factor, factor)


def test_the_factor_is_that_of_the_experts_size() -> None:
    links = [*shared_link(1.0, (65536,)), *shared_link(4.0, (64 << 20,))]
    small = [replace(link, samples=link.samples + other.samples) for link, other in zip(links, links[2:], strict=False)]
    assert link_groups(small, DEVICES, sizes=(73_728,)) == ()
    assert link_groups(small, DEVICES, sizes=(60 << 20,))[0].factor == 1.0
    assert link_groups(small, DEVICES[:1]) == ()


def test_the_factor_of_any_size_from_two_models(measured: Probe) -> None:
    models = [m for m in calibrate(measured).models if m.kind is LinkKind.HOST_MEMORY]
    alone = next(m for m in models if m.concurrency is Concurrency.SOLO)
    assert contention_factor(alone, replace(alone, beta_seconds=0.0, alpha=alone.alpha * 1.5), 2, 1 << 30) == (
        pytest.approx(0.75, rel=1e-3)
    )
    assert contention_factor(alone, alone, 2, 1 << 20) == 0.5
