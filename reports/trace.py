"""What is in a routing trace, as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from reports.info.words import plural
from reports.tables import Sheet

SHOWN_LAYERS = 8


def trace_tables(info: dict[str, Any], *, all_layers: bool = False) -> list[RenderableType]:
    """Tables of what ``runtime.trace.show.show_info`` returns: the trace, its balance, its layers, its warnings.

    Of many layers those whose devices are least even are shown, unless ``all_layers``.
    """
    return [
        _facts(info),
        _balance(info["balance"]),
        *_layers(info, all_layers=all_layers),
        *(Text(f"warning: {warning}", style="yellow") for warning in info["warnings"]),
        *(Text(f"note: {note}") for note in info["notes"]),
    ]


def _facts(info: dict[str, Any]) -> Sheet:
    meta, tokens = info["meta"], info["tokens"]
    kind = "a routing trace" if info["kind"] == "routing" else "a load profile"
    table = Sheet(f"{info['path']}: {kind}", ("what", "value"))
    table.add_row("model", _text(meta["model"]))
    table.add_row("engine", _text(" ".join(filter(None, (meta["engine"], meta["engine_version"]))) or None))
    shape = (
        f"{plural(meta['moe_layers'], 'layer')} × {plural(meta['num_experts'], 'expert')}, top-{meta['top_k'] or '?'}"
    )
    table.add_row("shape", Text(shape))
    table.add_row("tokens", _text(", ".join(f"{count} {_words(name)}" for name, count in tokens.items() if count)))
    if info["kind"] == "routing":
        sequences = info["sequences"]
        lengths = f"{sequences['tokens_min']} to {sequences['tokens_max']} tokens, median {sequences['tokens_median']}"
        table.add_row("sequences", Text(f"{sequences['count']:,} of {lengths}" if sequences["count"] else "none"))
        table.add_row("recorded steps", _text(info["steps"]))
        importance = info["importance"]
        if importance is not None:
            table.add_row(
                "share of the gate weights",
                Text(
                    f"highest {importance['highest']:.3f}, lowest {importance['lowest']:.3f} of a token's experts, "
                    f"ratio {_number(importance['ratio'])}"
                ),
            )
    return table


def _balance(balance: dict[str, Any]) -> Sheet:
    over = f"{plural(balance['devices'], 'device')} ({balance['placement']})"
    headings = ("formula", "devices", "experts", "is")
    table = Sheet(f"Balance over {over} and over single experts", headings, right=("devices", "experts"))
    for name, meaning in balance["formulas"].items():
        table.add_row(name, _number(balance["by_device"][name]), _number(balance["by_expert"][name]), Text(meaning))
    return table


def _layers(info: dict[str, Any], *, all_layers: bool) -> list[RenderableType]:
    layers = info["layers"]
    shown = layers if all_layers else _least_even(layers)
    numbers = ("layer", "share high", "low", "ratio", "device max/mean", "Gini", "expert max/mean", "Gini")
    per_device = "activated per device and step" if info.get("steps") else "experts used per device"
    title = "The layers"
    if len(shown) < len(layers):
        title = f"{len(shown)} of {len(layers)} layers: those whose devices are least even"
    table = Sheet(title, (*numbers, per_device, "hottest experts (times the mean)"), right=range(len(numbers)))
    _add_layers(table, shown)
    if len(shown) == len(layers):
        return [table]
    return [table, Text("--all-layers shows every layer here; --json has every figure of each.")]


def _least_even(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of many layers the few whose busiest device is furthest above the mean, in the layers' order."""

    def excess(place: int) -> float:
        return float(layers[place]["by_device"]["max_over_mean"] or 0.0)

    worst = sorted(range(len(layers)), key=excess, reverse=True)[:SHOWN_LAYERS]
    return [layers[place] for place in sorted(worst)]


def _add_layers(table: Sheet, layers: Sequence[dict[str, Any]]) -> None:
    for layer in layers:
        importance = layer["importance"] or {}
        activated = layer["activated_experts_per_device_and_step"]
        per_device = (
            [f"{count:.1f}" for count in activated] if activated else map(str, layer["used_experts_per_device"])
        )
        hot = [f"{expert['expert']} ({expert['load_over_mean']:.1f})" for expert in layer["hot_experts"]]
        table.add_row(
            f"{layer['layer']}{' draft' if layer['draft'] else ''}",
            *(_number(importance.get(name)) for name in ("highest", "lowest", "ratio")),
            *(_number(layer[bins][name]) for bins in ("by_device", "by_expert") for name in ("max_over_mean", "gini")),
            Text(" ".join(per_device)),
            Text(" ".join(hot)),
        )


def _text(value: object) -> Text:
    return Text("unknown" if value is None or value == "" else str(value))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
