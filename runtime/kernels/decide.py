"""Second launch, one program a layer: the kept set of ``router``, ``importance`` and ``caee``.

Source: arXiv:2606.29982, section IV: mandatory experts, then whatever does not raise the layer's cost.
"""

from __future__ import annotations

import triton.language as tl

from runtime.kernels.language import (
    NO_EXPERT,
    NO_KEY,
    crossed_links,
    f_of,
    jit,
    loads_of,
    order_key,
    shared,
)
from runtime.kernels.layer import store_figures, store_layer, take_summary

KEEP_ALL = tl.constexpr(0)
KEEP_MANDATORY = tl.constexpr(1)
EXPAND = tl.constexpr(2)


@jit
def above(
    importance_N: tl.tensor, active_N: tl.tensor, marked_N: tl.tensor, experts_N: tl.tensor, least: tl.tensor
) -> tl.tensor:
    """Rule ``score``: I ≥ ``least``; if nothing is marked then, the active expert of highest importance."""
    marked_N = marked_N | (active_N & (importance_N >= least))
    highest = tl.max(tl.where(active_N, importance_N, -1), axis=0)
    first = tl.min(tl.where(active_N & (importance_N == highest), experts_N, NO_EXPERT), axis=0)
    none = tl.max(marked_N.to(tl.int32), axis=0) == 0
    return marked_N | (none & (experts_N == first))


@jit
def store_candidates(
    importance: tl.pointer_type,
    device: tl.pointer_type,
    paid: tl.pointer_type,
    crosses: tl.pointer_type,
    mandatory: tl.pointer_type,
    active: tl.pointer_type,
    kept: tl.pointer_type,
    keys: tl.pointer_type,
    load_L: tl.tensor,
    factor_L: tl.tensor,
    f_base: tl.tensor,
    links_L: tl.tensor,
    L: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
) -> tl.tensor:
    """Keep what is mandatory or free; sort keys of what might be promoted, and how many those are on each device.

    What does not fit at once never will, since loads only grow.
    """
    count_L = tl.zeros((L_PAD,), tl.int32)
    for start in range(0, N_PAD, CHUNK):
        at_C = start + tl.arange(0, CHUNK)
        inside_C = at_C < N
        device_C = tl.load(device + at_C, mask=inside_C, other=0)
        paid_C = tl.load(paid + at_C, mask=inside_C, other=0)
        active_C = tl.load(active + at_C, mask=inside_C, other=0) != 0
        kept_C = tl.load(mandatory + at_C, mask=inside_C, other=0) != 0
        kept_C = kept_C | (active_C & (paid_C == 0))
        tl.store(kept + at_C, kept_C.to(tl.int8), mask=inside_C)
        crossed_CL = crossed_links(crosses, device_C[:, None], links_L[None, :], L)
        grown_CL = tl.where(crossed_CL, shared(load_L[None, :] + paid_C[:, None], factor_L[None, :]), 0)
        candidate_C = active_C & (kept_C == 0) & (tl.max(grown_CL, axis=1) <= f_base)
        group_C = device_C
        if SHARED:
            group_C = tl.zeros((CHUNK,), tl.int32)
        key_C = order_key(group_C, tl.load(importance + at_C, mask=inside_C, other=0), at_C)
        tl.store(keys + at_C, tl.where(candidate_C, key_C, NO_KEY))
        here_CL = candidate_C[:, None] & (device_C[:, None] == links_L[None, :])
        count_L += tl.sum(here_CL.to(tl.int32), axis=0)
    return count_L


