"""Cards about time: TTFT and TPOT with raw samples, and the prediction beside the measured."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from probes.units import format_seconds
from reports.figures import theme
from reports.figures.card import Card, Panel, error_bars, traces
from reports.info.table import table
from reports.info.timing import PhaseInfo, PredictedInfo
from reports.info.words import change_with_interval, interval_words, percent
from store.records import Estimate

LONG_NAMES = {"TPOT": "Time per output token (TPOT)", "TTFT": "Time to first token (TTFT)"}


def phases_card(phases: tuple[PhaseInfo, ...]) -> Card:
    """Raw samples of both passes with medians and intervals, a panel for each phase."""
    return Card(
        key="phases",
        title="Time per output token and time to first token",
        lede=(
            "Every dot is one pass; passes were run in interleaved pairs. The bar is the median with its 95 % "
            "bootstrap interval. The change is that of the medians; its interval resamples pairs. "
            + " ".join(f"{phase.name}: {change_with_interval(phase.gain)}." for phase in phases)
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
    number_of = f"{len(low.samples)} pass{'es' if len(low.samples) != 1 else ''}"
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
            f"{phase.name}: baseline median {format_seconds(low.median)} over {number_of}, with policy "
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
    median, bounds = estimate.median * 1e3, estimate.ci95 and (estimate.ci95[0] * 1e3, estimate.ci95[1] * 1e3)
    return go.Scatter(
        name=f"{name}, median",
        x=[median],
        y=[1 if name == "baseline" else 0],
        mode="markers",
        marker={"size": 11, "symbol": "line-ns-open", "color": theme.INK, "line": {"width": 2.5}},
        error_x=error_bars([median], [bounds], theme.INK, thickness=2),
        hovertemplate=f"{name}: median %{{x:.3f}} ms, {interval_words(bounds, 'ms')}<extra></extra>",
    )
