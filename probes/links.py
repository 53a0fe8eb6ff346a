"""Measuring one link as planned: warmed up, interleaved, verified, with its burst told from what lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from probes.contention import contention
from probes.errors import DeviceError
from probes.limits import cpus_allowed
from probes.plan import LinkPlan
from probes.records import LinkKind, LinkMeasurement, LinkStatus
from probes.sampling import Limits, Sweep, bandwidth, find_burst, sweep
from probes.text import plural
from probes.transfers import BrokenTransferError, Transfer
from probes.units import format_rate

# Sizes are rounded up to whole pages: that is what a direct read moves, and what a copy of words allows.
GRANULARITY = 4096
# A disk's credit is read away before the samples are taken, for this share of the link's time.
_DRAIN_SHARE = 0.25
_DRAIN_WINDOWS = 24
_DRAIN_BYTES = 8 << 20
# A sample is taken anew, a few times at most, when its thread waited for a processor for more than this share of it.
_WAITED_SHARE = 0.05
_ATTEMPTS = 4
_WORTH_A_WARNING = 0.1
# Both clocks are read one after the other: a share of all the time would leave none for the transfer.
_MOST_WAITED = 0.95


def measure_link(
    plan: LinkPlan,
    sizes: Sequence[int],
    limits: Limits,
    *,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> LinkMeasurement:
    """Measure ``plan``; what cannot be measured becomes ``waived``, what delivers wrong bytes ``broken``."""
    if plan.waived is not None:
        return _result(plan, LinkStatus.WAIVED, reason=plan.waived)
    try:
        transfer = plan.makers[0]()
        burst = _drain(transfer, limits.seconds * _DRAIN_SHARE) if plan.kind is LinkKind.DISK_TO_HOST else None
        taken = _sweep(plan, transfer, sizes, limits, seed, progress)
    except BrokenTransferError as error:
        return _result(plan, LinkStatus.BROKEN, reason=str(error))
    except DeviceError as error:
        return _result(plan, LinkStatus.WAIVED, reason=error.message)
    if not taken.samples:
        return _result(plan, LinkStatus.WAIVED, reason="no transfer was complete in the time allowed")
    rates = bandwidth(taken.samples)
    warnings = [*transfer.notes, *taken.warnings]
    burst_rate = burst if burst is not None and rates is not None and burst > rates.median else None
    if burst_rate is not None and rates is not None:
        warnings.append(
            f"short bursts reach {format_rate(burst_rate)}; the samples were taken after the burst was over"
        )
    return LinkMeasurement(
        kind=plan.kind,
        source=plan.source,
        destination=plan.destination,
        mode=plan.mode,
        concurrency=plan.concurrency,
        status=LinkStatus.OK if taken.unstable is None else LinkStatus.UNSTABLE,
        reason=taken.unstable,
        convention=plan.convention,
        bandwidth_bytes_per_s=rates,
        burst_bytes_per_s=burst_rate,
        samples=taken.samples,
        warnings=tuple(warnings),
    )


def _sweep(
    plan: LinkPlan,
    transfer: Transfer,
    sizes: Sequence[int],
    limits: Limits,
    seed: int,
    progress: Callable[[float], None],
) -> Sweep:
    fitting = [size for size in sizes if size <= transfer.max_bytes]
    # More ranks than processors wait for each other: that belongs to what is measured.
    undisturbed = _Undisturbed(
        transfer, retry=len(plan.makers) <= cpus_allowed(), on_cpu=plan.kind is LinkKind.HOST_MEMORY
    )
    if len(plan.makers) == 1:
        swept = sweep(undisturbed.take, fitting, limits, seed=seed, progress=progress)
    else:
        with contention(plan.makers[1:], on_host=transfer.runs_on_host) as others:

            def take(size_bytes: int) -> float:
                others.set_size(size_bytes)
                return undisturbed.take(size_bytes)

            # Their start, buffers and all, is not part of the time for measuring.
            others.set_size(fitting[0])
            swept = sweep(take, fitting, limits, seed=seed, progress=progress)
    return replace(swept, warnings=(*undisturbed.warnings(), *swept.warnings))


class _Undisturbed:
    """Takes a sample anew when the processor was given to others meanwhile: that says nothing about the link.

    ``on_cpu``: the processor itself moves the bytes, so that what is left of the waiting can be taken off. A disk reads
    on while a thread waits.
    """

    def __init__(self, transfer: Transfer, *, retry: bool, on_cpu: bool) -> None:
        self._transfer = transfer
        self._on_cpu = retry and on_cpu
        self._attempts = _ATTEMPTS if retry else 1
        self._taken = self._disturbed = 0

    def take(self, size_bytes: int) -> float:
        best = self._transfer.timed(size_bytes)
        for _ in range(self._attempts - 1):
            if best.waited <= _WAITED_SHARE:
                break
            self._disturbed += 1
            best = min(best, self._transfer.timed(size_bytes), key=lambda timing: timing.waited)
        self._taken += 1
        return best.seconds * (1.0 - min(best.waited, _MOST_WAITED)) if self._on_cpu else best.seconds

    def warnings(self) -> tuple[str, ...]:
        share = self._disturbed / max(self._taken, 1)
        if share < _WORTH_A_WARNING:
            return ()
        return (f"other programs held the processor: {plural(self._disturbed, 'sample')} taken anew; close them",)


def _drain(transfer: Transfer, seconds: float) -> float | None:
    """Read without a pause for ``seconds``; the rate of the burst at the start, if there was one."""
    size = min(_DRAIN_BYTES, transfer.max_bytes)
    window = seconds / _DRAIN_WINDOWS
    start = begin = time.monotonic()
    moved = 0
    rates: list[float] = []
    while begin < start + seconds:
        transfer.load(size)
        moved += size
        now = time.monotonic()
        if now - begin >= window:
            rates.append(moved / (now - begin))
            begin, moved = now, 0
    burst = find_burst(rates)
    return None if burst is None else burst.burst


def _result(plan: LinkPlan, status: LinkStatus, *, reason: str) -> LinkMeasurement:
    return LinkMeasurement(
        kind=plan.kind,
        source=plan.source,
        destination=plan.destination,
        mode=plan.mode,
        concurrency=plan.concurrency,
        status=status,
        reason=reason,
        convention=plan.convention,
    )
