"""The forms a cost model can take, each with its error on sizes that it was not fitted to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from probes.holdout import holdout_error
from probes.records import ModelForm, Segment
from probes.regression import Floats, Line, Observations, Replicates, fit_line

MIN_SIZES_PER_SEGMENT = 3
MAX_SEGMENTS = 3
# A line is refused when the F test rejects it and it is off by more than this at some size: with many replicates the
# test alone rejects what no one would notice.
LACK_OF_FIT_P = 0.01
TOLERATED_ERROR = 0.05
# A table has no parameters to trust: it must predict what it was not fitted to clearly better than lines do.
_TABLE_ADVANTAGE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fitted form. ``holdout_mape``: expected |relative error| at held-out sizes, against the median of as many new
    timings (probes/holdout.py). ``max_relative_error``: the largest at any size; of a table, which meets every size
    exactly, the largest at a held-out one.
    """

    form: ModelForm
    segments: tuple[Segment, ...]
    holdout_mape: float | None
    max_relative_error: float


def choose_form(observed: Observations) -> Candidate:
    """The simplest form that the data do not refuse: affine, a few segments, else a table of medians."""
    replicates = Replicates.of(observed)
    affine = _segmented(observed, replicates, [list(range(len(observed.sizes_K)))])
    if not _line_refused(observed, replicates, affine):
        return affine
    segmented = _segmented(observed, replicates, _best_parts(observed, replicates))
    if not _better(segmented, affine):
        segmented = affine
    table = _table(observed, replicates)
    predicts_well = segmented.holdout_mape is not None and segmented.holdout_mape <= TOLERATED_ERROR
    return table if not predicts_well and _better(table, segmented, _TABLE_ADVANTAGE) else segmented


def predict(segments: Sequence[Segment], sizes: Floats) -> Floats:
    """Seconds at each size: the last segment that begins at or below it."""
    starts = np.array([segment.from_bytes for segment in segments], dtype=np.float64)
    at = np.maximum(np.searchsorted(starts, sizes, side="right") - 1, 0)
    beta = np.array([segment.beta_seconds for segment in segments])[at]
    slope = np.array([segment.slope_seconds_per_byte for segment in segments])[at]
    seconds: Floats = beta + slope * sizes
    return seconds


def _line_refused(observed: Observations, replicates: Replicates, affine: Candidate) -> bool:
    if affine.max_relative_error <= TOLERATED_ERROR:
        return False
    relative_K = predict(affine.segments, observed.sizes_K) / observed.medians_K
    return replicates.refuse_p(relative_K, parameters=2) < LACK_OF_FIT_P


def _better(candidate: Candidate, than: Candidate, advantage: float = 1.0) -> bool:
    if candidate.holdout_mape is None or than.holdout_mape is None:
        return False
    return candidate.holdout_mape < advantage * than.holdout_mape


def _best_parts(observed: Observations, replicates: Replicates) -> list[list[int]]:
    """The split of the sizes that minimises the Bayesian information criterion, every part a line of its own."""
    lack: dict[tuple[int, int], float] = {}
    for low, high in itertools.combinations(range(len(observed.sizes_K) + 1), 2):
        if high - low >= MIN_SIZES_PER_SEGMENT:
            line = _segments(observed, [list(range(low, high))], alone=low == 0)
            relative_K = predict(line, observed.sizes_K) / observed.medians_K
            lack[low, high] = float(replicates.lack_of_fit(relative_K)[low:high].sum())
    count = float(replicates.counts_K.sum())

    def criterion(cuts: Sequence[int]) -> float:
        error = float(replicates.pure_K.sum()) + sum(lack[part] for part in itertools.pairwise(cuts))
        parameters = 3 * (len(cuts) - 1) - 1
        return count * math.log(max(error, 1e-12) / count) + parameters * math.log(count)

    best = min(_cuts(len(observed.sizes_K)), key=criterion)
    return [list(range(low, high)) for low, high in itertools.pairwise(best)]


