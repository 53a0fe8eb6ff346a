"""One layer's decision, as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from probes.units import format_seconds
from reports.tables import Sheet
from runtime.policy.spec import POLICIES

SHOWN_TOKENS = 32
SHOWN_EXPERTS = 32


def decision_tables(outcome: dict[str, Any]) -> list[RenderableType]:
    """Tables of what ``runtime.policy.case.explain_case`` returns, and a sentence for each pruned expert."""
    policy = outcome["policy"]
    written = ", ".join(f"{key}={value}" for key, value in policy.items() if key != "name")
    about = POLICIES[policy["name"]]
    return [
        Text(f"Policy {policy['name']} ({written}): {about.rule}. Source: {about.source}."),
        _figures(outcome),
        _devices(outcome),
        _tokens(outcome),
        *(Text(entry["reason"]) for entry in outcome["reasons"]),
        Text("" if outcome["pruned"] else "No expert was pruned."),
    ]


def _figures(outcome: dict[str, Any]) -> Sheet:
    table = Sheet("The layer", ("", "value"), right=("value",))
    for which in ("active", "mandatory", "kept", "pruned"):
        if which in outcome:
            table.add_row(f"{which} experts", _counted(outcome[which]))
    table.add_row("layer cost before", format_seconds(outcome["f_before"]))
    if "f_base" in outcome:
        table.add_row("layer cost of the mandatory", format_seconds(outcome["f_base"]))
    table.add_row("layer cost after", format_seconds(outcome["f_after"]))
    table.add_row("removed importance per token", f"{outcome['removed_importance']:.4%}")
    table.add_row("re-routed slots", str(outcome["rerouted_slots"]))
    return table


def _counted(experts: Sequence[int]) -> str:
    """``0``, ``1 (expert 2)``, ``3 (experts 0, 1, 3)``; of many the first are named."""
    if not experts:
        return "0"
    named = ", ".join(map(str, experts[:SHOWN_EXPERTS]))
    more = ", …" if len(experts) > SHOWN_EXPERTS else ""
    return f"{len(experts)} ({'expert' if len(experts) == 1 else 'experts'} {named}{more})"


def _devices(outcome: dict[str, Any]) -> Sheet:
    headings = ("device", "cost before", "cost after")
    table = Sheet("The devices", headings, right=headings)
    costs = zip(outcome["device_cost_before"], outcome["device_cost_after"], strict=True)
    for device, (before, after) in enumerate(costs):
        table.add_row(str(device), format_seconds(before), format_seconds(after))
    return table


def _tokens(outcome: dict[str, Any]) -> Sheet:
    rows = list(zip(outcome["topk_ids"], outcome["topk_weights"], strict=True))
    title = "The tokens" if len(rows) <= SHOWN_TOKENS else f"The first {SHOWN_TOKENS} of {len(rows)} tokens"
    table = Sheet(title, ("token", "experts and weights"), right=("token",))
    for token, (ids, weights) in enumerate(rows[:SHOWN_TOKENS]):
        slots = [f"{expert} ({weight:.3f})" for expert, weight in zip(ids, weights, strict=True) if expert >= 0]
        table.add_row(str(token), ", ".join(slots) or "none")
    return table
