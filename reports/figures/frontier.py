"""Card of the frontier: what policies gain against what they give up, in several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from reports.figures import theme
from reports.figures.card import Card, Panel, error_bars, plain, series_colour, traces, with_legend
from reports.info.comparison import ComparedRun, ComparisonInfo, Interval
from reports.info.table import DataTable, table
from reports.info.words import percent

Cost = Callable[[ComparedRun], Interval | None]


def frontier_card(info: ComparisonInfo) -> Card:
    """Cut in TPOT against removed importance, and against the loss where it was measured."""
    panels = [
        _panel(
            info,
            "frontier-importance",
            "Against removed importance",
            "removed importance per token and layer",
            lambda run: Interval(value=run.removed_importance, ci95=None),
            info.front_by_importance,
        )
    ]
    if any(run.loss_rise for run in info.runs):
        panels.append(
            _panel(
                info,
                "frontier-loss",
                "Against measured loss",
                "rise of held-out loss",
                lambda run: run.loss_rise,
                info.front_by_loss,
            )
        )
    dotted = (
        " The dotted line joins what nothing beats in both, from the router's own choice at 0." if _fronts(info) else ""
    )
    return Card(
        key="frontier",
        title="What is gained for what is given up",
        lede=(
            "Cut in time per output token, 1 − ratio of medians, with 95 % intervals. Up and left is better. A "
            f"number is the value of the policy's knob.{dotted}"
        ),
        table=_table(info),
        panels=tuple(panels),
    )


def _panel(info: ComparisonInfo, key: str, title: str, axis: str, cost: Cost, front: Sequence[ComparedRun]) -> Panel:
    measured = [[run for run in runs if cost(run)] for runs in info.series]
    data = [_series(runs, cost, series_colour(at)) for at, runs in enumerate(measured) if runs]
    if front:
        data = [_front(front, cost), *data]
    return Panel(
        key=key,
        title=title,
        data=traces(*data),
        layout={
            "height": with_legend(360, len(data)),
            "xaxis": {"title": {"text": axis}, "tickformat": ".1%", "zeroline": True},
            "yaxis": {"title": {"text": "cut in TPOT"}, "tickformat": ".0%", "zeroline": True},
            "showlegend": True,
        },
        alt=_alt([run for runs in measured for run in runs]),
    )


def _series(runs: Sequence[ComparedRun], cost: Cost, colour: str) -> Any:
    """One policy; its runs are joined in the order of their knob."""
    costs = [found for found in map(cost, runs) if found]
    cuts = [_cut(run) for run in runs]
    knob = f" by {runs[0].knob}" if runs[0].knob else ""
    uncertain = any(each.ci95 and each.ci95[0] < each.ci95[1] for each in costs)
    return go.Scatter(
        name=plain(f"{runs[0].series}{knob}"),
        x=[each.value for each in costs],
        y=[cut.value for cut in cuts],
        mode="lines+markers+text" if len(runs) > 1 else "markers+text",
        line={"color": colour, "width": 1},
        marker={"size": 9, "color": colour},
        text=["" if run.knob_value is None else f"{run.knob_value:g}" for run in runs],
        textposition="top left",
        textfont={"size": 11, "color": theme.MUTED},
        error_y=error_bars([cut.value for cut in cuts], [cut.ci95 for cut in cuts], colour),
        error_x=error_bars([each.value for each in costs], [each.ci95 for each in costs], colour)
        if uncertain
        else None,
        customdata=[plain(run.label) for run in runs],
        hovertemplate="%{customdata}<br>%{y:.1%} less TPOT for %{x:.2%}<extra></extra>",
    )


def _front(front: Sequence[ComparedRun], cost: Cost) -> Any:
    costs = [found.value for found in map(cost, front) if found]
    return go.Scatter(
        name="Pareto front",
        x=[0.0, *costs],
        y=[0.0, *(_cut(run).value for run in front)],
        mode="lines",
        line={"color": theme.MUTED, "width": 1.5, "dash": "dot"},
        hoverinfo="skip",
    )


def _cut(run: ComparedRun) -> Interval:
    ratio, interval = run.gain_tpot.ratio, run.gain_tpot.interval
    return Interval(value=1 - ratio, ci95=interval and (1 - interval[1], 1 - interval[0]))


def _with_bounds(found: Interval | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if found is None else (found.value, *(found.ci95 or (None, None)))


def _fronts(info: ComparisonInfo) -> bool:
    return bool(info.front_by_importance or info.front_by_loss)


def _table(info: ComparisonInfo) -> DataTable:
    by_importance, by_loss = info.front_by_importance, info.front_by_loss
    return table(
        ("run", "run"),
        ("policy", "policy"),
        ("tpot_ratio", "TPOT ratio"),
        ("tpot_ratio_low", "95 % low"),
        ("tpot_ratio_high", "95 % high"),
        ("removed_importance", "removed importance", "share"),
        ("on_importance_front", "on its front"),
        ("loss_rise", "rise of loss", "share"),
        ("loss_rise_low", "95 % low", "share"),
        ("loss_rise_high", "95 % high", "share"),
        ("on_loss_front", "on its front"),
        rows=(
            (
                run.run_id,
                run.policy,
                run.gain_tpot.ratio,
                *(run.gain_tpot.ci95 or (None, None)),
                run.removed_importance,
                run in by_importance,
                *_with_bounds(run.loss_rise),
                run in by_loss,
            )
            for run in info.runs
        ),
    )


def _alt(runs: Sequence[ComparedRun]) -> str:
    points = (
        f"{run.label}: {percent(1 - run.gain_tpot.ratio)} less TPOT, {percent(run.removed_importance)} of importance "
        f"removed" + (f", loss {percent(run.loss_rise.value, signed=True)}" if run.loss_rise else "")
        for run in runs
    )
    return f"{'; '.join(points)}."
