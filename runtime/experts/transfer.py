"""Fetching experts into slots, beside the computation: checkpoint or host memory → staging → slot.

A thread issues the reads in the order asked, so that n fetches cost n times one, which is what the cost model says, and
queues the device copies on a stream of their own. On a CPU nothing copies on its own: several threads take turns there
with large experts, so that some copy while another reads. All waiting and retrying is in here.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from probes.backend import Backend, Event, Stream
from probes.disk import ALIGNMENT, DirectFile
from probes.errors import CaeeError, RunError
from probes.numa import near
from probes.records import LinkMode
from runtime.experts.index import ExpertIndex, Piece, by_target
from runtime.experts.memory import Bytes, Staging, bytes_for, tensor_of
from runtime.experts.pool import SlotPool

STAGING_BUFFERS = 4
"""Reads may run this far ahead of the device copies that empty the buffers; not on a CPU, which copies at once."""
DISK_READERS = 4
"""On a CPU: with fewer, all copy at times and the disk rests."""
MEMORY_READERS = 2
"""On a CPU: two fill its memory's bandwidth."""
WORTH_A_THREAD = 512 << 10
"""Smaller experts are fetched before another thread would have begun."""
PART_BYTES = 2 << 20
"""A CPU reads large experts in parts of this size, over and over into the same huge page: what is copied from there is
still in the processor's caches, and a disk has several requests at work at once."""
SLAB_BYTES = (256 << 20) - ALIGNMENT
"""Experts that wait in host memory lie together in pieces of this size: with its alignment, a power of two."""
SLAB_ALIGNMENT = 64


def most_staging_bytes(device: torch.device, expert_bytes: int) -> int:
    """What the buffers between source and slots take of ``device``'s host where experts are read in parts."""
    return most_buffers(device) * (min(expert_bytes, PART_BYTES) if device.type == "cpu" else expert_bytes)


def most_buffers(device: torch.device) -> int:
    """How many buffers there are between source and slots of ``device``, at most."""
    return DISK_READERS if device.type == "cpu" else STAGING_BUFFERS


@dataclass(frozen=True, slots=True)
class Request:
    """Bring ``expert`` of MoE layer ``layer`` into ``slot``."""

    layer: int
    expert: int
    slot: int


T = TypeVar("T")

Deliver = Callable[[tuple[Piece, ...], Bytes, int], None]
"""Pieces of a span, bytes of it, and where in the span these begin."""


class ExpertSource(Protocol):
    """Where experts lie while they are not on the device."""

    mode: LinkMode | None
    reason: str | None
    cpu_readers: int
    """How many threads are worth fetching large experts side by side on a CPU."""

    def deliver(self, layer: int, expert: int, staging: Staging | None, deliver: Deliver) -> None:
        """Hand the expert's bytes to ``deliver``, span by span, in parts or whole; ``staging``, of ``staging_bytes``,
        may be used until this returns.

        Called from the engine's threads, of which each has staging buffers of its own. Raises a ``CaeeError`` where the
        bytes cannot be had.
        """

    def staging_bytes(self) -> int:
        """How large a buffer ``deliver`` needs; 0: none."""

    def close(self) -> None: ...


