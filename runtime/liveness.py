"""Telling a rank that hangs from one that is slow, at no cost to its work.

Slow work may take minutes: a disk, a prefill, a compiler. All of it computes, reads or writes, which the system counts
for every process and the launcher looks up; or it waits for another rank, which a thread of the rank's own tells from
where its main thread stands. A rank of which none of this is true for long hangs: its process is stopped, or a read,
a lock or a driver never returns. What a process does is looked at, never how far it is: no work has to report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from probes.errors import RunError

OWN_PACKAGES = ("caee_cli", "reports", "runtime", "store", "probes")
EXCHANGES = "runtime.parallel"
"""Whose functions return when other ranks take part."""

PROC = Path("/proc")
LEAST_BYTES = 4096
"""Of reads and writes between two looks; what the system is asked for here counts as some hundred."""
LEAST_SHARE = 0.01
"""Of one processor between two looks; idle threads of libraries take less."""
LEAST_SECONDS = 0.025
"""The system counts hundredths of a second, and one more comes to anybody now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a rank may show no sign of life.

    It is counted in looks: where the whole machine was suspended, or the launcher stopped with its ranks, nobody hangs.
    A read may well return after a minute (disks retry, servers come back); a process that is stopped says nothing.
    """

    look_seconds: float = 5.0
    stopped_seconds: float = 60.0
    idle_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank's own thread tells of its main thread: where in our code it stands, and what it is there for."""

    process_id: int
    place: str
    waiting: bool
    done: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What the system has counted for a process and those that it started."""

    processor_seconds: float
    bytes_moved: int


# in the rank ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def beating(towards: Connection, patience: Patience) -> Iterator[None]:
    """Tell the launcher twice per look, as long as the block lasts, where this process's main thread stands."""
    end = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, and ends this rank otherwise
            while not end.wait(patience.look_seconds / 2):
                towards.send(beat_of(sys._current_frames().get(main)))
            towards.send(Beat(os.getpid(), "", waiting=False, done=True))

    main = threading.main_thread().ident or 0
    with contextlib.suppress(OSError):
        towards.send(beat_of(None))
    thread = threading.Thread(target=beat, daemon=True, name="beat")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(patience.look_seconds)


def beat_of(frame: FrameType | None) -> Beat:
    """Of a thread whose innermost frame is ``frame``."""
    own = list(_own_frames(frame))
    waiting = bool(own) and _module(own[0]) == EXCHANGES
    place = next((each for each in own if _module(each) != EXCHANGES), None)
    where = "" if place is None else f"{_module(place).replace('.', '/')}.py:{place.f_lineno} ({place.f_code.co_name})"
    return Beat(os.getpid(), where, waiting)


def _own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if _module(frame).partition(".")[0] in OWN_PACKAGES:
            yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


# in the launcher ------------------------------------------------------------------------------------------------------


class RankWatch:
    """What the launcher knows of one rank."""

    def __init__(self, rank: int, beats: Connection, patience: Patience) -> None:
        self.rank = rank
        self.beat: Beat | None = None
        self._beats = beats
        self._patience = patience
        self._work: Work | None = None
        self._looks_silent = 0
        self.looks_idle = 0

    def look(self) -> None:
        """Take in what has happened since the last look."""
        heard = self._listen()
        if self.beat is None or self.beat.done:
            return
        state, work = process_state(self.beat.process_id), work_of(self.beat.process_id)
        # A debugger holds what it examines. Without figures of the system nobody is accused.
        alive = state in ("t", None) or work is None or self._has_worked(work) or (heard and self.beat.waiting)
        self._work = work
        self._looks_silent = 0 if alive or heard else self._looks_silent + 1
        self.looks_idle = 0 if alive else self.looks_idle + 1

    def complaint(self) -> str | None:
        """That this rank hangs, and where; None as long as it may not."""
        if self.beat is None or self.beat.done:
            return None
        looks, patience = self._patience.look_seconds, self._patience
        silent, idle = self._looks_silent * looks, self.looks_idle * looks
        where = f" at {self.beat.place}" if self.beat.place else ""
        if silent >= patience.stopped_seconds:
            how = "its process is stopped" if process_state(self.beat.process_id) == "T" else "its process does nothing"
            return f"rank {self.rank} has not answered for {silent:.0f} s: {how}; it was{where or ' starting'}"
        if idle >= patience.idle_seconds:
            return f"rank {self.rank} has neither computed nor read anything for {idle:.0f} s: it hangs{where}"
        return None

    def kill(self) -> None:
        if self.beat is not None and not self.beat.done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.beat.process_id, signal.SIGKILL)

    def _listen(self) -> bool:
        heard = False
        with contextlib.suppress(EOFError, OSError):
            while self._beats.poll():
                self.beat, heard = self._beats.recv(), True
        return heard

    def _has_worked(self, work: Work) -> bool:
        before = self._work
        least_seconds = max(LEAST_SECONDS, LEAST_SHARE * self._patience.look_seconds)
        return (
            before is None
            or abs(work.processor_seconds - before.processor_seconds) > least_seconds
            or abs(work.bytes_moved - before.bytes_moved) > LEAST_BYTES
        )


