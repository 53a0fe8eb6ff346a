"""The copy, stream and event primitives that probes and live transfers share.

One interface over torch's device modules. On a CPU every operation is synchronous and an event is a host timestamp, so
the very same code runs there; ``probes.simulated`` implements it with a virtual clock and known α and β.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from probes.disk import aligned_buffer
from probes.errors import DeviceError

# A matmul of this many rows and columns takes a GPU some tenths of a millisecond: longer than the host needs to queue
# the copies of one sample.
_HOLD_SIZE = 2048


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Make the current stream wait until the point is reached; the host goes on."""

    def synchronize(self) -> None:
        """Make the host wait until the point is reached."""


class Stream(Protocol):
    """A queue of device work; only handed to ``Backend.use``."""


class Backend(Protocol):
    """One device's memory, copies and clock.

    Buffers are uint8 and belong to the caller, who keeps them alive until the copies that use them are done. Streams
    and events belong to the backend that made them. One backend may be used from several threads; each thread has its
    own current stream.
    """

    device: torch.device

    def host_buffer(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Host memory, page-aligned and touched; page-locked where asked and the device profits from it.

        Raises ``DeviceError`` when page-locked memory cannot be had; pageable memory is never passed off as such.
        """

    def device_buffer(self, size_bytes: int) -> torch.Tensor:
        """Memory of the device. Raises ``DeviceError`` when it has no room."""

    def new_stream(self) -> Stream:
        """A further queue, which runs beside the current one."""

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Make ``stream`` the current one within the block."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of all bytes on the current stream. Same dtype and size, both contiguous (asserted)."""

    def hold(self) -> None:
        """Keep the current stream busy for a moment, so that what is queued next runs back to back when it ends."""

    def record(self) -> Event:
        """Mark the current stream's present end."""

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds between two recorded events that have been reached."""

    def synchronize(self) -> None:
        """Make the host wait for all work of the device."""


def check_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Assert that a copy moves plain bytes: a dtype conversion or a stride would go through a slower path unnoticed."""
    assert destination.dtype == source.dtype, f"{source.dtype} to {destination.dtype} is no byte copy"
    assert destination.numel() == source.numel(), f"{source.numel()} elements do not fit {destination.numel()}"
    assert destination.is_contiguous()
    assert source.is_contiguous()


class TorchBackend:
    """``Backend`` over a torch device: ``cpu``, or any accelerator that torch has a device module for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: HostQueue | DeviceQueue = HostQueue() if device.type == "cpu" else DeviceQueue(device)

    def host_buffer(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        return aligned_buffer(size_bytes, pinned=pinned and self._queue.profits_from_pinning)

    def device_buffer(self, size_bytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return aligned_buffer(size_bytes)
        try:
            return torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self.device} has no room for {size_bytes} bytes", hint="free memory on it or use smaller sizes"
            ) from error

    def new_stream(self) -> Stream:
        return self._queue.new_stream()

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return self._queue.use(stream)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        check_copy(destination, source)
        destination.copy_(source, non_blocking=True)

    def hold(self) -> None:
        self._queue.hold()

    def record(self) -> Event:
        return self._queue.record()

    def elapsed(self, start: Event, end: Event) -> float:
        return self._queue.elapsed(start, end)

    def synchronize(self) -> None:
        self._queue.synchronize()


class HostEvent:
    """A moment on the host's clock (or a virtual one); its work is done when it exists."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        return


class HostQueue:
    """Work that is done when the call returns: a CPU's."""

    profits_from_pinning = False

    def new_stream(self) -> Stream:
        return object()

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        yield

    def hold(self) -> None:
        return

    def record(self) -> HostEvent:
        return HostEvent(time.perf_counter())

    def elapsed(self, start: Event, end: Event) -> float:
        assert isinstance(start, HostEvent)
        assert isinstance(end, HostEvent)
        return end.seconds - start.seconds

    def synchronize(self) -> None:
        return


class DeviceEvent:
    """An accelerator's event, on the device it was recorded on."""

    def __init__(self, event: Any, module: Any, device: torch.device) -> None:
        self.event = event
        self._module = module
        self._device = device

    def wait(self) -> None:
        self.event.wait(self._module.current_stream(self._device))

    def synchronize(self) -> None:
        self.event.synchronize()


class DeviceQueue:
    """Streams and events of one accelerator, through torch's module for its kind (``torch.cuda``, ``torch.xpu``)."""

    profits_from_pinning = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._ballast: torch.Tensor | None = None
        if not self._module.is_available():
            raise DeviceError(f"{device} is not available here", hint="run `caee doctor` to see why")

    def new_stream(self) -> Stream:
        stream: Stream = self._module.Stream(device=self._device)
        return stream

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        with self._module.stream(stream):
            yield

    def hold(self) -> None:
        if self._ballast is None:
            self._ballast = torch.zeros((_HOLD_SIZE, _HOLD_SIZE), device=self._device)
        torch.mm(self._ballast, self._ballast)

    def record(self) -> DeviceEvent:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return DeviceEvent(event, self._module, self._device)

    def elapsed(self, start: Event, end: Event) -> float:
        assert isinstance(start, DeviceEvent)
        assert isinstance(end, DeviceEvent)
        return float(start.event.elapsed_time(end.event)) / 1e3

    def synchronize(self) -> None:
        self._module.synchronize(self._device)
