"""What a rank's program needs around its work: its device, its progress, and quiet while it is timed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from probes.errors import DeviceError
from probes.records import Device
from probes.text import first_line
from runtime.parallel import Ranks


def _own_device(devices: Sequence[Device]) -> Device:
    """This rank's device: the one of this host's ``devices`` that its local rank counts to. Raises ``DeviceError``."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= len(devices):
        raise DeviceError(
            f"local rank {local} has no device: --devices names {len(devices)} on this host",
            hint="start as many ranks per host as it has devices",
        )
    device = devices[local]
    if device.kind != "cpu":
        torch.get_device_module(device.kind).set_device(device.index)
    return device


def _torch_device(device: Device) -> torch.device:
    """As torch names it; CPU ranks share one."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device(device.kind, device.index)


def _all_devices(own: Device, ranks: Ranks) -> tuple[Device, ...]:
    """Every rank's device, numbered by rank."""
    return tuple(replace(device, index=rank) for rank, device in enumerate(ranks.gather(own)))


def _share_processors(ranks: Ranks) -> None:
    """CPU ranks divide the processors among themselves, unless the user has said how many threads there are."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.world))


def take_device(devices: Sequence[Device], ranks: Ranks) -> tuple[tuple[Device, ...], torch.device]:
    """Every rank's device, numbered by rank, and this rank's own as torch names it. Raises ``DeviceError``."""
    own = _own_device(devices)
    everyone = _all_devices(own, ranks)
    device = _torch_device(own)
    if device.type == "cpu":
        _share_processors(ranks)
    return everyone, device


class Progress:
    """Writes how far rank 0 is to the file that the command shows as a bar; does nothing without one."""

    def __init__(self, file: Path | None, ranks: Ranks) -> None:
        self._file = file if ranks.rank == 0 else None
        self._done = 0
        self._total = 1

    def expect(self, total: int) -> None:
        """So many calls of ``advance`` will follow."""
        self._total = self._done + total
        self._write()

    def advance(self) -> None:
        self._done += 1
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps({"done": self._done, "total": self._total, "at": time.time()}))


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collected before, and not within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def full_device_named(rank: int) -> Iterator[None]:
    """Where a device's memory does not suffice within the block, say whose it is and what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"rank {rank}: its device has no room: {first_line(error)}",
            hint="give a smaller --cache-experts or --batch-size; docs/runtime.md says what a rank needs",
        ) from error
