"""A rank that hangs ends all ranks with one message that names it; one that is slow does not."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from probes.devices import find_devices
from probes.errors import RunError
from runtime import liveness, parallel
from runtime.experts.transfer import DiskSource
from runtime.launch import launch
from runtime.liveness import Beat, Patience, RankWatch, Work, beat_of, beating, process_state, work_of
from runtime.options import RunOptions
from runtime.parallel import Ranks
from runtime.policy.spec import parse_policy
from runtime.worker import RankReport, run_rank

Checkpoint = Callable[..., Path]

LOOKS = Patience(look_seconds=1.0, stopped_seconds=3.0, idle_seconds=6.0)
PATIENCE = Patience(look_seconds=0.25, stopped_seconds=5.0, idle_seconds=6.0)
SLOW_SECONDS = 13.0
JOIN_SECONDS = 10.0
"""Of slow ranks: more than twice what a rank may be idle, and longer than the process group would wait."""


class Process:
    """What the system tells of a process that is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: str | None = "S"
        self.work: Work | None = Work(1.0, 10_000)
        receiver, self.sender = Pipe(duplex=False)
        self.watch = RankWatch(1, receiver, LOOKS)
        monkeypatch.setattr(liveness, "process_state", lambda _: self.state)
        monkeypatch.setattr(liveness, "work_of", lambda _: self.work)
        self.sender.send(Beat(os.getpid(), "runtime/engine.py:7 (step)", waiting=False))
        self.watch.look()

    def looks(self, number: int, *, beat: Beat | None = None, work: Work | None = None) -> list[str | None]:
        """What is said after each of ``number`` looks, before which there was a ``beat`` and so much ``work``."""
        said = []
        for _ in range(number):
            if beat is not None:
                self.sender.send(beat)
            if work is not None and self.work is not None:
                self.work = Work(
                    self.work.processor_seconds + work.processor_seconds, self.work.bytes_moved + work.bytes_moved
                )
            self.watch.look()
            said.append(self.watch.complaint())
        return said


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


BUSY = Beat(1, "runtime/engine.py:9 (step)", waiting=False)
WAITING = Beat(1, "runtime/execution.py:5 (add_up)", waiting=True)


@pytest.mark.parametrize(
    ("beat", "work"),
    [
        (WAITING, None),
        (BUSY, Work(0.5, 0)),
        (BUSY, Work(0.0, 1 << 20)),
        (None, Work(0.5, 0)),  # a call that never lets other threads in
        (None, Work(0.0, 1 << 20)),
    ],
)
def test_who_waits_or_works_never_hangs(process: Process, beat: Beat | None, work: Work | None) -> None:
    assert process.looks(100, beat=beat, work=work) == [None] * 100


@pytest.mark.parametrize("last", [BUSY, WAITING])
def test_who_says_nothing_and_does_nothing_is_stopped(process: Process, last: Beat) -> None:
    process.looks(1, beat=last, work=Work(1.0, 0))
    process.state = "T"
    said = process.looks(3)
    assert said[:2] == [None, None]
    assert said[2] == f"rank 1 has not answered for 3 s: its process is stopped; it was at {last.place}"


def test_who_tells_of_no_wait_and_does_nothing_hangs(process: Process) -> None:
    said = process.looks(6, beat=BUSY, work=Work(0.001, 300))  # what its own thread and the launcher's looks take
    assert said[:5] == [None] * 5
    assert said[5] == f"rank 1 has neither computed nor read anything for 6 s: it hangs at {BUSY.place}"


@pytest.mark.parametrize("sign", [{"beat": WAITING}, {"work": Work(0.5, 0)}, {"work": Work(0.0, 1 << 20)}])
def test_any_sign_of_life_begins_the_count_anew(process: Process, sign: dict[str, Any]) -> None:
    for _ in range(5):
        assert process.looks(2) == [None, None]
        assert process.looks(1, **sign) == [None]


@pytest.mark.parametrize(
    ("state", "work", "last"),
    [
        ("t", Work(1.0, 0), BUSY),  # a debugger's
        (None, None, BUSY),
        ("S", None, BUSY),  # a system that does not tell
        ("S", Work(1.0, 0), Beat(1, "", waiting=False, done=True)),
    ],
)
def test_whom_nothing_is_known_of_is_not_accused(
    process: Process, state: str | None, work: Work | None, last: Beat
) -> None:
    process.looks(1, beat=last)
    process.state, process.work = state, work
    assert process.looks(20) == [None] * 20


