"""The primitives that probes and transfers share: one suite for every backend."""

from __future__ import annotations

import pytest
import torch

from probes.backend import Backend, TorchBackend
from probes.disk import ALIGNMENT
from probes.errors import DeviceError
from probes.simulated import SimulatedBackend, SimulatedLink


def simulated(**faults: int) -> SimulatedBackend:
    link = SimulatedLink.affine(alpha=1.25, bandwidth_bytes_per_s=1e9, beta_seconds=1e-5)
    return SimulatedBackend(link, corrupt_copy=faults.get("corrupt_copy"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu), "simulated"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "simulated":
        return simulated()
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return TorchBackend(torch.device(request.param))


@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_survive_the_way_there_and_back(backend: Backend, pinned: bool) -> None:
    source = backend.host_buffer(100_000, pinned=pinned)
    source.copy_(torch.randint(0, 256, (100_000,), dtype=torch.uint8))
    on_device = backend.device_buffer(100_000)
    back = backend.host_buffer(100_000, pinned=pinned)
    backend.copy(on_device, source)
    backend.copy(back, on_device)
    backend.synchronize()
    assert torch.equal(back, source)
    assert source.data_ptr() % ALIGNMENT == 0


def test_events_order_streams_and_measure(backend: Backend) -> None:
    source = backend.host_buffer(1 << 20, pinned=True).fill_(7)
    first = backend.device_buffer(1 << 20)
    second = backend.device_buffer(1 << 20)
    start = backend.record()
    stream = backend.new_stream()
    with backend.use(stream):
        start.wait()
        backend.copy(first, source)
        copied = backend.record()
    copied.wait()
    backend.copy(second, first)
    end = backend.record()
    end.synchronize()
    assert backend.elapsed(start, end) >= backend.elapsed(start, copied) >= 0
    assert bool((second == 7).all())


def test_only_plain_byte_copies(backend: Backend) -> None:
    buffer = backend.device_buffer(64)
    with pytest.raises(AssertionError, match="no byte copy"):
        backend.copy(buffer, torch.zeros(64, dtype=torch.int8))
    with pytest.raises(AssertionError, match="do not fit"):
        backend.copy(buffer, torch.zeros(63, dtype=torch.uint8))
    with pytest.raises(AssertionError):
        backend.copy(buffer, torch.zeros(128, dtype=torch.uint8)[::2])


def test_an_absent_accelerator_is_a_device_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(DeviceError, match="cuda:0"):
        TorchBackend(torch.device("cuda:0"))


def test_the_simulated_clock_obeys_the_model() -> None:
    backend = simulated()
    source, destination = backend.host_buffer(10**6, pinned=False), backend.device_buffer(10**6)
    start = backend.record()
    for _ in range(3):
        backend.copy(destination, source)
    assert backend.elapsed(start, backend.record()) == pytest.approx(3 * (1e-5 + 1.25e-3))


def test_the_simulated_fault_hits_exactly_one_copy() -> None:
    backend = simulated(corrupt_copy=1)
    source, destination = backend.host_buffer(1000, pinned=False), backend.device_buffer(1000)
    wrong = []
    for _ in range(3):
        backend.copy(destination, source)
        wrong.append(int((destination != source).sum()))
    assert wrong == [0, 1, 0]
