"""The third stage in compiled loops over arrays: slots, weights, and what the tokens lost.

Conventions as in ``runtime.policy.kernels``; ``out_TK`` needs no initialisation.
"""

from __future__ import annotations

import numpy as np

from runtime.compile import compiled
from runtime.policy.kernels import best_first
from runtime.policy.types import Bools, Floats, Ints

SURVIVORS, ORIGINAL, UNSCALED = 0, 1, 2


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


@compiled
def settle(
    ids_TK: Ints,
    gates_TK: Floats,
    scores_TN: Floats,
    q_TK: Ints,
    mask_T: Bools,
    out_TK: Ints,
    renormalize: int,
    factor: float,
    weights_TK: Floats,
) -> tuple[int, int]:
    """``gather``, ``weigh`` and ``account`` of the dispatched ids in one call.

    ``scores_TN`` has no columns where only the choice was recorded: then no slot has changed but for those lost.
    """
    if scores_TN.shape[1] > 0:
        gather(scores_TN, out_TK, weights_TK)
    else:
        for row in range(len(out_TK)):
            for slot in range(out_TK.shape[1]):
                weights_TK[row, slot] = gates_TK[row, slot] if out_TK[row, slot] >= 0 else 0.0
    weigh(ids_TK, gates_TK, out_TK, renormalize, factor, weights_TK)
    return account(ids_TK, q_TK, mask_T, out_TK)
