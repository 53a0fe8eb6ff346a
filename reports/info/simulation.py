"""What a simulation predicts, from the JSON document of ``caee simulate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from probes.errors import InputError
from reports.info.balance import BalanceInfo, LayerBalance, imbalance
from reports.info.machine import Fact
from reports.info.pareto import pareto_front


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPass:
    """One policy on one cache. ``cut``: 1 − mean step time ÷ that of ``router`` on the same cache, where simulated.

    ``on_front``: no other pass is at least as fast and removes at most as much importance, and is better in one.
    """

    label: str
    policy: str
    cache: str | None
    cache_experts: int | None
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
    on_front: bool
    balance: BalanceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInfo:
    """Passes in the order in which they were asked for."""

    tier: str
    devices: int
    passes: tuple[SimulatedPass, ...]
    trace: tuple[Fact, ...]
    machine: tuple[Fact, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> int:
        """Position of the pass that cuts most, else of the fastest."""
        return min(
            range(len(self.passes)), key=lambda at: (-(self.passes[at].cut or 0.0), self.passes[at].mean_seconds)
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
    costs = [float(each["seconds_per_expert"]) for each in machine["cost"]]
    front = pareto_front([(each["time_per_step_seconds"]["mean"], each["removed_importance"]) for each in results])
    routers = {_cache(each): each["time_per_step_seconds"]["mean"] for each in results if each["name"] == "router"}
    labels = _labels(results)
    return SimulationInfo(
        tier=str(machine["tier"]),
        devices=int(machine["devices"]),
        passes=tuple(
            _pass(result, label, routers.get(_cache(result)), on_front=on_front, costs=costs)
            for result, label, on_front in zip(results, labels, front, strict=True)
        ),
        trace=_facts("trace", document["trace"]),
        machine=_facts("machine", machine),
        notes=tuple(str(note) for note in document.get("notes", document.get("warnings", ()))),
    )


def _pass(
    result: dict[str, Any], label: str, router_seconds: float | None, *, on_front: bool, costs: list[float]
) -> SimulatedPass:
    times, steps = result["time_per_step_seconds"], int(result["steps"])
    return SimulatedPass(
        label=label,
        policy=_policy(result),
        cache=result["cache"],
        cache_experts=result["cache_experts"],
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
        cut=1 - times["mean"] / router_seconds if router_seconds else None,
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


def _labels(results: list[dict[str, Any]]) -> list[str]:
    """Policy as it was written, and the cache where more than one was simulated."""
    several = len({_cache(result) for result in results}) > 1
    return [
        f"{_policy(result)} · {result['cache']} {result['cache_experts']}" if several else _policy(result)
        for result in results
    ]


def _policy(result: dict[str, Any]) -> str:
    pairs = ",".join(f"{key}={value}" for key, value in result["parameters"].items())
    return f"{result['name']}:{pairs}" if pairs else str(result["name"])


def _cache(result: dict[str, Any]) -> tuple[str | None, int | None]:
    return result["cache"], result["cache_experts"]


def _facts(group: str, values: dict[str, Any]) -> tuple[Fact, ...]:
    """The scalars of a part of the document; nested values are shown elsewhere."""
    return tuple(
        Fact(group=group, name=name.replace("_", " "), value=value)
        for name, value in values.items()
        if value is None or isinstance(value, (str, int, float, bool))
    )
