"""What the decision's kernels share: a typed decorator, and device functions on the vectors of one token or one layer.

Suffixes name shapes as in ``runtime.policy.types``, padded to powers of two: experts_N, slots_K, load_L. A *link* is a
device's own link or a group's shared one: F is the largest of all links, a device's factor being 1024.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

NO_EXPERT = tl.constexpr(1 << 30)
NO_KEY = tl.constexpr((1 << 63) - 1)
MOST_IMPORTANCE = tl.constexpr((1 << 47) - 2)


def jit(function: Any) -> Any:
    """``triton.jit``, for type checkers a function like any other."""
    return triton.jit(function)


@jit
def widened(values: tl.tensor) -> tl.tensor:
    """Half precisions as float32: every one of their values is exact there."""
    if values.dtype == tl.float64:
        return values
    return values.to(tl.float32)


@jit
def best_of(ranks_N: tl.tensor, candidates_N: tl.tensor, experts_N: tl.tensor) -> tl.tensor:
    """The candidate of highest rank (ties: lower id); NO_EXPERT where there is none."""
    highest = tl.max(tl.where(candidates_N, ranks_N, float("-inf")), axis=0)
    return tl.min(tl.where(candidates_N & (ranks_N == highest), experts_N, NO_EXPERT), axis=0)


@jit
def sum_in_slot_order(values_K: tl.tensor, slots_K: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """The float64 sum in slot order: a tree of additions would round differently."""
    total = tl.sum(tl.where(slots_K == 0, values_K, 0.0), axis=0)
    for slot in tl.static_range(1, K):
        total += tl.sum(tl.where(slots_K == slot, values_K, 0.0), axis=0)
    return total


@jit
def shares_of(gates_K: tl.tensor, chosen_K: tl.tensor, slots_K: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """q = round-half-even(g · 2³⁰), g from sums in slot order; equal shares where the scores sum to 0."""
    total = sum_in_slot_order(gates_K, slots_K, K)
    count = tl.sum(chosen_K.to(tl.int32), axis=0).to(tl.float64)
    share_K = tl.where(total > 0, gates_K / total, 1.0 / count)
    # Adding 2⁵² leaves no fraction bits: the addition rounds half to even, and the mantissa is the integer.
    rounded_K = (share_K * 1073741824.0 + 4503599627370496.0).to(tl.int64, bitcast=True) & ((1 << 52) - 1)
    return tl.where(chosen_K, rounded_K, 0)


@jit
def shared(load: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """factor · load // 1024 in two parts, so that the product stays within int64."""
    return factor * (load >> 10) + ((factor * (load & 1023)) >> 10)


@jit
def f_of(load_L: tl.tensor, factor_L: tl.tensor) -> tl.tensor:
    """F from the loads of all links."""
    return tl.max(shared(load_L, factor_L), axis=0)


@jit
def crossed_links(crosses: tl.pointer_type, device: tl.tensor, links: tl.tensor, L: tl.constexpr) -> tl.tensor:
    """Which links the transfers to a device cross, from the matrix ``crosses`` [D, L]."""
    return tl.load(crosses + device * L + links, mask=links < L, other=0) != 0


@jit
def loads_of(
    marks: tl.pointer_type,
    device: tl.pointer_type,
    paid: tl.pointer_type,
    crosses: tl.pointer_type,
    links_L: tl.tensor,
    L: tl.constexpr,
    N: tl.constexpr,
    L_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """The load of every link for the marked experts."""
    load_L = tl.zeros((L_PAD,), tl.int64)
    for start in range(0, N, CHUNK):
        at_C = start + tl.arange(0, CHUNK)
        marked_C = tl.load(marks + at_C, mask=at_C < N, other=0) != 0
        paid_C = tl.load(paid + at_C, mask=marked_C, other=0)
        device_C = tl.load(device + at_C, mask=marked_C, other=0)
        crossed_CL = crossed_links(crosses, device_C[:, None], links_L[None, :], L)
        load_L += tl.sum(tl.where(crossed_CL, paid_C[:, None], 0), axis=0)
    return load_L


@jit
def order_key(group: tl.tensor, importance: tl.tensor, experts: tl.tensor) -> tl.tensor:
    """Sorts by group, then by importance descending, then by id: 7, 47 and 9 bits, so ascending keys are positive."""
    return (group.to(tl.int64) << 56) | ((MOST_IMPORTANCE - importance) << 9) | experts.to(tl.int64)
