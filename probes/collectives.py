"""The collectives of expert parallelism over all devices: a process each, through torch.distributed (gloo or NCCL)."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from probes.collective_ranks import RankTask, RankTimes, serve
from probes.records import Concurrency, Device, LinkKind, LinkMeasurement, LinkStatus, Sample
from probes.sampling import Limits, bandwidth, stability_warnings, why_unstable

KINDS = (LinkKind.ALL_TO_ALL_DISPATCH, LinkKind.ALL_TO_ALL_COMBINE, LinkKind.ALL_REDUCE)
RANKS = "ranks"
# Bytes that one rank gives: from a few tokens' activations to a prefill's.
_SMALLEST_BYTES = 4 << 10
_LARGEST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_STEP = 4
# For the ranks to start and to find each other, on a busy machine.
_START_SECONDS = 90.0
_POLL_SECONDS = 0.2


def measure_collectives(
    devices: Sequence[Device],
    *,
    seconds: float,
    sizes: Sequence[int] = (),
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[LinkMeasurement, ...]:
    """Every collective on every device, or one waived entry for each collective with the reason.

    ``sizes``: bytes that one device gives; without them a geometric sweep.
    """
    if len(devices) == 1:
        return tuple(
            _waived(kind, devices[0].kind, "there is only one device: it has no one to talk to") for kind in KINDS
        )
    # Whole words for every peer.
    unit = 8 * len(devices)
    whole = tuple(sorted({-(-size // unit) * unit for size in sizes or _sweep(devices[0].kind)}))
    outcomes = _run(devices, whole, seconds, seed, progress)
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if failures:
        return tuple(_waived(kind, devices[0].kind, failures[0]) for kind in KINDS)
    return tuple(
        _measurement(kind, device, outcome)
        for kind in KINDS
        for device, outcome in zip(devices, outcomes, strict=True)
        if isinstance(outcome, RankTimes)
    )


def _sweep(kind: str) -> tuple[int, ...]:
    sizes = [_SMALLEST_BYTES]
    while sizes[-1] * _STEP <= _LARGEST_BYTES.get(kind, _LARGEST_BYTES["cuda"]):
        sizes.append(sizes[-1] * _STEP)
    return tuple(sizes)


def _run(
    devices: Sequence[Device], sizes: tuple[int, ...], seconds: float, seed: int, progress: Callable[[float], None]
) -> list[RankTimes | str]:
    # A fork of a process with torch's threads, or with a CUDA context, cannot use either.
    spawn = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    processes: list[SpawnProcess] = []
    with tempfile.TemporaryDirectory(prefix="caee-") as folder:
        try:
            for rank, device in enumerate(devices):
                task = RankTask(
                    rank=rank,
                    ranks=len(devices),
                    device="cpu" if device.kind == "cpu" else device.name_on_link,
                    sizes=sizes,
                    seconds=seconds,
                    seed=seed,
                    meeting_file=str(Path(folder) / "ranks"),
                )
                ours, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(target=serve, args=(task, theirs), daemon=True)
                process.start()
                theirs.close()
                ends.append(ours)
                processes.append(process)
            return _outcomes(ends, seconds, progress)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for end in ends:
                end.close()


def _outcomes(ends: Sequence[Connection], seconds: float, progress: Callable[[float], None]) -> list[RankTimes | str]:
    """What the ranks send, in their order; the first failure ends the waiting for the others."""
    start = time.monotonic()
    found: dict[int, RankTimes | str] = {}
    while len(found) < len(ends):
        passed = time.monotonic() - start
        if passed > _START_SECONDS + 2 * seconds:
            return ["the ranks did not come together in time: let the machine idle"]
        progress(min(1.0, passed / (2 * seconds)))
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        for end in wait(waiting, timeout=_POLL_SECONDS):
            rank = next(at for at, one in enumerate(ends) if one is end)
            try:
                found[rank] = ends[rank].recv()
            except (EOFError, OSError):
                return [f"rank {rank} died while it was measuring"]
            if isinstance(found[rank], str):
                return [found[rank]]
    return [found[rank] for rank in range(len(ends))]


def _measurement(kind: LinkKind, device: Device, times: RankTimes) -> LinkMeasurement:
    values = times.seconds.get(kind, {})
    samples = tuple(Sample(size_bytes=size, seconds=tuple(values[size])) for size in sorted(values))
    broken = times.broken.get(kind)
    unstable = why_unstable(values, Limits(seconds=0.0)) if values else "no round was complete in the time allowed"
    status = LinkStatus.BROKEN if broken else LinkStatus.UNSTABLE if unstable else LinkStatus.OK
    return LinkMeasurement(
        kind=kind,
        source=device.name_on_link,
        destination=RANKS,
        mode=None,
        concurrency=Concurrency.ALL,
        status=status,
        reason=broken or unstable,
        bandwidth_bytes_per_s=None if broken else bandwidth(samples),
        samples=() if broken else samples,
        warnings=() if broken else stability_warnings(samples),
    )


def _waived(kind: LinkKind, source: str, reason: str) -> LinkMeasurement:
    return LinkMeasurement(
        kind=kind,
        source=source,
        destination=RANKS,
        mode=None,
        concurrency=Concurrency.ALL,
        status=LinkStatus.WAIVED,
        reason=reason,
    )
