"""The decision in compiled loops over arrays, for callers that compile themselves (the simulator) and for ``fast``.

Importing this module imports numba; the first call of each function compiles it, once per machine (the result is kept
beside this file or in the user's cache folder). Nothing here checks its arguments: ``runtime.policy.inputs`` does.

Shapes and units as in ``runtime.policy.types``; ids, shares, importance and loads are int64, marks are bool, arrays are
C-contiguous. Arguments named last are written to; those named ``…_D``, ``kept_N`` and ``out_TK`` need no
initialisation; ``importance_N``, ``active_N`` and ``marks_N`` are added to. ``paid_N`` is R·c: 0 where an expert is
resident. ``groups`` are the three arrays of ``LinkGroups``: starts, members, factors (empty without shared links).

A layer-step with only the chosen weights (a trace) reads::

    shares(ids_TK, gates_TK, mask_T, q_TK)
    tokens = summarise(ids_TK, q_TK, mask_T, importance_N, active_N)
    mark_prefixes(ids_TK, q_TK, mask_T, least(theta, K), marks_N)        # cir; or mark_above(…) for score
    f_base = decide_caee(importance_N, marks_N, active_N, device_N, paid_N, *groups, load_D, kept_N)
    f_after = f_of(load_D, *groups)
    drop_lost(ids_TK, mask_T, kept_N, out_TK)
    removed, rerouted = account(ids_TK, q_TK, mask_T, out_TK)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from runtime.policy.types import GROUP_UNIT, SHARE_UNIT, Bools, Floats, Ints

Function = TypeVar("Function", bound=Callable[..., Any])

SURVIVORS, ORIGINAL, UNSCALED = 0, 1, 2


def compiled(function: Function) -> Function:
    """``function`` compiled, without the interpreter lock, kept on disk."""
    result: Function = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return result


# ---- summarise


@compiled
def shares(ids_TK: Ints, gates_TK: Floats, mask_T: Bools, q_TK: Ints) -> None:
    """q = round-half-even(g · 2³⁰), g from sums in slot order; 0 for empty slots and padding."""
    tokens, slots = ids_TK.shape
    for row in range(tokens):
        total = 0.0
        chosen = 0
        for slot in range(slots):
            q_TK[row, slot] = 0
            if mask_T[row] and ids_TK[row, slot] >= 0:
                total += gates_TK[row, slot]
                chosen += 1
        if chosen == 0:
            continue
        for slot in range(slots):
            if ids_TK[row, slot] >= 0:
                share = gates_TK[row, slot] / total if total > 0.0 else 1.0 / chosen
                q_TK[row, slot] = np.int64(np.rint(share * SHARE_UNIT))


@compiled
def summarise(ids_TK: Ints, q_TK: Ints, mask_T: Bools, importance_N: Ints, active_N: Bools) -> int:
    """Add the tokens' shares to ``importance_N`` and mark A_act; the number of real tokens."""
    tokens, slots = ids_TK.shape
    real = 0
    for row in range(tokens):
        if not mask_T[row]:
            continue
        real += 1
        for slot in range(slots):
            expert = ids_TK[row, slot]
            if expert >= 0:
                importance_N[expert] += q_TK[row, slot]
                active_N[expert] = True
    return real


@compiled
def best_first(ids_K: Ints, q_K: Ints, order_K: Ints) -> int:
    """Slots of one token by share descending (ties: lower id) in ``order_K``; how many hold an expert."""
    count = 0
    for slot in range(len(ids_K)):
        if ids_K[slot] < 0:
            continue
        at = count
        while at > 0:
            other = order_K[at - 1]
            if q_K[other] > q_K[slot] or (q_K[other] == q_K[slot] and ids_K[other] < ids_K[slot]):
                break
            order_K[at] = other
            at -= 1
        order_K[at] = slot
        count += 1
    return count


@compiled
def mark_prefixes(ids_TK: Ints, q_TK: Ints, mask_T: Bools, least: int, marks_N: Bools) -> None:
    """Rule ``cir``: mark each token's shortest non-empty prefix with Σq ≥ ``least`` = round(θ·2³⁰) − K."""
    tokens, slots = ids_TK.shape
    order_K = np.empty(slots, np.int64)
    for row in range(tokens):
        if not mask_T[row]:
            continue
        total = 0
        for at in range(best_first(ids_TK[row], q_TK[row], order_K)):
            marks_N[ids_TK[row, order_K[at]]] = True
            total += q_TK[row, order_K[at]]
            if total >= least:
                break


