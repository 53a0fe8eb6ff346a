"""One probe: the machine's fingerprint and every link, within a time limit that holds on a loaded machine too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from probes.backend import TorchBackend
from probes.collectives import measure_collectives
from probes.contention import busy
from probes.devices import find_devices
from probes.errors import DeviceError, Interrupted, UsageError
from probes.fingerprint import take_fingerprint
from probes.groups import link_groups
from probes.ids import new_id, now
from probes.links import GRANULARITY, measure_link
from probes.plan import BackendFactory, LinkPlan, host_copies, plan_links
from probes.records import INTERRUPTED, Concurrency, Device, Field, Fingerprint, LinkKind, LinkMeasurement, Probe
from probes.sampling import Limits
from probes.scratch import make_scratch
from probes.topology import pcie_while_busy

# With start-up before and storing after it, a default probe takes at most 30 s, a quick one 15.
FULL_SECONDS = 20.0
QUICK_SECONDS = 9.0
_SMALLEST_BYTES = 4 << 10
_LARGEST_BYTES = {"full": 64 << 20, "quick": 16 << 20}
_LARGEST_DISK_BYTES = 32 << 20
_LARGEST_GPU_BYTES = {"full": 512 << 20, "quick": 64 << 20}
_STEP = {"full": 2, "quick": 4}
_SCRATCH_BYTES = {"full": 512 << 20, "quick": 256 << 20}
_WRITE_SHARE = 0.15
# A disk scatters more than memory, and its burst has to be spent first.
_WEIGHTS = {LinkKind.DISK_TO_HOST: 2.0}
_LEAST_LINK_SECONDS = 0.2
# Long enough a copy that the link is at work whenever the driver is asked.
_BUSY_BYTES = 32 << 20
# Beside the starting of a process for each device; not part of a default probe's time.
_COLLECTIVES_SECONDS = {"full": 8.0, "quick": 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What to measure. ``devices``: as ``--devices``; None for what the machine offers.

    ``extra_sizes``: measured beside the geometric sweep, such as the bytes of a model's experts.
    ``disk_folder``: where the disk is measured. ``seconds``: time for measuring, without start-up. ``collectives``:
    also what expert parallelism sends between all devices, which takes time of its own.
    """

    disk_folder: Path
    devices: str | None = None
    quick: bool = False
    extra_sizes: tuple[int, ...] = ()
    seconds: float | None = None
    seed: int = 0
    collectives: bool = False

    def __post_init__(self) -> None:
        wrong = [size for size in self.extra_sizes if size <= 0]
        if wrong:
            raise UsageError(f"a transfer of {wrong[0]} bytes cannot be measured", hint="sizes are positive")
        if self.seconds is not None and self.seconds <= 0:
            raise UsageError("there is no time to measure anything", hint="allow some seconds")

    @property
    def scale(self) -> str:
        return "quick" if self.quick else "full"

    def sizes_for(self, kind: LinkKind) -> tuple[int, ...]:
        """Ascending sizes of whole pages to measure links of ``kind`` with."""
        largest = _LARGEST_BYTES[self.scale]
        if kind is LinkKind.DISK_TO_HOST:
            largest = min(largest, _LARGEST_DISK_BYTES)
        elif kind is not LinkKind.HOST_MEMORY:
            largest = _LARGEST_GPU_BYTES[self.scale]
        sizes = [_SMALLEST_BYTES]
        while sizes[-1] * _STEP[self.scale] <= largest:
            sizes.append(sizes[-1] * _STEP[self.scale])
        return tuple(sorted({-(-size // GRANULARITY) * GRANULARITY for size in (*sizes, *self.extra_sizes)}))


class ProbeInterrupted(Interrupted):
    """Stopped by the user; ``probe`` holds the links that were complete, or is None."""

    def __init__(self, message: str = "interrupted", *, hint: str | None = None, probe: Probe | None = None) -> None:
        super().__init__(message, hint=hint)
        self.probe = probe


Progress = Callable[[str, float], None]


def probe(
    options: ProbeOptions,
    *,
    make_backend: BackendFactory = TorchBackend,
    progress: Progress = lambda what, share: None,
) -> Probe:
    """Measure this machine. ``progress`` is told what is being measured and the share of the work that is done.

    Raises ``UsageError`` or ``DeviceError`` for devices that are not here, and ``ProbeInterrupted`` on Ctrl-C.
    """
    deadline = time.monotonic() + (options.seconds or (QUICK_SECONDS if options.quick else FULL_SECONDS))
    progress("fingerprint", 0.0)
    devices = find_devices(options.devices)
    fingerprint = _with_busy_pcie(take_fingerprint(devices, options.disk_folder), devices, make_backend)
    links: list[LinkMeasurement] = []
    stopped = False
    try:
        for link in _measure(options, devices, make_backend, deadline, progress):
            links.append(link)
        if options.collectives:
            links += measure_collectives(
                devices,
                seconds=_COLLECTIVES_SECONDS[options.scale],
                seed=options.seed,
                progress=lambda share: progress("collectives of all devices", share),
            )
    except KeyboardInterrupt:
        stopped = True
    found = Probe(
        probe_id=new_id(),
        created_at=now(),
        fingerprint=fingerprint,
        devices=devices,
        links=tuple(links),
        link_groups=link_groups(links, devices, sizes=options.extra_sizes),
        warnings=(INTERRUPTED,) if stopped else (),
    )
    if stopped:
        raise ProbeInterrupted(probe=found if any(link.samples for link in links) else None)
    return found


def _measure(
    options: ProbeOptions,
    devices: tuple[Device, ...],
    make_backend: BackendFactory,
    deadline: float,
    progress: Progress,
) -> Iterator[LinkMeasurement]:
    """One link after the other; what one leaves of its time, the following share."""
    progress("writing a file to read", 0.01)
    start = time.monotonic()
    with prepared(options, devices, make_backend, seconds=deadline - start) as plans:
        weight_left = sum(_weight(plan) for plan in plans)
        for plan in plans:
            begin = time.monotonic()
            weight = _weight(plan)
            seconds = max(_LEAST_LINK_SECONDS, (deadline - begin) * weight / weight_left if weight else 0.0)
            done, whole = (begin - start) / (deadline - start), seconds / (deadline - start)
            yield measure_link(
                plan,
                options.sizes_for(plan.kind),
                Limits(seconds=seconds),
                seed=options.seed,
                progress=_shifted(progress, _describe(plan), done, whole),
            )
            weight_left -= weight
    progress("done", 1.0)


@contextlib.contextmanager
def prepared(
    options: ProbeOptions, devices: tuple[Device, ...], make_backend: BackendFactory, *, seconds: float
) -> Iterator[tuple[LinkPlan, ...]]:
    """The links to measure, with the file that the disk's are measured on, written in a part of ``seconds``.

    Within the block torch copies with one thread, as a rank does; it would split large copies among all of them.
    """
    scratch = make_scratch(
        options.disk_folder,
        size_bytes=_SCRATCH_BYTES[options.scale],
        seconds=seconds * _WRITE_SHARE,
        seed=options.seed,
    )
    largest = max(options.sizes_for(LinkKind.HOST_TO_DEVICE if devices[0].kind != "cpu" else LinkKind.HOST_MEMORY))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.closing(scratch):
            yield plan_links(devices, scratch, max_bytes=largest, seed=options.seed, make_backend=make_backend)
    finally:
        torch.set_num_threads(threads)


def _with_busy_pcie(fingerprint: Fingerprint, devices: Sequence[Device], make_backend: BackendFactory) -> Fingerprint:
    """The PCIe generation as it is during a transfer, added to the state; nothing where that cannot be had."""

    def copying(device: Device) -> AbstractContextManager[None]:
        return busy(host_copies(device, size_bytes=_BUSY_BYTES, make_backend=make_backend), _BUSY_BYTES)

    try:
        found = pcie_while_busy(devices, copying)
    except DeviceError as error:
        found = {"pcie_busy": Field(value=None, reason=error.message)}
    return replace(fingerprint, state=dict(sorted({**fingerprint.state, **found}.items()))) if found else fingerprint


def _weight(plan: LinkPlan) -> float:
    return 0.0 if plan.waived is not None else _WEIGHTS.get(plan.kind, 1.0)


def _describe(plan: LinkPlan) -> str:
    mode = f" {plan.mode}" if plan.mode else ""
    together = {Concurrency.ALL: ", all at once", Concurrency.BOTH_WAYS: ", both ways"}.get(plan.concurrency, "")
    return f"{plan.kind.replace('_', ' ')} {plan.source} → {plan.destination}{mode}{together}"


def _shifted(progress: Progress, what: str, done: float, whole: float) -> Callable[[float], None]:
    return lambda share: progress(what, min(1.0, done + whole * share))
