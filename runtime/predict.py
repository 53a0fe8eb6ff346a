"""What a decode step should take: the calibrated fetch cost with the measured compute, beside the measured time.

Per layer and device, fetches run beside the experts already there; fetched experts are computed after. So
t_d = max(C·misses_d, c·hits_d) + c·misses_d, and the layer takes max_d t_d, or longer where a link group is the
bottleneck. Everything else of a step (dense layers, decision, exchange) is taken as measured in the baseline passes.

Shape legend: S steps, L MoE layers, D devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.cost import CostTable
from runtime.policy.types import GROUP_UNIT, LinkGroups
from runtime.recording import Counts, PassRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds: to fetch one expert by device, to compute one expert, and the rest of a decode step."""

    fetch_D: tuple[float, ...]
    compute: float
    rest: float
    groups: LinkGroups


def measure_costs(passes: Sequence[Sequence[PassRecord]], table: CostTable) -> StepCosts:
    """Compute and rest of a step from baseline ``passes``, by rank and pair.

    The exchange is counted at the rank that waits least in it: what others wait there is another device's fetches.
    """
    computes, exchanges = [], []
    for rank, records in enumerate(passes):
        steps = [step for record in records for step in record.decode_steps()]
        dispatched = sum(int(layer.dispatched_D[rank]) for step in steps for layer in step.layers)
        computes.append(sum(step.timers.experts for step in steps) / max(1, dispatched))
        exchanges.append(float(np.mean([step.timers.exchange for step in steps])))
    first = [step for record in passes[0] for step in record.decode_steps()]
    outside = [step.seconds - step.timers.experts - step.timers.exchange - step.timers.fetch_wait for step in first]
    return StepCosts(
        fetch_D=table.seconds_per_expert,
        compute=float(np.mean(computes)),
        rest=float(np.mean(outside)) + min(exchanges),
        groups=table.groups,
    )


def predicted_tpot(costs: StepCosts, misses_SLD: Counts, dispatched_SLD: Counts) -> float:
    """Mean predicted seconds of a decode step, from recorded fetches and dispatches [S, L, D]."""
    fetch_SLD = misses_SLD * np.asarray(costs.fetch_D)
    for members, factor in costs.groups:
        shared_SL = fetch_SLD[..., members].sum(-1) * factor / GROUP_UNIT
        # A device of the group is done when the group's link is, if that is later.
        busy = fetch_SLD[..., members] > 0
        fetch_SLD[..., members] = np.where(busy, np.maximum(fetch_SLD[..., members], shared_SL[..., None]), 0.0)
    hits_SLD = (dispatched_SLD - misses_SLD) * costs.compute
    layer_SL = (np.maximum(fetch_SLD, hits_SLD) + misses_SLD * costs.compute).max(-1)
    return float(layer_SL.sum(-1).mean()) + costs.rest