@jit
def store_order(
    keys: tl.pointer_type, order: tl.pointer_type, experts_N: tl.tensor, N_PAD: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """The candidates by ascending key: an expert's place is how many keys are below its own."""
    key_N = tl.load(keys + experts_N)
    place_N = tl.zeros((N_PAD,), tl.int32)
    for start in range(0, N_PAD, ROWS):
        other_C = tl.load(keys + start + tl.arange(0, ROWS))
        place_N += tl.sum((other_C[:, None] < key_N[None, :]).to(tl.int32), axis=0)
    tl.store(order + place_N, experts_N, mask=key_N != NO_KEY)


@jit
def expand_by_device(
    order: tl.pointer_type,
    paid: tl.pointer_type,
    kept: tl.pointer_type,
    load_L: tl.tensor,
    count_L: tl.tensor,
    f_base: tl.tensor,
) -> tl.tensor:
    """Cost-invariant expansion without shared links: all devices at once, each through its own candidates in order."""
    first_L = tl.cumsum(count_L, axis=0) - count_L
    for step in range(tl.max(count_L, axis=0)):
        candidate_L = step < count_L
        expert_L = tl.load(order + first_L + step, mask=candidate_L, other=0)
        grown_L = load_L + tl.load(paid + expert_L, mask=candidate_L, other=0)
        fits_L = candidate_L & (grown_L <= f_base)
        load_L = tl.where(fits_L, grown_L, load_L)
        tl.store(kept + expert_L, 1, mask=fits_L)
    return load_L


@jit
def expand_in_order(
    order: tl.pointer_type,
    device: tl.pointer_type,
    paid: tl.pointer_type,
    crosses: tl.pointer_type,
    kept: tl.pointer_type,
    load_L: tl.tensor,
    factor_L: tl.tensor,
    count_L: tl.tensor,
    f_base: tl.tensor,
    links_L: tl.tensor,
    L: tl.constexpr,
) -> tl.tensor:
    """Cost-invariant expansion where links are shared: one candidate after the other."""
    for step in range(tl.sum(count_L, axis=0)):
        expert = tl.load(order + step)
        crossed_L = crossed_links(crosses, tl.load(device + expert), links_L, L)
        grown_L = load_L + tl.where(crossed_L, tl.load(paid + expert), 0)
        fits = f_of(grown_L, factor_L) <= f_base
        load_L = tl.where(fits, grown_L, load_L)
        tl.store(kept + expert, 1, mask=fits)
    return load_L


@jit
def decide(
    summary: tl.pointer_type,
    placement: tl.pointer_type,
    cost: tl.pointer_type,
    resident: tl.pointer_type,
    crosses: tl.pointer_type,
    factors: tl.pointer_type,
    importance: tl.pointer_type,
    device: tl.pointer_type,
    paid: tl.pointer_type,
    held: tl.pointer_type,
    active: tl.pointer_type,
    mandatory: tl.pointer_type,
    kept: tl.pointer_type,
    keys: tl.pointer_type,
    order: tl.pointer_type,
    figures: tl.pointer_type,
    loads: tl.pointer_type,
    least: tl.tensor,
    N: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    N_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFLOADING: tl.constexpr,
    SCORE: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """Clears ``summary`` [3·N + 2] and writes what follows ``factors``, up to ``loads`` (before and after, [2, D])."""
    experts_N = tl.arange(0, N_PAD)
    links_L = tl.arange(0, L_PAD)
    factor_L = tl.load(factors + links_L, mask=links_L < L, other=0)
    importance_N, marked_N, active_N, tokens, faults = take_summary(summary, importance, experts_N, N)
    store_layer(placement, cost, resident, device, paid, held, experts_N, N, R, N_PAD, OFFLOADING)
    mandatory_N = marked_N
    if SCORE:
        mandatory_N = above(importance_N, active_N, marked_N, experts_N, least)
    if MODE == KEEP_ALL:
        mandatory_N = active_N
    tl.store(active + experts_N, active_N.to(tl.int8), mask=experts_N < N)
    tl.store(mandatory + experts_N, mandatory_N.to(tl.int8), mask=experts_N < N)
    tl.debug_barrier()

    before_L = loads_of(active, device, paid, crosses, links_L, L, N, L_PAD, CHUNK)
    load_L = loads_of(mandatory, device, paid, crosses, links_L, L, N, L_PAD, CHUNK)
    f_base = f_of(load_L, factor_L)
    kept_N = mandatory_N
    if MODE == EXPAND:
        count_L = store_candidates(
            importance, device, paid, crosses, mandatory, active, kept, keys, load_L, factor_L, f_base, links_L,
            L, N, N_PAD, L_PAD, CHUNK, L > D,
        )  # fmt: skip
        tl.debug_barrier()
        store_order(keys, order, experts_N, N_PAD, ROWS)
        tl.debug_barrier()
        if L > D:
            load_L = expand_in_order(order, device, paid, crosses, kept, load_L, factor_L, count_L, f_base, links_L, L)
        else:
            load_L = expand_by_device(order, paid, kept, load_L, count_L, f_base)
        tl.debug_barrier()
        kept_N = tl.load(kept + experts_N, mask=experts_N < N, other=0) != 0
    kept_N = tl.where(faults > 0, active_N, kept_N)
    load_L = tl.where(faults > 0, before_L, load_L)
    tl.debug_barrier()
    tl.store(kept + experts_N, kept_N.to(tl.int8), mask=experts_N < N)
    store_figures(figures, loads, f_base, before_L, load_L, factor_L, tokens, faults, links_L, D)
