"""Cards about a simulation: the frontier of time and importance, every pass in a table, gaps, busiest devices."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from probes.units import format_seconds
from reports.figures import theme
from reports.figures.card import Card, Panel, Picker, Variant, plain, series_colour, traces, with_legend
from reports.info.simulation import SimulatedPass, SimulationInfo
from reports.info.table import table
from reports.info.words import number, percent, plural

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star")
"""Marker shapes of the conditions that passes differ in."""


def front_card(info: SimulationInfo) -> Card:
    """Mean step time against removed importance, all passes, and the line through the best."""
    front = info.front
    line = go.Scatter(
        name="Pareto front",
        x=[each.removed_importance for each in front],
        y=[each.mean_seconds * 1e3 for each in front],
        mode="lines",
        line={"color": theme.MUTED, "width": 1.5, "dash": "dot"},
        hoverinfo="skip",
    )
    policies = list(dict.fromkeys(each.name for each in info.passes))
    places = list(dict.fromkeys(each.where for each in info.passes))
    points = [
        _points(alike, series_colour(policies.index(name)), SYMBOLS[places.index(where) % len(SYMBOLS)])
        for where in places
        for name in policies
        if (alike := [each for each in info.passes if (each.name, each.where) == (name, where)])
    ]
    return Card(
        key="pareto",
        title="Step time against removed importance",
        lede=(
            "Every simulated pass; down and left is better. The dotted line joins those that no other pass beats in "
            "both. Removed importance is per token and layer, of the router's own choice."
        ),
        table=table(
            ("pass", "pass"),
            ("mean_seconds", "mean step", "s"),
            ("removed_importance", "removed importance", "share"),
            ("on_front", "on the front"),
            rows=((each.label, each.mean_seconds, each.removed_importance, each.on_front) for each in info.passes),
        ),
        panels=(
            Panel(
                key="pareto",
                data=traces(line, *points),
                layout={
                    "height": with_legend(380, len(points) + 1),
                    "showlegend": True,
                    "xaxis": {"title": {"text": "removed importance"}, "tickformat": ".1%", "zeroline": True},
                    "yaxis": {"title": {"text": "mean step time (ms)"}},
                },
                alt="On the Pareto front: "
                + "; ".join(
                    f"{each.label}, {format_seconds(each.mean_seconds)} at {percent(each.removed_importance)}"
                    for each in front
                )
                + ".",
            ),
        ),
    )


def passes_card(info: SimulationInfo, noun: str) -> Card:
    """Policy × cache × size."""
    return Card(
        key="passes",
        title="Every policy and cache",
        lede="In the order asked for. The cut compares with the router's own choice under the same conditions.",
        table=table(
            ("policy", "policy"),
            ("cache", "cache"),
            ("cache_experts", "cached per device"),
            ("tier", "tier"),
            ("placement", "placement"),
            ("mean_seconds", "mean step", "s"),
            ("p50_seconds", "median", "s"),
            ("p95_seconds", "95th percentile", "s"),
            ("cut", "cut", "share"),
            ("max_device_movements_per_step", f"busiest device, {noun}"),
            ("gap_mean", "mean gap"),
            ("removed_importance", "removed importance", "share"),
            ("rerouted_slots", "re-routed slots"),
            rows=(
                (
                    each.policy,
                    each.cache,
                    each.cache_experts,
                    each.tier,
                    each.placement,
                    each.mean_seconds,
                    each.p50_seconds,
                    each.p95_seconds,
                    each.cut,
                    each.max_device_movements_per_step,
                    each.gap_mean,
                    each.removed_importance,
                    each.rerouted_slots,
                )
                for each in info.passes
            ),
        ),
    )


def gaps_card(info: SimulationInfo, noun: str) -> Card:
    """Distribution of the gap under one pass (paper, Fig. 5)."""
    reach = max(len(each.gap_histogram) for each in info.passes)
    variants = tuple(
        _gap_variant(each, None if each.router is None else info.passes[each.router], noun) for each in info.passes
    )
    return Card(
        key="gaps",
        title="Gap between the busiest and the least busy device",
        lede=f"Of every layer in every step, how many {noun} lie between the two; 0 is perfect balance.",
        table=table(
            ("pass", "pass"),
            ("gap", "gap", "experts"),
            ("layer_steps", "layer-steps"),
            rows=((each.label, gap, count) for each in info.passes for gap, count in enumerate(each.gap_histogram)),
        ),
        panels=(
            Panel(
                key="gaps",
                data=variants[info.best].data,
                layout={
                    "height": 300,
                    "barmode": "group",
                    "showlegend": True,
                    "xaxis": {
                        "title": {"text": f"gap ({noun})"},
                        "range": [-0.6, reach - 0.4],
                        "dtick": max(1, reach // 12),
                    },
                    "yaxis": {"title": {"text": "share of layer-steps"}, "tickformat": ".0%", "rangemode": "tozero"},
                },
                alt=variants[info.best].alt,
                variants=variants,
            ),
        ),
        pickers=(_picker(info),),
        wide=False,
    )


def busiest_layers_card(info: SimulationInfo, noun: str) -> Card:
    """Busiest device of every layer under one pass, before and after."""
    variants = tuple(_busiest_variant(each, noun) for each in info.passes)
    most = max(len(each.balance.layers) for each in info.passes)
    return Card(
        key="busiest-layers",
        title="Busiest device by layer",
        lede="“Before” is the router's own choice on the very same caches.",
        table=table(
            ("pass", "pass"),
            ("layer", "layer"),
            ("busiest_before", "before", f"{noun} per step"),
            ("busiest_after", "after", f"{noun} per step"),
            rows=(
                (each.label, layer.layer, max(layer.movements_before), max(layer.movements_after))
                for each in info.passes
                for layer in each.balance.layers
            ),
        ),
        panels=(
            Panel(
                key="busiest-layers",
                data=variants[info.best].data,
                layout={
                    "height": 300,
                    "barmode": "group",
                    "xaxis": {"title": {"text": "layer"}, "dtick": max(1, most // 10)},
                    "yaxis": {"title": {"text": f"{noun} per step"}, "rangemode": "tozero"},
                },
                alt=variants[info.best].alt,
                variants=variants,
            ),
        ),
        pickers=(_picker(info),),
        wide=False,
    )


def _picker(info: SimulationInfo) -> Picker:
    return Picker(label="Policy", options=tuple(each.label for each in info.passes), selected=info.best)


def _points(passes: list[SimulatedPass], colour: str, symbol: str) -> Any:
    """One policy under one set of conditions, its passes joined in the order of removed importance."""
    ordered = sorted(passes, key=lambda each: each.removed_importance)
    first = ordered[0]
    return go.Scatter(
        name=plain(f"{first.name} · {first.where}" if first.where else first.name),
        x=[each.removed_importance for each in ordered],
        y=[each.mean_seconds * 1e3 for each in ordered],
        mode="lines+markers" if len(ordered) > 1 else "markers",
        cliponaxis=False,
        line={"color": colour, "width": 1},
        marker={"size": 10, "color": colour, "symbol": symbol},
        customdata=[plain(each.label) for each in ordered],
        hovertemplate="%{customdata}<br>%{y:.3f} ms per step, %{x:.2%} removed<extra></extra>",
    )


def _gap_variant(each: SimulatedPass, router: SimulatedPass | None, noun: str) -> Variant:
    def bars(name: str, colour: str, histogram: tuple[int, ...]) -> Any:
        total = sum(histogram) or 1
        return go.Bar(
            name=plain(name),
            x=list(range(len(histogram))),
            y=[count / total for count in histogram],
            marker={"color": colour, "cornerradius": 2},
            hovertemplate=f"gap of %{{x}} {noun}, %{{fullData.name}}: %{{y:.1%}}<extra></extra>",
        )

    made = [bars(each.policy, theme.AFTER, each.gap_histogram)]
    alt = f"{each.label}: mean gap {number(each.gap_mean)} {noun}"
    if router is not None and router is not each:
        made = [bars("router", theme.BEFORE, router.gap_histogram), *made]
        alt += f", {number(router.gap_mean)} with the router's own choice"
    return Variant(data=traces(*made), layout={}, alt=f"{alt}.")


def _busiest_variant(each: SimulatedPass, noun: str) -> Variant:
    def bars(name: str, colour: str, values: list[float]) -> Any:
        return go.Bar(
            name=name,
            x=[layer.layer for layer in each.balance.layers],
            y=values,
            marker={"color": colour, "cornerradius": 2},
            hovertemplate=f"layer %{{x}}, {name}: %{{y:.2f}} {noun}<extra></extra>",
        )

    layers = each.balance.layers
    return Variant(
        data=traces(
            bars("before", theme.BEFORE, [max(layer.movements_before) for layer in layers]),
            bars("after", theme.AFTER, [max(layer.movements_after) for layer in layers]),
        ),
        layout={},
        alt=f"{each.label}: busiest device of {plural(len(layers), 'layer')} before and after, {noun} per step.",
    )
