"""Why an expert was pruned, in one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from probes.units import format_seconds
from runtime.policy.loads import Layer, cheapest_replicas
from runtime.policy.reference import members
from runtime.policy.types import PICOSECONDS, SHARE_UNIT, Decision, Machine, PolicySpec, Summary


def reasons_for_pruning(
    spec: PolicySpec, summary: Summary, decision: Decision, machine: Machine
) -> Iterator[tuple[int, str]]:
    """Each pruned expert, ascending, with the sentence that says why."""
    layer = cheapest_replicas(machine)
    kept = members(decision.kept_N)
    for expert in map(int, np.flatnonzero(decision.active_N & ~decision.kept_N)):
        weight = int(summary.importance_N[expert]) / SHARE_UNIT
        start = f"Expert {expert} on device {decision.device_N[expert]} carried {weight:.4g} tokens' worth of weight; "
        yield expert, start + _why(spec, expert, decision, layer, kept) + "."


def _why(spec: PolicySpec, expert: int, decision: Decision, layer: Layer, kept: set[int]) -> str:
    values = spec.parameters
    match spec.name:
        case "caee" | "random":
            return f"{_not_mandatory(spec)}, and {_too_dear(expert, decision.f_base or 0, layer, kept)}"
        case "importance":
            return _not_mandatory(spec)
        case "budget":
            cost = format_seconds(int(layer.paid_N[expert]) / PICOSECONDS)
            return (
                f"at a price of {values.get('price', 'the controller')} the layer saves more without it and what ranks "
                f"below it on its device: it costs {cost}, and the layer takes {_f(decision.f_after)} "
                f"instead of {_f(decision.f_before)}"
            )
        case "top-k" | "oea":
            return f"it is among no token's {values['k0']} best"
        case "skip":
            return f"in every token that chose it, its weight is below {values['beta']:g} of the best expert's"
        case "xshare":
            scope = (
                f"the budget of {values['budget']} experts"
                if "budget" in values
                else (f"its device's budget of {values['per_device']} experts")
            )
            return f"it is no token's best, and {scope} was full when its summed scores came to their turn"
        case "lynx":
            return f"it is no token's best, and its votes are not among the {values['keep']} highest"
        case "max-rank":
            return f"it is among no token's {values['j']} best, and resident experts took its places"
        case "cache-prior":
            return f"it is among no token's {values['j']} best, and resident experts ranked above it with their bonus"
    raise AssertionError(f"policy {spec.name} prunes nothing")


def _not_mandatory(spec: PolicySpec) -> str:
    theta = spec.parameters["theta"]
    ceiling = spec.parameters.get("ceiling")
    also = "" if ceiling is None else f", nor to stay within the ceiling of {ceiling:g}"
    if spec.parameters["rule"] == "cir":
        return f"no token needs it to reach {theta:g} of its weight{also}"
    return f"that is below theta = {theta:g}{also}"


def _too_dear(expert: int, f_base: int, layer: Layer, kept: set[int]) -> str:
    # Loads only grow during the expansion, so what did not fit at its turn does not fit at the end either.
    before, after = _f(layer.f(kept)), _f(layer.f(kept | {expert}))
    return f"keeping it would take the layer from {before} to {after}, beyond the mandatory experts' {_f(f_base)}"


def _f(load: int) -> str:
    return format_seconds(load / PICOSECONDS)
