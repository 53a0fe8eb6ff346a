"""Card of a sweep: one policy, or its ablations, at several values of its knob (paper, Tables II to V)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from reports.figures.card import Card, Panel, error_bars, plain, series_colour, traces, with_legend
from reports.info.comparison import ComparedRun, ComparisonInfo, Interval, Sweep
from reports.info.table import DataTable, table
from reports.info.words import with_bounds
from store.records import Ratio

Figure = Callable[[ComparedRun], Interval | None]


def sweep_cards(info: ComparisonInfo) -> tuple[Card, ...]:
    """A card for each knob, with a line for each series, in the colours of the frontier."""
    colours = {runs[0].series: series_colour(at) for at, runs in enumerate(info.series)}
    knobs = dict.fromkeys(sweep.knob for sweep in info.sweeps)
    return tuple(
        _card(f"sweep-{at}", knob, [sweep for sweep in info.sweeps if sweep.knob == knob], colours)
        for at, knob in enumerate(knobs)
    )


def _card(key: str, knob: str, sweeps: Sequence[Sweep], colours: Mapping[str, str]) -> Card:
    panels: list[tuple[str, str, str, Figure]] = [
        ("tpot", "Time per output token", "change in TPOT", lambda run: _change(run.gain_tpot)),
    ]
    if any(run.gain_ttft for sweep in sweeps for run in sweep.runs):
        panels.append(("ttft", "Time to first token", "change in TTFT", lambda run: _change(run.gain_ttft)))
    if any(run.loss_rise for sweep in sweeps for run in sweep.runs):
        panels.append(("loss", "Held-out loss", "change in loss", lambda run: run.loss_rise))
    direction = "; a lower θ keeps fewer experts" if knob == "θ" else ""
    return Card(
        key=key,
        title=f"Sweep of {knob}",
        lede=f"All else equal{direction}. Against each run's own baseline, with 95 % intervals.",
        table=_table(knob, sweeps),
        panels=tuple(
            _panel(
                f"{key}-{name}",
                title,
                axis,
                sweeps,
                [_line(sweep, figure, colours[sweep.series]) for sweep in sweeps],
                figure,
            )
            for name, title, axis, figure in panels
        ),
    )


def _panel(key: str, title: str, axis: str, sweeps: Sequence[Sweep], lines: Sequence[Any], figure: Figure) -> Panel:
    values = sorted({run.knob_value for sweep in sweeps for run in sweep.runs if run.knob_value is not None})
    return Panel(
        key=key,
        title=title,
        data=traces(*lines),
        layout={
            "height": with_legend(300, len(sweeps)),
            "showlegend": len(sweeps) > 1,
            "xaxis": {"title": {"text": sweeps[0].knob}, "tickvals": values},
            "yaxis": {"title": {"text": axis}, "tickformat": "+.1%", "zeroline": True},
        },
        alt="; ".join(f"{run.label}: {_said(figure(run))}" for sweep in sweeps for run in sweep.runs) + ".",
    )


def _line(sweep: Sweep, figure: Figure, colour: str) -> Any:
    known = [(run, found) for run in sweep.runs if (found := figure(run))]
    return go.Scatter(
        name=plain(sweep.series),
        x=[run.knob_value for run, _ in known],
        y=[found.value for _, found in known],
        mode="lines+markers",
        line={"color": colour, "width": 2},
        marker={"size": 8, "color": colour},
        error_y=error_bars([found.value for _, found in known], [found.ci95 for _, found in known], colour),
        customdata=[plain(run.label) for run, _ in known],
        hovertemplate="%{customdata}: %{y:+.2%}<extra></extra>",
    )


def _table(knob: str, sweeps: Sequence[Sweep]) -> DataTable:
    return table(
        ("series", "policy"),
        ("knob", knob),
        ("ttft_baseline_seconds", "TTFT, baseline", "s"),
        ("ttft_seconds", "TTFT", "s"),
        ("ttft_ratio", "TTFT ratio"),
        ("ttft_ratio_low", "95 % low"),
        ("ttft_ratio_high", "95 % high"),
        ("tpot_baseline_seconds", "TPOT, baseline", "s"),
        ("tpot_seconds", "TPOT", "s"),
        ("tpot_ratio", "TPOT ratio"),
        ("tpot_ratio_low", "95 % low"),
        ("tpot_ratio_high", "95 % high"),
        ("removed_importance", "removed importance", "share"),
        ("loss_rise", "rise of loss", "share"),
        ("top1_agreement", "same most likely token", "share"),
        rows=(
            (
                sweep.series,
                run.knob_value,
                run.ttft_baseline.median if run.ttft_baseline else None,
                run.ttft_policy.median if run.ttft_policy else None,
                *(_ratio(run.gain_ttft) if run.gain_ttft else (None, None, None)),
                run.tpot_baseline.median,
                run.tpot_policy.median,
                *_ratio(run.gain_tpot),
                run.removed_importance,
                run.loss_rise.value if run.loss_rise else None,
                run.top1_agreement,
            )
            for sweep in sweeps
            for run in sweep.runs
        ),
    )


def _ratio(ratio: Ratio) -> tuple[float | None, float | None, float | None]:
    return (ratio.ratio, *(ratio.ci95 or (None, None)))


def _change(ratio: Ratio | None) -> Interval | None:
    if ratio is None:
        return None
    return Interval(value=ratio.ratio - 1, ci95=ratio.ci95 and (ratio.ci95[0] - 1, ratio.ci95[1] - 1))


def _said(found: Interval | None) -> str:
    if found is None:
        return "not measured"
    return with_bounds(found.value, found.ci95)
