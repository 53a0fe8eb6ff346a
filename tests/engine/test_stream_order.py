"""On a GPU, copies and computation run beside each other: what may touch the same bytes must be ordered by events.

There need be no GPU to see it. A backend here does everything at once on the CPU and keeps a vector clock for each of
those that act: the stream that computes, the stream that copies, and the threads on the host. Whoever reads
or writes a slot or a staging buffer must come after everyone who did before, by events alone; where one does not, a
GPU could run them in the other order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.backend import HostEvent
from probes.disk import aligned_buffer
from runtime.experts.memory import Bytes, Staging
from runtime.experts.transfer import TransferEngine
from runtime.worker import RankSession

Clock = dict[str, int]
PROMPTS = [list(b"Hello there, my"), list(b"And he said, go")]


class Race(Exception):
    """Two accesses that no event orders."""


class Ordering:
    """Who has seen whom, and who touched what last."""

    def __init__(self) -> None:
        self.seen: dict[str, Clock] = {}
        self.touched: dict[object, list[tuple[str, int, bool]]] = {}
        self.races: list[str] = []
        self.accesses = 0
        self._lock = threading.Lock()

    def now(self, actor: str) -> Clock:
        """A copy of what ``actor`` has seen of everyone."""
        with self._lock:
            return dict(self._of(actor))

    def learn(self, actor: str, clock: Clock) -> None:
        with self._lock:
            mine = self._of(actor)
            for other, at in clock.items():
                mine[other] = max(mine.get(other, 0), at)

    def access(self, actor: str, what: object, *, writes: bool) -> None:
        with self._lock:
            mine = self._of(actor)
            mine[actor] += 1
            self.accesses += 1
            for other, at, wrote in self.touched.get(what, []):
                if other != actor and (writes or wrote) and mine.get(other, 0) < at:
                    self.races.append(f"{actor} {'writes' if writes else 'reads'} {what} while {other} may be at it")
            kept = [] if writes else self.touched.get(what, [])
            self.touched[what] = [*kept, (actor, mine[actor], writes)]

    def _of(self, actor: str) -> Clock:
        return self.seen.setdefault(actor, {actor: 0})


class OrderingEvent(HostEvent):
    def __init__(self, backend: OrderingBackend) -> None:
        super().__init__(0.0)
        self._backend = backend
        self._clock = backend.ordering.now(backend.stream)

    def wait(self) -> None:
        """The current stream goes on after the event, and the host need not."""
        if not self._backend.deaf:
            self._backend.ordering.learn(self._backend.stream, self._clock)

    def synchronize(self) -> None:
        """The host goes on after the event, and with it what it queues from now on."""
        self._backend.ordering.learn(self._backend.thread, self._clock)


class OrderingBackend:
    """A device whose work is done at once, and whose streams are names. ``deaf``: streams wait for no event."""

    def __init__(self, ordering: Ordering, *, deaf: bool = False) -> None:
        self.device = torch.device("cpu")
        self.ordering = ordering
        self.deaf = deaf
        self._local = threading.local()
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def thread(self) -> str:
        """The main thread, or whichever of the engine's it is."""
        if threading.current_thread() is threading.main_thread():
            return "host"
        with self._lock:
            return self._names.setdefault(threading.get_ident(), f"worker {len(self._names)}")

    @property
    def stream(self) -> str:
        return str(getattr(self._local, "stream", "compute"))

    def host_buffer(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        return aligned_buffer(size_bytes)

    def new_stream(self) -> str:
        return "copies"

    @contextlib.contextmanager
    def use(self, stream: str) -> Iterator[None]:
        self._local.stream = stream
        yield
        del self._local.stream

    def record(self) -> OrderingEvent:
        # Queued by this thread after all that it knows of.
        self.ordering.learn(self.stream, self.ordering.now(self.thread))
        return OrderingEvent(self)

    def elapsed(self, start: HostEvent, end: HostEvent) -> float:
        return 0.0

    def synchronize(self) -> None:
        for other in list(self.ordering.seen):
            self.ordering.learn(self.thread, self.ordering.now(other))


def watch(
    session: RankSession,
    ordering: Ordering,
    backend: OrderingBackend,
    monkeypatch: pytest.MonkeyPatch,
    *,
    readers: int = 1,
) -> None:
    """Put ``backend`` under the session's transfers and report every access to slots and staging buffers."""
    write, deliver = session.pool.write, session.source.deliver

    def written(slot: int, pieces: Any, data: Bytes, start: int) -> None:
        # A copy is queued after all that the thread knows of.
        ordering.learn(backend.stream, ordering.now(backend.thread))
        ordering.access(backend.stream, buffer_of(data), writes=False)
        ordering.access(backend.stream, ("slot", slot), writes=True)
        write(slot, pieces, data, start)

    def delivered(layer: int, expert: int, staging: Staging | None, hand_over: Any) -> None:
        ordering.access(backend.thread, buffer_of(staging.given), writes=True)
        deliver(layer, expert, staging, hand_over)

    monkeypatch.setattr(session.pool, "write", written)
    monkeypatch.setattr(session.source, "deliver", delivered)
    for reader in session.transfers._readers:
        reader.close()
    transfers = TransferEngine(backend, session.source, session.pool, readers=readers, buffers=2)  # type: ignore[arg-type]  # streams are names
    buffers = [staging.filled for reader in transfers._readers for staging in reader.staging]

    def buffer_of(data: Bytes) -> object:
        (number,) = (number for number, buffer in enumerate(buffers) if np.shares_memory(buffer, data))
        return ("staging", number)

    session.transfers = transfers
    session.execution._transfers = transfers
    for kernel in session.execution.kernels:
        rows = kernel.rows

        def watched(*arguments: Any, rows: Callable[..., None] = rows) -> None:
            ordering.learn("compute", ordering.now("host"))
            for slot in arguments[3].values():
                ordering.access("compute", ("slot", slot), writes=False)
            rows(*arguments)

        monkeypatch.setattr(kernel, "rows", watched)


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("cache", ["lfu", "forecast:prefetch=1"])
def test_every_access_is_ordered_by_events(
    checkpoint: Callable[..., Path],
    open_session: Callable[..., RankSession],
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
    readers: int,
) -> None:
    session = open_session(checkpoint("qwen3_moe", experts=32, top_k=4), cache_experts=9, cache=cache)
    ordering = Ordering()
    watch(session, ordering, OrderingBackend(ordering), monkeypatch, readers=readers)
    session.run_pass(PROMPTS, session.router, new_tokens=6)
    snapshot = session.execution.snapshot()
    session.run_pass(PROMPTS, session.router, new_tokens=3)
    session.execution.restore(snapshot)
    session.run_pass(PROMPTS, session.router, new_tokens=3)
    assert ordering.accesses > 200
    assert not ordering.races, ordering.races[:3]


def test_the_check_sees_a_stream_that_waits_for_nothing(
    checkpoint: Callable[..., Path], open_session: Callable[..., RankSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(checkpoint("qwen3_moe", experts=32, top_k=4), cache_experts=9)
    ordering = Ordering()
    watch(session, ordering, OrderingBackend(ordering, deaf=True), monkeypatch)
    session.run_pass(PROMPTS, session.router, new_tokens=4)
    assert any("copies writes ('slot'" in race for race in ordering.races)
    assert any("compute reads ('slot'" in race for race in ordering.races)


def test_the_check_sees_a_buffer_that_is_filled_too_early(
    checkpoint: Callable[..., Path], open_session: Callable[..., RankSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(checkpoint("qwen3_moe", experts=32, top_k=4), cache_experts=9)
    ordering = Ordering()
    watch(session, ordering, OrderingBackend(ordering), monkeypatch)
    monkeypatch.setattr(OrderingEvent, "synchronize", lambda self: None)
    session.run_pass(PROMPTS, session.router, new_tokens=4)
    assert any("worker 0 writes ('staging'" in race for race in ordering.races)
