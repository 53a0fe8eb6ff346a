"""First launch, one program a token: the router's choice, its shares, and what they add to the layer's summary.

``summary`` is int64 [3·N + 2]: importance, marks of the policy's per-token rule, activity, then real tokens and faulty
ones. Its parts are sums, so data-parallel ranks add it up as it is. A faulty token (a score that is negative or not
finite, an id out of range) makes the decision fall back to the router's own choice.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.language import NO_EXPERT, best_of, jit, shares_of, widened


@jit
def summarise(
    scores: tl.pointer_type,
    ranks: tl.pointer_type,
    choice: tl.pointer_type,
    mask: tl.pointer_type,
    own: tl.pointer_type,
    shares: tl.pointer_type,
    summary: tl.pointer_type,
    scores_stride: tl.tensor,
    ranks_stride: tl.tensor,
    choice_stride: tl.tensor,
    least: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    N_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    CHOOSE: tl.constexpr,
    MARK: tl.constexpr,
) -> None:
    """Writes ``own`` [T, K] and ``shares`` [T, K], adds to ``summary``.

    ``scores``: G(t)_e [T, N]. ``ranks``: selection scores [T, N]. ``choice``: ids [T, K], read unless CHOOSE, which
    takes the K of highest rank. MARK: mark the shortest non-empty prefix of the best slots with Σq ≥ ``least``.
    """
    row = tl.program_id(0).to(tl.int64)
    real = tl.load(mask + row) != 0
    experts_N = tl.arange(0, N_PAD)
    slots_K = tl.arange(0, K_PAD)
    read_N = experts_N < tl.where(real, N, 0)

    scores_N = widened(tl.load(scores + row * scores_stride + experts_N, mask=read_N, other=0.0))
    ranks_N = widened(tl.load(ranks + row * ranks_stride + experts_N, mask=read_N, other=0.0))
    sound_N = (scores_N >= 0) & (scores_N < float("inf")) & (ranks_N > float("-inf")) & (ranks_N < float("inf"))
    faults = tl.sum((sound_N == 0).to(tl.int32), axis=0)

    own_K = tl.full((K_PAD,), -1, tl.int32)
    if CHOOSE:
        left_N = read_N
        for slot in tl.static_range(K):
            best = best_of(ranks_N, left_N, experts_N)
            own_K = tl.where((slots_K == slot) & (best != NO_EXPERT), best, own_K)
            left_N = left_N & (experts_N != best)
    else:
        choice_K = tl.load(choice + row * choice_stride + slots_K, mask=slots_K < tl.where(real, K, 0), other=-1)
        faults += tl.sum(((choice_K < -1) | (choice_K >= N)).to(tl.int32), axis=0)
        own_K = tl.where((choice_K >= 0) & (choice_K < N), choice_K, -1).to(tl.int32)

    chosen_K = own_K >= 0
    gates_K = tl.load(scores + row * scores_stride + own_K, mask=chosen_K, other=0.0).to(tl.float64)
    shares_K = shares_of(gates_K, chosen_K, slots_K, K)
    tl.store(own + row * K + slots_K, own_K, mask=slots_K < K)
    tl.store(shares + row * K + slots_K, shares_K, mask=slots_K < K)

    tl.atomic_add(summary + own_K, shares_K, mask=chosen_K, sem="relaxed")
    if MARK:
        better_KK = (shares_K[None, :] > shares_K[:, None]) | (
            (shares_K[None, :] == shares_K[:, None]) & (own_K[None, :] < own_K[:, None])
        )
        better_KK = better_KK & chosen_K[None, :]
        before_K = tl.sum(tl.where(better_KK, shares_K[None, :], 0), axis=1)
        is_best_K = tl.sum(better_KK.to(tl.int32), axis=1) == 0
        tl.store(summary + N + own_K, 1, mask=chosen_K & (is_best_K | (before_K < least)))
    tl.store(summary + 2 * N + own_K, 1, mask=chosen_K)
    tl.atomic_add(summary + 3 * N, real.to(tl.int64), sem="relaxed")
    tl.atomic_add(summary + 3 * N + 1, (faults > 0).to(tl.int64), sem="relaxed")
