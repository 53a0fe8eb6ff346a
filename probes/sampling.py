"""When a sweep over sizes has been measured often enough, and how much its figures can be trusted.

Sizes are interleaved, so that a machine that warms up or slows down does not look like a size that costs more. The
figure is the median; a size is done when the 95 % interval of its median is narrow, and the sweep ends when all sizes
are, or at a time limit, and then says so. The warnings follow pyperf's rules.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from probes.records import Bandwidth, Sample
from probes.units import format_seconds, format_size

# A size is done when its median's 95 % interval is within ± this share of the median.
RELATIVE_HALF_WIDTH = 0.05
# Fewer values have no 95 % interval of the median.
MIN_SAMPLES = 6
MAX_SAMPLES = 60
# Clocks ramp up for some time, whatever the number of transfers.
WARM_UP_SECONDS = 0.2
# A round must leave time for this many rounds; the largest sizes are left out until it does.
MIN_ROUNDS = 8
MIN_SIZES = 3
# pyperf: a standard deviation of 10 % of the mean, or an extreme half a mean away, is no stable benchmark.
STDEV_WARNING = 0.10
EXTREME_WARNING = 0.50
# Sizes from a quarter of the largest on tell what bandwidth lasts.
LARGE_SHARE = 4
# A burst is told from what lasts when it is faster by this factor and far outside the scatter.
BURST_FACTOR = 1.25
BURST_T = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop: by statistic, at the latest after ``seconds``."""

    seconds: float
    relative_half_width: float = RELATIVE_HALF_WIDTH
    min_samples: int = MIN_SAMPLES
    max_samples: int = MAX_SAMPLES
    warm_up_seconds: float = WARM_UP_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Samples by ascending size. ``unstable``: why the figures should not be trusted, or None."""

    samples: tuple[Sample, ...]
    unstable: str | None
    warnings: tuple[str, ...]


class Burst(NamedTuple):
    """Rates in bytes per second before and after the credit was spent."""

    burst: float
    sustained: float


def sweep(
    take: Callable[[int], float],
    sizes: Sequence[int],
    limits: Limits,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[float], None] = lambda share: None,
) -> Sweep:
    """Measure ``take(size) → seconds`` for every size until all medians are known well enough.

    ``progress`` is told the share of the time limit that has passed. Errors of ``take`` go through.
    """
    start = clock()
    deadline = start + limits.seconds
    sizes, left_out = _affordable(take, sorted(set(sizes)), limits, clock)
    values: dict[int, list[float]] = {size: [] for size in sizes}
    order = random.Random(seed)
    open_sizes = list(sizes)
    while open_sizes and clock() < deadline:
        order.shuffle(open_sizes)
        for size in open_sizes:
            values[size].append(take(size))
            if clock() >= deadline:
                break
        progress(min(1.0, (clock() - start) / limits.seconds))
        open_sizes = [size for size in sizes if not _is_done(values[size], limits)]
    samples = tuple(Sample(size_bytes=size, seconds=tuple(values[size])) for size in sizes if values[size])
    return Sweep(
        samples=samples, unstable=why_unstable(values, limits), warnings=(*left_out, *stability_warnings(samples))
    )


def _affordable(
    take: Callable[[int], float], sizes: list[int], limits: Limits, clock: Callable[[], float]
) -> tuple[list[int], list[str]]:
    """Warm up, and leave out the largest sizes when there is no time to measure them often enough."""
    start = clock()
    # The first transfer also waits for whatever has to start before it.
    take(sizes[0])
    total = 0.0
    kept = list(sizes[:MIN_SIZES])
    cost = 0.0
    for before, size in itertools.pairwise([sizes[0], *sizes]):
        # Far too large to try: half of what it costs if time grows with size.
        if size not in kept and cost * size / before / 2 * MIN_ROUNDS > limits.seconds:
            break
        # One interruption must not cost a size its place: the shorter of two.
        cost = _cost(take, size, clock)
        if (total + cost) * MIN_ROUNDS > limits.seconds:
            cost = min(cost, _cost(take, size, clock))
        if size not in kept and (total + cost) * MIN_ROUNDS > limits.seconds:
            break
        total += cost
        kept = list(sizes[: max(len(kept), sizes.index(size) + 1)])
    while clock() - start < min(limits.warm_up_seconds, limits.seconds / 10):
        take(kept[-1])
    if len(kept) == len(sizes):
        return kept, []
    dropped = ", ".join(format_size(size) for size in sizes[len(kept) :])
    return kept, [f"too slow here to measure in the time allowed, left out: {dropped}"]


def _cost(take: Callable[[int], float], size: int, clock: Callable[[], float]) -> float:
    before = clock()
    take(size)
    return clock() - before


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the median from order statistics (binomial), or None for fewer than six values.

    Hahn & Meeker, Statistical Intervals (1991), section 5.2: no assumption about the distribution.
    """
    n = len(values)
    below = 0.0
    rank = 0
    # The largest rank r with P(Binomial(n, 1/2) < r) ≤ 2.5 %: the r-th smallest and r-th largest value.
    while True:
        below += math.comb(n, rank) / 2**n
        if below > 0.025:
            break
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[n - rank]


