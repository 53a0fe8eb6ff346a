"""The first two stages in compiled loops over arrays: summarise and decide. ``slot_kernels`` has the third.

For callers that compile themselves, and for ``runtime.policy.fast``. Importing this module imports numba; the first
call of each function compiles it, once per machine. Nothing here checks its arguments: ``runtime.policy.inputs`` does.

Shapes and units as in ``runtime.policy.types``; ids, shares, importance and loads are int64, marks are bool, arrays are
C-contiguous. What is written to comes last: ``importance_N``, ``active_N`` and ``marks_N`` are added to, the others
need no initialisation. ``paid_N`` is R·c: 0 where an expert is resident. ``groups`` below stands for the three
arrays of ``LinkGroups`` (a single start and nothing else without shared links). A layer-step of a trace reads::

    shares(ids_TK, gates_TK, mask_T, q_TK)
    tokens = summarise(ids_TK, q_TK, mask_T, importance_N, active_N)
    mark_prefixes(ids_TK, q_TK, mask_T, threshold(theta) - K, marks_N)      # cir; mark_above(…) for score
    f_base = decide_caee(importance_N, marks_N, active_N, device_N, paid_N, *groups, load_D, kept_N)
    f_after = f_of(load_D, *groups)
    drop_lost(ids_TK, mask_T, kept_N, out_TK)
    removed, rerouted = account(ids_TK, q_TK, mask_T, out_TK)
"""

from __future__ import annotations

import numpy as np

from runtime.compile import compiled, compiled_without_allocations
from runtime.policy.types import GROUP_UNIT, SHARE_UNIT, Bools, Floats, Ints

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
def tally(ids_TK: Ints, gates_TK: Floats, mask_T: Bools, q_TK: Ints, importance_N: Ints, active_N: Bools) -> int:
    """``shares`` and ``summarise`` in one call: what a caller outside pays for is the calls."""
    shares(ids_TK, gates_TK, mask_T, q_TK)
    return summarise(ids_TK, q_TK, mask_T, importance_N, active_N)


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
def costs_of(
    active_N: Bools,
    kept_N: Bools,
    device_N: Ints,
    paid_N: Ints,
    starts_G1: Ints,
    members: Ints,
    factors_G: Ints,
    before_D: Ints,
    after_D: Ints,
) -> tuple[int, int]:
    """The loads of two sets of experts, and F of each."""
    load_of(active_N, device_N, paid_N, before_D)
    load_of(kept_N, device_N, paid_N, after_D)
    return f_of(before_D, starts_G1, members, factors_G), f_of(after_D, starts_G1, members, factors_G)


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


@compiled_without_allocations
def highest(values: Ints) -> int:
    """Where the highest of ``values``, of which there is one at least, comes first."""
    # Two loops without branches, which become vector instructions.
    best = values[0]
    for at in range(len(values)):
        best = max(best, values[at])
    first = len(values)
    for at in range(len(values)):
        first = min(first, at if values[at] == best else len(values))
    return first


@compiled_without_allocations
def expand(
    candidates: Ints,
    importance_N: Ints,
    device_N: Ints,
    paid_N: Ints,
    starts_G1: Ints,
    members: Ints,
    factors_G: Ints,
    f_base: int,
    room_3A: Ints,
    load_D: Ints,
    kept_N: Bools,
) -> None:
    """Keep each of ``candidates``, by importance descending (ties: lower id), that leaves F within ``f_base``.

    ``candidates`` ascends, and the load of each fits at first; ``load_D`` and ``kept_N`` are added to.
    """
    count = len(candidates)
    waiting, device_A, paid_A = room_3A[:count], room_3A[count : 2 * count], room_3A[2 * count : 3 * count]
    for at in range(count):
        expert = candidates[at]
        waiting[at], device_A[at], paid_A[at] = importance_N[expert], device_N[expert], paid_N[expert]
    while count > 0:
        at = highest(waiting)
        if waiting[at] < 0:
            return
        device = device_A[at]
        load_D[device] += paid_A[at]
        fits = True
        for group in range(len(factors_G)):
            fits = fits and _shared(load_D, starts_G1, members, factors_G, group) <= f_base
        kept_N[candidates[at]] = fits
        if not fits:
            load_D[device] -= paid_A[at]
        waiting[at] = -1
        # What does not fit now never will: loads only grow.
        most = f_base - load_D[device]
        for other in range(count):
            full = (device_A[other] == device) & (paid_A[other] > most)
            waiting[other] = -1 if full else waiting[other]


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
    room = np.empty(3 * count, np.int64)
    expand(order[:count], importance_N, device_N, paid_N, starts_G1, members, factors_G, f_base, room, load_D, kept_N)
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
    scratch_3N: Ints,
    load_D: Ints,
    kept_N: Bools,
) -> None:
    """Keep the level of cost that minimises F(kept)/c̄ + price · Σ_{pruned} I.

    On each device experts enter in a fixed order, so an expert is kept at a level when the sum up to it is within it.
    Allocates nothing, so that a caller may do without reference counts.
    """
    num_experts = len(importance_N)
    order, minus_sum_to, by_level = scratch_3N[0], scratch_3N[1], scratch_3N[2]
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

    load_D[:] = 0
    for at in range(count):
        device = device_N[order[at]]
        load_D[device] += paid_N[order[at]]
        minus_sum_to[at] = -load_D[device]
        by_level[at] = at
    sort_by_importance(by_level, count, minus_sum_to)
    mean = paid_total / count if count > 0 else 0.0

    load_D[:] = 0
    best_value, best_entered = np.inf, 0
    entered, level = 0, floor
    while True:
        while entered < count and -minus_sum_to[by_level[entered]] <= level:
            expert = order[by_level[entered]]
            load_D[device_N[expert]] += paid_N[expert]
            removed -= importance_N[expert]
            entered += 1
        cost = f_of(load_D, starts_G1, members, factors_G)
        value = (cost / mean if mean > 0.0 else 0.0) + price * (removed / SHARE_UNIT)
        if value <= best_value:
            best_value, best_entered = value, entered
        if entered == count:
            break
        level = -minus_sum_to[by_level[entered]]
    for at in range(best_entered):
        kept_N[order[by_level[at]]] = True
    load_of(kept_N, device_N, paid_N, load_D)
