"""What is in a routing trace, as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def trace_tables(info: dict[str, Any]) -> list[RenderableType]:
    """Tables of what ``runtime.trace.show.show_info`` returns: the trace, its balance, its layers, its warnings."""
    return [
        _facts(info),
        _balance(info["balance"]),
        _layers(info),
        *(Text(f"warning: {warning}", style="yellow") for warning in info["warnings"]),
        *(Text(f"note: {note}") for note in info["notes"]),
    ]


def _facts(info: dict[str, Any]) -> Table:
    meta, tokens = info["meta"], info["tokens"]
    table = _table(f"{info['path']}: {'a routing trace' if info['kind'] == 'routing' else 'a load profile'}")
    table.add_column("")
    table.add_column("value")
    table.add_row("model", _text(meta["model"]))
    table.add_row("engine", _text(" ".join(filter(None, (meta["engine"], meta["engine_version"]))) or None))
    shape = f"{meta['moe_layers']} layers × {meta['num_experts']} experts, top-{meta['top_k'] or '?'}"
    table.add_row("shape", Text(shape))
    table.add_row("tokens", _text(", ".join(f"{count} {_words(name)}" for name, count in tokens.items() if count)))
    if info["kind"] == "routing":
        sequences = info["sequences"]
        lengths = f"{sequences['tokens_min']} to {sequences['tokens_max']} tokens, median {sequences['tokens_median']}"
        table.add_row("sequences", Text(f"{sequences['count']} of {lengths}" if sequences["count"] else "none"))
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


def _balance(balance: dict[str, Any]) -> Table:
    table = _table(f"Balance over {balance['devices']} devices ({balance['placement']}) and over single experts")
    table.add_column("formula")
    for heading in ("devices", "experts"):
        table.add_column(heading, justify="right")
    table.add_column("is")
    for name, meaning in balance["formulas"].items():
        table.add_row(name, _number(balance["by_device"][name]), _number(balance["by_expert"][name]), Text(meaning))
    return table


def _layers(info: dict[str, Any]) -> Table:
    table = _table("The layers")
    for heading in ("layer", "share high", "low", "ratio", "device max/mean", "Gini", "expert max/mean", "Gini"):
        table.add_column(heading, justify="right")
    table.add_column("activated per device and step" if info.get("steps") else "experts used per device")
    table.add_column("hottest experts (times the mean)")
    for layer in info["layers"]:
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
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left")


def _text(value: object) -> Text:
    return Text("unknown" if value is None or value == "" else str(value))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
