"""Evaluation tasks with and without the policy, in words."""

from __future__ import annotations

from reports.info.words import number, percent, plural
from store.records import TaskMetric, TaskResult

SHAPES = {
    "decode": "every token decoded in lockstep, contexts included",
    "prefill": "prefill-shaped: each context in one forward pass, where nearly every expert is mandatory",
}


def shape_words(task: TaskResult) -> str:
    """How it was measured, and how much the policy removed: what was not pruned cannot lose anything."""
    return f"{SHAPES[task.shape]}; the policy removed {percent(task.removed_importance)} of the importance"


def metric_name(metric: TaskMetric) -> str:
    """With the filter of its answers, where there is one."""
    return metric.metric if metric.filter == "none" else f"{metric.metric}, {metric.filter}"


def metric_words(metric: TaskMetric) -> str:
    """Interval, documents and what guessing scores."""
    parts = []
    if metric.difference_ci95 is not None:
        low, high = metric.difference_ci95
        if low < high:
            sure = ": inside the noise" if low <= 0 <= high else ""
            parts.append(f"95 % interval {_signed(low)} to {_signed(high)}{sure}")
    counted = plural(metric.documents, "document")
    if metric.documents_better is not None and metric.documents_worse is not None:
        counted += f", {number(metric.documents_better)} better and {number(metric.documents_worse)} worse"
    parts.append(counted)
    if metric.chance is not None:
        parts.append(f"guessing scores {number(metric.chance)}")
    return "; ".join(parts)


def difference_words(metric: TaskMetric) -> str:
    """With its sign, since what is better depends on the metric."""
    return "–" if metric.difference is None else _signed(metric.difference)


def difference_tone(metric: TaskMetric) -> str:
    """``bad`` or ``good`` where the interval leaves no doubt, ``neutral`` elsewhere."""
    if metric.difference_ci95 is None or metric.higher_is_better is None:
        return "neutral"
    low, high = (
        metric.difference_ci95 if metric.higher_is_better else (-bound for bound in metric.difference_ci95[::-1])
    )
    return "bad" if high < 0 else "good" if low > 0 else "neutral"


def _signed(value: float) -> str:
    shown = number(value, 2)
    return f"+{shown}" if value > 0 else shown
