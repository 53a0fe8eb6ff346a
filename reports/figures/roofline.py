"""Card of the roofline of the expert matmuls (paper, Fig. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from probes.units import format_flops, format_rate, format_seconds, format_size
from reports.figures import theme
from reports.figures.card import Card, Panel, plain, traces
from reports.figures.facts import fact_card
from reports.info.machine import Fact
from reports.info.roofline import Roof, RooflineInfo, RooflineSample, roofline_sentence
from reports.info.table import DataTable, table
from reports.info.words import plural

KEY, TITLE = "roofline", "Roofline of the expert matmuls"
REACH = 1.6
"""How far the roofs go beyond the first and the last sample, as a factor."""


def roofline_card(info: RooflineInfo | None) -> Card:
    """Compute intensity against FLOP/s, with the roofs of memory, fetch and compute; without one, why there is none."""
    if info is None or not info.samples:
        reason = "not measured: the run was interrupted, or is of a version that measured none"
        fact = Fact(group="time", name="roofline", value=None, reason=reason)
        return fact_card(KEY, TITLE, "How far the experts' matmuls are from the limits of their device.", [fact])
    return Card(
        key=KEY,
        title=TITLE,
        lede=_lede(info),
        table=_table(info),
        panels=(
            Panel(
                key=KEY,
                data=traces(*_roofs(info), *_points(info)),
                layout={
                    "height": 400,
                    "xaxis": {
                        "type": "log",
                        "title": {"text": "compute intensity (FLOP per byte)"},
                        "tickvals": [each.intensity for each in info.samples],
                        "ticktext": [f"{each.intensity:.3g}" for each in info.samples],
                    },
                    "yaxis": {
                        "type": "log",
                        "title": {"text": "FLOP/s"},
                        "dtick": 1,
                        "exponentformat": "SI",
                        "minexponent": 0,
                    },
                },
                alt=_alt(info),
            ),
        ),
    )


def _lede(info: RooflineInfo) -> str:
    text = (
        f"One expert of {format_size(info.expert_bytes)} ({info.dtype}) on 1 to {info.samples[-1].tokens} tokens, on "
        f"{info.device}. Filled: already there, measured."
    )
    if info.fetch:
        text += (
            f" Hollow: fetched from {info.tier} first, derived from the calibrated fetch of "
            f"{format_seconds(info.expert_bytes / info.fetch.bytes_per_s)} and the measured matmuls, one after the "
            "other."
        )
    if info.memory is None:
        text += " The bandwidth of this device's memory is not known: caee calibrate fits it."
    if above := info.above_memory_roof:
        text += (
            f" {plural(above, 'measurement')} above the memory roof: an expert this small stays in the processor's "
            "caches between repeats."
        )
    return text


def _roofs(info: RooflineInfo) -> list[Any]:
    reach = (info.samples[0].intensity / REACH, info.samples[-1].intensity * REACH)
    roofs = [
        ("memory", info.memory, theme.MUTED, "solid"),
        (f"fetch from {info.tier}", info.fetch, theme.FETCH, "dash"),
    ]
    known = [
        _line(f"roof of {name}, {format_rate(roof.bytes_per_s)}", colour, dash, _corners(roof, reach))
        for name, roof, colour, dash in roofs
        if roof is not None
    ]
    peak = [(at, info.peak_flops_per_s) for at in reach]
    return [*known, _line(f"peak, {format_flops(info.peak_flops_per_s)}", theme.INK, "dot", peak)]


def _corners(roof: Roof, reach: tuple[float, float]) -> list[tuple[float, float]]:
    """A roof is straight on logarithmic axes but for its ridge."""
    low, high = reach
    at = [low, *([roof.ridge] if low < roof.ridge < high else []), high]
    return [(intensity, roof.flops_per_s(intensity)) for intensity in at]


def _line(name: str, colour: str, dash: str, corners: Sequence[tuple[float, float]]) -> Any:
    return go.Scatter(
        name=plain(name),
        x=[x for x, _ in corners],
        y=[y for _, y in corners],
        mode="lines",
        line={"color": colour, "width": 1.5, "dash": dash},
        hoverinfo="skip",
    )


def _points(info: RooflineInfo) -> list[Any]:
    points = [
        _markers("resident, measured", "circle", theme.AFTER, info.samples, [s.flops_per_s for s in info.samples])
    ]
    if info.fetch:
        derived = [each.fetched_flops_per_s for each in info.samples]
        points.append(_markers("fetched, derived", "circle-open", theme.FETCH, info.samples, derived))
    return points


def _markers(
    name: str, symbol: str, colour: str, samples: Sequence[RooflineSample], rates: Sequence[float | None]
) -> Any:
    return go.Scatter(
        name=name,
        x=[each.intensity for each in samples],
        y=list(rates),
        mode="markers",
        marker={"size": 9, "color": colour, "symbol": symbol, "line": {"width": 2, "color": colour}},
        customdata=[
            [plural(each.tokens, "token"), format_flops(rate or 0)] for each, rate in zip(samples, rates, strict=True)
        ],
        hovertemplate=f"%{{customdata[0]}}, {name}: %{{customdata[1]}}<extra></extra>",
    )


def _table(info: RooflineInfo) -> DataTable:
    return table(
        ("tokens", "tokens"),
        ("flop", "FLOP"),
        ("flop_per_byte", "intensity", "FLOP/byte"),
        ("seconds", "resident, measured", "s"),
        ("flops_per_s", "resident, measured", "FLOP/s"),
        ("memory_roof_flops_per_s", "roof of memory", "FLOP/s"),
        ("fetched_seconds", "fetched, derived", "s"),
        ("fetched_flops_per_s", "fetched, derived", "FLOP/s"),
        ("fetch_roof_flops_per_s", "roof of the fetch", "FLOP/s"),
        ("peak_flops_per_s", "peak", "FLOP/s"),
        rows=(
            (
                each.tokens,
                each.flops,
                each.intensity,
                each.seconds,
                each.flops_per_s,
                info.memory.flops_per_s(each.intensity) if info.memory else None,
                each.fetched_seconds,
                each.fetched_flops_per_s,
                info.fetch.flops_per_s(each.intensity) if info.fetch else None,
                info.peak_flops_per_s,
            )
            for each in info.samples
        ),
    )


def _alt(info: RooflineInfo) -> str:
    first, last = info.samples[0], info.samples[-1]
    text = (
        f"Log-log plot: a resident expert reaches {format_flops(first.flops_per_s)} on {plural(first.tokens, 'token')} "
        f"and {format_flops(last.flops_per_s)} on {plural(last.tokens, 'token')}, of a peak of "
        f"{format_flops(info.peak_flops_per_s)}."
    )
    sentence = roofline_sentence(info)
    return f"{text} {sentence}" if sentence else text