class DiskSource:
    """Experts read from the checkpoint's files at every fetch, past the page cache where that is possible."""

    cpu_readers = DISK_READERS

    def __init__(self, index: ExpertIndex, *, part_bytes: int | None = None) -> None:
        """``part_bytes``: at most so much is read at a time, and every part into the same memory, so that each must be
        copied when ``deliver`` returns; None: whole spans, one beside the other."""
        self._reads = index.reads
        self._part_bytes = part_bytes
        paths = {read.path for layer in index.reads for expert in layer for read in expert}
        self._files: dict[Path, DirectFile] = {path: DirectFile(path) for path in sorted(paths)}
        any_file = next(iter(self._files.values()))
        self.mode: LinkMode | None = any_file.mode
        self.reason = any_file.reason

    def deliver(self, layer: int, expert: int, staging: Staging | None, deliver: Deliver) -> None:
        assert staging is not None
        place = 0
        for read in self._reads[layer][expert]:
            file = self._files[read.path]
            for start, size in parts_of(read.offset, read.size_bytes, self._part_bytes):
                lead = place + file.read_span(read.offset + start, size, staging.filled[place:])
                deliver(read.pieces, staging.given[lead : lead + size], start)
            if self._part_bytes is None:
                place += file.span_bytes(read.offset, read.size_bytes)

    def staging_bytes(self) -> int:
        whole = max(
            sum(self._files[read.path].span_bytes(read.offset, read.size_bytes) for read in expert)
            for layer in self._reads
            for expert in layer
        )
        return whole if self._part_bytes is None else min(whole, self._part_bytes)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def tried_twice(layer: int, expert: int, fetch: Callable[[], T]) -> T:
    """``fetch`` that expert; once more where it fails, since a read that failed or was cut short once often succeeds.

    Raises ``RunError`` where both fail, which means damage.
    """
    try:
        return fetch()
    except CaeeError:
        try:
            return fetch()
        except CaeeError as error:
            raise RunError(
                f"fetching expert {expert} of MoE layer {layer} failed twice: {error.message}", hint=error.hint
            ) from error


def parts_of(offset: int, size_bytes: int, most: int | None) -> Iterator[tuple[int, int]]:
    """(start, size) of the parts in which a span at ``offset`` of a file is read; ``most`` None: one part.

    Each is within ``most`` bytes as a direct read rounds it; all but the first begin where such a read may begin.
    """
    start = 0
    while start < size_bytes:
        at = offset + start
        stop = size_bytes if most is None else min(size_bytes, at // ALIGNMENT * ALIGNMENT + most - offset)
        yield start, stop - start
        start = stop


class HostSource:
    """Experts kept in (pinned) host memory, read there once from the checkpoint."""

    cpu_readers = MEMORY_READERS

    def __init__(self, index: ExpertIndex, backend: Backend, mine: Sequence[tuple[int, int]]) -> None:
        """``mine``: the (layer, expert) pairs that this device may fetch."""
        self._pieces: dict[tuple[int, int], list[tuple[tuple[Piece, ...], Bytes]]] = {}
        disk = DiskSource(index)
        needed = sum(_rounded(read.size_bytes) for layer, expert in mine for read in index.reads[layer][expert])
        slabs = _Slabs(backend, needed)
        try:
            staging = Staging(backend.host_buffer(disk.staging_bytes(), pinned=False), backend.device)

            def kept_of(layer: int, expert: int) -> list[tuple[tuple[Piece, ...], Bytes]]:
                kept: list[tuple[tuple[Piece, ...], Bytes]] = []

                def keep(pieces: tuple[Piece, ...], data: Bytes, _: int) -> None:
                    copy = bytes_for(backend.device, slabs.take(len(data)).copy_(tensor_of(data)))
                    # Cut once and for all: a slice takes as long as a device's copy of a tenth of a megabyte.
                    kept.extend((part, copy[first:stop]) for first, stop, part in by_target(pieces))

                disk.deliver(layer, expert, staging, keep)
                return kept

            for layer, expert in mine:
                self._pieces[layer, expert] = tried_twice(layer, expert, partial(kept_of, layer, expert))
        finally:
            disk.close()
        self.mode: LinkMode | None = None if backend.device.type == "cpu" else LinkMode.PINNED
        self.reason: str | None = None

    def deliver(self, layer: int, expert: int, staging: Staging | None, deliver: Deliver) -> None:
        for pieces, data in self._pieces[layer, expert]:
            deliver(pieces, data, 0)

    def staging_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._pieces.clear()


class _Slabs:
    """Host memory for many experts in few allocations: page-locked memory is handed out in powers of two only."""

    def __init__(self, backend: Backend, needed_bytes: int) -> None:
        self._backend = backend
        self._needed = needed_bytes
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes], at a multiple of ``SLAB_ALIGNMENT``."""
        size = _rounded(size_bytes)
        if len(self._left) < size:
            wanted = max(size, min(self._needed, SLAB_BYTES))
            with near(self._backend.device):
                self._left = self._backend.host_buffer(wanted, pinned=True)
        taken, self._left = self._left[:size_bytes], self._left[size:]
        self._needed -= size
        return taken


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT


class Ticket:
    """A batch of fetches under way."""

    def __init__(self, futures: Sequence[Future[Event]]) -> None:
        self._futures = futures

    def wait(self) -> None:
        """Make the current stream wait until all are in their slots. Raises what went wrong, after one retry."""
        # Nobody writes into a slot any more when this raises.
        concurrent.futures.wait(self._futures)
        for future in self._futures:
            future.result().wait()


class TransferEngine:
    """Fills slots of ``pool`` from ``source``. One instance per device; not to be shared between threads."""

    def __init__(
        self,
        backend: Backend,
        source: ExpertSource,
        pool: SlotPool,
        *,
        readers: int | None = None,
        buffers: int | None = None,
    ) -> None:
        """``readers``: how many threads fetch side by side; None: as the source says on a CPU where experts are large,
        else one.
        ``buffers``: between source and slots, of each; None: as ``most_buffers`` counts."""
        self.backend = backend
        on_cpu = backend.device.type == "cpu"
        if readers is None:
            readers = source.cpu_readers if on_cpu and pool.slot_bytes >= WORTH_A_THREAD else 1
        if buffers is None:
            buffers = 1 if on_cpu else STAGING_BUFFERS
        stream = backend.new_stream()
        self._source = source
        self._readers = [_Reader(backend, stream, source, pool, buffers) for _ in range(readers)]

    def fetch(self, requests: Sequence[Request]) -> Ticket:
        """Start fetching in the order given. The slots must not be used before the ticket's ``wait`` returned."""
        if not requests:
            return Ticket([])
        # What was computed so far may still read the slots that are about to be overwritten.
        computed, open_requests = self.backend.record(), _Shared(requests)
        return Ticket([reader.start(open_requests, computed) for reader in self._readers[: len(requests)]])

    def synchronize(self) -> None:
        """Make the host wait for all that the device was given so far."""
        self.backend.synchronize()

    def close(self) -> None:
        """Wait for what is under way and release the source."""
        for reader in self._readers:
            reader.close()
        self.backend.synchronize()
        self._source.close()