def relative_half_width(values: Sequence[float]) -> float:
    """Half the width of the median's interval, as a share of the median; infinite where there is no interval."""
    interval = median_interval(values)
    if interval is None:
        return math.inf
    return (interval[1] - interval[0]) / 2 / statistics.median(values)


def _is_done(values: Sequence[float], limits: Limits) -> bool:
    if len(values) < limits.min_samples:
        return False
    return len(values) >= limits.max_samples or relative_half_width(values) <= limits.relative_half_width


def why_unstable(values: Mapping[int, Sequence[float]], limits: Limits) -> str | None:
    """Which medians are not known well enough, or None."""
    widths = {size: relative_half_width(taken) for size, taken in values.items()}
    wide = {size: width for size, width in widths.items() if width > limits.relative_half_width}
    if not wide:
        return None
    size, width = max(wide.items(), key=lambda item: item[1])
    known = "too few samples" if math.isinf(width) else f"± {width:.0%}" if width < 1 else "± 100% and more"
    return (
        f"the medians of {len(wide)} of {len(values)} sizes are not known to ± {limits.relative_half_width:.0%} "
        f"(worst: {format_size(size)}, {known}); let the machine idle and probe again"
    )


def stability_warnings(samples: Sequence[Sample]) -> tuple[str, ...]:
    """What makes these figures doubtful, and what to do about it (pyperf's rules)."""
    loose = [sample for sample in samples if _relative_stdev(sample.seconds) >= STDEV_WARNING]
    extreme = [sample for sample in samples if _extreme(sample.seconds) >= EXTREME_WARNING]
    warnings = []
    if loose:
        worst = max(loose, key=lambda sample: _relative_stdev(sample.seconds))
        warnings.append(
            f"standard deviation of 10 % or more at {len(loose)} of {len(samples)} sizes (worst: "
            f"{format_size(worst.size_bytes)}, {_relative_stdev(worst.seconds):.0%}): close other programs"
        )
    if extreme:
        worst = max(extreme, key=lambda sample: _extreme(sample.seconds))
        warnings.append(
            f"values half a mean or more off at {len(extreme)} of {len(samples)} sizes (worst: "
            f"{format_size(worst.size_bytes)}, {format_seconds(max(worst.seconds))} against a median of "
            f"{format_seconds(statistics.median(worst.seconds))}): something else runs now and then"
        )
    return tuple(warnings)


def _relative_stdev(values: Sequence[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0


def _extreme(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return max(max(values) - mean, mean - min(values)) / mean


def bandwidth(samples: Sequence[Sample]) -> Bandwidth | None:
    """Distribution of bytes per second over the largest sizes, or None without samples."""
    if not samples:
        return None
    largest = max(sample.size_bytes for sample in samples)
    rates = sorted(
        sample.size_bytes / seconds
        for sample in samples
        if sample.size_bytes * LARGE_SHARE >= largest
        for seconds in sample.seconds
    )
    return Bandwidth(
        median=statistics.median(rates), p05=percentile(rates, 0.05), p95=percentile(rates, 0.95), n=len(rates)
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of the ascending values."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def find_burst(rates: Sequence[float]) -> Burst | None:
    """Tell a fast start from what lasts, in the rates of equal windows of one uninterrupted transfer.

    The windows are split where the squared error around two means is least; the first part is a burst when it is
    clearly faster than the second, far outside the scatter of both.
    """
    best: tuple[float, int] | None = None
    for at in range(2, len(rates) - 2):
        error = _squared_error(rates[:at]) + _squared_error(rates[at:])
        if best is None or error < best[0]:
            best = error, at
    if best is None:
        return None
    error, at = best
    burst, sustained = statistics.median(rates[:at]), statistics.median(rates[at:])
    scatter = math.sqrt(error / (len(rates) - 2) * (1 / at + 1 / (len(rates) - at)))
    if burst < BURST_FACTOR * sustained or burst - sustained < BURST_T * scatter:
        return None
    return Burst(burst, sustained)


def _squared_error(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)
