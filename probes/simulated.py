"""A backend with a virtual clock and known costs, to test the estimators and everything built on ``Backend``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from probes.backend import Event, HostEvent, Stream, check_copy
from probes.disk import aligned_buffer
from probes.records import Concurrency, LinkKind, LinkMeasurement, LinkMode, LinkStatus, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """seconds = beta + size · slope for sizes from ``from_bytes`` on."""

    from_bytes: int
    slope_seconds_per_byte: float
    beta_seconds: float


class SimulatedLink:
    """Times of copies whose true cost is known.

    ``noise``: relative standard deviation of every copy. ``outliers``: share of copies that take two to six times as
    long. ``credit_bytes``: how much may pass at ``burst_factor`` times the speed before the sustained cost applies.
    """

    def __init__(
        self,
        *regimes: Regime,
        noise: float = 0.0,
        outliers: float = 0.0,
        credit_bytes: int = 0,
        burst_factor: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.regimes = tuple(sorted(regimes, key=lambda regime: regime.from_bytes))
        self.noise = noise
        self.outliers = outliers
        self.credit_bytes = credit_bytes
        self.burst_factor = burst_factor
        self._random = random.Random(seed)

    @classmethod
    def affine(
        cls, *, alpha: float, bandwidth_bytes_per_s: float, beta_seconds: float, noise: float = 0.0, seed: int = 0
    ) -> SimulatedLink:
        """C(S) = α·S/B + β."""
        slope = alpha / bandwidth_bytes_per_s
        regime = Regime(from_bytes=0, slope_seconds_per_byte=slope, beta_seconds=beta_seconds)
        return cls(regime, noise=noise, seed=seed)

    def true_seconds(self, size_bytes: int) -> float:
        """Cost without noise, outliers or burst."""
        regime = [regime for regime in self.regimes if regime.from_bytes <= size_bytes][-1]
        return regime.beta_seconds + size_bytes * regime.slope_seconds_per_byte

    def seconds(self, size_bytes: int) -> float:
        """Cost of the next copy; spends burst credit."""
        seconds = self.true_seconds(size_bytes)
        if self.credit_bytes >= size_bytes:
            self.credit_bytes -= size_bytes
            seconds /= self.burst_factor
        seconds *= max(1.0 + self._random.gauss(0.0, self.noise), 0.05)
        if self._random.random() < self.outliers:
            seconds *= self._random.uniform(2.0, 6.0)
        return seconds


def simulated_sweep(
    link: SimulatedLink, sizes: Sequence[int], count: int, *, concurrency: Concurrency = Concurrency.SOLO
) -> LinkMeasurement:
    """``count`` rounds over ``sizes``, interleaved as in a real sweep, as a pinned copy from the host to ``cuda:0``."""
    rounds = [[link.seconds(size) for size in sizes] for _ in range(count)]
    samples = tuple(
        Sample(size_bytes=size, seconds=tuple(taken[at] for taken in rounds)) for at, size in enumerate(sizes)
    )
    return LinkMeasurement(
        kind=LinkKind.HOST_TO_DEVICE,
        source="host",
        destination="cuda:0",
        mode=LinkMode.PINNED,
        concurrency=concurrency,
        status=LinkStatus.OK,
        samples=samples,
    )


class SimulatedBackend:
    """``Backend`` whose copies move real bytes and take virtual time.

    ``corrupt_copy``: the copy with this number (counted from 0) delivers one wrong byte.
    """

    def __init__(self, link: SimulatedLink, *, corrupt_copy: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.link = link
        self.corrupt_copy = corrupt_copy
        self.copies = 0
        self._now = 0.0

    def now(self) -> float:
        """Virtual seconds since the backend was made."""
        return self._now

    def host_buffer(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        return aligned_buffer(size_bytes)

    def device_buffer(self, size_bytes: int) -> torch.Tensor:
        return aligned_buffer(size_bytes)

    def new_stream(self) -> Stream:
        return object()

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return self._use()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        yield

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        check_copy(destination, source)
        destination.copy_(source)
        if self.copies == self.corrupt_copy:
            destination.view(torch.uint8)[destination.nbytes // 2] ^= 0xFF
        self.copies += 1
        self._now += self.link.seconds(source.nbytes)

    def hold(self) -> None:
        return

    def record(self) -> Event:
        return HostEvent(self._now)

    def elapsed(self, start: Event, end: Event) -> float:
        assert isinstance(start, HostEvent)
        assert isinstance(end, HostEvent)
        return end.seconds - start.seconds

    def synchronize(self) -> None:
        return
