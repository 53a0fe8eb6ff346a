"""Where a run's experts live: which device has which, how many it caches, and what moving one costs.

Shape legend: N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probes.records import Calibration, Device
from runtime.cost import CostTable, cost_table, uniform_costs
from runtime.options import check_device_count
from runtime.parallel import contiguous_placement
from runtime.policy.types import Ints, LinkGroups

STAGING_SLOTS = 8
"""Experts beyond the cache that one wave can hold; more run in further waves."""
UNKNOWN_SECONDS = 1e-3
"""Of an expert, without a calibration: all cost the same then, and policies only compare costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where experts live and what moving one costs. ``staging_slots`` follow the ``cache_slots`` in the pool."""

    placement_N: Ints
    devices: int
    cost_N: Ints
    groups: LinkGroups
    cache_slots: int
    staging_slots: int
    offloading: bool


def lay_out(
    devices: Sequence[Device],
    *,
    num_experts: int,
    layers: int,
    expert_bytes: int,
    tier: str,
    cache_experts: int | None,
    calibration: Calibration | None,
) -> tuple[CostTable | None, Layout]:
    """The layout over ``devices``, one per rank, and the costs behind it; no costs without a calibration.

    ``cache_experts`` per device over all layers; None: half of the device's own. On tier ``device`` all are cached.
    Raises ``UsageError`` where a device would have no expert.
    """
    check_device_count(len(devices), num_experts)
    placement_N = contiguous_placement(num_experts, len(devices))
    own, offloading = most_experts(placement_N) * layers, tier != "device"
    wanted = own if not offloading else (cache_experts or max(1, own // 2))
    costs = None
    if calibration is not None:
        costs = cost_table(calibration, tier, [device.name_on_link for device in devices], expert_bytes)
    decisive = costs or uniform_costs(UNKNOWN_SECONDS, len(devices))
    return costs, Layout(
        placement_N=placement_N,
        devices=len(devices),
        cost_N=decisive.picoseconds[placement_N],
        groups=decisive.groups,
        cache_slots=min(wanted, own),
        staging_slots=min(STAGING_SLOTS, num_experts),
        offloading=offloading,
    )


def most_experts(placement_N: Ints) -> int:
    """How many experts of a layer the device with most of them has."""
    return int(np.bincount(placement_N).max())