class _Shared:
    """Requests that several readers take from, each once, in order; none after one failed."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._left: Iterator[Request] = iter(tuple(requests))
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Request]:
        while (request := self._next()) is not None:
            yield request

    def _next(self) -> Request | None:
        with self._lock:
            return next(self._left, None)

    def give_up(self) -> None:
        with self._lock:
            self._left = iter(())


class _Reader:
    """A thread that fetches, with staging buffers of its own."""

    def __init__(self, backend: Backend, stream: Stream, source: ExpertSource, pool: SlotPool, buffers: int) -> None:
        self._backend = backend
        self._stream = stream
        self._source = source
        self._pool = pool
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="expert-transfer")
        size = source.staging_bytes()
        with near(backend.device):
            self.staging = [
                Staging(backend.host_buffer(size, pinned=True), backend.device) for _ in range(buffers if size else 0)
            ]
        self._emptied: list[Event | None] = [None] * buffers
        self._next = 0

    def start(self, requests: _Shared, computed: Event) -> Future[Event]:
        return self._worker.submit(self._run, requests, computed)

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _run(self, requests: _Shared, computed: Event) -> Event:
        with self._backend.use(self._stream):
            computed.wait()
            try:
                for request in requests:
                    self._fetch(request)
            except BaseException:
                requests.give_up()
                raise
            return self._backend.record()

    def _fetch(self, request: Request) -> None:
        tried_twice(request.layer, request.expert, partial(self._deliver, request))

    def _deliver(self, request: Request) -> None:
        deliver = partial(self._pool.write, request.slot)
        if not self.staging:
            self._source.deliver(request.layer, request.expert, None, deliver)
            return
        at = self._next
        self._next = (at + 1) % len(self.staging)
        emptied = self._emptied[at]
        if emptied is not None:
            emptied.synchronize()
        self._source.deliver(request.layer, request.expert, self.staging[at], deliver)
        self._emptied[at] = self._backend.record()
