"""One policy's pass over a block of steps, compiled: decide, dispatch, count. Equal to ``runtime.simulate.reference``
in every figure.

An expert on a device is a *copy*, numbered (layer · experts + id) · replicas + replica: with one replica, the expert
itself. Costs and times are integer picoseconds, shares integers in 2⁻³⁰.
"""

from __future__ import annotations

from runtime.compile import compiled_without_allocations, inlined
from runtime.policy.kernels import f_of
from runtime.policy.types import GROUP_UNIT
from runtime.simulate.caches import Cache, demand, fetch, start_step, use
from runtime.simulate.keep import keep_experts
from runtime.simulate.layerstep import Int64s, LayerStep, Layout, Rule, Totals
from runtime.simulate.prefetch import prefetch_idle
from runtime.simulate.prepare import Prepared

MAX_MISSES, REMOVED, TOKENS, REROUTED, LAYER_STEPS, MOMENT = range(6)


@compiled_without_allocations
def run_block(
    block: Prepared,
    layout: Layout,
    cache: Cache,
    rule: Rule,
    totals: Totals,
    now: LayerStep,
    next_use: Int64s,
    times: Int64s,
    uncounted: int,
) -> None:
    """Replays the block on the cache's state and fills ``times`` [S].

    ``next_use``: [A] when the router next chooses each active expert, for ``belady``, else empty. The first
    ``uncounted`` steps are warm-up: they run, and count in no figure.
    """
    place = 0
    moment = totals.sums[MOMENT]
    for step in range(block.steps):
        start_step(cache)
        tokens = block.offsets[step + 1] - block.offsets[step]
        times[step] = layout.dense
        for layer in range(block.layers):
            moment += 1
            at = step * block.layers + layer
            first, last = block.active_start[at], block.active_start[at + 1]
            for active in range(first, last) if len(next_use) else range(0):
                cache.next_use[layer * layout.experts + block.active[active]] = next_use[active]
            choose_copies(block, layout, cache, now, layer, first, last)
            removed, rerouted = keep_experts(
                block, layout, cache, rule, totals.controller, now, moment, first, last, place, tokens
            )
            dispatch(layout, cache, now, moment, last - first)
            if cache.prefetch:
                prefetch_idle(layout, cache, now, layer, moment)
            times[step] += layer_time(layout, now)
            if step >= uncounted:
                count(layout, totals, now, layer, tokens, removed, rerouted)
            place += tokens * block.slots
    totals.sums[MOMENT] = moment


@inlined
def choose_copies(
    block: Prepared, layout: Layout, cache: Cache, now: LayerStep, layer: int, first: int, last: int
) -> None:
    """The copy of each active expert that would be used; ``runtime.simulate.replicas`` has the rule."""
    for device in range(layout.devices):
        now.misses_before[device] = now.misses[device] = now.dispatched[device] = now.load[device] = 0
    for place in range(last - first):
        copy = (layer * layout.experts + block.active[first + place]) * layout.replicas
        if layout.replicas == 1 or layout.device[copy + 1] < 0:
            use_copy(layout, cache, now, place, copy)
    for place in range(last - first) if layout.replicas > 1 else range(0):
        copy = (layer * layout.experts + block.active[first + place]) * layout.replicas
        if layout.device[copy + 1] >= 0:
            use_copy(layout, cache, now, place, lightest_replica(layout, cache, now, copy))


@inlined
def use_copy(layout: Layout, cache: Cache, now: LayerStep, place: int, copy: int) -> None:
    """Notes the copy and what it costs."""
    device = layout.device[copy]
    resident = layout.offloading and cache.resident[copy]
    paid = 0 if resident else layout.cost[device]
    now.copy[place] = copy
    now.device[place] = device
    now.resident[place] = resident
    now.paid[place] = paid
    now.load[device] += paid
    now.misses_before[device] += not resident


