"""A simulation as the JSON document that ``caee simulate --json`` prints, and that is stored and shown."""

from __future__ import annotations

import dataclasses
from typing import Any

from probes.records import LayerModel
from runtime.policy.spec import SHARED_KEYS, format_policy
from runtime.policy.types import PolicySpec
from runtime.simulate.figures import cut_against_router, pareto
from runtime.simulate.records import PassFigures, SimulatedMachine, Simulation

SCHEMA = "caee.simulate/1"


def simulation_document(
    simulation: Simulation, *, simulation_id: str, created_at: str, trace: str, expert_bytes: int | None
) -> dict[str, Any]:
    """Times in seconds, sizes in bytes; misses by device are totals over the counted steps.

    ``pareto``: places in ``policies``. ``machine`` is the first pass's; other tiers stand in ``machines``.
    """
    machines = list({id(each.plan.machine): each.plan.machine for each in simulation.passes}.values())
    described = [_machine(machine, expert_bytes) for machine in machines]
    first = simulation.passes[0].plan
    return {
        "schema": SCHEMA,
        "simulation_id": simulation_id,
        "created_at": created_at,
        "trace": {
            "path": trace,
            "model": simulation.model,
            "tokens": simulation.tokens,
            "sequences": simulation.sequences,
            "moe_layers": simulation.moe_layers,
            "num_experts": simulation.num_experts,
            "top_k": simulation.top_k,
            "full_scores": simulation.has_scores,
            "batch_size": "recorded" if simulation.batch_size is None else simulation.batch_size,
            "warmup_steps": simulation.warmup_steps,
            "planned_steps": simulation.planned_steps,
        },
        "machine": described[0] | {"placement": first.placement.name},
        "machines": described,
        "policies": [_policy(each, simulation.passes) for each in simulation.passes],
        "pareto": list(pareto(simulation.passes)),
        "interrupted": simulation.interrupted,
        "notes": list(simulation.notes),
    }


def _machine(machine: SimulatedMachine, expert_bytes: int | None) -> dict[str, Any]:
    return {
        "devices": machine.devices,
        "tier": machine.tier,
        "origin": machine.origin,
        "expert_bytes": expert_bytes,
        "cost": [
            {"device": device, "seconds_per_expert": seconds}
            for device, seconds in enumerate(machine.costs.seconds_per_expert)
        ],
        "link_groups": [
            {"devices": [int(device) for device in members], "factor": factor / 1024}
            for members, factor in machine.costs.groups
        ],
        "layer_model": None if machine.costs.layer is None else _layer(machine.costs.layer),
        "expert_compute_seconds": machine.expert_compute_seconds,
        "overlap": machine.overlap,
        "staged": machine.staged,
        "dense_seconds": machine.dense_seconds,
    }


def _layer(layer: LayerModel) -> dict[str, Any]:
    """The measured layer that the times are of; ``knots``: experts and seconds, for a table."""
    return {
        **dataclasses.asdict(layer.shape),
        "form": layer.fit.form.value,
        "beta_seconds": layer.fit.beta_seconds,
        "seconds_per_expert": layer.fit.seconds_per_expert,
        "knots": [list(knot) for knot in layer.fit.knots],
        "holdout_error": layer.holdout_error,
        "status": layer.status,
    }


def _policy(each: PassFigures, passes: tuple[PassFigures, ...]) -> dict[str, Any]:
    plan = each.plan
    return {
        "name": plan.policy.name,
        "parameters": _parameters(plan.policy),
        "written": format_policy(plan.policy),
        "cache": None if plan.cache is None else str(plan.cache),
        "cache_experts": plan.cache_experts,
        "placement": plan.placement.name,
        "tier": plan.machine.tier,
        "compensated": each.compensated,
        "steps": each.steps,
        "layer_steps": each.layer_steps,
        "time_per_step_seconds": {
            "mean": each.time_per_step.mean,
            "p50": each.time_per_step.p50,
            "p95": each.time_per_step.p95,
        },
        "cut_against_router": cut_against_router(each, passes),
        "misses_per_device": list(each.misses_per_device),
        "max_device_misses_per_step": each.max_device_misses_per_step,
        "gap": {"mean": each.gap_mean, "histogram": list(each.gap_histogram)},
        "removed_importance": each.removed_importance,
        "rerouted_slots": each.rerouted_slots,
        "layers": [
            {
                "layer": layer.layer,
                "device_misses_before": list(layer.device_misses_before),
                "device_misses_after": list(layer.device_misses_after),
            }
            for layer in each.layers
        ],
    }


def _parameters(policy: PolicySpec) -> dict[str, Any]:
    """The policy's own parameters, and the shared ones that are not the usual."""
    usual = PolicySpec(name=policy.name, renormalize="survivors", routed_scaling_factor=1.0)
    shared = {key: getattr(policy, key) for key in SHARED_KEYS if getattr(policy, key) != getattr(usual, key)}
    return policy.parameters | shared