@compiled
def mark_best(ids_TK: Ints, q_TK: Ints, mask_T: Bools, count: int, marks_N: Bools) -> None:
    """Mark each token's ``count`` experts of highest share: the M of ``budget`` (1), ``oea`` (k0)."""
    tokens, slots = ids_TK.shape
    order_K = np.empty(slots, np.int64)
    for row in range(tokens):
        if mask_T[row]:
            for at in range(min(count, best_first(ids_TK[row], q_TK[row], order_K))):
                marks_N[ids_TK[row, order_K[at]]] = True


@compiled
def mark_above(importance_N: Ints, active_N: Bools, least: int, marks_N: Bools) -> None:
    """Rule ``score``: mark active experts with I ≥ ``least``; if nothing is marked then, the one of highest I."""
    highest = -1
    marked = False
    for expert in range(len(importance_N)):
        if active_N[expert]:
            if importance_N[expert] >= least:
                marks_N[expert] = True
            if highest < 0 or importance_N[expert] > importance_N[highest]:
                highest = expert
        marked = marked or marks_N[expert]
    if not marked and highest >= 0:
        marks_N[highest] = True


# ---- decide


@compiled
def cheapest_replicas(
    placement_NR: Ints, cost_NR: Ints, resident_NR: Bools, device_N: Ints, paid_N: Ints, resident_N: Bools
) -> None:
    """Each expert's replica that costs the least now (ties: a resident one, then the lower device).

    ``resident_NR`` has no columns in on-device inference.
    """
    num_experts, replicas = placement_NR.shape
    for expert in range(num_experts):
        best = -1
        for replica in range(replicas):
            device = placement_NR[expert, replica]
            if device < 0:
                continue
            resident = resident_NR.shape[1] > 0 and resident_NR[expert, replica]
            paid = 0 if resident else cost_NR[expert, replica]
            better = best < 0 or paid < paid_N[expert]
            if best >= 0 and paid == paid_N[expert]:
                better = resident and not resident_N[expert]
                better = better or (resident == resident_N[expert] and device < device_N[expert])
            if better:
                best = replica
                device_N[expert], paid_N[expert], resident_N[expert] = device, paid, resident


@compiled
def load_of(experts_N: Bools, device_N: Ints, paid_N: Ints, load_D: Ints) -> None:
    """``load_d`` of a set of experts."""
    load_D[:] = 0
    for expert in range(len(experts_N)):
        if experts_N[expert]:
            load_D[device_N[expert]] += paid_N[expert]


@compiled
def f_of(load_D: Ints, starts_G1: Ints, members: Ints, factors_G: Ints) -> int:
    """F from the loads of the devices."""
    highest: int = 0
    for device in range(len(load_D)):
        highest = max(highest, load_D[device])
    for group in range(len(factors_G)):
        highest = max(highest, _shared(load_D, starts_G1, members, factors_G, group))
    return highest


