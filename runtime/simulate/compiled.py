"""A pass on the compiled kernel, for policies whose dispatched experts need no full scores to be known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.policy.controller import START
from runtime.policy.shares import threshold
from runtime.policy.types import PICOSECONDS, PolicySpec
from runtime.simulate import keep, kernel
from runtime.simulate.batches import Block
from runtime.simulate.caches import empty_cache
from runtime.simulate.layerstep import Layout, Rule, Totals, new_layer_step
from runtime.simulate.lookahead import NextUse
from runtime.simulate.prepare import Prepared
from runtime.simulate.records import Counts, PassSpec, Placement, SimulatedMachine

ANY = 1 << 62
NO_FUTURE = np.zeros(0, np.int64)


def rule_of(policy: PolicySpec, *, top_k: int, has_scores: bool) -> Rule:
    """The policy in numbers; it must be one that ``can_compile``."""
    given = policy.parameters
    least = [0]
    if given.get("rule") == "cir":
        least.append(threshold(float(given["theta"])) - top_k)
    if "ceiling" in given:
        least.append(threshold(1 - float(given["ceiling"])) - top_k)
    keeps = {
        "router": keep.ALL,
        "caee": keep.EXPANDED,
        "importance": keep.MARKED,
        "oea": keep.MARKED,
        "budget": keep.PRICED,
        "top-k": keep.SLOTS,
        "skip": keep.SLOTS,
    }[policy.name]
    # A prefix is never empty, and a token's best expert is in every price's kept set.
    never_empty = len(least) > 1 or policy.name == "budget"
    best = {"top-k": int(given.get("k0", 0)), "oea": int(given.get("k0", 0)), "skip": ANY}.get(policy.name, 0)
    return Rule(
        keeps=keeps,
        best=max(best, int(never_empty)),
        least=max(least),
        score=threshold(float(given["theta"])) if given.get("rule") == "score" else -1,
        ratio=float(given["beta"]) if policy.name == "skip" else 0.0,
        price=float(given.get("price", -1)),
        epsilon=float(given.get("epsilon", 0)),
        reuse=float(given.get("reuse", 0)),
        fills=has_scores and policy.compensation == "active" and keeps in (keep.EXPANDED, keep.MARKED, keep.PRICED),
    )


def layout_of(machine: SimulatedMachine, placement: Placement) -> Layout:
    """The machine in numbers."""
    groups = machine.costs.groups
    _, experts, replicas = placement.devices_LNR.shape
    return Layout(
        devices=machine.devices,
        experts=experts,
        replicas=replicas,
        offloading=machine.offloading,
        device=placement.devices_LNR.reshape(-1),
        cost=machine.costs.picoseconds,
        group_starts=groups.starts_G1,
        group_members=groups.members,
        group_factors=groups.factors_G,
        layer=machine.costs.layer_picoseconds(experts),
        compute=round(machine.expert_compute_seconds * PICOSECONDS),
        overlap=machine.overlap,
        staged=machine.staged,
        dense=round(machine.dense_seconds * PICOSECONDS),
    )


class CompiledPass:
    """One pass; its caches, and the price of ``budget``, go on from block to block."""

    def __init__(self, plan: PassSpec, *, top_k: int, has_scores: bool) -> None:
        layers, experts, _ = plan.placement.devices_LNR.shape
        devices = plan.machine.devices
        self._layout = layout_of(plan.machine, plan.placement)
        self._rule = rule_of(plan.policy, top_k=top_k, has_scores=has_scores)
        self._cache = empty_cache(plan.cache, plan.cache_experts or 0, plan.placement.devices_LNR, devices)
        self._totals = Totals(
            before_LD=np.zeros((layers, devices), np.int64),
            after_LD=np.zeros((layers, devices), np.int64),
            gaps=np.zeros(experts + 1, np.int64),
            sums=np.zeros(6, np.int64),
            controller=np.array(START),
        )
        self._now = new_layer_step(self._layout)
        self._times: list[npt.NDArray[np.int64]] = []

    def run(self, block: Block, prepared: Prepared, next_use: NextUse | None, uncounted: int) -> None:
        times = np.zeros(block.steps, np.int64)
        future = NO_FUTURE if next_use is None else next_use
        kernel.run_block(
            prepared, self._layout, self._cache, self._rule, self._totals, self._now, future, times, uncounted
        )
        self._times.append(times[uncounted:])

    def counts(self) -> Counts:
        totals = self._totals
        return Counts(
            before_LD=totals.before_LD,
            after_LD=totals.after_LD,
            gaps=totals.gaps,
            max_misses=int(totals.sums[kernel.MAX_MISSES]),
            removed=int(totals.sums[kernel.REMOVED]),
            tokens=int(totals.sums[kernel.TOKENS]),
            rerouted_slots=int(totals.sums[kernel.REROUTED]),
            layer_steps=int(totals.sums[kernel.LAYER_STEPS]),
            step_times=self._times,
        )
