"""When to stop, what to warn of, and a burst told from what lasts."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.records import Sample
from probes.sampling import (
    MIN_SAMPLES,
    Limits,
    bandwidth,
    find_burst,
    median_interval,
    percentile,
    relative_half_width,
    stability_warnings,
    sweep,
)


class Machine:
    """Transfers on a virtual clock: size ÷ rate seconds each, times a random factor."""

    def __init__(self, *, noise: float = 0.0, rate: float = 1e9, seed: int = 0) -> None:
        self.now = 0.0
        self.noise = noise
        self.rate = rate
        self.calls: list[int] = []
        self._random = random.Random(seed)

    def clock(self) -> float:
        return self.now

    def take(self, size_bytes: int) -> float:
        self.calls.append(size_bytes)
        seconds = size_bytes / self.rate * math.exp(self._random.gauss(0.0, self.noise))
        self.now += seconds
        return seconds


SIZES = [1_000_000, 2_000_000, 4_000_000]


def test_quiet_machines_need_the_fewest_samples() -> None:
    machine = Machine()
    swept = sweep(machine.take, SIZES, Limits(seconds=10.0, warm_up_seconds=0.0), clock=machine.clock)
    assert [len(sample.seconds) for sample in swept.samples] == [MIN_SAMPLES] * 3
    assert swept.unstable is None
    assert swept.warnings == ()


def test_noisy_sizes_are_measured_until_their_median_is_known() -> None:
    machine = Machine(noise=0.1)
    limits = Limits(seconds=1000.0, relative_half_width=0.05, max_samples=500)
    swept = sweep(machine.take, SIZES, limits, clock=machine.clock)
    for sample in swept.samples:
        assert len(sample.seconds) > MIN_SAMPLES
        assert relative_half_width(sample.seconds) <= 0.05
    assert swept.unstable is None


def test_the_time_limit_holds_and_is_told() -> None:
    machine = Machine(noise=1.0)
    swept = sweep(machine.take, SIZES, Limits(seconds=2.0, max_samples=10_000), clock=machine.clock)
    assert machine.now < 3.0
    assert swept.unstable is not None
    assert "± 5%" in swept.unstable


def test_sizes_are_interleaved() -> None:
    machine = Machine()
    swept = sweep(machine.take, SIZES, Limits(seconds=10.0, warm_up_seconds=0.0), clock=machine.clock)
    taken = machine.calls[-len(SIZES) * len(swept.samples[0].seconds) :]
    rounds = [sorted(part) for part in itertools.batched(taken, 3)] if hasattr(itertools, "batched") else None
    rounds = rounds or [sorted(taken[at : at + 3]) for at in range(0, len(taken), 3)]
    assert all(part == SIZES for part in rounds)


def test_what_takes_too_long_is_left_out_and_named() -> None:
    machine = Machine()
    sizes = [1_000_000, 2_000_000, 4_000_000, 8_000_000, 900_000_000]
    swept = sweep(machine.take, sizes, Limits(seconds=1.0), clock=machine.clock)
    assert [sample.size_bytes for sample in swept.samples] == sizes[:-1]
    assert any("900 MB" in warning for warning in swept.warnings)
    assert all(len(sample.seconds) >= MIN_SAMPLES for sample in swept.samples)


def test_one_interruption_costs_no_size_its_place() -> None:
    machine = Machine()
    genuine = machine.take
    interrupted = iter([False, False, False, False, True])

    def take(size_bytes: int) -> float:
        machine.now += 0.5 if next(interrupted, False) else 0.0
        return genuine(size_bytes)

    swept = sweep(take, [*SIZES, 8_000_000], Limits(seconds=2.0), clock=machine.clock)
    assert len(swept.samples) == 4


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=200))
def test_the_median_lies_within_its_interval(values: list[float]) -> None:
    interval = median_interval(values)
    if len(values) < 6:
        assert interval is None
    else:
        assert interval is not None
        assert interval[0] <= statistics.median(values) <= interval[1]


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = random.Random(1)
    inside = 0
    for _ in range(2000):
        interval = median_interval([generator.expovariate(1.0) for _ in range(25)])
        assert interval is not None
        inside += interval[0] <= math.log(2) <= interval[1]
    # Order statistics are discrete: the interval covers at least 95 %, here 95.7 %.
    assert 0.94 <= inside / 2000 <= 0.975


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((1.0, 1.01, 0.99, 1.0), ()),
        ((1.0, 1.3, 0.8, 1.1), ("standard deviation",)),
        ((1.0,) * 39 + (1.6,), ("half a mean",)),
        ((1.0, 1.0, 1.0, 3.0), ("standard deviation", "half a mean")),
    ],
)
def test_warnings_follow_pyperf(seconds: tuple[float, ...], words: tuple[str, ...]) -> None:
    warnings = stability_warnings([Sample(size_bytes=4096, seconds=seconds)])
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_bandwidth_is_of_the_largest_sizes() -> None:
    small = Sample(size_bytes=1000, seconds=(1.0,) * 10)
    large = Sample(size_bytes=100_000, seconds=(1.0, 2.0, 4.0))
    rates = bandwidth([small, large])
    assert rates is not None
    assert (rates.median, rates.n) == (50_000.0, 3)
    assert rates.p05 < rates.median < rates.p95
    assert bandwidth([]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_percentiles_agree_with_numpy(values: list[float], share: float) -> None:
    import numpy as np

    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)


def windows(*parts: tuple[int, float], noise: float, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [rate * (1 + generator.gauss(0, noise)) for count, rate in parts for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_a_burst_is_found_and_what_lasts_is_told(seed: int) -> None:
    burst = find_burst(windows((6, 4e9), (18, 1.1e9), noise=0.1, seed=seed))
    assert burst is not None
    assert burst.burst == pytest.approx(4e9, rel=0.15)
    assert burst.sustained == pytest.approx(1.1e9, rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_noise_slow_starts_and_short_series_are_no_burst(seed: int) -> None:
    assert find_burst(windows((24, 1.1e9), noise=0.2, seed=seed)) is None
    assert find_burst(windows((4, 0.3e9), (20, 1.1e9), noise=0.1, seed=seed)) is None
    assert find_burst([4e9, 1e9, 1e9]) is None
