"""Cards about devices and layers: bars per layer (paper, Fig. 10), gaps (Fig. 5), importance (Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from reports.figures import theme
from reports.figures.card import Card, Panel, Picker, Variant, plain, traces
from reports.figures.heat import balance_table
from reports.info.balance import BalanceInfo, GapInfo, ImportanceInfo, LayerBalance
from reports.info.table import table
from reports.info.words import number, plural


def layer_card(info: BalanceInfo, noun: str) -> Card:
    """Bars per device of one layer, before and after; layer and measure are picked. ``noun``: what is counted."""
    measures = (f"{noun} per step", *(["time per step"] if info.priced else []))
    relieved = info.most_relieved
    start = info.layers.index(relieved) if relieved else 0
    variants = tuple(
        _layer_variant(info, layer, measure, noun) for layer in info.layers for measure in range(len(measures))
    )
    first = variants[len(measures) * start] if variants else Variant(data=[], layout={}, alt="No layer was recorded.")
    return Card(
        key="layer-devices",
        title="One layer, device by device",
        lede=(
            "What each device pays at one MoE layer in a mean decode step. The tallest bar sets the pace: the others "
            "wait for it. “Before” is the router's own choice on the very caches and tokens of “after”. "
            + (f"Layer {relieved.layer} is relieved most." if relieved else "")
        ),
        table=balance_table([("", info)], noun),
        panels=(
            Panel(
                key="layer-devices",
                data=first.data,
                layout={
                    "barmode": "group",
                    "height": 320,
                    "xaxis": {"title": {"text": "device"}, "type": "category"},
                    "yaxis": {"rangemode": "tozero"},
                }
                | first.layout,
                alt=first.alt,
                variants=variants,
            ),
        ),
        pickers=(
            Picker(label="Layer", options=tuple(str(layer.layer) for layer in info.layers), selected=start),
            Picker(label="Show", options=measures),
        ),
    )


def gap_card(info: GapInfo, noun: str) -> Card:
    """Distribution of busiest − least busy device."""
    total = sum(info.count_before)
    means = f"{number(info.mean_before)} before, {number(info.mean_after)} after"
    return Card(
        key="gap",
        title="Gap between the busiest and the least busy device",
        lede=f"Of every layer in every step, how many {noun} lie between the two; 0 is perfect balance. "
        f"Mean gap: {means}.",
        table=table(
            ("gap", "gap", "experts"),
            ("layer_steps_before", "before", "layer-steps"),
            ("layer_steps_after", "after", "layer-steps"),
            ("share_before", "before", "share"),
            ("share_after", "after", "share"),
            rows=zip(info.gaps, info.count_before, info.count_after, info.share_before, info.share_after, strict=True),
        ),
        panels=(
            Panel(
                key="gap",
                data=traces(
                    _bars("before", theme.BEFORE, info.gaps, info.share_before, "%{y:.1%}"),
                    _bars("after", theme.AFTER, info.gaps, info.share_after, "%{y:.1%}"),
                ),
                layout={
                    "barmode": "group",
                    "height": 300,
                    "xaxis": {"title": {"text": f"gap ({noun})"}, "dtick": max(1, len(info.gaps) // 12)},
                    "yaxis": {"title": {"text": "share of layer-steps"}, "tickformat": ".0%", "rangemode": "tozero"},
                },
                alt=f"Histogram of the gap over {plural(total, 'layer-step')}; mean gap {means}.",
            ),
        ),
        wide=False,
    )


def importance_card(info: ImportanceInfo) -> Card:
    """Highest and lowest importance among activated experts, by layer."""
    return Card(
        key="importance",
        title="Importance of activated experts",
        lede=(
            "Mean highest and lowest importance (summed gate share) among the experts that a layer activates in a "
            "step. Both cost the same to move: the distance between the lines is what pruning can use."
        ),
        table=table(
            ("layer", "layer"),
            ("importance_highest", "highest"),
            ("importance_lowest", "lowest"),
            rows=zip(info.layers, info.highest, info.lowest, strict=True),
        ),
        panels=(
            Panel(
                key="importance",
                data=traces(
                    _line("highest", theme.BLUE, info.layers, info.highest),
                    _line("lowest", theme.PALE_BLUE, info.layers, info.lowest),
                ),
                layout={
                    "height": 300,
                    "xaxis": {"title": {"text": "layer"}, "dtick": max(1, len(info.layers) // 10)},
                    "yaxis": {"title": {"text": "importance per step"}, "rangemode": "tozero"},
                },
                alt=(
                    f"Lines over {plural(len(info.layers), 'layer')}; "
                    f"highest importance {number(min(info.highest))} to {number(max(info.highest))}, "
                    f"lowest {number(min(info.lowest))} to {number(max(info.lowest))}."
                ),
            ),
        ),
        wide=False,
    )


def _layer_variant(info: BalanceInfo, layer: LayerBalance, measure: int, noun: str) -> Variant:
    if measure == 0:
        before, after, shown, unit = layer.movements_before, layer.movements_after, "%{y:.2f}", noun
        title = f"{noun} per step"
        everywhere = [value for of in info.layers for value in (*of.movements_before, *of.movements_after)]
    else:
        before, after = _milliseconds(layer.seconds_before), _milliseconds(layer.seconds_after)
        shown, unit, title = "%{y:.3f} ms", "ms", "calibrated time per step (ms)"
        everywhere = [value for of in info.layers for value in _milliseconds((*of.seconds_before, *of.seconds_after))]
    # One scale for all layers, so that they can be compared while one picks.
    axis = {"title": {"text": title}, "range": [0, (max(everywhere, default=0.0) or 1.0) * 1.06]}
    names = [plain(device) for device in info.devices]
    return Variant(
        data=traces(
            _bars("before", theme.BEFORE, names, before, shown),
            _bars("after", theme.AFTER, names, after, shown),
        ),
        layout={"yaxis": axis},
        alt=(
            f"Layer {layer.layer}, {plural(len(info.devices), 'device')}: busiest device "
            f"{number(max(before, default=0.0))} {unit} per step before, {number(max(after, default=0.0))} after; "
            f"busiest ÷ mean {number(layer.imbalance_before)} before, {number(layer.imbalance_after)} after."
        ),
    )


def _milliseconds(seconds: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(value * 1e3 for value in seconds if value is not None)


def _bars(name: str, colour: str, x: Sequence[Any], y: Sequence[float], shown: str) -> Any:
    return go.Bar(
        name=name,
        x=list(x),
        y=list(y),
        marker={"color": colour, "cornerradius": 2},
        hovertemplate=f"%{{x}}, {name}: {shown}<extra></extra>",
    )


def _line(name: str, colour: str, x: Sequence[float], y: Sequence[float]) -> Any:
    return go.Scatter(
        name=name,
        x=list(x),
        y=list(y),
        mode="lines+markers",
        line={"color": colour, "width": 2},
        marker={"size": 6, "color": colour},
        hovertemplate=f"layer %{{x}}, {name}: %{{y:.3f}}<extra></extra>",
    )
