"""What the two deciding kernels share: the summary they take, the experts' cheapest replicas, the figures they leave.

Only one program runs, so what it stores and reads again (after a barrier) is its own. ``figures`` is int64 [7]: F of
the mandatory set, of the router's choice and of the kept set, real tokens, faulty ones, and two that the third launch
fills: the shares that were lost and how many slots were re-routed.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.language import f_of, jit


@jit
def store_layer(
    placement: tl.pointer_type,
    cost: tl.pointer_type,
    resident: tl.pointer_type,
    device: tl.pointer_type,
    paid: tl.pointer_type,
    held: tl.pointer_type,
    experts_N: tl.tensor,
    N: tl.constexpr,
    R: tl.constexpr,
    N_PAD: tl.constexpr,
    OFFLOADING: tl.constexpr,
) -> None:
    """Device, R·c and residency of each expert's replica that costs least now (ties: a resident one, the lower device).

    ``placement``, ``cost``, ``resident``: [N, R]; device −1: no such replica.
    """
    device_N = tl.full((N_PAD,), -1, tl.int32)
    paid_N = tl.zeros((N_PAD,), tl.int64)
    held_N = tl.zeros((N_PAD,), tl.int1)
    for replica in tl.static_range(R):
        at_N = experts_N * R + replica
        place_N = tl.load(placement + at_N, mask=experts_N < N, other=-1)
        price_N = tl.load(cost + at_N, mask=experts_N < N, other=0)
        here_N = tl.zeros((N_PAD,), tl.int1)
        if OFFLOADING:
            here_N = tl.load(resident + at_N, mask=experts_N < N, other=0) != 0
            price_N = tl.where(here_N, 0, price_N)
        tie_won_N = (here_N & (held_N == 0)) | ((here_N == held_N) & (place_N < device_N))
        better_N = (device_N < 0) | (price_N < paid_N) | ((price_N == paid_N) & tie_won_N)
        better_N = better_N & (place_N >= 0)
        device_N = tl.where(better_N, place_N, device_N)
        paid_N = tl.where(better_N, price_N, paid_N)
        held_N = tl.where(better_N, here_N, held_N)
    tl.store(device + experts_N, device_N, mask=experts_N < N)
    tl.store(paid + experts_N, paid_N, mask=experts_N < N)
    tl.store(held + experts_N, held_N.to(tl.int8), mask=experts_N < N)


@jit
def take_summary(
    summary: tl.pointer_type, importance: tl.pointer_type, experts_N: tl.tensor, N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Importance, marks, activity, real tokens and faulty ones; copies the importance out and clears the summary."""
    inside_N = experts_N < N
    importance_N = tl.load(summary + experts_N, mask=inside_N, other=0)
    marked_N = tl.load(summary + N + experts_N, mask=inside_N, other=0) != 0
    active_N = tl.load(summary + 2 * N + experts_N, mask=inside_N, other=0) != 0
    tokens = tl.load(summary + 3 * N)
    faults = tl.load(summary + 3 * N + 1)
    tl.store(importance + experts_N, importance_N, mask=inside_N)
    tl.debug_barrier()
    for part in tl.static_range(3):
        tl.store(summary + part * N + experts_N, 0, mask=inside_N)
    tl.store(summary + 3 * N, 0)
    tl.store(summary + 3 * N + 1, 0)
    return importance_N, marked_N, active_N, tokens, faults


@jit
def store_figures(
    figures: tl.pointer_type,
    loads: tl.pointer_type,
    f_base: tl.tensor,
    before_L: tl.tensor,
    after_L: tl.tensor,
    factor_L: tl.tensor,
    tokens: tl.tensor,
    faults: tl.tensor,
    links_L: tl.tensor,
    D: tl.constexpr,
) -> None:
    """Figures of the decision, and the loads of the devices before and after, [2, D]: devices are the first D links."""
    tl.store(figures, f_base)
    tl.store(figures + 1, f_of(before_L, factor_L))
    tl.store(figures + 2, f_of(after_L, factor_L))
    tl.store(figures + 3, tokens)
    tl.store(figures + 4, faults)
    tl.store(figures + 5, 0)
    tl.store(figures + 6, 0)
    tl.store(loads + links_L, before_L, mask=links_L < D)
    tl.store(loads + D + links_L, after_L, mask=links_L < D)
