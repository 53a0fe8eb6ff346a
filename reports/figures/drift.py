"""Card of the cost models' drift over calibrations."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from probes.units import format_rate
from reports.figures import theme
from reports.figures.card import Card, Panel, Picker, Variant, error_bars, traces
from reports.info.drift import LinkDrift
from reports.info.table import table


def drift_card(links: Sequence[LinkDrift]) -> Card:
    """Effective bandwidth of one link, calibration by calibration."""
    variants = tuple(_variant(link) for link in links)
    return Card(
        key="drift",
        title="Drift of the calibrations",
        lede="Effective bandwidth of a link at every calibration of this very machine, with 95 % intervals.",
        table=table(
            ("link", "link"),
            ("calibration", "calibration"),
            ("calibrated_at", "calibrated"),
            ("bandwidth_bytes_per_s", "bandwidth", "B/s"),
            ("bandwidth_low", "95 % low", "B/s"),
            ("bandwidth_high", "95 % high", "B/s"),
            ("beta_seconds", "β", "s"),
            rows=(
                (
                    link.name,
                    point.calibration_id,
                    point.created_at,
                    point.bandwidth_bytes_per_s,
                    *(point.ci95 or (None, None)),
                    point.beta_seconds,
                )
                for link in links
                for point in link.points
            ),
        ),
        panels=(
            Panel(
                key="drift",
                data=variants[0].data,
                layout={
                    "height": 280,
                    "showlegend": False,
                    "xaxis": {"type": "date"},
                    "yaxis": {"title": {"text": "bandwidth (GB/s)"}, "rangemode": "tozero"},
                },
                alt=variants[0].alt,
                variants=variants,
            ),
        ),
        pickers=(Picker(label="Link", options=tuple(link.name for link in links)),),
    )


def _variant(link: LinkDrift) -> Variant:
    rates = [point.bandwidth_bytes_per_s / 1e9 for point in link.points]
    known = [point.ci95 or (point.bandwidth_bytes_per_s,) * 2 for point in link.points]
    bounds = [(low / 1e9, high / 1e9) for low, high in known]
    line = go.Scatter(
        name=link.name,
        x=[point.created_at for point in link.points],
        y=rates,
        mode="lines+markers",
        line={"color": theme.BLUE, "width": 2},
        marker={"size": 8, "color": theme.BLUE},
        error_y=error_bars(rates, bounds, theme.BLUE),
        hovertemplate="%{x}: %{y:.4g} GB/s<extra></extra>",
    )
    return Variant(
        data=traces(line),
        layout={},
        alt=(
            f"{link.name}: {len(rates)} calibrations, {format_rate(min(rates) * 1e9)} to "
            f"{format_rate(max(rates) * 1e9)}."
        ),
    )