def _cuts(sizes: int) -> list[list[int]]:
    """All ways to cut 0 … sizes into one to three parts of at least three."""
    found = [[0, sizes]]
    for count in range(2, MAX_SEGMENTS + 1):
        for cuts in [cuts for cuts in found if len(cuts) == count]:
            places = range(cuts[-2] + MIN_SIZES_PER_SEGMENT, sizes - MIN_SIZES_PER_SEGMENT + 1)
            found += [[*cuts[:-1], at, sizes] for at in places]
    return found


def _segmented(observed: Observations, replicates: Replicates, parts: Sequence[Sequence[int]]) -> Candidate:
    alone = len(parts) == 1
    segments = _segments(observed, parts, alone)
    misses: dict[int, float] = {}
    for part in parts:
        misses |= _held_out_misses(observed, part, lambda kept: _segments(observed, [kept], alone))
    relative_K = predict(segments, observed.sizes_K) / observed.medians_K - 1.0
    return Candidate(
        form=ModelForm.AFFINE if alone else ModelForm.PIECEWISE,
        segments=segments,
        holdout_mape=_holdout_error(misses, replicates, parameters=2 * len(parts)),
        max_relative_error=float(np.abs(relative_K).max()),
    )


def _segments(observed: Observations, parts: Sequence[Sequence[int]], alone: bool) -> tuple[Segment, ...]:
    # Between two regimes a negative intercept is no negative latency; the first regime's is one.
    lines = [fit_line(observed.at(part), nonnegative_beta=alone or number == 0) for number, part in enumerate(parts)]
    starts = [0, *(int(observed.sizes_K[part[0]]) for part in parts[1:])]
    return tuple(_segment(start, line) for start, line in zip(starts, lines, strict=True))


def _segment(start: int, line: Line) -> Segment:
    return Segment(from_bytes=start, slope_seconds_per_byte=line.slope, beta_seconds=line.beta)


def _table(observed: Observations, replicates: Replicates) -> Candidate:
    everything = list(range(len(observed.sizes_K)))
    misses = _held_out_misses(observed, everything, lambda kept: _interpolation(observed, kept))
    return Candidate(
        form=ModelForm.TABLE,
        segments=_interpolation(observed, everything),
        holdout_mape=_holdout_error(misses, replicates, parameters=len(everything)),
        max_relative_error=max((abs(miss) for miss in misses.values()), default=0.0),
    )


def _holdout_error(misses: dict[int, float], replicates: Replicates, *, parameters: int) -> float | None:
    errors = [float(replicates.errors_K[number]) for number in misses]
    return holdout_error(list(misses.values()), errors, parameters=parameters, sizes=len(replicates.counts_K))


def _interpolation(observed: Observations, kept: Sequence[int]) -> tuple[Segment, ...]:
    """Lines between the medians; below the smallest size its median, beyond the largest the last line goes on."""
    sizes, medians = observed.sizes_K[list(kept)], observed.medians_K[list(kept)]
    segments = [_segment(0, Line(float(medians[0]), 0.0))]
    for low in range(len(kept) - 1):
        slope = float((medians[low + 1] - medians[low]) / (sizes[low + 1] - sizes[low]))
        segments.append(_segment(int(sizes[low]), Line(float(medians[low] - slope * sizes[low]), slope)))
    if segments[-1].slope_seconds_per_byte < 0:
        segments.append(_segment(int(sizes[-1]), Line(0.0, float(medians[-1] / sizes[-1]))))
    return tuple(segments)


def _held_out_misses(
    observed: Observations, part: Sequence[int], refit: Callable[[Sequence[int]], tuple[Segment, ...]]
) -> dict[int, float]:
    """Relative errors by the number of every inner size of ``part``, predicted without it: alternate sizes are held out
    in turn.
    """
    misses: dict[int, float] = {}
    for first in (1, 2):
        held = list(part[first:-1:2])
        if not held:
            continue
        segments = refit([number for number in part if number not in held])
        relative = predict(segments, observed.sizes_K[held]) / observed.medians_K[held] - 1.0
        misses |= dict(zip(held, relative.tolist(), strict=True))
    return misses
