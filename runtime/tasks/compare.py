"""Before and after of an evaluation task, over the same documents."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.statistics import mean_difference_interval, paired_difference_interval
from runtime.tasks.harness import Scores
from store.records import TaskMetric

OF_ALL_AT_ONCE = ("bleu", "chrf", "ter")
"""Metrics of all documents together, whose thousands of resamples would take minutes: without an interval."""


def compare(before: Scores, after: Scores, *, seed: int) -> TaskMetric:
    """One metric of the router's own choice and of the policy, by document in the same order."""
    theirs, ours = _total(before), _total(after)
    means = _mean_of(before, theirs) and _mean_of(after, ours)
    differences = np.subtract(after.values, before.values, dtype=np.float64) if means else None
    better, worse = None, None
    if differences is not None and before.higher_is_better is not None:
        signed = differences if before.higher_is_better else -differences
        better, worse = int((signed > 0).sum()), int((signed < 0).sum())
    return TaskMetric(
        metric=before.metric,
        filter=before.filter,
        baseline=theirs,
        with_policy=ours,
        difference=None if ours is None or theirs is None else ours - theirs,
        difference_ci95=None if ours is None or theirs is None else _interval(before, after, differences, seed),
        higher_is_better=before.higher_is_better,
        documents=len(before.values),
        documents_better=better,
        documents_worse=worse,
        chance=before.chance,
    )


def _interval(before: Scores, after: Scores, differences: Any, seed: int) -> tuple[float, float] | None:
    if len(before.values) < 2 or before.metric in OF_ALL_AT_ONCE:
        return None
    if differences is not None:
        return mean_difference_interval(differences, seed=seed)
    low, high = paired_difference_interval(
        before.values, after.values, lambda values: _number(before.aggregate, values), seed=seed
    )
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _total(scores: Scores) -> float | None:
    total = _number(scores.aggregate, scores.values)
    return None if math.isnan(total) else total


def _mean_of(scores: Scores, total: float | None) -> bool:
    """Whether documents have values of their own that the metric is the mean of."""
    if total is None or not all(isinstance(value, int | float | np.number) for value in scores.values):
        return False
    return math.isclose(total, float(np.mean(scores.values)), rel_tol=1e-9, abs_tol=1e-12)


def _number(aggregate: Callable[[list[Any]], Any], values: list[Any]) -> float:
    """What the harness makes of ``values``; NaN where that is no finite number."""
    try:
        value = float(aggregate(values))
    except (ArithmeticError, ValueError):
        return math.nan
    return value if math.isfinite(value) else math.nan
