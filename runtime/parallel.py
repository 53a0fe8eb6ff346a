"""Expert parallelism over torch.distributed: who holds which expert, and the few exchanges between ranks.

One process per device; gloo on CPUs, NCCL on GPUs. ``runtime.launch`` starts the processes through torch's elastic
launcher; under ``torchrun``, on one host or several, the same program joins what torchrun set up.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from probes.errors import CaeeError, RunError
from probes.text import first_line
from runtime.interfaces import interface_towards
from runtime.policy.types import Ints

JOIN_TIMEOUT = datetime.timedelta(seconds=25)
"""How long ranks wait for each other, when they join and in every exchange of a step, before they give up; in a step
only where no launcher watches them."""

JOIN_GRACE = datetime.timedelta(seconds=3)
"""How much longer joining may take before it is given up from outside."""

LOAD_TIMEOUT = datetime.timedelta(minutes=30)
"""How long they wait where one may be slower than another by far: hosts load at the pace of their disks. A rank that
ends is noticed at once all the same, by its closed connections."""

WATCHED = "CAEE_RANKS_WATCHED"
"""Set in the environment of ranks whose launcher ends them when one hangs (``runtime.liveness``): their steps may take
as long as they take."""

T = TypeVar("T")


def contiguous_placement(num_experts: int, devices: int) -> Ints:
    """[N] device of every expert: d = e·D // N, in every layer."""
    return np.arange(num_experts, dtype=np.int64) * devices // num_experts


class PeerLost(RunError):
    """An exchange failed because another rank ended; that rank's own error is the one to show."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank sends in place of its value when it cannot go on."""

    rank: int
    host: str
    message: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all. With one rank every exchange is a no-op, and torch.distributed is not needed.

    ``patient``: the process group of exchanges that may take long. ``steps``: that of the exchanges of a step, None for
    torch's own.
    """

    rank: int
    world: int
    patient: Any = None
    steps: Any = None

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add ``tensor`` up over all ranks, in place. Raises ``RunError`` where a rank is gone."""
        if self.world == 1:
            return
        try:
            dist.all_reduce(tensor, group=self.steps)
        except (RuntimeError, dist.DistBackendError) as error:
            raise _lost(error) from error

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' ``tensor``, of equal shape and type, one after another along the first dimension."""
        if self.world == 1:
            return tensor
        # As bytes, since not every backend moves every type.
        own = tensor.contiguous().view(torch.uint8)
        gathered = own.new_empty((self.world, *own.shape))
        try:
            dist.all_gather(list(gathered.unbind()), own, group=self.steps)
        except (RuntimeError, dist.DistBackendError) as error:
            raise _lost(error) from error
        return gathered.flatten(0, 1).view(tensor.dtype)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum_(torch.zeros(1))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank. Raises ``PeerLost`` where a rank tells why it has none."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self.patient)
        except (RuntimeError, dist.DistBackendError) as error:
            raise _lost(error) from error
        failed = next((each for each in values if isinstance(each, _Failure)), None)
        if failed is not None and failed.rank != self.rank:
            raise PeerLost(f"rank {failed.rank} on {failed.host} failed: {failed.message}", hint=failed.hint)
        return values

    def all_or_none(self, prepare: Callable[[], T]) -> T:
        """What ``prepare`` returns, once it has returned on all ranks, however long that takes.

        Where it raises on one, all others raise ``PeerLost`` with that rank's reason. Exchanges within ``prepare`` may
        be ``gather`` only: there it is where a rank that fails meets the others.
        """
        try:
            prepared = prepare()
        except PeerLost:
            raise
        except Exception as error:
            self.tell(error)
            raise
        self.gather(None)
        return prepared

    def tell(self, error: Exception) -> None:
        """Say at the next ``gather`` of the others why this rank ends."""
        message, hint = (error.message, error.hint) if isinstance(error, CaeeError) else (first_line(error), None)
        failure = _Failure(rank=self.rank, host=socket.gethostname(), message=message, hint=hint)
        with contextlib.suppress(PeerLost):  # another may have ended before
            self.gather(failure)

    def from_first(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        try:
            dist.broadcast_object_list(box, src=0, group=self.steps)
        except (RuntimeError, dist.DistBackendError) as error:
            raise _lost(error) from error
        return box[0]


def join(device_kind: str) -> Ranks:
    """Join the process group that the environment (elastic launcher, torchrun) describes; alone without one."""
    world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if world == 1:
        return Ranks(rank=0, world=1)
    interface = interface_towards(os.environ.get("MASTER_ADDR", "localhost"))
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # gloo beside NCCL: objects and control flags travel over the CPU.
    backend = "gloo" if device_kind == "cpu" else f"cpu:gloo,{device_kind}:nccl"

    def enter() -> tuple[Any, Any]:
        dist.init_process_group(backend, timeout=JOIN_TIMEOUT)
        patient = dist.new_group(backend="gloo", timeout=LOAD_TIMEOUT)
        if WATCHED not in os.environ:
            return patient, None
        return patient, patient if device_kind == "cpu" else dist.new_group(backend=backend, timeout=LOAD_TIMEOUT)

    try:
        patient, steps = _within(JOIN_TIMEOUT + JOIN_GRACE, enter)
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise RunError(
            f"this rank could not join the other {world - 1}: {first_line(error)}",
            hint="start all ranks within 25 s, with the same master address and a free port; between hosts, name the "
            "network interface with GLOO_SOCKET_IFNAME where there are several",
        ) from error
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), patient=patient, steps=steps)


def end_together(error: Exception, device_kind: str) -> None:
    """Tell the other ranks why this one does not take part, when they come to ``all_or_none``, or find none to tell."""
    with contextlib.suppress(RunError):
        ranks = join(device_kind)
        try:
            ranks.from_first(None)  # where the others get what decides
            ranks.tell(error)
        finally:
            leave(ranks)


def _within(limit: datetime.timedelta, action: Callable[[], T]) -> T:
    """What ``action`` returns or raises, or a ``RuntimeError`` after ``limit``: not all of torch's waiting ends by
    itself, as when something else listens at the master's port. A thread that never returns goes with the process."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def act() -> None:
        try:
            done.put((action(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=act, daemon=True, name="join").start()
    try:
        value, error = done.get(timeout=limit.total_seconds())
    except queue.Empty:
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RuntimeError(f"no rank answers at {master}, or none can reach another") from None
    if error is not None:
        raise error
    return cast(T, value)


def leave(ranks: Ranks) -> None:
    """Leave the process group."""
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _lost(error: BaseException) -> PeerLost:
    reason = first_line(error)[:200]
    hint = "another rank probably ended; its own message says why"
    if "timed out" in reason.lower():
        hint = "another rank hangs, or its host does: look there (dmesg; py-spy dump --pid of the rank's process)"
    return PeerLost(f"an exchange between the ranks failed: {reason}", hint=hint)