@inlined
def lightest_replica(layout: Layout, cache: Cache, now: LayerStep, copy: int) -> int:
    """A resident replica, else the one whose device would carry the least; ties: the lower device."""
    best, least = -1, 0
    for replica in range(copy, copy + layout.replicas):
        device = layout.device[replica]
        if device < 0:
            break
        # -1 is below every load.
        load = -1 if layout.offloading and cache.resident[replica] else int(now.load[device] + layout.cost[device])
        if best < 0 or load < least:
            best, least = replica, load
    return best


@inlined
def dispatch(layout: Layout, cache: Cache, now: LayerStep, moment: int, actives: int) -> None:
    """The kept experts are used, the absent ones are moved; caches change."""
    for place in range(actives):
        demand(cache, now.copy[place])
        if now.kept[place]:
            now.dispatched[now.device[place]] += 1
            if not now.resident[place]:
                now.misses[now.device[place]] += 1
            if layout.offloading:
                use(cache, now.copy[place], moment)
    if not layout.offloading:
        return
    for place in range(actives):
        if now.kept[place] and not now.resident[place]:
            fetch(cache, now.device[place], now.copy[place], moment, layout.replicas)


@inlined
def device_time(layout: Layout, misses: int, device: int) -> int:
    """What a device's paid movements take."""
    return int(layout.layer[misses] if len(layout.layer) else misses * layout.cost[device])


@inlined
def layer_time(layout: Layout, now: LayerStep) -> int:
    """F of the paid movements, and compute beside or after them, or some of both."""
    movements, dispatched = 0, 0
    for device in range(layout.devices):
        now.load[device] = device_time(layout, now.misses[device], device)
        movements = max(movements, now.load[device])
        dispatched = max(dispatched, now.dispatched[device])
    if layout.staged:
        return staged_time(layout, now)
    if len(layout.group_factors):
        movements = f_of(now.load, layout.group_starts, layout.group_members, layout.group_factors)
    compute = dispatched * layout.compute
    return max(movements, compute) if layout.overlap else movements + compute


@inlined
def staged_time(layout: Layout, now: LayerStep) -> int:
    """Experts that are there compute beside the movements, those that were moved after them; ``load`` becomes when a
    device's movements end, on a shared link not before all of that link's do."""
    for group in range(len(layout.group_factors)):
        total = 0
        for at in range(layout.group_starts[group], layout.group_starts[group + 1]):
            member = layout.group_members[at]
            total += now.misses[member] * layout.cost[member]
        factor = layout.group_factors[group]
        # factor · total // unit in two parts, so that the product stays within int64.
        shared = factor * (total // GROUP_UNIT) + factor * (total % GROUP_UNIT) // GROUP_UNIT
        for at in range(layout.group_starts[group], layout.group_starts[group + 1]):
            member = layout.group_members[at]
            if now.misses[member] > 0:
                now.load[member] = max(now.load[member], shared)
    latest = 0
    for device in range(layout.devices):
        moved = min(now.misses[device], now.dispatched[device])
        there = now.dispatched[device] - moved
        latest = max(latest, max(now.load[device], there * layout.compute) + moved * layout.compute)
    return latest


@inlined
def count(layout: Layout, totals: Totals, now: LayerStep, layer: int, tokens: int, removed: int, rerouted: int) -> None:
    """Adds one layer-step to the figures."""
    most, least = now.misses[0], now.misses[0]
    for device in range(layout.devices):
        totals.before_LD[layer, device] += now.misses_before[device]
        totals.after_LD[layer, device] += now.misses[device]
        most = max(most, now.misses[device])
        least = min(least, now.misses[device])
    totals.gaps[most - least] += 1
    totals.sums[MAX_MISSES] += most
    totals.sums[REMOVED] += removed
    totals.sums[TOKENS] += tokens
    totals.sums[REROUTED] += rerouted
    totals.sums[LAYER_STEPS] += 1
