"""Cards about several runs: times with intervals, the busiest device by layer, figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from reports.figures import theme
from reports.figures.card import Card, Panel, error_bars, plain, series_colour, traces, with_legend
from reports.info.comparison import ComparedRun, ComparisonInfo
from reports.info.keyfigures import movement_noun
from reports.info.policies import shortened
from reports.info.table import Cell, Column, DataTable, table
from reports.info.words import change_with_interval, interval_words, plural, with_bounds
from store.records import Estimate, Ratio

ROW_PIXELS = 44
APART = 0.13
"""Half the distance of a run's two passes, in rows: their intervals would cover each other."""


def tpot_card(info: ComparisonInfo) -> Card:
    """Median TPOT of every run, baseline and policy, with intervals."""
    runs = info.runs
    return Card(
        key="runs-tpot",
        title="Time per output token, run by run",
        lede="Median over all pairs with its 95 % bootstrap interval, without and with the run's policy.",
        table=table(
            ("run", "run"),
            ("pass", "pass"),
            ("median_seconds", "median", "s"),
            ("low_seconds", "95 % low", "s"),
            ("high_seconds", "95 % high", "s"),
            rows=(
                (run.run_id, name, estimate.median, *(estimate.ci95 or (None, None)))
                for run in runs
                for name, estimate in (("baseline", run.tpot_baseline), ("with policy", run.tpot_policy))
            ),
        ),
        panels=(
            Panel(
                key="runs-tpot",
                data=traces(
                    _medians("baseline", theme.BEFORE, [run.tpot_baseline for run in runs], above=APART),
                    _medians("with policy", theme.AFTER, [run.tpot_policy for run in runs], above=-APART),
                ),
                layout={
                    "height": 130 + ROW_PIXELS * len(runs),
                    "xaxis": {"title": {"text": "TPOT (ms)"}},
                    "yaxis": {
                        "range": [len(runs) - 0.5, -0.5],
                        "tickvals": list(range(len(runs))),
                        "ticktext": [plain(run.label) for run in runs],
                    },
                },
                alt="; ".join(f"{run.label}: TPOT {change_with_interval(run.gain_tpot)}" for run in runs) + ".",
            ),
        ),
    )


def busiest_card(info: ComparisonInfo) -> Card:
    """Busiest device's movements by layer, one line per run."""
    noun = movement_noun(info.tier)
    lines = [
        go.Scatter(
            name=plain(run.label),
            x=[layer for layer, _, _ in run.busiest_by_layer],
            y=[after for _, _, after in run.busiest_by_layer],
            mode="lines+markers",
            line={"color": series_colour(at), "width": 2, "dash": "solid" if at < len(theme.SERIES) else "dot"},
            marker={"size": 5, "color": series_colour(at)},
            hovertemplate=f"layer %{{x}}: %{{y:.2f}} {noun}<extra>%{{fullData.name}}</extra>",
        )
        for at, run in enumerate(info.runs)
    ]
    most = max(len(run.busiest_by_layer) for run in info.runs)
    return Card(
        key="runs-layers",
        title="Busiest device by layer",
        lede=f"Mean {noun} per step of each layer's busiest device, under each run's policy.",
        table=table(
            ("run", "run"),
            ("layer", "layer"),
            ("busiest_before", "before", f"{noun} per step"),
            ("busiest_after", "after", f"{noun} per step"),
            rows=((run.run_id, *row) for run in info.runs for row in run.busiest_by_layer),
        ),
        panels=(
            Panel(
                key="runs-layers",
                data=traces(*lines),
                layout={
                    "height": with_legend(320, len(lines)),
                    "xaxis": {"title": {"text": "layer"}, "dtick": max(1, most // 10)},
                    "yaxis": {"title": {"text": f"{noun} per step"}, "rangemode": "tozero"},
                },
                alt=f"A line for each of {plural(len(info.runs), 'run')} over their layers.",
            ),
        ),
    )


def side_by_side_card(info: ComparisonInfo) -> Card:
    """A column for each run."""
    noun = movement_noun(info.tier)
    written = shortened([run.policy for run in info.runs])
    policies = {run.run_id: policy for run, policy in zip(info.runs, written, strict=True)}
    figures: tuple[tuple[str, Callable[[ComparedRun], Cell]], ...] = (
        ("run", lambda run: run.run_id),
        ("model", lambda run: run.model),
        ("policy", lambda run: policies[run.run_id]),
        ("TPOT against baseline", lambda run: change_with_interval(run.gain_tpot)),
        ("TTFT against baseline", lambda run: change_with_interval(run.gain_ttft) if run.gain_ttft else None),
        ("TPOT against the first run", lambda run: _against_first(run.tpot_against_first)),
        ("TTFT against the first run", lambda run: _against_first(run.ttft_against_first) if run.gain_ttft else None),
        (f"{noun} of the busiest device, baseline", lambda run: run.movements_baseline),
        (f"{noun} of the busiest device, with policy", lambda run: run.movements_policy),
        ("cache hit rate, with policy", lambda run: run.hit_rate_policy),
        ("removed importance", lambda run: run.removed_importance),
        ("held-out loss against baseline", _loss),
        ("same most likely token", lambda run: run.top1_agreement),
    )
    return Card(
        key="side-by-side",
        title="Side by side",
        lede="Differences against the first run compare the passes with policy; those samples are not paired.",
        table=DataTable(
            columns=(
                Column(key="figure", title="figure"),
                *(Column(key=run.run_id, title=run.label) for run in info.runs),
            ),
            rows=tuple((name, *(figure(run) for run in info.runs)) for name, figure in figures),
        ),
    )


def _against_first(ratio: Ratio | None) -> str:
    return change_with_interval(ratio) if ratio else "the first"


def _loss(run: ComparedRun) -> str | None:
    if run.loss_rise is None:
        return None
    return with_bounds(run.loss_rise.value, run.loss_rise.ci95)


def _medians(name: str, colour: str, estimates: Sequence[Estimate], *, above: float) -> Any:
    medians = [estimate.median * 1e3 for estimate in estimates]
    bounds = [estimate.ci95 and (estimate.ci95[0] * 1e3, estimate.ci95[1] * 1e3) for estimate in estimates]
    return go.Scatter(
        name=name,
        x=medians,
        y=[row - above for row in range(len(estimates))],
        mode="markers",
        marker={"size": 10, "color": colour},
        error_x=error_bars(medians, bounds, colour, thickness=2),
        customdata=[interval_words(bound, "ms") for bound in bounds],
        hovertemplate=f"{name}: %{{x:.3f}} ms, %{{customdata}}<extra></extra>",
    )
