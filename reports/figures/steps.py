"""Cards about decode steps: where their time goes, and hits and misses one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from probes.units import format_seconds
from reports.figures import theme
from reports.figures.card import Card, Panel, traces
from reports.info.table import table
from reports.info.timing import SeriesInfo, StepPart, running_mean
from reports.info.words import number, plural

PART_COLOURS = (theme.FETCH, theme.BLUE, theme.EXCHANGE, theme.DECIDE, theme.DENSE)
MOST_SINGLE_STEPS = 200


def step_card(parts: tuple[StepPart, ...]) -> Card:
    """Stacked bars of a mean decode step, baseline and policy."""
    totals = sum(part.baseline for part in parts), sum(part.with_policy for part in parts)
    bars = [
        go.Bar(
            name=part.short_name,
            y=["with policy", "baseline"],
            x=[part.with_policy * 1e3, part.baseline * 1e3],
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"%{{y}}, {part.name}: %{{x:.3f}} ms<extra></extra>",
        )
        for part, colour in zip(parts, PART_COLOURS, strict=True)
    ]
    largest = max(parts, key=lambda part: part.with_policy)
    return Card(
        key="step-time",
        title="Where a decode step goes",
        lede="Mean decode step on the slowest rank, by where its time went.",
        table=table(
            ("part", "part"),
            ("baseline_seconds", "baseline", "s"),
            ("with_policy_seconds", "with policy", "s"),
            rows=((part.name, part.baseline, part.with_policy) for part in parts),
        ),
        panels=(
            Panel(
                key="step-time",
                data=traces(*bars),
                layout={
                    "barmode": "stack",
                    "bargap": 0.45,
                    "height": 300,
                    "legend": {"traceorder": "normal"},
                    "xaxis": {"title": {"text": "time per step (ms)"}},
                    "yaxis": {"type": "category", "showgrid": False},
                },
                alt=(
                    f"Stacked bars: a step takes {format_seconds(totals[0])} in the baseline and "
                    f"{format_seconds(totals[1])} with the policy, of which {largest.name} "
                    f"{format_seconds(largest.with_policy)}."
                ),
            ),
        ),
        wide=False,
    )


def series_card(info: SeriesInfo, noun: str) -> Card:
    """Busiest device's movements and the hit rate, step by step; many steps are drawn with their running mean."""
    axis = {"title": {"text": "decode step"}}
    smooth = f" Thick: mean of {_window(info)} steps." if _window(info) > 1 else ""
    return Card(
        key="steps",
        title="Step by step",
        lede=f"Decode steps of the last pair: {noun} of the busiest device, and share of dispatches that hit.{smooth}",
        table=table(
            ("step", "step"),
            ("max_movements_baseline", "busiest device, baseline", noun),
            ("max_movements_policy", "busiest device, with policy", noun),
            ("hit_rate_baseline", "hit rate, baseline", "share"),
            ("hit_rate_policy", "hit rate, with policy", "share"),
            rows=zip(
                info.steps,
                info.movements_baseline,
                info.movements_policy,
                info.hit_rate_baseline,
                info.hit_rate_policy,
                strict=True,
            ),
        ),
        panels=(
            Panel(
                key="steps-movements",
                title=f"Busiest device, {noun}",
                data=traces(*_step_lines(info, info.movements_baseline, info.movements_policy, "%{y:.4~g}")),
                layout={"height": 280, "xaxis": axis, "yaxis": {"title": {"text": noun}, "rangemode": "tozero"}},
                alt=_series_alt(f"{noun} of the busiest device", info.movements_baseline, info.movements_policy),
            ),
            Panel(
                key="steps-hits",
                title="Cache hit rate",
                data=traces(*_step_lines(info, info.hit_rate_baseline, info.hit_rate_policy, "%{y:.1%}")),
                layout={
                    "height": 280,
                    "xaxis": axis,
                    "yaxis": {"title": {"text": "hits ÷ dispatches"}, "tickformat": ".0%", "range": [0, 1.02]},
                },
                alt=_series_alt("hit rate", info.hit_rate_baseline, info.hit_rate_policy),
            ),
        ),
    )


def _window(info: SeriesInfo) -> int:
    """Steps in the running mean: 1 while single steps can be told apart, then a 40th of them, odd."""
    return 1 if len(info.steps) <= MOST_SINGLE_STEPS else len(info.steps) // 40 | 1


def _step_lines(info: SeriesInfo, baseline: Sequence[float], policy: Sequence[float], shown: str) -> list[Any]:
    window = _window(info)
    passes = (("baseline", theme.BEFORE, baseline), ("with policy", theme.AFTER, policy))

    def line(name: str, colour: str, values: Sequence[float], *, behind: bool, label: str) -> Any:
        return go.Scatter(
            name=name,
            x=list(info.steps),
            y=list(values),
            mode="lines",
            showlegend=not behind,
            opacity=0.3 if behind else 1,
            line={"color": colour, "width": 1 if behind else 2 if window > 1 else 1.5},
            hovertemplate=f"step %{{x}}, {label}: {shown}<extra></extra>",
        )

    single = [line(name, colour, values, behind=window > 1, label=name) for name, colour, values in passes]
    if window == 1:
        return single
    means = (
        line(name, colour, running_mean(values, window), behind=False, label=f"{name}, mean of {window}")
        for name, colour, values in passes
    )
    return [*single, *means]


def _series_alt(what: str, baseline: tuple[float, ...], policy: tuple[float, ...]) -> str:
    def mean(values: tuple[float, ...]) -> str:
        return number(sum(values) / len(values) if values else None)

    means = f"{mean(baseline)} in the baseline, {mean(policy)} with policy"
    return f"Lines over {plural(len(baseline), 'step')}: mean {what} {means}."
