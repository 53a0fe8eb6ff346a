"""Third launch, one program a token: the slots after the decision, their weights, and what was lost."""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.language import NO_EXPERT, best_of, jit, sum_in_slot_order, widened

DROP = tl.constexpr(0)
AFFECTED = tl.constexpr(1)
EVERY = tl.constexpr(2)

SURVIVORS = tl.constexpr(0)
ORIGINAL = tl.constexpr(1)
UNSCALED = tl.constexpr(2)


@jit
def refill(
    ranks_N: tl.tensor,
    candidates_N: tl.tensor,
    held_N: tl.tensor,
    fills: tl.tensor,
    experts_N: tl.tensor,
    slots_K: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
) -> tl.tensor:
    """The held experts and the ``fills`` best other candidates, by rank descending (ties: lower id), then −1."""
    ids_K = tl.full((K_PAD,), -1, tl.int32)
    others_N = candidates_N & (held_N == 0)
    for slot in tl.static_range(K):
        best = best_of(ranks_N, held_N | (others_N & (fills > 0)), experts_N)
        ids_K = tl.where((slots_K == slot) & (best != NO_EXPERT), best, ids_K)
        is_best_N = experts_N == best
        fills -= tl.max((others_N & is_best_N).to(tl.int32), axis=0)
        held_N = held_N & (is_best_N == 0)
        others_N = others_N & (is_best_N == 0)
    return ids_K


@jit
def reroute(
    scores: tl.pointer_type,
    ranks: tl.pointer_type,
    mask: tl.pointer_type,
    own: tl.pointer_type,
    shares: tl.pointer_type,
    kept: tl.pointer_type,
    held: tl.pointer_type,
    figures: tl.pointer_type,
    ids: tl.pointer_type,
    weights: tl.pointer_type,
    scores_stride: tl.tensor,
    ranks_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    N_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    FILL: tl.constexpr,
    WITH_RESIDENT: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
) -> None:
    """Writes ``ids`` and ``weights`` [T, K]; adds lost shares and re-routed slots to ``figures``."""
    row = tl.program_id(0).to(tl.int64)
    real = tl.load(mask + row) != 0
    slots_K = tl.arange(0, K_PAD)
    own_K = tl.load(own + row * K + slots_K, mask=slots_K < K, other=-1)
    chosen_K = own_K >= 0
    survives_K = chosen_K & (tl.load(kept + own_K, mask=chosen_K, other=0) != 0)
    wanted = tl.sum(chosen_K.to(tl.int32), axis=0)
    survivors = tl.sum(survives_K.to(tl.int32), axis=0)

    ids_K = tl.where(survives_K, own_K, -1)
    if FILL != DROP:
        affected = survivors < wanted
        if FILL == EVERY:
            # After a fault the router's own choice stands.
            affected = real & (tl.load(figures + 4) == 0)
        if affected:
            experts_N = tl.arange(0, N_PAD)
            ranks_N = widened(tl.load(ranks + row * ranks_stride + experts_N, mask=experts_N < N, other=0.0))
            candidates_N = tl.load(kept + experts_N, mask=experts_N < N, other=0) != 0
            if WITH_RESIDENT:
                candidates_N = candidates_N | (tl.load(held + experts_N, mask=experts_N < N, other=0) != 0)
            held_N = tl.zeros((N_PAD,), tl.int1)
            fills = wanted - survivors
            if FILL == EVERY:
                fills = tl.full((), K, tl.int32)
            else:
                for slot in tl.static_range(K):
                    expert = tl.max(tl.where((slots_K == slot) & survives_K, own_K, -1), axis=0)
                    held_N = held_N | (experts_N == expert)
            ids_K = refill(ranks_N, candidates_N, held_N, fills, experts_N, slots_K, K, K_PAD)

    gates_K = tl.load(scores + row * scores_stride + ids_K, mask=ids_K >= 0, other=0.0).to(tl.float64)
    below = tl.full((), 1.0, tl.float64)
    if RENORMALIZE == SURVIVORS:
        below = sum_in_slot_order(gates_K, slots_K, K)
    if RENORMALIZE == ORIGINAL:
        own_gates_K = tl.load(scores + row * scores_stride + own_K, mask=chosen_K, other=0.0).to(tl.float64)
        below = sum_in_slot_order(own_gates_K, slots_K, K)
    weights_K = tl.where(below > 0, gates_K / below * FACTOR, 0.0)
    tl.store(ids + row * K + slots_K, ids_K, mask=slots_K < K)
    tl.store(weights + row * K + slots_K, weights_K, mask=slots_K < K)

    same_KK = (own_K[:, None] == ids_K[None, :]) & chosen_K[:, None]
    stays_K = tl.max(same_KK.to(tl.int32), axis=1) != 0
    was_there_K = tl.max(same_KK.to(tl.int32), axis=0) != 0
    shares_K = tl.load(shares + row * K + slots_K, mask=chosen_K & (stays_K == 0), other=0)
    tl.atomic_add(figures + 5, tl.sum(shares_K, axis=0), sem="relaxed")
    rerouted = tl.sum(((ids_K >= 0) & (was_there_K == 0)).to(tl.int64), axis=0)
    tl.atomic_add(figures + 6, rerouted, sem="relaxed")
