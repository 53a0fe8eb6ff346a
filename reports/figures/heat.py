"""Heat maps of layers × devices: before, after and the difference, for one pass or for a choice of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from reports.figures import theme
from reports.figures.card import Card, Panel, Picker, Variant, plain, traces
from reports.info.balance import BalanceInfo
from reports.info.table import DataTable, table
from reports.info.words import number, plural

ROW_PIXELS = 20
MAPS = (("heat-before", "Before"), ("heat-after", "After"), ("heat-difference", "Difference (after − before)"))

Grid = list[list[float]]


def heat_card(passes: Sequence[tuple[str, BalanceInfo]], noun: str, *, selected: int = 0) -> Card:
    """Layers × devices of every (label, balance) in ``passes``; with several, one is picked."""
    grids = [_grids(info) for _, info in passes]
    top = max((value for grid in grids for part in grid[:2] for row in part for value in row), default=0.0) or 1.0
    reach = max((abs(value) for grid in grids for row in grid[2] for value in row), default=0.0) or 1.0
    load = {"zmin": 0, "zmax": top, "colorscale": theme.colour_scale(theme.LOAD_SCALE)}
    change = {"zmin": -reach, "zmax": reach, "colorscale": theme.colour_scale(theme.DIFFERENCE_SCALE)}
    panels = []
    for at, (key, title) in enumerate(MAPS):
        variants = tuple(
            _variant(title, info, grid[at], change if at == 2 else load, noun)
            for (_, info), grid in zip(passes, grids, strict=True)
        )
        layers = len(passes[0][1].layers)
        panels.append(
            Panel(
                key=key,
                title=title,
                data=variants[selected].data,
                layout=_layout(layers),
                alt=variants[selected].alt,
                variants=variants if len(variants) > 1 else (),
            )
        )
    several = len(passes) > 1
    return Card(
        key="layer-heat",
        title="All layers and devices",
        lede=(
            f"Mean {noun} per decode step, by the scale above each map. Before and after share one scale; in the "
            "difference, green is fewer and brown is more."
        ),
        table=balance_table(passes, noun),
        panels=tuple(panels),
        pickers=(Picker(label="Policy", options=tuple(label for label, _ in passes), selected=selected),)
        if several
        else (),
    )


def balance_table(passes: Sequence[tuple[str, BalanceInfo]], noun: str) -> DataTable:
    """One row for each pass, layer and device; the pass is named where there are several."""
    several = len(passes) > 1
    named: list[tuple[str, str] | tuple[str, str, str]] = [("pass", "policy")] if several else []
    return table(
        *named,
        ("layer", "layer"),
        ("device", "device"),
        ("movements_per_step_before", "before", f"{noun} per step"),
        ("movements_per_step_after", "after", f"{noun} per step"),
        ("seconds_per_step_before", "before", "s"),
        ("seconds_per_step_after", "after", "s"),
        rows=(
            (*([label] if several else []), layer.layer, *row)
            for label, info in passes
            for layer in info.layers
            for row in zip(
                info.devices,
                layer.movements_before,
                layer.movements_after,
                layer.seconds_before,
                layer.seconds_after,
                strict=True,
            )
        ),
    )


def _grids(info: BalanceInfo) -> tuple[Grid, Grid, Grid]:
    before = [list(layer.movements_before) for layer in info.layers]
    after = [list(layer.movements_after) for layer in info.layers]
    difference = [[new - old for old, new in zip(*rows, strict=True)] for rows in zip(before, after, strict=True)]
    return before, after, difference


def _variant(title: str, info: BalanceInfo, values: Grid, scale: dict[str, Any], noun: str) -> Variant:
    flat = [value for row in values for value in row]
    sign = "+" if scale["zmin"] else ""
    heat = go.Heatmap(
        x=[plain(device) for device in info.devices],
        y=[layer.layer for layer in info.layers],
        z=values,
        xgap=1,
        ygap=1,
        hovertemplate=f"layer %{{y}}, %{{x}}: %{{z:{sign}.2f}} {noun}<extra></extra>",
        colorbar={
            "orientation": "h",
            "thickness": 10,
            "len": 1,
            "x": 0.5,
            "y": 1.0,
            "yanchor": "bottom",
            "ypad": 6,
            "xpad": 0,
            "outlinewidth": 0,
            "nticks": 5,
            "tickfont": {"size": 11, "color": theme.MUTED},
        },
        **scale,
    )
    return Variant(
        data=traces(heat),
        layout={},
        alt=(
            f"Heat map, {title.lower()}: {plural(len(info.layers), 'layer')} by {plural(len(info.devices), 'device')}, "
            f"{number(min(flat, default=0.0))} to {number(max(flat, default=0.0))} {noun} per step."
        ),
    )


def _layout(layers: int) -> dict[str, Any]:
    return {
        "height": max(280, min(ROW_PIXELS * layers + 140, 760)),
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {
            "autorange": "reversed",
            "showgrid": False,
            "title": {"text": "layer"},
            "dtick": max(1, layers // 12),
        },
    }
