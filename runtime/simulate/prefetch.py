"""``runtime.prefetch`` compiled: exchanges over idle links, as long as F stays what the decision made it."""

from __future__ import annotations

from runtime.compile import inlined
from runtime.policy.kernels import f_of
from runtime.simulate.caches import Cache, exchange
from runtime.simulate.layerstep import LayerStep, Layout


@inlined
def prefetch_idle(layout: Layout, cache: Cache, now: LayerStep, layer: int, moment: int) -> None:
    """Adds each device's movements ahead of need to ``now.misses``."""
    level = 0
    for device in range(layout.devices):
        now.load[device] = now.misses[device] * layout.cost[device]
        level = max(level, now.load[device])
    if len(layout.group_factors):
        level = f_of(now.load, layout.group_starts, layout.group_members, layout.group_factors)
    for device in range(layout.devices):
        while True:
            now.load[device] += layout.cost[device]
            fits = now.load[device] <= level
            if fits and len(layout.group_factors):
                fits = f_of(now.load, layout.group_starts, layout.group_members, layout.group_factors) <= level
            if not fits or not exchange(cache, device, layer, moment):
                now.load[device] -= layout.cost[device]
                break
            now.misses[device] += 1
