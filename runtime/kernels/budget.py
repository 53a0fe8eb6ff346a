"""Second launch, one program a layer, for ``budget`` at a given price: the level of cost that is worth its price.

On each device experts enter in a fixed order (marked ones, then by importance), so an expert is kept at a level when
the sum of costs up to it is within the level. Every expert compares itself with all others, some rows of a matrix at a
time: sums up to it, then what the level it stands for would cost and lose. Nothing is sorted.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.language import (
    NO_KEY,
    crossed_links,
    f_of,
    jit,
    loads_of,
    order_key,
    shared,
)
from runtime.kernels.layer import store_figures, store_layer, take_summary


@jit
def sums_up_to(
    keys: tl.pointer_type,
    paid: tl.pointer_type,
    key_N: tl.tensor,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """For every key the cost of the keys on its device up to its own; the device stands above bit 57."""
    sum_N = tl.zeros((N_PAD,), tl.int64)
    for start in range(0, N_PAD, ROWS):
        at_C = start + tl.arange(0, ROWS)
        other_C = tl.load(keys + at_C)
        paid_C = tl.load(paid + at_C, mask=(at_C < N) & (other_C != NO_KEY), other=0)
        before_CN = (other_C[:, None] <= key_N[None, :]) & ((other_C >> 57)[:, None] == (key_N >> 57)[None, :])
        sum_N += tl.sum(tl.where(before_CN, paid_C[:, None], 0), axis=0)
    return sum_N


@jit
def removed_and_cost(
    keys: tl.pointer_type,
    sums: tl.pointer_type,
    importance: tl.pointer_type,
    level_N: tl.tensor,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """For every level the importance it prunes, and the highest load of a device."""
    removed_N = tl.zeros((N_PAD,), tl.int64)
    cost_N = tl.zeros((N_PAD,), tl.int64)
    for start in range(0, N_PAD, ROWS):
        at_C = start + tl.arange(0, ROWS)
        counts_C = tl.load(keys + at_C) != NO_KEY
        sum_C = tl.load(sums + at_C, mask=counts_C, other=0)
        importance_C = tl.load(importance + at_C, mask=counts_C, other=0)
        inside_CN = sum_C[:, None] <= level_N[None, :]
        removed_N += tl.sum(tl.where(inside_CN, 0, importance_C[:, None]), axis=0)
        cost_N = tl.maximum(cost_N, tl.max(tl.where(inside_CN, sum_C[:, None], 0), axis=0))
    return removed_N, cost_N


@jit
def shared_cost(
    keys: tl.pointer_type,
    sums: tl.pointer_type,
    paid: tl.pointer_type,
    device: tl.pointer_type,
    crosses: tl.pointer_type,
    factors: tl.pointer_type,
    level_N: tl.tensor,
    cost_N: tl.tensor,
    D: tl.constexpr,
    L: tl.constexpr,
    N_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """``cost_N`` raised to the cost of the shared links at every level."""
    for link in range(D, L):
        load_N = tl.zeros((N_PAD,), tl.int64)
        for start in range(0, N_PAD, ROWS):
            at_C = start + tl.arange(0, ROWS)
            counts_C = tl.load(keys + at_C) != NO_KEY
            sum_C = tl.load(sums + at_C, mask=counts_C, other=0)
            crossed_C = crossed_links(crosses, tl.load(device + at_C, mask=counts_C, other=0), link, L)
            paid_C = tl.load(paid + at_C, mask=counts_C & crossed_C, other=0)
            load_N += tl.sum(tl.where(sum_C[:, None] <= level_N[None, :], paid_C[:, None], 0), axis=0)
        cost_N = tl.maximum(cost_N, shared(load_N, tl.load(factors + link)))
    return cost_N


@jit
def decide_budget(
    summary: tl.pointer_type,
    placement: tl.pointer_type,
    cost: tl.pointer_type,
    resident: tl.pointer_type,
    crosses: tl.pointer_type,
    factors: tl.pointer_type,
    price: tl.pointer_type,
    importance: tl.pointer_type,
    device: tl.pointer_type,
    paid: tl.pointer_type,
    held: tl.pointer_type,
    active: tl.pointer_type,
    mandatory: tl.pointer_type,
    kept: tl.pointer_type,
    keys: tl.pointer_type,
    sums: tl.pointer_type,
    figures: tl.pointer_type,
    loads: tl.pointer_type,
    N: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    N_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFLOADING: tl.constexpr,
) -> None:
    """As ``decide``; ``price`` is one float64 on the device."""
    experts_N = tl.arange(0, N_PAD)
    inside_N = experts_N < N
    links_L = tl.arange(0, L_PAD)
    factor_L = tl.load(factors + links_L, mask=links_L < L, other=0)
    importance_N, marked_N, active_N, tokens, faults = take_summary(summary, importance, experts_N, N)
    store_layer(placement, cost, resident, device, paid, held, experts_N, N, R, N_PAD, OFFLOADING)
    tl.store(active + experts_N, active_N.to(tl.int8), mask=inside_N)
    tl.store(mandatory + experts_N, marked_N.to(tl.int8), mask=inside_N)
    tl.debug_barrier()

    before_L = loads_of(active, device, paid, crosses, links_L, L, N, L_PAD, CHUNK)
    floor = f_of(loads_of(mandatory, device, paid, crosses, links_L, L, N, L_PAD, CHUNK), factor_L)
    paid_for_N = active_N & (tl.load(held + experts_N, mask=inside_N, other=1) == 0)
    group_N = 2 * tl.load(device + experts_N, mask=inside_N, other=0) + (marked_N == 0).to(tl.int32)
    key_N = tl.where(paid_for_N, order_key(group_N, importance_N, experts_N), NO_KEY)
    tl.store(keys + experts_N, key_N)
    tl.debug_barrier()
    sum_N = sums_up_to(keys, paid, key_N, N, N_PAD, ROWS)
    tl.store(sums + experts_N, sum_N)
    tl.debug_barrier()

    # Experts that are not paid for stand for the lowest level.
    level_N = tl.where(paid_for_N, tl.maximum(sum_N, floor), floor)
    removed_N, cost_N = removed_and_cost(keys, sums, importance, level_N, N, N_PAD, ROWS)
    if L > D:
        cost_N = shared_cost(keys, sums, paid, device, crosses, factors, level_N, cost_N, D, L, N_PAD, ROWS)
    count = tl.sum(paid_for_N.to(tl.int32), axis=0)
    paid_total = tl.sum(tl.load(paid + experts_N, mask=paid_for_N, other=0), axis=0)
    mean = paid_total.to(tl.float64) / count.to(tl.float64)
    value_N = tl.where(mean > 0, cost_N.to(tl.float64) / mean, 0.0)
    value_N = value_N + tl.load(price) * (removed_N.to(tl.float64) / 1073741824.0)
    best = tl.min(value_N, axis=0)
    level = tl.max(tl.where(value_N == best, level_N, -1), axis=0)

    kept_N = active_N & ((sum_N <= level) | (paid_for_N == 0) | (faults > 0))
    tl.store(kept + experts_N, kept_N.to(tl.int8), mask=inside_N)
    tl.debug_barrier()
    after_L = loads_of(kept, device, paid, crosses, links_L, L, N, L_PAD, CHUNK)
    store_figures(figures, loads, floor, before_L, after_L, factor_L, tokens, faults, links_L, D)
