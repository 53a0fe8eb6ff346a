"""Measuring links: verified, alone and beside others; what cannot be measured is waived, what lies is broken."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes.backend import TorchBackend
from probes.content import FileContent
from probes.contention import contention
from probes.disk import ALIGNMENT, DirectFile
from probes.errors import DeviceError
from probes.links import measure_link
from probes.plan import LinkPlan, _between, plan_links
from probes.records import Concurrency, Device, LinkKind, LinkMode, LinkStatus
from probes.sampling import Limits
from probes.scratch import ScratchFile, make_scratch
from probes.simulated import SimulatedBackend, SimulatedLink
from probes.transfers import BrokenTransferError, CopyTransfer, DiskTransfer, StagedTransfer, Timing

SIZES = (4096, 65536, 1 << 20)
MIB = 1 << 20


def link(noise: float = 0.0) -> SimulatedLink:
    return SimulatedLink.affine(alpha=1.0, bandwidth_bytes_per_s=1e9, beta_seconds=1e-5, noise=noise)


def transfer(backend: SimulatedBackend, *, read_and_write: bool = False) -> CopyTransfer:
    source, destination = backend.host_buffer(4 * MIB, pinned=False), backend.device_buffer(4 * MIB)
    return CopyTransfer(backend, source, destination, read_and_write=read_and_write)


def plan(*makers: object, kind: LinkKind = LinkKind.HOST_TO_DEVICE) -> LinkPlan:
    return LinkPlan(kind=kind, source="host", destination="cuda:0", makers=makers)  # type: ignore[arg-type]  # lambdas


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[ScratchFile]:
    made = make_scratch(tmp_path, size_bytes=32 * MIB, seconds=20.0, seed=1)
    yield made
    made.close()


def test_a_simulated_link_is_measured_to_its_truth() -> None:
    measured = measure_link(plan(lambda: transfer(SimulatedBackend(link()))), SIZES, Limits(seconds=5.0))
    assert measured.status is LinkStatus.OK
    for sample in measured.samples:
        assert sample.seconds == pytest.approx((link().true_seconds(sample.size_bytes),) * len(sample.seconds))
    assert measured.bandwidth_bytes_per_s is not None
    assert measured.bandwidth_bytes_per_s.median == pytest.approx(1e9, rel=0.02)


def test_inside_one_memory_both_ways_count() -> None:
    backend = SimulatedBackend(link())
    timing = transfer(backend, read_and_write=True).timed(MIB)
    assert timing.seconds == pytest.approx(link().true_seconds(MIB // 2))


@pytest.mark.parametrize("corrupt_copy", [0, 1, 70, 500])
def test_one_wrong_copy_makes_a_link_broken_and_leaves_no_speed(corrupt_copy: int) -> None:
    backend = SimulatedBackend(link(noise=0.3), corrupt_copy=corrupt_copy)
    measured = measure_link(plan(lambda: transfer(backend)), SIZES, Limits(seconds=5.0))
    assert measured.status is LinkStatus.BROKEN
    assert "arrived wrong" in (measured.reason or "")
    assert measured.samples == ()
    assert measured.bandwidth_bytes_per_s is None


def test_a_copy_that_never_happens_is_broken() -> None:
    class Idle(SimulatedBackend):
        def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
            self.copies += 1
            if self.copies <= 64:
                super().copy(destination, source)

    backend = Idle(link())
    measured = measure_link(plan(lambda: transfer(backend)), SIZES, Limits(seconds=5.0))
    assert measured.status is LinkStatus.BROKEN


def test_samples_that_waited_for_a_processor_are_taken_anew() -> None:
    """Three of four transfers are interrupted and look five times as slow: more than a median can bear."""

    class Disturbed(CopyTransfer):
        calls = 0

        def timed(self, size_bytes: int) -> Timing:
            self.calls += 1
            seconds = super().timed(size_bytes).seconds
            return Timing(seconds, 0.0) if self.calls % 4 == 0 else Timing(seconds * 5, 0.8)

    def make() -> CopyTransfer:
        backend = SimulatedBackend(link())
        return Disturbed(backend, backend.host_buffer(MIB, pinned=False), backend.device_buffer(MIB))

    measured = measure_link(plan(make), SIZES, Limits(seconds=60.0, relative_half_width=0.01, max_samples=200))
    assert any("taken anew" in warning for warning in measured.warnings)
    # Four attempts meet the fourth transfer, wherever the count stood when a sample began.
    for sample in measured.samples:
        assert sample.seconds == pytest.approx([link().true_seconds(sample.size_bytes)] * len(sample.seconds))


def test_memory_that_cannot_be_had_waives_the_link() -> None:
    def refuse() -> CopyTransfer:
        raise DeviceError("no page-locked memory")

    measured = measure_link(plan(refuse), SIZES, Limits(seconds=1.0))
    assert (measured.status, measured.reason) == (LinkStatus.WAIVED, "no page-locked memory")


def test_short_memory_means_smaller_buffers_and_a_word_about_it() -> None:
    class Tight(SimulatedBackend):
        def host_buffer(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
            if size_bytes > 2 * MIB:
                raise DeviceError("no room")
            return super().host_buffer(size_bytes, pinned=pinned)

    from probes.transfers import pool_pair

    source, destination, notes = pool_pair(Tight(link()), 16 * MIB, source="host", destination="device", pinned=True)
    assert source.numel() == destination.numel() == 2 * MIB
    assert f"{2 * MIB} bytes instead of {16 * MIB}" in notes[0]


def test_concurrent_copies_are_measured_while_the_others_work() -> None:
    def make() -> CopyTransfer:
        backend = TorchBackend(torch.device("cpu"))
        return CopyTransfer(backend, backend.host_buffer(MIB, pinned=False), backend.device_buffer(MIB))

    together = LinkPlan(
        kind=LinkKind.HOST_MEMORY,
        source="host",
        destination="host",
        concurrency=Concurrency.ALL,
        makers=(make, make, make),
    )
    measured = measure_link(together, (4096, 65536), Limits(seconds=2.0))
    assert measured.status in (LinkStatus.OK, LinkStatus.UNSTABLE)
    assert len(measured.samples) == 2


@pytest.mark.parametrize("on_host", [True, False])
def test_the_others_follow_the_size_and_are_gone_afterwards(tmp_path: Path, on_host: bool) -> None:
    trail = tmp_path / "sizes"

    class Noted:
        max_bytes = MIB
        runs_on_host = True
        notes: tuple[str, ...] = ()

        def timed(self, size_bytes: int) -> Timing:
            return Timing(0.0, 0.0)

        def load(self, size_bytes: int) -> None:
            with trail.open("a") as stream:
                stream.write(f"{os.getpid()} {size_bytes}\n")

    with contention([Noted, Noted], on_host=on_host) as others:
        others.set_size(4096)
        others.set_size(8192)
    lines = [line.split() for line in trail.read_text().splitlines()]
    assert {int(size) for _, size in lines} == {4096, 8192}
    assert (str(os.getpid()) in {pid for pid, _ in lines}) is not on_host
    length = trail.stat().st_size
    assert trail.stat().st_size == length


@pytest.mark.parametrize("on_host", [True, False])
def test_a_failing_other_is_an_error_not_a_hang(on_host: bool) -> None:
    def refuse() -> CopyTransfer:
        raise DeviceError("no memory")

    with contention([refuse], on_host=on_host) as others, pytest.raises(DeviceError, match="concurrent transfer"):
        others.set_size(4096)


def test_the_disk_is_read_and_verified(scratch: ScratchFile) -> None:
    assert scratch.content is not None
    assert scratch.buffered is not None
    for file in (scratch.direct, scratch.buffered):
        if file is not None:
            reader = DiskTransfer(file, scratch.content, part=1, parts=2, seed=0)
            assert all(reader.timed(size).seconds > 0 for size in (4096, 65536, MIB) for _ in range(5))


@given(sizes=st.lists(st.integers(1, 40).map(lambda words: words * 2048), min_size=2, max_size=30))
def test_the_disk_is_read_into_ever_new_memory(sizes: list[int]) -> None:
    """A buffer that is read into again and again stays in the processor's caches, which slots do not."""
    places: list[tuple[int, int]] = []

    class Watched:
        def read_span(self, offset: int, size_bytes: int, buffer: npt.NDArray[np.uint8]) -> int:
            assert len(buffer) >= -(-size_bytes // ALIGNMENT) * ALIGNMENT
            places.append((buffer.ctypes.data, size_bytes))
            return 0

    reader = DiskTransfer(Watched(), FileContent(4 * MIB, seed=1), part=0, parts=1, seed=0)  # type: ignore[arg-type]  # a file that only notes where to
    for size in sizes:
        reader.load(size)
    start, stop = places[0][0], places[0][0] + reader.max_bytes
    expected = start
    for at, size in places:
        span = -(-size // ALIGNMENT) * ALIGNMENT
        if expected + span > stop:
            expected = start
        assert at == expected
        expected += span


def test_a_disk_that_returns_other_bytes_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "wrong.bin"
    content = FileContent(8 * MIB, seed=3)
    blocks = np.concatenate(list(content.blocks()))
    blocks[::512] ^= 1
    path.write_bytes(blocks.tobytes())
    with DirectFile(path) as file:
        with pytest.raises(BrokenTransferError, match="read back wrong"):
            DiskTransfer(file, content, part=0, parts=1, seed=0).timed(65536)
        measured = measure_link(
            plan(lambda: DiskTransfer(file, content, part=0, parts=1, seed=0), kind=LinkKind.DISK_TO_HOST),
            SIZES,
            Limits(seconds=1.0),
        )
    assert measured.status is LinkStatus.BROKEN


def test_content_is_checked_at_any_place() -> None:
    content = FileContent(3 * MIB, seed=5)
    whole = np.concatenate(list(content.blocks())).view(np.uint8)
    assert len(whole) == content.size_bytes == 3 * MIB
    for offset, size in ((0, 8), (MIB - 8, 16), (4096, 2 * MIB), (0, 3 * MIB)):
        part = whole[offset : offset + size].copy()
        assert content.matches(offset, part)
        part[size // 2] ^= 1
        assert not content.matches(offset, part)
    assert len({whole[at : at + 4096].tobytes() for at in range(0, 3 * MIB, 4096)}) == 3 * 256


def test_the_scratch_file_has_no_name(tmp_path: Path, scratch: ScratchFile) -> None:
    assert list(tmp_path.iterdir()) == []
    assert scratch.waived is None


def test_no_room_no_permission_no_folder_are_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    import tempfile
    from collections import namedtuple

    absent = make_scratch(tmp_path / "absent", size_bytes=MIB, seconds=1.0, seed=0)
    assert "No such file" in (absent.waived or "")
    usage = namedtuple("usage", "total used free")  # the shape of shutil's answer
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10**6))
        full = make_scratch(tmp_path, size_bytes=MIB, seconds=1.0, seed=0)
    assert "only 1.00 MB are free" in (full.waived or "")

    def refuse(**options: object) -> tuple[int, str]:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", refuse)
        locked = make_scratch(tmp_path, size_bytes=MIB, seconds=1.0, seed=0)
    assert "Permission denied" in (locked.waived or "")


def cpu_devices(count: int) -> tuple[Device, ...]:
    return tuple(Device(index=at, kind="cpu", name="CPU", uuid=None, memory_bytes=None) for at in range(count))


def test_on_a_cpu_gpu_links_are_waived_with_a_reason(scratch: ScratchFile) -> None:
    plans = plan_links(cpu_devices(2), scratch, max_bytes=MIB, seed=0)
    waived = {plan.kind for plan in plans if plan.waived}
    assert waived >= {
        LinkKind.DEVICE_MEMORY,
        LinkKind.HOST_TO_DEVICE,
        LinkKind.DEVICE_TO_HOST,
        LinkKind.DEVICE_TO_DEVICE,
    }
    assert LinkKind.HOST_MEMORY not in waived
    assert all(bool(plan.waived) != bool(plan.makers) for plan in plans)
    names = [(plan.kind, plan.source, plan.destination, plan.mode, plan.concurrency) for plan in plans]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("gpus", [1, 2, 3, 6])
def test_gpu_links_are_planned_through_the_same_code(
    scratch: ScratchFile, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With simulated GPUs every link is measurable: pinned, pageable, both ways, each pair, alone and all at once."""
    monkeypatch.setattr("probes.plan.last_level_cache_bytes", lambda: MIB)
    devices = tuple(Device(index=at, kind="cuda", name="GPU", uuid=None, memory_bytes=None) for at in range(gpus))
    plans = plan_links(devices, scratch, max_bytes=MIB, seed=0, make_backend=lambda device: SimulatedBackend(link()))
    pairs = {
        (plan.source, plan.destination) for plan in plans if plan.kind is LinkKind.DEVICE_TO_DEVICE and plan.makers
    }
    assert len(pairs) == gpus * (gpus - 1)
    modes = {(plan.kind, plan.mode) for plan in plans if plan.makers}
    assert {(LinkKind.HOST_TO_DEVICE, LinkMode.PINNED), (LinkKind.DEVICE_TO_HOST, LinkMode.PAGEABLE)} <= modes
    for planned in plans:
        if planned.makers and planned.kind is not LinkKind.DISK_TO_HOST:
            assert planned.makers[0]().timed(65536).seconds > 0
    for concurrency, mode in ((Concurrency.BOTH_WAYS, None), (Concurrency.SOLO, LinkMode.STAGED)):
        found = [
            plan
            for plan in plans
            if (plan.kind, plan.concurrency, plan.mode) == (LinkKind.DEVICE_TO_DEVICE, concurrency, mode)
        ]
        measured = [plan for plan in found if plan.makers]
        assert len(found) == max(1, gpus * (gpus - 1))
        assert len(measured) == (gpus * (gpus - 1) if gpus <= 4 else gpus), "beyond four GPUs only neighbours"
        assert all(plan.waived for plan in found if not plan.makers)
    alone = [plan for plan in plans if plan.concurrency is Concurrency.ALL and plan.waived]
    assert bool(alone) == (gpus == 1) or scratch.direct is None


def test_staged_copies_cross_host_memory_and_are_verified() -> None:
    """The wrong byte is put in by the second half of the way, from host memory to the other device."""
    source, destination = SimulatedBackend(link()), SimulatedBackend(link())
    transfer = StagedTransfer(source, destination, 16 * MIB)
    size = 10 * MIB
    timing = transfer.timed(size)
    assert (source.copies, destination.copies) == (3, 3), "chunks of 4 MiB"
    assert timing.seconds == pytest.approx(sum(link().true_seconds(part) for part in (4 * MIB, 4 * MIB, 2 * MIB)))
    broken = StagedTransfer(source, SimulatedBackend(link(), corrupt_copy=1), 16 * MIB)
    with pytest.raises(BrokenTransferError, match="1 of"):
        broken.timed(size)


@pytest.mark.parametrize("count", [2, 3])
def test_copies_between_devices_share_no_stream(count: int) -> None:
    """Torch has a copy between two devices wait for the current streams of both: what is measured at the same time must
    not share one, or it would take turns."""

    class StreamsBackend(TorchBackend):
        """A device of which there may be several; ``used``: the streams that copies from it were queued on."""

        def __init__(self, number: int) -> None:
            super().__init__(torch.device("cpu"))
            self.number = number
            self.current: object = "default"

        @contextlib.contextmanager
        def use(self, stream: object) -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
            for backend in backends:
                if backend.current != "default" or backend is self:
                    streams[-1].add((backend.number, id(backend.current)))
            super().copy(destination, source)

    streams: list[set[tuple[int, int]]] = []
    backends = [StreamsBackend(number) for number in range(count)]
    pairs = list(itertools.permutations(backends, 2))
    transfers = [_between(*pair, 1 << 20) for pair in pairs]
    for transfer, (source, destination) in zip(transfers, pairs, strict=True):
        for act in (transfer.timed, transfer.load):
            streams.append(set())
            act(1 << 16)
            assert {number for number, _ in streams[-1]} == {source.number, destination.number}
        assert streams.pop() == streams[-1]
    assert len(set.union(*streams)) == sum(len(each) for each in streams)
    assert all(backend.current == "default" for backend in backends)
