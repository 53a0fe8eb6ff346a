"""One transfer at a time: timed and verified, or repeated as load for others.

Every timed transfer moves bytes that were changed just before and is compared with its source afterwards: there are
links that accept a copy and deliver garbage.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from probes.backend import Backend, Event
from probes.content import FileContent
from probes.disk import ALIGNMENT, DirectFile, aligned_buffer
from probes.errors import DeviceError
from probes.waiting import WaitingTime

# Copies of one sample that are timed together: a clock read costs as much as a small copy.
_COPIES_PER_SAMPLE = 64
_BYTES_PER_SAMPLE = 1 << 18
# One int64 of every 64 is changed before a copy, so that no 512 bytes can arrive by having been there before.
_STAMP_STRIDE = 64
_SMALLEST_POOL_BYTES = 1 << 20
# What a longer rest gives is spent before a link is sampled at all.
_LONGEST_REST_SECONDS = 0.05
# Large enough to reach the host link's full rate, small enough for both halves of the way to overlap.
_STAGE_BYTES = 4 << 20


class BrokenTransferError(Exception):
    """Bytes arrived that were not sent."""


class Timing(NamedTuple):
    """Seconds of one transfer; ``waited``: the share of the timed span in which the thread had no processor."""

    seconds: float
    waited: float


class Transfer(Protocol):
    """A way for bytes from one place to another, with its buffers.

    ``max_bytes``: the largest transfer the buffers allow. ``runs_on_host``: the CPU does the work, so that load beside
    it needs a process of its own. ``notes``: what had to be done differently from what was asked.
    """

    max_bytes: int
    runs_on_host: bool
    notes: tuple[str, ...]

    def timed(self, size_bytes: int) -> Timing:
        """Time one transfer. Raises ``BrokenTransferError`` where the bytes did not arrive."""

    def load(self, size_bytes: int) -> None:
        """The same transfer, neither timed nor verified."""


class CopyTransfer:
    """Copies between two pools of memory, each several times the caches, at ever new places.

    ``read+write``: inside one memory, where reading and writing share the bandwidth, a copy of n bytes counts as 2n.
    """

    def __init__(
        self,
        backend: Backend,
        source: torch.Tensor,
        destination: torch.Tensor,
        *,
        read_and_write: bool = False,
        notes: tuple[str, ...] = (),
        other: Backend | None = None,
    ) -> None:
        """``other``: the destination's backend where that is another device than the source's.

        Torch has a copy between two devices wait for the current streams of both. So it gets streams of its own, or one
        that goes the opposite way at the same time would wait for it.
        """
        assert source.numel() == destination.numel()
        self._backend = backend
        self._source = source
        self._destination = destination
        self._ways = 2 if read_and_write else 1
        self._at = 0
        self.max_bytes = source.numel() * self._ways
        self.runs_on_host = backend.device.type == "cpu"
        self.notes = notes
        self._waiting = WaitingTime()
        _fill_random(source)
        ends = () if other is None else (backend, other)
        self._streams = [(each, each.new_stream()) for each in ends]
        for each, _ in self._streams:
            each.synchronize()  # the pools are filled on other streams

    def timed(self, size_bytes: int) -> Timing:
        chunk, copies, source, destination = self._next_regions(size_bytes)
        source.view(torch.int64)[::_STAMP_STRIDE] = random.getrandbits(62)
        pairs = list(zip(torch.split(destination, chunk), torch.split(source, chunk), strict=True))
        self._backend.synchronize()
        with self._own_streams():
            self._backend.hold()
            waited = self._waiting.seconds()
            start = self._backend.record()
            for to, from_ in pairs:
                self._backend.copy(to, from_)
            end = self._backend.record()
            end.synchronize()
        waited = self._waiting.seconds() - waited
        _verify(source, destination)
        seconds = self._backend.elapsed(start, end)
        # A device copies on while the host waits for a processor.
        return Timing(seconds / copies, waited / seconds if self.runs_on_host else 0.0)

    def load(self, size_bytes: int) -> None:
        chunk, _, source, destination = self._next_regions(size_bytes)
        with self._own_streams():
            for to, from_ in zip(torch.split(destination, chunk), torch.split(source, chunk), strict=True):
                self._backend.copy(to, from_)
            self._backend.record().synchronize()

    @contextlib.contextmanager
    def _own_streams(self) -> Iterator[None]:
        with contextlib.ExitStack() as within:
            for backend, stream in self._streams:
                within.enter_context(backend.use(stream))
            yield

    def _next_regions(self, size_bytes: int) -> tuple[int, int, torch.Tensor, torch.Tensor]:
        """Bytes of one copy, number of copies, and as much of both pools, further on than last time."""
        chunk = size_bytes // self._ways
        assert chunk % 8 == 0, f"{size_bytes} bytes are no whole number of words"
        room = self._source.numel() // chunk
        copies = min(room, _COPIES_PER_SAMPLE, max(1, _BYTES_PER_SAMPLE // chunk))
        if self._at + chunk * copies > self._source.numel():
            self._at = 0
        region = slice(self._at, self._at + chunk * copies)
        self._at += _aligned(chunk * copies)
        return chunk, copies, self._source[region], self._destination[region]


class StagedTransfer:
    """From one device's memory to another's through page-locked host memory, as where peer access is off.

    Two buffers take turns, so that one is filled while the other is emptied.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, source: Backend, destination: Backend, pool_bytes: int) -> None:
        self._from, self._to = source, destination
        self._source = source.device_buffer(pool_bytes)
        self._destination = destination.device_buffer(pool_bytes)
        self._stages = [source.host_buffer(min(_STAGE_BYTES, pool_bytes), pinned=True) for _ in range(2)]
        self.max_bytes = pool_bytes
        self.runs_on_host = source.device.type == "cpu"
        self._at = 0
        _fill_random(self._source)

    def timed(self, size_bytes: int) -> Timing:
        source, destination = self._next_regions(size_bytes)
        source.view(torch.int64)[::_STAMP_STRIDE] = random.getrandbits(62)
        self._from.synchronize()
        self._to.synchronize()
        # Events of one device only can be compared: the last to act is the destination.
        start = self._to.record()
        self._move(source, destination)
        end = self._to.record()
        end.synchronize()
        _verify(source, destination)
        return Timing(self._to.elapsed(start, end), 0.0)

    def load(self, size_bytes: int) -> None:
        self._move(*self._next_regions(size_bytes))
        self._to.record().synchronize()

    def _move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        emptied: list[Event | None] = [None, None]
        chunk = self._stages[0].numel()
        for number, (from_, to) in enumerate(
            zip(torch.split(source, chunk), torch.split(destination, chunk), strict=True)
        ):
            stage, free = self._stages[number % 2][: from_.numel()], emptied[number % 2]
            if free is not None:
                free.synchronize()
            self._from.copy(stage, from_)
            self._from.record().synchronize()
            self._to.copy(to, stage)
            emptied[number % 2] = self._to.record()

    def _next_regions(self, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._at + size_bytes > self.max_bytes:
            self._at = 0
        region = slice(self._at, self._at + size_bytes)
        self._at += _aligned(size_bytes)
        return self._source[region], self._destination[region]


class DiskTransfer:
    """Reads of a file at random places of one reader's own part of it, to ever new places of a buffer several times the
    caches: memory that is read into again and again stays in them, and a slot does not."""

    runs_on_host = True

    def __init__(
        self,
        file: DirectFile,
        content: FileContent,
        *,
        part: int,
        parts: int,
        seed: int,
        buffer_bytes: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """``buffer_bytes``: how much memory is read into, place after place; None: a quarter of the reader's part."""
        self._file = file
        self._content = content
        length = content.size_bytes // parts // ALIGNMENT * ALIGNMENT
        self._start = part * length
        self._buffer = aligned_buffer(_aligned(length // 4 if buffer_bytes is None else buffer_bytes)).numpy()
        self._at = 0
        self._length = length
        self._random = random.Random(seed * 1000 + part)
        self._rested_since = time.perf_counter()
        self.max_bytes = len(self._buffer)
        self.notes = notes
        self._waiting = WaitingTime()

    def timed(self, size_bytes: int) -> Timing:
        self._spend_credit(size_bytes)
        offset = self._next_offset(size_bytes)
        buffer = self._next_place(size_bytes)
        waited = self._waiting.seconds()
        start = time.perf_counter()
        lead = self._file.read_span(offset, size_bytes, buffer)
        self._rested_since = time.perf_counter()
        seconds = self._rested_since - start
        waited = self._waiting.seconds() - waited
        if not self._content.matches(offset, buffer[lead : lead + size_bytes]):
            raise BrokenTransferError(f"bytes {offset} to {offset + size_bytes} were read back wrong")
        return Timing(seconds, waited / seconds)

    def load(self, size_bytes: int) -> None:
        self._file.read_span(self._next_offset(size_bytes), size_bytes, self._next_place(size_bytes))
        self._rested_since = time.perf_counter()

    def _spend_credit(self, size_bytes: int) -> None:
        """Read for as long as the disk rested: one that is throttled by credit gained some meanwhile."""
        now = time.perf_counter()
        until = now + min(now - self._rested_since, _LONGEST_REST_SECONDS)
        while time.perf_counter() < until:
            self.load(size_bytes)

    def _next_place(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        if self._at + _aligned(size_bytes) > len(self._buffer):
            self._at = 0
        place = self._buffer[self._at :]
        self._at += _aligned(size_bytes)
        return place

    def _next_offset(self, size_bytes: int) -> int:
        places = (self._length - size_bytes) // ALIGNMENT
        return self._start + self._random.randrange(places + 1) * ALIGNMENT


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def pool_pair(
    backend: Backend, pool_bytes: int, *, source: str, destination: str, pinned: bool
) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Two pools of equal size on ``host`` or ``device``; smaller than asked, and said so, where memory is short.

    Raises ``DeviceError`` when not even the smallest useful pool can be had.
    """
    asked = pool_bytes
    while True:
        try:
            pair = [
                backend.host_buffer(pool_bytes, pinned=pinned) if place == "host" else backend.device_buffer(pool_bytes)
                for place in (source, destination)
            ]
        except DeviceError:
            if pool_bytes // 2 < _SMALLEST_POOL_BYTES:
                raise
            pool_bytes //= 2
            continue
        note = f"buffers of {pool_bytes} bytes instead of {asked}: no more memory could be had"
        return pair[0], pair[1], (note,) if pool_bytes < asked else ()


def _fill_random(pool: torch.Tensor) -> None:
    # One random block repeated: generating every byte would take longer than measuring; the stamps make them differ.
    block = torch.from_numpy(np.random.default_rng(0).integers(0, 256, min(pool.numel(), 1 << 20), dtype=np.uint8))
    for start in range(0, pool.numel(), block.numel()):
        part = pool[start : start + block.numel()]
        part.copy_(block[: part.numel()])


def _verify(source: torch.Tensor, destination: torch.Tensor) -> None:
    arrived = destination if destination.device == source.device else destination.to(source.device)
    # As words, which compare eight times as fast as bytes.
    if torch.equal(arrived.view(torch.int64), source.view(torch.int64)):
        return
    wrong = torch.nonzero(arrived != source)
    raise BrokenTransferError(f"{wrong.numel()} of {source.numel()} bytes arrived wrong, the first at {int(wrong[0])}")