class Watch:
    """Looks at all ranks of this host from a thread of its own, and ends them all where one hangs.

    ``senders``: by local rank, for ``beating``. ``error``: what is wrong, once something is.
    """

    def __init__(self, processes: int, patience: Patience) -> None:
        pipes = [Pipe(duplex=False) for _ in range(processes)]
        self.senders = [sender for _, sender in pipes]
        self.error: RunError | None = None
        self._receivers = [receiver for receiver, _ in pipes]
        self._ranks = [RankWatch(rank, receiver, patience) for rank, receiver in enumerate(self._receivers)]
        self._patience = patience
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch ranks")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for connection in (*self.senders, *self._receivers):
            connection.close()

    def _run(self) -> None:
        while self.error is None and not self._end.wait(self._patience.look_seconds):
            for rank in self._ranks:
                rank.look()
            # Who waits on a device, in no exchange of ours, may look idle too, but not for as long.
            for hanging in sorted(self._ranks, key=lambda rank: -rank.looks_idle):
                complaint = hanging.complaint()
                if complaint is not None:
                    self.error = stall(complaint, hanging, self._ranks)
                    break
            if self.error is not None:
                for rank in self._ranks:
                    rank.kill()


def stall(complaint: str, hanging: RankWatch, ranks: Sequence[RankWatch]) -> RunError:
    """The error of a rank that hangs, with where another one waits for it."""
    waiting = [r for r in ranks if r is not hanging and r.beat is not None and r.beat.waiting and r.beat.place]
    others = f"; rank {waiting[0].rank} waits for it at {waiting[0].beat.place}" if waiting and waiting[0].beat else ""
    return RunError(
        f"{complaint}{others}; the run was stopped on all ranks and nothing of it was stored",
        hint="look for a disk, a file server or a driver in trouble (dmesg); if it happens again, "
        "py-spy dump --pid of that rank's process tells where it hangs",
    )


def process_state(process_id: int) -> str | None:
    """The letter that the system has for it, None where there is no such process."""
    stat = _stat(process_id)
    return None if stat is None else stat[0]


def work_of(process_id: int) -> Work | None:
    """None where the system does not tell."""
    seconds = _processor_seconds(process_id)
    try:
        lines = (PROC / str(process_id) / "io").read_text().splitlines()
    except OSError:
        return None
    if seconds is None:
        return None
    moved = dict(line.split(": ") for line in lines)
    counted = ("rchar", "wchar", "read_bytes", "write_bytes")
    return Work(seconds, sum(int(moved[name]) for name in counted))


def _processor_seconds(process_id: int) -> float | None:
    """With that of the processes it started, which compile for it."""
    stat = _stat(process_id)
    if stat is None:
        return None
    own = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    children: set[int] = set()
    for file in (PROC / str(process_id) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # threads end while they are listed
            children.update(map(int, file.read_text().split()))
    return own + sum(_processor_seconds(child) or 0.0 for child in children)


def _stat(process_id: int) -> list[str] | None:
    """Of /proc/…/stat, what follows the program's name, which may have anything in it."""
    try:
        return (PROC / str(process_id) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
