"""The robust line T = β + s·S, its bootstrap interval, and the test whether a line is enough.

Legend: R bootstrap replicates, n observations, K sizes. Residuals are relative to the median time at the size: an
absolute one would let the largest sizes decide alone, and β would come out at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.records import Sample

Floats = npt.NDArray[np.float64]
# Huber's constant: 95 % efficient on normal residuals.
_HUBER = 1.345
# Interruptions only ever delay: Huber's bounded influence alone would still shift the line, so that what lies this many
# robust standard deviations off is left out in the end.
_REJECTED = 4.0
_MAD_TO_SIGMA = 1.4826
_ITERATIONS = 16
_CONVERGED = 1e-9
# Replicates start close to their answer.
_REPLICATE_ITERATIONS = 6
_SMALLEST_SCALE = 1e-9
_CLIP_SIGMAS = 2.5
# √(π/2): the standard error of a median of normal values ÷ that of their mean.
_MEDIAN_EFFICIENCY = 1.2533


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Timings of one link: [n] sizes and times with the number of their size, [K] medians at the sizes, ascending."""

    sizes_n: Floats
    seconds_n: Floats
    size_of_n: npt.NDArray[np.intp]
    sizes_K: Floats
    medians_K: Floats

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Observations:
        ordered = sorted(samples, key=lambda sample: sample.size_bytes)
        counts = [len(sample.seconds) for sample in ordered]
        size_of_n = np.repeat(np.arange(len(ordered)), counts)
        sizes_K = np.array([sample.size_bytes for sample in ordered], dtype=np.float64)
        return cls(
            sizes_n=sizes_K[size_of_n],
            seconds_n=np.concatenate([np.asarray(sample.seconds, dtype=np.float64) for sample in ordered]),
            size_of_n=size_of_n,
            sizes_K=sizes_K,
            medians_K=np.array([np.median(sample.seconds) for sample in ordered]),
        )

    def at(self, chosen: Sequence[int]) -> Observations:
        """Only the sizes with these numbers."""
        keep = np.isin(self.size_of_n, chosen)
        numbers = np.searchsorted(np.asarray(chosen), self.size_of_n[keep])
        return Observations(
            self.sizes_n[keep],
            self.seconds_n[keep],
            numbers,
            self.sizes_K[list(chosen)],
            self.medians_K[list(chosen)],
        )


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = beta + slope · bytes."""

    beta: float
    slope: float


def fit_line(observed: Observations, *, nonnegative_beta: bool) -> Line:
    """The Huber line of ``observed``; neither slope nor, where asked, β is negative."""
    beta_R, slope_R = _huber(observed, observed.seconds_n[None, :], nonnegative_beta, _ITERATIONS)
    return Line(float(beta_R[0]), float(slope_R[0]))


def bootstrap_lines(
    observed: Observations, *, nonnegative_beta: bool, replicates: int, seed: int
) -> tuple[Floats, Floats]:
    """[R] β and [R] slope of lines through samples redrawn within their sizes.

    Deviations from the size's median are widened by √(m/(m−1)): redrawing m values understates their variance.
    """
    generator = np.random.default_rng(seed)
    redrawn_Rn = np.empty((replicates, len(observed.seconds_n)))
    for number, median in enumerate(observed.medians_K):
        at = np.flatnonzero(observed.size_of_n == number)
        widened = median + (observed.seconds_n[at] - median) * np.sqrt(len(at) / max(len(at) - 1, 1))
        redrawn_Rn[:, at] = generator.choice(np.maximum(widened, median / 100), size=(replicates, len(at)))
    return _huber(observed, redrawn_Rn, nonnegative_beta, _REPLICATE_ITERATIONS)


def _huber(
    observed: Observations, seconds_Rn: Floats, nonnegative_beta: bool, iterations: int
) -> tuple[Floats, Floats]:
    """Iteratively reweighted least squares for R sets of times at once. Every size has the same weight in all."""
    unit = observed.sizes_K[-1]
    ones_n = 1.0 / observed.medians_K[observed.size_of_n]
    sizes_n = observed.sizes_n / unit * ones_n
    target_Rn = seconds_Rn * ones_n
    counts_K = np.bincount(observed.size_of_n, minlength=len(observed.sizes_K))
    share_n = counts_K.mean() / counts_K[observed.size_of_n]
    weight_Rn = np.broadcast_to(share_n, target_Rn.shape)
    beta_R, slope_R = _weighted_line(ones_n, sizes_n, target_Rn, weight_Rn, nonnegative_beta)
    for iteration in range(iterations):
        residual_Rn = np.abs(target_Rn - beta_R[:, None] * ones_n - slope_R[:, None] * sizes_n)
        scale_R = np.maximum(np.median(residual_Rn, axis=1) * _MAD_TO_SIGMA, _SMALLEST_SCALE)
        huber_Rn = np.minimum(1.0, _HUBER * scale_R[:, None] / np.maximum(residual_Rn, _SMALLEST_SCALE))
        if iteration >= iterations // 2:
            huber_Rn *= residual_Rn <= _REJECTED * scale_R[:, None]
        before_R = slope_R
        beta_R, slope_R = _weighted_line(ones_n, sizes_n, target_Rn, share_n * huber_Rn, nonnegative_beta)
        if iteration > iterations // 2 and np.allclose(before_R, slope_R, rtol=_CONVERGED, atol=0.0):
            break
    return beta_R, slope_R / unit


def _weighted_line(
    ones_n: Floats, sizes_n: Floats, target_Rn: Floats, weight_Rn: Floats, nonnegative_beta: bool
) -> tuple[Floats, Floats]:
    """The normal equations of two parameters, and their boundary where one comes out negative."""
    oo_R = weight_Rn @ (ones_n * ones_n)
    os_R = weight_Rn @ (ones_n * sizes_n)
    ss_R = weight_Rn @ (sizes_n * sizes_n)
    weighted_Rn = weight_Rn * target_Rn
    ot_R = weighted_Rn @ ones_n
    st_R = weighted_Rn @ sizes_n
    determinant_R = oo_R * ss_R - os_R * os_R
    with np.errstate(divide="ignore", invalid="ignore"):
        beta_R = (ss_R * ot_R - os_R * st_R) / determinant_R
        slope_R = (oo_R * st_R - os_R * ot_R) / determinant_R
    if nonnegative_beta:
        slope_R = np.where(beta_R < 0, st_R / ss_R, slope_R)
        beta_R = np.maximum(beta_R, 0.0)
    flat_R = ~(slope_R >= 0)
    return np.where(flat_R, ot_R / oo_R, beta_R), np.where(flat_R, 0.0, slope_R)


@dataclass(frozen=True, slots=True, eq=False)
class Replicates:
    """What the repeated timings say: [K] how many, their mean ÷ their median, their sum of squares (pure error), and
    the relative standard error of their median.

    Values are clipped at 2.5 robust standard deviations of their size, so that outliers decide nothing.
    """

    counts_K: Floats
    means_K: Floats
    pure_K: Floats
    errors_K: Floats

    @classmethod
    def of(cls, observed: Observations) -> Replicates:
        counts, means, pure, errors = [], [], [], []
        for number, median in enumerate(observed.medians_K):
            values = observed.seconds_n[observed.size_of_n == number] / median
            sigma = _MAD_TO_SIGMA * float(np.median(np.abs(values - 1.0)))
            values = np.clip(values, 1.0 - _CLIP_SIGMAS * sigma, 1.0 + _CLIP_SIGMAS * sigma)
            errors.append(sigma * _few(len(values)) * _MEDIAN_EFFICIENCY / math.sqrt(len(values)))
            counts.append(float(len(values)))
            means.append(float(values.mean()))
            pure.append(float(((values - values.mean()) ** 2).sum()))
        return cls(np.array(counts), np.array(means), np.array(pure), np.array(errors))

    def lack_of_fit(self, relative_K: Floats) -> Floats:
        """[K] sums of squares of the means about the prediction, which is given ÷ the medians."""
        squares: Floats = self.counts_K * (self.means_K - relative_K) ** 2
        return squares

    def refuse_p(self, relative_K: Floats, parameters: int) -> float:
        """P value of the lack-of-fit F test: small when the prediction misses by more than the replicates scatter.

        Where nothing was repeated (0.0) only the size of the misses can decide.
        """
        from scipy.stats import f as f_distribution

        free = len(self.counts_K) - parameters
        repeats = float((self.counts_K - 1).sum())
        if free <= 0:
            return 1.0
        if repeats <= 0:
            return 0.0
        lack, pure = float(self.lack_of_fit(relative_K).sum()), float(self.pure_K.sum())
        if pure == 0.0:
            return 1.0 if lack < _SMALLEST_SCALE else 0.0
        return float(f_distribution.sf((lack / free) / (pure / repeats), free, repeats))


def _few(count: int) -> float:
    """What the median deviation of few values falls short of the spread (Croux and Rousseeuw, 1992)."""
    return count / (count - 0.8)
