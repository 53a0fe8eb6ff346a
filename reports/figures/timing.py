"""Cards about time: TTFT and TPOT with raw samples, the parts of a step, hits and misses over steps, the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from probes.units import format_seconds
from reports.figures import theme
from reports.figures.card import Card, Panel, traces
from reports.info.table import table
from reports.info.timing import PhaseInfo, PredictedInfo, SeriesInfo, StepPart, running_mean
from reports.info.words import change_with_interval, number, percent
from store.records import Estimate

PART_COLOURS = (theme.FETCH, theme.BLUE, theme.EXCHANGE, theme.DECIDE, theme.DENSE)
MOST_SINGLE_STEPS = 200
LONG_NAMES = {"TPOT": "Time per output token (TPOT)", "TTFT": "Time to first token (TTFT)"}


def phases_card(phases: tuple[PhaseInfo, ...]) -> Card:
    """Raw samples of both passes with medians and intervals, a panel for each phase."""
    return Card(
        key="phases",
        title="Time per output token and time to first token",
        lede=(
            "Every dot is one pass; passes were run in interleaved pairs. The bar is the median with its 95 % "
            "bootstrap interval. " + " ".join(f"{phase.name}: {change_with_interval(phase.gain)}." for phase in phases)
        ),
        table=table(
            ("phase", "phase"),
            ("pass", "pass"),
            ("sample", "sample"),
            ("seconds", "time", "s"),
            rows=(
                (phase.name, name, at, seconds)
                for phase in phases
                for name, estimate in (("baseline", phase.baseline), ("with policy", phase.with_policy))
                for at, seconds in enumerate(estimate.samples, start=1)
            ),
        ),
        panels=tuple(_phase_panel(phase) for phase in phases),
    )


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


def predicted_card(rows: tuple[PredictedInfo, ...]) -> Card:
    """Predicted beside measured TPOT."""
    names = [row.name for row in rows]

    def bars(name: str, colour: str, values: list[float]) -> Any:
        return go.Bar(
            name=name,
            x=names,
            y=[value * 1e3 for value in values],
            marker={"color": colour, "cornerradius": 2},
            hovertemplate=f"%{{x}}, {name}: %{{y:.3f}} ms<extra></extra>",
        )

    errors = "; ".join(f"{row.name} {percent(row.relative_error, signed=True)}" for row in rows)
    return Card(
        key="predicted",
        title="Predicted and measured",
        lede=(
            "TPOT from the calibrated cost model, the recorded fetches and the measured compute, beside the measured "
            f"one. Relative error (predicted ÷ measured − 1): {errors}."
        ),
        table=table(
            ("pass", "pass"),
            ("predicted_tpot_seconds", "predicted TPOT", "s"),
            ("measured_tpot_seconds", "measured TPOT", "s"),
            ("relative_error", "relative error", "share"),
            rows=((row.name, row.predicted_seconds, row.measured_seconds, row.relative_error) for row in rows),
        ),
        panels=(
            Panel(
                key="predicted",
                data=traces(
                    bars("predicted", theme.PALE_BLUE, [row.predicted_seconds for row in rows]),
                    bars("measured", theme.BLUE, [row.measured_seconds for row in rows]),
                ),
                layout={
                    "barmode": "group",
                    "height": 300,
                    "xaxis": {"type": "category"},
                    "yaxis": {"title": {"text": "TPOT (ms)"}, "rangemode": "tozero"},
                },
                alt=f"Bars of predicted and measured TPOT; relative error: {errors}.",
            ),
        ),
        wide=False,
    )


def _phase_panel(phase: PhaseInfo) -> Panel:
    passes = (("with policy", theme.AFTER, phase.with_policy), ("baseline", theme.BEFORE, phase.baseline))
    made: list[Any] = []
    for name, colour, estimate in passes:
        made.append(_sample_dots(name, colour, estimate))
        made.append(_median_mark(name, estimate))
    low, high = phase.baseline, phase.with_policy
    return Panel(
        key=f"phase-{phase.name.lower()}",
        title=LONG_NAMES.get(phase.name, phase.name),
        data=traces(*made),
        layout={
            "height": 220,
            "showlegend": False,
            "xaxis": {"title": {"text": "ms"}},
            "yaxis": {
                "range": [-0.6, 1.6],
                "tickvals": [0, 1],
                "ticktext": [name for name, _, _ in passes],
                "showgrid": False,
            },
        },
        alt=(
            f"{phase.name}: baseline median {format_seconds(low.median)} over {len(low.samples)} passes, with policy "
            f"{format_seconds(high.median)} over {len(high.samples)}; change {change_with_interval(phase.gain)}."
        ),
    )


def _sample_dots(name: str, colour: str, estimate: Estimate) -> Any:
    row = 1 if name == "baseline" else 0
    # A fixed zigzag keeps equal samples apart and the page's bytes the same.
    offsets = [row + 0.2 + 0.09 * (at % 3) for at in range(len(estimate.samples))]
    return go.Scatter(
        name=f"{name}, samples",
        x=[seconds * 1e3 for seconds in estimate.samples],
        y=offsets,
        mode="markers",
        marker={"size": 7, "color": colour, "opacity": 0.65},
        customdata=list(range(1, len(estimate.samples) + 1)),
        hovertemplate=f"{name}, sample %{{customdata}}: %{{x:.3f}} ms<extra></extra>",
    )


def _median_mark(name: str, estimate: Estimate) -> Any:
    low, high = estimate.ci95
    return go.Scatter(
        name=f"{name}, median",
        x=[estimate.median * 1e3],
        y=[1 if name == "baseline" else 0],
        mode="markers",
        marker={"size": 11, "symbol": "line-ns-open", "color": theme.INK, "line": {"width": 2.5}},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [(high - estimate.median) * 1e3],
            "arrayminus": [(estimate.median - low) * 1e3],
            "color": theme.INK,
            "thickness": 2,
            "width": 5,
        },
        hovertemplate=(
            f"{name}: median %{{x:.3f}} ms, 95 % interval {low * 1e3:.3f} to {high * 1e3:.3f} ms<extra></extra>"
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

    return (
        f"Lines over {len(baseline):,} steps: mean {what} {mean(baseline)} in the baseline, {mean(policy)} with policy."
    )
