"""Cards about several runs of policies: the frontier of gain and cost, and the sweep of θ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from reports.figures import theme
from reports.figures.card import Card, Panel, plain, series_colour, traces
from reports.info.comparison import ComparedRun, ComparisonInfo
from reports.info.table import table
from reports.info.words import change_with_interval, percent

Values = Sequence[float]


def frontier_card(info: ComparisonInfo) -> Card:
    """What each run gains against what it gives up."""
    measured = [run for run in info.runs if run.loss_rise is not None]
    panels = [
        Panel(
            key="frontier-importance",
            title="Against removed importance",
            data=traces(*(_point(run, run.removed_importance, None, at) for at, run in enumerate(info.runs))),
            layout=_frontier_layout("removed importance per token and layer"),
            alt=_frontier_alt(info.runs),
        )
    ]
    if measured:
        points = (
            _point(run, run.loss_rise.value, run.loss_rise.ci95, at)
            for at, run in enumerate(info.runs)
            if run.loss_rise is not None
        )
        panels.append(
            Panel(
                key="frontier-loss",
                title="Against measured loss",
                data=traces(*points),
                layout=_frontier_layout("rise of held-out loss"),
                alt=_frontier_alt(measured),
            )
        )
    return Card(
        key="frontier",
        title="What is gained for what is given up",
        lede="Cut in time per output token, 1 − ratio of paired passes, with 95 % intervals. Up and left is better.",
        table=table(
            ("run", "run"),
            ("policy", "policy"),
            ("tpot_ratio", "TPOT ratio"),
            ("tpot_ratio_low", "95 % low"),
            ("tpot_ratio_high", "95 % high"),
            ("removed_importance", "removed importance", "share"),
            ("loss_rise", "rise of loss", "share"),
            ("loss_rise_low", "95 % low", "share"),
            ("loss_rise_high", "95 % high", "share"),
            rows=(
                (
                    run.run_id,
                    run.policy,
                    run.gain_tpot.ratio,
                    *run.gain_tpot.ci95,
                    run.removed_importance,
                    *((run.loss_rise.value, *run.loss_rise.ci95) if run.loss_rise else (None, None, None)),
                )
                for run in info.runs
            ),
        ),
        panels=tuple(panels),
    )


def sweep_card(runs: Sequence[ComparedRun]) -> Card:
    """The same policy at several θ (paper, Tables II to V)."""
    thetas = [run.theta for run in runs]

    def line(name: str, colour: str, values: Values, low: Values, high: Values) -> Any:
        return go.Scatter(
            name=name,
            x=thetas,
            y=values,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 8, "color": colour},
            error_y=_error(values, low, high, colour),
            hovertemplate=f"θ = %{{x}}: {name} %{{y:+.2%}}<extra></extra>",
        )

    cuts = line(
        "TPOT",
        theme.AFTER,
        [run.gain_tpot.ratio - 1 for run in runs],
        [run.gain_tpot.ci95[0] - 1 for run in runs],
        [run.gain_tpot.ci95[1] - 1 for run in runs],
    )
    losses = [
        line(
            "held-out loss",
            theme.FETCH,
            [run.loss_rise.value for run in runs if run.loss_rise],
            [run.loss_rise.ci95[0] for run in runs if run.loss_rise],
            [run.loss_rise.ci95[1] for run in runs if run.loss_rise],
        )
    ]
    known = all(run.loss_rise for run in runs)
    axis = {"title": {"text": "θ"}, "tickvals": thetas}

    def panel(key: str, title: str, data: list[Any], unit: str) -> Panel:
        return Panel(
            key=key,
            title=title,
            data=traces(*data),
            layout={
                "height": 280,
                "showlegend": False,
                "xaxis": axis,
                "yaxis": {"title": {"text": unit}, "tickformat": "+.1%", "zeroline": True},
            },
            alt="; ".join(f"θ = {run.theta}: TPOT {change_with_interval(run.gain_tpot)}" for run in runs) + ".",
        )

    panels = [panel("sweep-tpot", "Time per output token", [cuts], "change in TPOT")]
    if known:
        panels.append(panel("sweep-loss", "Held-out loss", losses, "change in loss"))
    return Card(
        key="theta-sweep",
        title="Sweep of θ",
        lede="One policy at several θ, all else equal: a lower θ keeps fewer experts.",
        table=table(
            ("theta", "θ"),
            ("tpot_seconds", "TPOT", "s"),
            ("tpot_ratio", "TPOT ratio"),
            ("removed_importance", "removed importance", "share"),
            ("loss_rise", "rise of loss", "share"),
            rows=(
                (
                    run.theta,
                    run.tpot_policy.median,
                    run.gain_tpot.ratio,
                    run.removed_importance,
                    run.loss_rise.value if run.loss_rise else None,
                )
                for run in runs
            ),
        ),
        panels=tuple(panels),
    )


def _point(run: ComparedRun, given_up: float, interval: tuple[float, float] | None, at: int) -> Any:
    cut = 1 - run.gain_tpot.ratio
    high, low = (1 - bound for bound in run.gain_tpot.ci95)
    colour = series_colour(at)
    return go.Scatter(
        name=plain(run.label),
        x=[given_up],
        y=[cut],
        mode="markers",
        marker={"size": 11, "color": colour},
        error_y=_error([cut], [low], [high], colour),
        error_x=_error([given_up], [interval[0]], [interval[1]], colour) if interval else None,
        hovertemplate="%{y:.1%} less TPOT for %{x:.2%}<extra>%{fullData.name}</extra>",
    )


def _error(values: Values, low: Values, high: Values, colour: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [top - value for value, top in zip(values, high, strict=True)],
        "arrayminus": [value - bottom for value, bottom in zip(values, low, strict=True)],
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }


def _frontier_layout(given_up: str) -> dict[str, Any]:
    return {
        "height": 340,
        "showlegend": True,
        "xaxis": {"title": {"text": given_up}, "tickformat": ".1%", "zeroline": True},
        "yaxis": {"title": {"text": "cut in TPOT"}, "tickformat": ".0%", "zeroline": True},
    }


def _frontier_alt(runs: Sequence[ComparedRun]) -> str:
    points = (
        f"{run.label}: {percent(1 - run.gain_tpot.ratio)} less TPOT, {percent(run.removed_importance)} of importance "
        f"removed" + (f", loss {percent(run.loss_rise.value, signed=True)}" if run.loss_rise else "")
        for run in runs
    )
    return f"{'; '.join(points)}."
