"""Keeping every other device's link busy while one is measured."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from probes.errors import CaeeError, DeviceError
from probes.transfers import Transfer

_SIZE, _STOP, _FIRST = 0, 1, 2
_FAILED = -1
_READY_SECONDS = 10.0
_POLL_SECONDS = 2e-5

Factory = Callable[[], Transfer]


class Contention:
    """Others that repeat transfers of the published size until they are stopped.

    Work that a CPU does gets a process each, as ranks have (threads would wait for each other's interpreter lock);
    copies that a device does get a thread each, since a device's context does not survive a fork.
    """

    def __init__(self, others: int) -> None:
        # Anonymous shared memory: written and read as aligned words by parent and children alike.
        self._shared = np.frombuffer(mmap.mmap(-1, 8 * (_FIRST + others)), dtype=np.int64)
        self._others = others

    def set_size(self, size_bytes: int) -> None:
        """Return when every other is at work with transfers of ``size_bytes``. Raises ``DeviceError``."""
        self._shared[_SIZE] = size_bytes
        deadline = time.monotonic() + _READY_SECONDS
        while not bool((self._shared[_FIRST:] == size_bytes).all()):
            if bool((self._shared[_FIRST:] == _FAILED).any()):
                raise DeviceError("a concurrent transfer failed", hint="see the warnings of the link measured alone")
            if time.monotonic() > deadline:
                raise DeviceError("the concurrent transfers did not start in time", hint="let the machine idle")
            time.sleep(_POLL_SECONDS)

    def work(self, number: int, make: Factory, parent: int) -> None:
        """What other ``number`` does until it is told to stop or its parent is gone."""
        try:
            transfer = make()
            while not self._shared[_STOP] and os.getppid() == parent:
                size = int(self._shared[_SIZE])
                if size == 0:
                    time.sleep(_POLL_SECONDS)
                    continue
                self._shared[_FIRST + number] = size
                transfer.load(min(size, transfer.max_bytes))
        except CaeeError:
            self._shared[_FIRST + number] = _FAILED

    def stop(self) -> None:
        self._shared[_STOP] = 1


@contextlib.contextmanager
def contention(others: Sequence[Factory], *, on_host: bool) -> Iterator[Contention]:
    """Start the others; they are idle until the first ``set_size`` and are gone when the block ends."""
    shared = Contention(len(others))
    workers: list[threading.Thread | multiprocessing.process.BaseProcess] = []
    if on_host:
        fork = multiprocessing.get_context("fork")
        workers += [
            fork.Process(target=_in_process, args=(shared, number, make, os.getpid()), daemon=True)
            for number, make in enumerate(others)
        ]
    else:
        workers += [
            threading.Thread(target=shared.work, args=(number, make, os.getppid()), daemon=True)
            for number, make in enumerate(others)
        ]
    try:
        for worker in workers:
            worker.start()
        yield shared
    finally:
        shared.stop()
        for worker in workers:
            worker.join(timeout=_READY_SECONDS)
            if isinstance(worker, multiprocessing.process.BaseProcess) and worker.is_alive():
                worker.kill()


def _in_process(shared: Contention, number: int, make: Factory, parent: int) -> None:
    # Ctrl-C reaches the whole process group: the parent decides what is kept, and stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent's thread pool does not exist in a forked child.
    torch.set_num_threads(1)
    shared.work(number, make, parent)


@contextlib.contextmanager
def busy(make: Factory, size_bytes: int) -> Iterator[None]:
    """Within the block a thread repeats one transfer of a device, which has begun. Raises ``DeviceError``."""
    with contention([make], on_host=False) as others:
        others.set_size(size_bytes)
        yield
