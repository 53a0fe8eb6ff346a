"""Which experts a layer-step keeps, compiled: the policies of ``runtime.policy`` that need no full scores.

The policies' own plain implementation is ``runtime.policy.reference``; both keep the same sets.
"""

from __future__ import annotations

import numpy as np

from runtime.compile import compiled, inlined
from runtime.policy import controller as pricing
from runtime.policy.kernels import decide_budget, f_of, sort_by_importance
from runtime.policy.types import SHARE_UNIT
from runtime.simulate.caches import Cache, rate
from runtime.simulate.layerstep import Floats, LayerStep, Layout, Rule, clear
from runtime.simulate.prepare import Prepared

# What is kept: all; each token's own slots; the marked experts; those, expanded where it costs nothing; those, and what
# is worth its price.
ALL, SLOTS, MARKED, EXPANDED, PRICED = range(5)

_price = compiled(pricing.price)
_observe = compiled(pricing.observe)


@inlined
def keep_experts(
    block: Prepared,
    layout: Layout,
    cache: Cache,
    rule: Rule,
    controller: Floats,
    now: LayerStep,
    moment: int,
    first: int,
    last: int,
    place: int,
    tokens: int,
) -> tuple[int, int]:
    """Fills ``now.kept``; returns the removed shares and the rerouted slots.

    The layer-step's active experts are ``first`` to ``last`` of the block's, its tokens' slots begin at ``place``.
    """
    if rule.keeps == ALL:
        for at in range(last - first):
            now.kept[at] = True
        return 0, 0
    if rule.keeps == SLOTS:
        removed = _keep_slots(block, rule, now, moment, place, tokens)
        for at in range(last - first):
            now.kept[at] = now.marked[block.active[first + at]] == moment
        return removed, 0
    _mark(block, rule, now, moment, place, tokens)
    _keep_marked(block, rule, now, moment, first, last)
    if rule.keeps == EXPANDED:
        _expand(block, layout, now, first, last)
    elif rule.keeps == PRICED:
        _keep_worthwhile(block, layout, cache, rule, controller, now, moment, first, last)
    removed = 0
    for at in range(last - first):
        if not now.kept[at]:
            removed += block.importance[first + at]
    if rule.keeps == PRICED and rule.price < 0 and tokens:
        observed = _observe(*state_of(controller), rule.epsilon, removed / SHARE_UNIT, tokens)
        controller[0], controller[1], controller[2], controller[3] = observed
    return removed, _rerouted(block, now, moment, first, last, place, tokens) if rule.fills else 0


@inlined
def _mark(block: Prepared, rule: Rule, now: LayerStep, moment: int, place: int, tokens: int) -> None:
    """Every token marks the experts that its rule holds on to."""
    for token in range(tokens):
        base = place + token * block.slots
        before = 0
        for slot in range(block.slots):
            expert = block.ids[base + slot]
            if expert < 0 or (slot >= rule.best and before >= rule.least):
                break
            now.marked[expert] = moment
            before += block.shares[base + slot]


@inlined
def _keep_marked(block: Prepared, rule: Rule, now: LayerStep, moment: int, first: int, last: int) -> None:
    """What is marked, or important enough by rule ``score``; if that is nothing, the most important expert."""
    top = first
    any_kept = False
    for at in range(first, last):
        expert = block.active[at]
        if 0 <= rule.score <= block.importance[at]:
            now.marked[expert] = moment
        now.kept[at - first] = now.marked[expert] == moment
        any_kept |= now.kept[at - first]
        if block.importance[at] > block.importance[top]:
            top = at
    if not any_kept and last > first:
        now.kept[top - first] = True
        now.marked[block.active[top]] = moment


@inlined
def _keep_slots(block: Prepared, rule: Rule, now: LayerStep, moment: int, place: int, tokens: int) -> int:
    """Token by token: the ``best`` slots, of those from ``ratio`` of the highest share on; returns what is lost."""
    removed = 0
    for token in range(tokens):
        base = place + token * block.slots
        least = rule.ratio * block.shares[base]
        for slot in range(block.slots):
            expert = block.ids[base + slot]
            if expert < 0:
                break
            if slot < rule.best and block.shares[base + slot] >= least:
                now.marked[expert] = moment
            else:
                removed += block.shares[base + slot]
    return removed


@inlined
def _expand(block: Prepared, layout: Layout, now: LayerStep, first: int, last: int) -> None:
    """Cost-invariant expansion (arXiv:2606.29982, V-B): by importance, whatever does not raise F of the kept."""
    clear(now.load)
    for at in range(last - first):
        if now.kept[at]:
            now.load[now.device[at]] += now.paid[at]
    base = f_of(now.load, layout.group_starts, layout.group_members, layout.group_factors)
    order, candidates = now.order[0], 0
    for at in range(last - first):
        # What costs nothing always fits, and what does not fit at once never will: loads only grow.
        if now.paid[at] == 0:
            now.kept[at] = True
        elif not now.kept[at] and now.load[now.device[at]] + now.paid[at] <= base:
            order[candidates] = at
            candidates += 1
    sort_by_importance(order, candidates, block.importance[first:last])
    for rank in range(candidates):
        at = order[rank]
        device, paid = now.device[at], now.paid[at]
        now.load[device] += paid
        now.kept[at] = now.load[device] <= base
        if now.kept[at] and len(layout.group_factors):
            now.kept[at] = f_of(now.load, layout.group_starts, layout.group_members, layout.group_factors) <= base
        if not now.kept[at]:
            now.load[device] -= paid


@inlined
def _keep_worthwhile(
    block: Prepared,
    layout: Layout,
    cache: Cache,
    rule: Rule,
    controller: Floats,
    now: LayerStep,
    moment: int,
    first: int,
    last: int,
) -> None:
    """``budget``, with its price from the state of ``runtime.policy.controller`` or fixed."""
    price = rule.price if rule.price >= 0 else _price(*state_of(controller))
    actives = last - first
    for at in range(actives):
        later = rule.reuse * rate(cache, now.copy[at], moment) if rule.reuse > 0 else 0.0
        now.worth[at] = block.importance[first + at] + np.int64(np.rint(later * SHARE_UNIT))
    decide_budget(
        now.worth[:actives],
        now.kept[:actives],
        now.active[:actives],
        now.resident[:actives],
        now.device[:actives],
        now.paid[:actives],
        layout.group_starts,
        layout.group_members,
        layout.group_factors,
        price,
        now.order,
        now.load,
        now.chosen[:actives],
    )
    for at in range(actives):
        now.kept[at] = now.chosen[at]


@inlined
def state_of(controller: Floats) -> tuple[float, float, float, float]:
    """The state of ``runtime.policy.controller``."""
    return controller[0], controller[1], controller[2], controller[3]


@inlined
def _rerouted(block: Prepared, now: LayerStep, moment: int, first: int, last: int, place: int, tokens: int) -> int:
    """How many lost slots find another kept expert: none of these is the token's own choice, and the token holds
    what it kept of it."""
    kept = 0
    for at in range(last - first):
        if now.kept[at]:
            now.marked[block.active[first + at]] = moment
            kept += 1
    rerouted = 0
    for token in range(tokens):
        base = place + token * block.slots
        chosen, survivors = 0, 0
        for slot in range(block.slots):
            expert = block.ids[base + slot]
            if expert >= 0:
                chosen += 1
                survivors += now.marked[expert] == moment
        rerouted += min(chosen - survivors, kept - survivors)
    return rerouted