def test_the_system_counts_computing_reading_and_what_children_compute(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    program = (
        "import os, sys, time\n"
        "def burn():\n    while time.process_time() < 0.3: pass\n"
        "for line in sys.stdin:\n"
        "    if line == 'compute\\n': burn()\n"
        f"    elif line == 'read\\n': open({str(file)!r}, 'rb').read()\n"
        "    elif os.fork() == 0:\n        burn(); print('', flush=True); time.sleep(600)\n"
        "    else: continue\n"
        "    print('', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        seen = [work_of(process.pid)]
        for order in ("read", "compute", "fork"):
            process.stdin.write(f"{order}\n")
            process.stdin.flush()
            process.stdout.readline()
            seen.append(work_of(process.pid))
        begin, read, computed, forked = (work for work in seen if work is not None)
        assert read.bytes_moved - begin.bytes_moved >= 1 << 20
        assert computed.processor_seconds - read.processor_seconds >= 0.1
        assert forked.processor_seconds - computed.processor_seconds >= 0.2
        assert process_state(process.pid) in "SR"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert process_state(process.pid) == "T"
    finally:
        for each in [*psutil.Process(process.pid).children(), process]:
            each.kill()
        process.communicate()
    assert process_state(process.pid) is None
    assert work_of(process.pid) is None


def test_a_beat_tells_who_waits_in_an_exchange_and_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Beat] = []

    def exchange(*_: object, **__: object) -> None:
        seen.append(beat_of(sys._getframe()))

    def load() -> None:
        step = SimpleNamespace(
            f_globals={"__name__": "runtime.models.load"},
            f_lineno=12,
            f_code=load.__code__,
            f_back=sys._getframe(),
        )
        seen.append(beat_of(cast(FrameType, step)))

    monkeypatch.setattr("runtime.parallel.dist.all_reduce", exchange)
    monkeypatch.setattr("runtime.parallel.dist.all_gather_object", exchange)
    ranks = Ranks(rank=0, world=2)
    ranks.sum_(torch.zeros(1))
    ranks.all_or_none(load)  # which waits only once all is loaded
    assert [beat.waiting for beat in seen] == [True, False, True]
    assert [beat.place for beat in seen] == ["", "runtime/models/load.py:12 (load)", ""]
    assert {beat.process_id for beat in seen} == {os.getpid()}
    assert beat_of(None) == Beat(os.getpid(), "", waiting=False)


def test_beats_come_until_the_end_and_end_with_the_launcher() -> None:
    receiver, sender = Pipe(duplex=False)
    with beating(sender, Patience(look_seconds=0.01)):
        first = [receiver.recv() for _ in range(3)]
    assert not any(beat.done for beat in first)
    beats = []
    while receiver.poll():
        beats.append(receiver.recv())
    assert beats[-1].done
    receiver.close()
    with beating(sender, Patience(look_seconds=0.01)):  # which nobody hears
        pass


# real ranks -----------------------------------------------------------------------------------------------------------


def hindered(asked: tuple[RunOptions, Path, int, str]) -> RankReport:
    """The program of a rank, where something befalls rank ``number`` at its first fetch after ten, or while loading."""
    options, folder, number, fault = asked
    parallel.JOIN_TIMEOUT = datetime.timedelta(seconds=JOIN_SECONDS)
    rank = int(os.environ["RANK"])
    (folder / f"rank-{rank}").write_text(str(os.getpid()))
    if rank == number:
        _hinder(fault)
    return run_rank(options)


def _hinder(fault: str) -> None:
    deliver, begin = DiskSource.deliver, DiskSource.__init__
    calls: list[int] = []

    def hindered_deliver(self: DiskSource, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 10:
            FAULTS[fault]()
        deliver(self, *arguments)

    def hindered_begin(self: DiskSource, *arguments: Any, **options: Any) -> None:
        FAULTS[fault.removesuffix(" while loading")]()
        begin(self, *arguments, **options)

    if fault.endswith("while loading"):
        DiskSource.__init__ = hindered_begin  # type: ignore[method-assign]  # in a process of its own
    else:
        DiskSource.deliver = hindered_deliver  # type: ignore[method-assign]


def _read_for_ever() -> None:
    reading, _ = os.pipe()
    os.read(reading, 1)


def _compute_slowly() -> None:
    until = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < until:
        sum(range(1000))


def _read_slowly() -> None:
    until = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < until:
        with Path(sys.executable).open("rb") as stream:
            stream.read(100_000)
        time.sleep(0.1)


FAULTS: dict[str, Callable[[], None]] = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hanging read": _read_for_ever,
    "slow processor": _compute_slowly,
    "slow disk": _read_slowly,
}


@pytest.fixture
def run_hindered(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, str], RankReport]]:
    """Two ranks of a tiny model, one of which meets a fault."""
    # Behind the packages under test, so that ranks find this module.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = RunOptions(
        model=checkpoint("qwen3_moe", top_k=4),
        devices=find_devices("cpu:2"),
        tier="disk",
        policy=parse_policy("router"),
        cache="lfu",
        prompts=("Hello",),
        held_out=None,
        calibration=None,
        cache_experts=2,
        dtype="float32",
        max_new_tokens=4,
        pairs=2,
        partial_file=tmp_path / "partial.pickle",
    )

    def run(number: int, fault: str) -> RankReport:
        report: RankReport = launch(hindered, (options, tmp_path, number, fault), processes=2, patience=PATIENCE)
        return report

    yield run
    for file in tmp_path.glob("rank-*"):
        assert not psutil.pid_exists(int(file.read_text()))


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("when", ["", " while loading"])
def test_a_stopped_rank_ends_all(run_hindered: Callable[[int, str], RankReport], number: int, when: str) -> None:
    with pytest.raises(RunError) as caught:
        run_hindered(number, f"stopped{when}")
    message = caught.value.message
    assert f"rank {number} has not answered for 5 s: its process is stopped; it was at runtime/" in message
    assert f"; rank {1 - number} waits for it at runtime/" in message
    assert "nothing of it was stored" in message
    assert "dmesg" in str(caught.value.hint)
    assert "py-spy" in str(caught.value.hint)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("fault", ["hanging read", "hanging read while loading"])
def test_a_rank_whose_read_never_returns_ends_all(run_hindered: Callable[[int, str], RankReport], fault: str) -> None:
    with pytest.raises(RunError) as caught:
        run_hindered(1, fault)
    message = caught.value.message
    where = "runtime/worker.py" if "loading" in fault else "runtime/experts/transfer.py"
    assert f"rank 1 has neither computed nor read anything for 6 s: it hangs at {where}" in message
    assert "; rank 0 waits for it at runtime/" in message


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("fault", ["slow processor", "slow disk", "slow disk while loading"])
def test_a_slow_rank_is_waited_for(run_hindered: Callable[[int, str], RankReport], fault: str) -> None:
    report = run_hindered(1, fault)
    assert [len(passes) for passes in (*report.baseline, *report.treated)] == [2, 2, 2, 2]
