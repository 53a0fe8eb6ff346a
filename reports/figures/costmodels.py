"""Card of the fitted cost models over their raw samples, with residuals."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from probes.units import format_rate, format_seconds
from reports.figures import theme
from reports.figures.card import Card, Panel, Picker, Variant, traces
from reports.info.costmodels import CostModelInfo
from reports.info.table import DataTable, table
from reports.info.words import percent

REACH = (0.05, 1.0)
_SI_DECADES = {"dtick": 1, "exponentformat": "SI", "minexponent": 0}


def cost_models_card(models: tuple[CostModelInfo, ...], *, selected: int = 0) -> Card:
    """One link at a time: samples and fit on logarithmic axes, and the residuals beside them."""
    fits = tuple(_fit_variant(model) for model in models)
    residuals = tuple(_residual_variant(model) for model in models)
    size_axis = {"type": "log", "title": {"text": "size"}, "ticksuffix": "B", **_SI_DECADES}
    return Card(
        key="cost-models",
        title="Fitted cost models over their raw samples",
        lede=(
            "Time to move one block of a given size, C(S) = α·S/B + β, over every timing it was fitted to. "
            "Residual: measured ÷ fitted − 1; a triangle lies beyond the axis."
        ),
        table=_sample_table(models),
        panels=(
            Panel(
                key="cost-fit",
                title="Samples and fit",
                data=fits[selected].data,
                layout={
                    "height": 320,
                    "xaxis": size_axis,
                    "yaxis": {"type": "log", "title": {"text": "time"}, "ticksuffix": "s", **_SI_DECADES},
                },
                alt=fits[selected].alt,
                variants=fits,
            ),
            Panel(
                key="cost-residuals",
                title="Residuals",
                data=residuals[selected].data,
                layout={
                    "height": 320,
                    "showlegend": False,
                    "xaxis": size_axis,
                    "yaxis": {"tickformat": "+.1~%", "zeroline": True} | residuals[selected].layout["yaxis"],
                },
                alt=residuals[selected].alt,
                variants=residuals,
            ),
        ),
        pickers=(Picker(label="Link", options=tuple(model.name for model in models), selected=selected),),
    )


def cost_table_card(models: tuple[CostModelInfo, ...]) -> Card:
    """The models' parameters with intervals and hold-out error."""
    return Card(
        key="cost-parameters",
        title="Cost models",
        lede="Effective bandwidth B/α and overhead β, 95 % intervals; hold-out error is of sizes left out of the fit.",
        table=table(
            ("link", "link"),
            ("form", "form"),
            ("status", "status"),
            ("bandwidth_bytes_per_s", "bandwidth", "B/s"),
            ("bandwidth_low", "95 % low", "B/s"),
            ("bandwidth_high", "95 % high", "B/s"),
            ("beta_seconds", "β", "s"),
            ("beta_low", "95 % low", "s"),
            ("beta_high", "95 % high", "s"),
            ("n_half_bytes", "half-speed size", "B"),
            ("holdout_mape", "hold-out error", "share"),
            ("max_relative_error", "largest error", "share"),
            rows=(
                (
                    model.name,
                    model.form,
                    model.status,
                    model.effective_bandwidth_bytes_per_s,
                    *(model.bandwidth_ci95 or (None, None)),
                    model.beta_seconds,
                    *(model.beta_ci95 or (None, None)),
                    model.n_half_bytes,
                    model.holdout_mape,
                    model.max_relative_error,
                )
                for model in models
            ),
        ),
    )


def _fit_variant(model: CostModelInfo) -> Variant:
    samples = go.Scatter(
        name="samples",
        x=[sample.size_bytes for sample in model.samples],
        y=[sample.seconds for sample in model.samples],
        mode="markers",
        marker={"size": 6, "color": theme.BEFORE, "opacity": 0.7},
        hovertemplate="%{x:.4s}B: %{y:.4s}s<extra></extra>",
    )
    curve = go.Scatter(
        name=f"fit ({model.form})",
        x=[size for size, _ in model.curve],
        y=[seconds for _, seconds in model.curve],
        mode="lines",
        line={"width": 2, "color": theme.BLUE},
        hovertemplate="fit at %{x:.4s}B: %{y:.4s}s<extra></extra>",
    )
    return Variant(
        data=traces(samples, curve),
        layout={},
        alt=(
            f"{model.name}: {len(model.samples)} timings and the {model.form} fit, "
            f"{format_rate(model.effective_bandwidth_bytes_per_s)} and {format_seconds(model.beta_seconds)} overhead."
        ),
    )


def _residual_variant(model: CostModelInfo) -> Variant:
    residuals = [sample.residual for sample in model.samples]
    reach = _reach(residuals)
    shown = [min(max(residual, -reach), reach) for residual in residuals]
    beyond = [abs(residual) > reach for residual in residuals]
    points: Any = go.Scatter(
        name="residual",
        x=[sample.size_bytes for sample in model.samples],
        y=shown,
        mode="markers",
        marker={
            "size": [9 if out else 6 for out in beyond],
            "color": theme.BEFORE,
            "opacity": 0.8,
            "symbol": [
                ("triangle-up" if residual > 0 else "triangle-down") if out else "circle"
                for residual, out in zip(residuals, beyond, strict=True)
            ],
        },
        customdata=residuals,
        hovertemplate="%{x:.4s}B: %{customdata:+.1%}<extra></extra>",
    )
    largest = max((abs(residual) for residual in residuals), default=None)
    return Variant(
        data=traces(points),
        layout={"yaxis": {"range": [-1.1 * reach, 1.1 * reach], "title": {"text": "residual"}}},
        alt=(
            f"{model.name}: residuals of {len(residuals)} timings, the largest {percent(largest)}, {sum(beyond)} of "
            f"them beyond the axis at {percent(reach)}."
        ),
    )


def _reach(residuals: list[float]) -> float:
    """Where the axis ends: a few stray timings, a hundred times too slow, would flatten all others."""
    ordered = sorted(abs(residual) for residual in residuals)
    usual = ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0
    return min(max(usual, REACH[0]), REACH[1])


def _sample_table(models: tuple[CostModelInfo, ...]) -> DataTable:
    return table(
        ("link", "link"),
        ("size_bytes", "size", "B"),
        ("seconds", "measured", "s"),
        ("fitted_seconds", "fitted", "s"),
        ("residual", "residual", "share"),
        rows=(
            (model.name, sample.size_bytes, sample.seconds, sample.fitted_seconds, sample.residual)
            for model in models
            for sample in model.samples
        ),
    )