@compiled
def _shared(load_D: Ints, starts_G1: Ints, members: Ints, factors_G: Ints, group: int) -> int:
    total = 0
    for at in range(starts_G1[group], starts_G1[group + 1]):
        total += load_D[members[at]]
    # factor · total // 1024 in two parts, so that the product stays within int64.
    factor = factors_G[group]
    return int(factor * (total // GROUP_UNIT) + factor * (total % GROUP_UNIT) // GROUP_UNIT)


@compiled
def sort_by_importance(order: Ints, count: int, importance_N: Ints) -> None:
    """Sort the first ``count`` experts of ``order`` by importance descending (ties: lower id), in place."""
    gap = 1
    while gap < count:
        gap = 3 * gap + 1
    while gap > 1:
        gap //= 3
        for at in range(gap, count):
            expert = order[at]
            importance = importance_N[expert]
            hole = at
            while hole >= gap:
                other = order[hole - gap]
                if importance_N[other] > importance or (importance_N[other] == importance and other < expert):
                    break
                order[hole] = other
                hole -= gap
            order[hole] = expert


@compiled
def decide_caee(
    importance_N: Ints,
    mandatory_N: Bools,
    active_N: Bools,
    device_N: Ints,
    paid_N: Ints,
    starts_G1: Ints,
    members: Ints,
    factors_G: Ints,
    load_D: Ints,
    kept_N: Bools,
) -> int:
    """Cost-invariant expansion: the kept set and its loads; returns F_base, the cost of the mandatory set."""
    num_experts = len(importance_N)
    load_of(mandatory_N, device_N, paid_N, load_D)
    f_base = f_of(load_D, starts_G1, members, factors_G)
    order = np.empty(num_experts, np.int64)
    count = 0
    for expert in range(num_experts):
        free = active_N[expert] and paid_N[expert] == 0
        kept_N[expert] = mandatory_N[expert] or free
        # What does not fit at once never will: loads only grow.
        if active_N[expert] and not kept_N[expert] and load_D[device_N[expert]] + paid_N[expert] <= f_base:
            order[count] = expert
            count += 1
    sort_by_importance(order, count, importance_N)
    for at in range(count):
        expert = order[at]
        device = device_N[expert]
        load_D[device] += paid_N[expert]
        fits = load_D[device] <= f_base
        for group in range(len(factors_G)):
            fits = fits and _shared(load_D, starts_G1, members, factors_G, group) <= f_base
        if fits:
            kept_N[expert] = True
        else:
            load_D[device] -= paid_N[expert]
    return f_base


@compiled
def decide_budget(
    importance_N: Ints,
    mandatory_N: Bools,
    active_N: Bools,
    resident_N: Bools,
    device_N: Ints,
    paid_N: Ints,
    starts_G1: Ints,
    members: Ints,
    factors_G: Ints,
    price: float,
    load_D: Ints,
    kept_N: Bools,
) -> int:
    """The level of cost that minimises F(kept)/c̄ + price · Σ_{pruned} I; returns Σ_{pruned} I (in 2⁻³⁰).

    On each device experts enter in a fixed order, so an expert is kept at a level when the sum up to it is within it.
    """
    num_experts = len(importance_N)
    order = np.empty(num_experts, np.int64)
    paid_total, removed, count = 0, 0, 0
    for pass_of in range(2):  # M first, then the rest
        start = count
        for expert in range(num_experts):
            if active_N[expert] and not resident_N[expert] and mandatory_N[expert] == (pass_of == 0):
                order[count] = expert
                paid_total += paid_N[expert]
                removed += importance_N[expert]
                count += 1
        sort_by_importance(order[start:count], count - start, importance_N)
    for expert in range(num_experts):
        kept_N[expert] = active_N[expert] and resident_N[expert]
    load_of(mandatory_N, device_N, paid_N, load_D)
    floor = f_of(load_D, starts_G1, members, factors_G)

    sum_to = np.empty(count, np.int64)
    load_D[:] = 0
    for at in range(count):
        device = device_N[order[at]]
        load_D[device] += paid_N[order[at]]
        sum_to[at] = load_D[device]
    by_level = np.argsort(sum_to, kind="mergesort")
    mean = paid_total / count if count > 0 else 0.0

    load_D[:] = 0
    best_value, best_removed, best_entered = np.inf, removed, 0
    entered, level = 0, floor
    while True:
        while entered < count and sum_to[by_level[entered]] <= level:
            expert = order[by_level[entered]]
            load_D[device_N[expert]] += paid_N[expert]
            removed -= importance_N[expert]
            entered += 1
        cost = f_of(load_D, starts_G1, members, factors_G)
        value = (cost / mean if mean > 0.0 else 0.0) + price * (removed / SHARE_UNIT)
        if value <= best_value:
            best_value, best_removed, best_entered = value, removed, entered
        if entered == count:
            break
        level = sum_to[by_level[entered]]
    for at in range(best_entered):
        kept_N[order[by_level[at]]] = True
    load_of(kept_N, device_N, paid_N, load_D)
    return best_removed


# ---- reroute


@compiled
def drop_lost(ids_TK: Ints, mask_T: Bools, kept_N: Bools, out_TK: Ints) -> None:
    """The tokens' own slots, −1 in the place of what is not kept; padding −1 throughout."""
    tokens, slots = ids_TK.shape
    for row in range(tokens):
        for slot in range(slots):
            expert = ids_TK[row, slot]
            out_TK[row, slot] = expert if mask_T[row] and expert >= 0 and kept_N[expert] else -1


@compiled
def keep_best(ids_TK: Ints, q_TK: Ints, mask_T: Bools, count: int, out_TK: Ints) -> None:
    """Policy ``top-k``: each token's ``count`` slots of highest share (ties: lower id) in their places."""
    tokens, slots = ids_TK.shape
    order_K = np.empty(slots, np.int64)
    out_TK[:] = -1
    for row in range(tokens):
        if mask_T[row]:
            for at in range(min(count, best_first(ids_TK[row], q_TK[row], order_K))):
                out_TK[row, order_K[at]] = ids_TK[row, order_K[at]]


@compiled
def keep_strong(ids_TK: Ints, q_TK: Ints, mask_T: Bools, beta: float, out_TK: Ints) -> None:
    """Policy ``skip``: each token's slots with a share of at least ``beta`` × its highest, in their places."""
    tokens, slots = ids_TK.shape
    for row in range(tokens):
        highest = 0
        for slot in range(slots):
            highest = max(highest, q_TK[row, slot])
        for slot in range(slots):
            strong = mask_T[row] and ids_TK[row, slot] >= 0 and q_TK[row, slot] >= beta * highest
            out_TK[row, slot] = ids_TK[row, slot] if strong else -1


@compiled
def compensate(
    ids_TK: Ints, mask_T: Bools, kept_N: Bools, candidates_N: Bools, ranks_TN: Floats, every_token: bool, out_TK: Ints
) -> None:
    """Fill lost slots with the candidates of highest rank (ties: lower id) that the token does not hold.

    ``every_token``: all real tokens choose anew (``reselect=all``); else those that lost a slot, keeping survivors.
    """
    tokens, slots = ids_TK.shape
    candidates = np.flatnonzero(candidates_N)
    for row in range(tokens):
        held = wanted = 0
        for slot in range(slots):
            out_TK[row, slot] = -1
            expert = ids_TK[row, slot]
            if mask_T[row] and expert >= 0:
                wanted += 1
                if kept_N[expert] and not every_token:
                    held += 1
        if not mask_T[row]:
            continue
        if every_token:
            wanted = slots
        elif held == wanted:
            out_TK[row] = ids_TK[row]
            continue
        else:
            held = 0
            for slot in range(slots):
                expert = ids_TK[row, slot]
                if expert >= 0 and kept_N[expert]:
                    _insert(ranks_TN[row], out_TK[row], held, expert)
                    held += 1
        _fill(ranks_TN[row], candidates, out_TK[row], held, wanted)


@compiled
def _fill(ranks_N: Floats, candidates: Ints, out_K: Ints, held: int, wanted: int) -> None:
    """Grow the ``held`` ordered experts of ``out_K`` to ``wanted`` with the best candidates among the others."""
    best = np.empty(wanted - held, np.int64)
    count = 0
    for candidate in candidates:
        full = count == len(best)
        if full and ranks_N[candidate] <= ranks_N[best[count - 1]]:
            continue
        is_held = False
        for slot in range(held):
            is_held = is_held or out_K[slot] == candidate
        if is_held:
            continue
        if full:
            count -= 1
        _insert(ranks_N, best, count, candidate)
        count += 1
    for at in range(count):
        _insert(ranks_N, out_K, held + at, best[at])


@compiled
def _insert(ranks_N: Floats, ordered: Ints, count: int, expert: int) -> None:
    """Put ``expert`` among the first ``count`` of ``ordered``, by rank descending (ties: lower id)."""
    at = count
    while at > 0:
        other = ordered[at - 1]
        if ranks_N[other] > ranks_N[expert] or (ranks_N[other] == ranks_N[expert] and other < expert):
            break
        ordered[at] = other
        at -= 1
    ordered[at] = expert


@compiled
def gather(scores_TN: Floats, ids_TK: Ints, gates_TK: Floats) -> None:
    """G(t)_e of the experts in ``ids_TK``; 0 for empty slots."""
    tokens, slots = ids_TK.shape
    for row in range(tokens):
        for slot in range(slots):
            gates_TK[row, slot] = scores_TN[row, ids_TK[row, slot]] if ids_TK[row, slot] >= 0 else 0.0


@compiled
def weigh(
    ids_TK: Ints,
    gates_TK: Floats,
    out_TK: Ints,
    renormalize: int,
    factor: float,
    weights_TK: Floats,
) -> None:
    """Divide the gates of ``out_TK``, which ``weights_TK`` holds, by the denominator of ``renormalize``, × ``factor``.

    ``SURVIVORS``: their own sum; ``ORIGINAL``: the sum of ``gates_TK`` over the router's choice ``ids_TK``.
    """
    tokens, slots = out_TK.shape
    for row in range(tokens):
        denominator = 0.0
        for slot in range(slots):
            if renormalize == SURVIVORS and out_TK[row, slot] >= 0:
                denominator += weights_TK[row, slot]
            elif renormalize == ORIGINAL and ids_TK[row, slot] >= 0:
                denominator += gates_TK[row, slot]
        if renormalize == UNSCALED:
            denominator = 1.0
        for slot in range(slots):
            lost = out_TK[row, slot] < 0 or denominator <= 0.0
            weights_TK[row, slot] = 0.0 if lost else weights_TK[row, slot] / denominator * factor


@compiled
def account(ids_TK: Ints, q_TK: Ints, mask_T: Bools, out_TK: Ints) -> tuple[int, int]:
    """Σq of the router's choices that are not dispatched, and how many dispatched ids lie outside the choice."""
    tokens, slots = ids_TK.shape
    removed = rerouted = 0
    for row in range(tokens):
        if not mask_T[row]:
            continue
        for slot in range(slots):
            lost, gained = ids_TK[row, slot] >= 0, out_TK[row, slot] >= 0
            for other in range(slots):
                lost = lost and out_TK[row, other] != ids_TK[row, slot]
                gained = gained and ids_TK[row, other] != out_TK[row, slot]
            if lost:
                removed += q_TK[row, slot]
            if gained:
                rerouted += 1
    return removed, rerouted
