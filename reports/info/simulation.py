"""What a simulation predicts, from the JSON document of ``caee simulate``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from probes.errors import InputError
from reports.info.balance import BalanceInfo, LayerBalance, imbalance
from reports.info.machine import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPass:
    """One policy on one cache, placement and tier. ``where``: those three, in words, as far as passes differ in them.

    ``cut``: 1 − mean step time ÷ that of ``router`` under the same conditions, where simulated (``router``: its place).
    ``on_front``: nothing else is faster and removes less.
    """

    label: str
    policy: str
    name: str
    where: str
    cache: str | None
    cache_experts: int | None
    placement: str
    tier: str
    steps: int
    mean_seconds: float
    p50_seconds: float
    p95_seconds: float
    max_device_movements_per_step: float
    movements_per_device: tuple[int, ...]
    gap_mean: float | None
    gap_histogram: tuple[int, ...]
    removed_importance: float
    rerouted_slots: int
    cut: float | None
    router: int | None
    on_front: bool
    balance: BalanceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInfo:
    """Passes in the order in which they were asked for."""

    simulation_id: str
    created_at: str
    tier: str
    devices: int
    passes: tuple[SimulatedPass, ...]
    trace: tuple[Fact, ...]
    machine: tuple[Fact, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> int:
        """Position of the fastest pass that gains on the router, else of the fastest."""
        gaining = [at for at, each in enumerate(self.passes) if each.cut is not None and each.cut > 0]
        return min(
            gaining or range(len(self.passes)),
            key=lambda at: (self.passes[at].mean_seconds, self.passes[at].removed_importance),
        )

    @property
    def front(self) -> tuple[SimulatedPass, ...]:
        """The passes on the Pareto front, by removed importance."""
        chosen = (each for each in self.passes if each.on_front)
        return tuple(sorted(chosen, key=lambda each: (each.removed_importance, each.mean_seconds)))


def simulation_info(document: dict[str, Any]) -> SimulationInfo:
    """Raises ``InputError`` where the document is not what ``caee simulate --json`` prints."""
    try:
        return _info(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"this is no result of caee simulate: {type(error).__name__} {error}",
            hint="caee simulate --json prints one",
        ) from error


def _info(document: dict[str, Any]) -> SimulationInfo:
    results, machine = document["policies"], document["machine"]
    if not results:
        raise ValueError("it has no policies")
    costs = {
        each["tier"]: [float(link["seconds_per_expert"]) for link in each["cost"]] for each in document["machines"]
    }
    routers = {_conditions(each): at for at, each in enumerate(results) if each["name"] == "router"}
    told_apart = [len({condition[part] for condition in map(_conditions, results)}) > 1 for part in range(3)]
    return SimulationInfo(
        simulation_id=str(document["simulation_id"]),
        created_at=str(document["created_at"]),
        tier=" and ".join(costs),
        devices=int(machine["devices"]),
        passes=tuple(
            _pass(
                result,
                where=", ".join(itertools.compress(_conditions(result), told_apart)),
                router=routers.get(_conditions(result)),
                on_front=at in document["pareto"],
                costs=costs[result["tier"]],
            )
            for at, result in enumerate(results)
        ),
        trace=_facts("trace", document["trace"]),
        machine=_facts("machine", machine),
        notes=tuple(str(note) for note in document["notes"]),
    )


def _pass(
    result: dict[str, Any], *, where: str, router: int | None, on_front: bool, costs: list[float]
) -> SimulatedPass:
    times, steps, policy = result["time_per_step_seconds"], int(result["steps"]), str(result["written"])
    return SimulatedPass(
        label=f"{policy} · {where}" if where else policy,
        policy=policy,
        name=str(result["name"]),
        where=where,
        cache=result["cache"],
        cache_experts=result["cache_experts"],
        placement=str(result["placement"]),
        tier=str(result["tier"]),
        steps=steps,
        mean_seconds=times["mean"],
        p50_seconds=times["p50"],
        p95_seconds=times["p95"],
        max_device_movements_per_step=result["max_device_misses_per_step"],
        movements_per_device=tuple(result["misses_per_device"]),
        gap_mean=result["gap"]["mean"],
        gap_histogram=tuple(result["gap"]["histogram"]),
        removed_importance=result["removed_importance"],
        rerouted_slots=result["rerouted_slots"],
        cut=result["cut_against_router"],
        router=router,
        on_front=on_front,
        balance=BalanceInfo(
            devices=tuple(f"device {at}" for at in range(len(costs))),
            layers=tuple(_layer(layer, steps, costs) for layer in result["layers"]),
        ),
    )


def _layer(layer: dict[str, Any], steps: int, costs: list[float]) -> LayerBalance:
    before = tuple(count / steps for count in layer["device_misses_before"])
    after = tuple(count / steps for count in layer["device_misses_after"])
    return LayerBalance(
        layer=int(layer["layer"]),
        movements_before=before,
        movements_after=after,
        seconds_before=tuple(count * cost for count, cost in zip(before, costs, strict=True)),
        seconds_after=tuple(count * cost for count, cost in zip(after, costs, strict=True)),
        imbalance_before=imbalance(before),
        imbalance_after=imbalance(after),
    )


def _conditions(result: dict[str, Any]) -> tuple[str, str, str]:
    """Cache, tier and placement of a pass: what its policy did not choose."""
    cache = "no cache" if result["cache"] is None else f"{result['cache']} {result['cache_experts']}"
    return cache, str(result["tier"]), str(result["placement"])


_NAMES = {
    "moe_layers": "MoE layers",
    "num_experts": "experts per layer",
    "top_k": "experts per token (top-k)",
    "full_scores": "scores of all experts recorded",
    "batch_size": "batch size",
    "warmup_steps": "warm-up steps, which do not count",
    "planned_steps": "steps with the warm-up",
    "origin": "costs from",
    "tier": "expert tier",
    "expert_bytes": "expert size (bytes)",
    "expert_compute_seconds": "to run one expert (s)",
    "dense_seconds": "the rest of a step (s)",
    "overlap": "compute runs while experts move",
    "staged": "cached experts run while others move",
}


def _facts(group: str, values: dict[str, Any]) -> tuple[Fact, ...]:
    """The scalars of a part of the document; nested values are shown elsewhere."""
    return tuple(
        Fact(group=group, name=_NAMES.get(name, name.replace("_", " ")), value=value)
        for name, value in values.items()
        if value is None or isinstance(value, (str, int, float, bool))
    )
