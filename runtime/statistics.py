"""Medians and intervals of what was measured: bootstrap, seeded, so that the same samples give the same interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from store.records import FEWEST_PAIRS, Estimate, Ratio

RESAMPLES = 2000


def estimate(samples: Sequence[float], *, seed: int) -> Estimate:
    """Median of ``samples`` with its 95 % percentile bootstrap interval, where there are enough for one."""
    values = np.asarray(samples, np.float64)
    interval = None if len(values) < FEWEST_PAIRS else _middle(np.median(_resampled(values, seed), axis=1))
    return Estimate(median=float(np.median(values)), ci95=interval, samples=tuple(map(float, values)))


def paired_ratio(baseline: Sequence[float], treated: Sequence[float], *, seed: int) -> Ratio:
    """Median of ``treated`` ÷ median of ``baseline``, with its 95 % bootstrap interval over pairs, if they are enough.

    Pairs are resampled as pairs, so what disturbs both passes of a pair widens the interval little; the ratio is that
    of the two medians that stand beside it.
    """
    values_P2 = np.stack([np.asarray(baseline, np.float64), np.asarray(treated, np.float64)], axis=1)
    before, after = np.median(values_P2, axis=0)
    interval = None
    if len(values_P2) >= FEWEST_PAIRS:
        medians_R2 = np.median(_resampled(values_P2, seed), axis=1)
        interval = _middle(medians_R2[:, 1] / medians_R2[:, 0])
    return Ratio(ratio=float(after / before), ci95=interval)


def mean_difference_interval(differences: npt.NDArray[np.float64], *, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of paired ``differences``."""
    return _middle(_resampled(differences, seed).mean(axis=1))


def paired_difference_interval(
    baseline: Sequence[Any], treated: Sequence[Any], statistic: Callable[[list[Any]], float], *, seed: int
) -> tuple[float, float]:
    """95 % bootstrap interval of ``statistic`` of ``treated`` − that of ``baseline``, resampled as pairs."""
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(baseline), (RESAMPLES, len(baseline))).tolist()
    differences = [statistic([treated[at] for at in draw]) - statistic([baseline[at] for at in draw]) for draw in draws]
    return _middle(np.asarray(differences, np.float64))


def _resampled(values: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    return values[generator.integers(0, len(values), (RESAMPLES, len(values)))]


def _middle(statistics: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(statistics, [2.5, 97.5])
    return float(low), float(high)
