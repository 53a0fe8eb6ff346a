"""What each rank does to time the collectives: dispatch, combine and all-reduce, interleaved and verified.

A rank's time runs from leaving a barrier until its own part is done: where ranks differ, the slowest decides how long a
layer takes (arXiv:2606.29982, Fig. 6).
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

import torch

from probes.backend import TorchBackend
from probes.records import LinkKind
from probes.text import first_line

_PATIENCE = timedelta(seconds=60)
# Sums of such integers are exact in float32, in whatever order they are added.
_VALUES = 1024
# Small messages scatter most and cost least: each round takes them this many times more.
_CHEAP_BYTES = 256 << 10
_OFTEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """``device``: torch's name. ``sizes``: bytes that one rank gives. ``seconds``: how long new rounds begin.

    ``meeting_file``: where the ranks find each other.
    """

    rank: int
    ranks: int
    device: str
    sizes: tuple[int, ...]
    seconds: float
    seed: int
    meeting_file: str


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """Seconds by collective and size, in the order taken; and what arrived wrong, by collective."""

    seconds: dict[LinkKind, dict[int, list[float]]] = field(default_factory=dict)
    broken: dict[LinkKind, str] = field(default_factory=dict)

    def add(self, kind: LinkKind, size_bytes: int, seconds: float, *, arrived: bool) -> None:
        self.seconds.setdefault(kind, {}).setdefault(size_bytes, []).append(seconds)
        if not arrived:
            self.broken.setdefault(kind, f"{size_bytes} bytes arrived wrong")


def serve(task: RankTask, connection: Connection) -> None:
    """Measure and send ``RankTimes`` back, or a sentence that says why not."""
    # Ctrl-C reaches the whole process group: the parent decides what is kept, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        connection.send(measure_rank(task))
    except Exception as error:
        connection.send(f"rank {task.rank}: {type(error).__name__}: {first_line(error)}")


def measure_rank(task: RankTask) -> RankTimes:
    """Join the other ranks and take part in their collectives until rank 0's time is over."""
    import torch.distributed as dist

    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{task.meeting_file}",
        rank=task.rank,
        world_size=task.ranks,
        timeout=_PATIENCE,
        # Else NCCL guesses a device for a barrier that comes before any other exchange.
        device_id=None if device.type == "cpu" else device,
    )
    try:
        return _rounds(task, TorchBackend(device))
    finally:
        dist.destroy_process_group()


def _rounds(task: RankTask, backend: TorchBackend) -> RankTimes:
    import torch.distributed as dist

    warm_up, times = RankTimes(), RankTimes()
    # The same order on all ranks, or they would wait for each other for ever.
    order = random.Random(task.seed)
    often = [size for size in task.sizes if size <= _CHEAP_BYTES] * _OFTEN
    todo = [(measure, size) for size in (*task.sizes, *often) for measure in (_exchange, _reduce)]
    more = torch.ones(1, device=backend.device)
    deadline = 0.0
    turn = 0
    while more.item():
        order.shuffle(todo)
        for measure, size in todo:
            measure(task, backend, size, turn, times if turn else warm_up)
        if turn == 0:
            deadline = time.monotonic() + task.seconds
        turn += 1
        more.fill_(time.monotonic() < deadline)
        dist.broadcast(more, src=0)
    return times


def _exchange(task: RankTask, backend: TorchBackend, size_bytes: int, turn: int, times: RankTimes) -> None:
    """Every rank sends an equal part to every rank, and gets its own back."""
    import torch.distributed as dist

    part = size_bytes // task.ranks // 8
    given = torch.cat([_content(task, task.rank, other, part, turn) for other in range(task.ranks)]).to(backend.device)
    taken, returned = torch.empty_like(given), torch.empty_like(given)
    seconds = _timed(backend, lambda: dist.all_to_all_single(taken, given))
    expected = torch.cat([_content(task, other, task.rank, part, turn) for other in range(task.ranks)])
    times.add(LinkKind.ALL_TO_ALL_DISPATCH, size_bytes, seconds, arrived=torch.equal(taken.cpu(), expected))
    seconds = _timed(backend, lambda: dist.all_to_all_single(returned, taken))
    times.add(LinkKind.ALL_TO_ALL_COMBINE, size_bytes, seconds, arrived=torch.equal(returned, given))


def _reduce(task: RankTask, backend: TorchBackend, size_bytes: int, turn: int, times: RankTimes) -> None:
    import torch.distributed as dist

    base = torch.arange(size_bytes // 4, dtype=torch.float32).remainder_(_VALUES).add_(turn % _VALUES)
    summed = (base + task.rank).to(backend.device)
    seconds = _timed(backend, lambda: dist.all_reduce(summed))
    expected = base.mul_(task.ranks).add_(sum(range(task.ranks)))
    times.add(LinkKind.ALL_REDUCE, size_bytes, seconds, arrived=torch.equal(summed.cpu(), expected))


def _content(task: RankTask, source: int, destination: int, words: int, turn: int) -> torch.Tensor:
    """What ``source`` sends to ``destination`` in round ``turn``: no two alike, so that nothing old passes for new."""
    number = (turn * task.ranks + source) * task.ranks + destination
    return torch.arange(words, dtype=torch.int64).add_(number * 1_000_003)


def _timed(backend: TorchBackend, operation: Callable[[], object]) -> float:
    import torch.distributed as dist

    backend.synchronize()
    dist.barrier()
    start = backend.record()
    operation()
    end = backend.record()
    end.synchronize()
    return backend.elapsed(start, end)
