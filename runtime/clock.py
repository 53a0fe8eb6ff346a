"""Where a forward pass spends its time, on the device's own clock.

The host queues a device's work and goes on, so that a clock on the host would count the queueing. Marks are left in the
device's queue instead, and read when its work has reached the host anyway: measuring waits for nothing. On a CPU a mark
is the present moment.
"""

from __future__ import annotations

from probes.backend import Backend, Event
from runtime.recording import Timers


class PhaseClock:
    """Adds to ``Timers`` what phases took. They are complete after ``settle``, on a CPU at once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_at_once = backend.device.type == "cpu"
        self._spans: list[tuple[Timers, str, Event, Event]] = []

    def mark(self) -> Event:
        """The beginning of a phase: the present end of the device's queue."""
        return self._backend.record()

    def add(self, timers: Timers, phase: str, start: Event) -> None:
        """The phase that began at ``start`` is queued: count it in ``timers.phase``."""
        end = self._backend.record()
        if self._is_at_once:
            self._count(timers, phase, start, end)
        else:
            self._spans.append((timers, phase, start, end))

    def settle(self) -> None:
        """Count every phase so far. Waits for the device where it has not come there yet."""
        for timers, phase, start, end in self._spans:
            end.synchronize()
            self._count(timers, phase, start, end)
        self._spans.clear()

    def _count(self, timers: Timers, phase: str, start: Event, end: Event) -> None:
        setattr(timers, phase, getattr(timers, phase) + self._backend.elapsed(start, end))
