"""A softmax router and ``caee`` in one compiled call: from logits to the experts and weights that are dispatched.

The way of most models: the softmax of the top-k logits, renormalised over what is dispatched. So neither the softmax
over all experts nor its sum is needed: shares and weights are ratios of exp(logit − highest logit) of the experts at
hand. Decides as ``runtime.policy.fast.Caee`` does with those exponentials for scores (compensation ``active``,
reselect ``affected``, renormalize ``survivors``). Importing this module imports numba. Shapes as in
``runtime.policy.types``.

A call of a microsecond has no time for arrays of its own: whatever it needs besides its outputs is in a workspace, and
each array that is handed over counts. The rows are gone through once for the router and the summary; a second time
only where an expert was pruned, and then only those tokens' lost slots are looked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from probes.errors import UsageError
from runtime.compile import compiled_without_allocations
from runtime.policy.kernels import expand, f_of
from runtime.policy.loads import Layer, cheapest_replicas
from runtime.policy.shares import threshold
from runtime.policy.spec import format_policy
from runtime.policy.types import SHARE_UNIT, Bools, Floats, Ints, Machine, PolicySpec

CIR, SCORE = 0, 1
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
# The bits of a float64 that are 0 where it was a float32.
SPARE = (1 << 29) - 1
# As many keys as a vector loop takes in one turn: the rest would be gone through one by one.
TURN = 32
FLOAT32 = 4


@compiled_without_allocations
def choose_top_k(logits_N: Floats, ids_K: Ints, best_K: Floats) -> None:
    """The K highest of a row, descending (ties: lower id), and their logits."""
    slots = len(ids_K)
    count = 0
    for expert in range(len(logits_N)):
        value = logits_N[expert]
        if count == slots:
            if value <= best_K[slots - 1]:
                continue
            count -= 1
        at = count
        while at > 0 and best_K[at - 1] < value:
            best_K[at] = best_K[at - 1]
            ids_K[at] = ids_K[at - 1]
            at -= 1
        best_K[at] = value
        ids_K[at] = expert
        count += 1


@compiled_without_allocations
def exponentials(best_K: Floats, count: int, gates_K: Floats) -> float:
    """exp(logit − the highest) of the first ``count`` logits, in descending order, and their sum; 0 beyond."""
    total = 0.0
    for slot in range(count):
        gates_K[slot] = math.exp(np.float64(best_K[slot]) - np.float64(best_K[0]))
        total += gates_K[slot]
    for slot in range(count, len(best_K)):
        gates_K[slot] = 0.0
    return total


@compiled_without_allocations
def route_plain(logits_TN: Floats, gates_K: Floats, ids_TK: Ints, weights_TK: Floats) -> None:
    """The router alone: softmax, top-k, renormalise. ``gates_K``: room to work in."""
    for row in range(len(ids_TK)):
        best_K = weights_TK[row]
        choose_top_k(logits_TN[row], ids_TK[row], best_K)
        total = exponentials(best_K, len(best_K), gates_K)
        for slot in range(len(best_K)):
            weights_TK[row, slot] = gates_K[slot] / total


@compiled_without_allocations
def mark_prefix(ids_K: Ints, q_K: Ints, least: int, marks_N: Ints) -> None:
    """Rule ``cir`` for a token whose shares descend: mark the shortest non-empty prefix with Σq ≥ ``least``."""
    slots = len(ids_K)
    total, end = 0, 0
    while end < slots and (end == 0 or total < least):
        total += q_K[end]
        end += 1
    # Of equal shares that it ends among, those of lower id are in the prefix, whatever their logits' last bits say.
    share = q_K[end - 1]
    start = end - 1
    while start > 0 and q_K[start - 1] == share:
        start -= 1
    for slot in range(start):
        marks_N[ids_K[slot]] = 1
    if end == slots or q_K[end] != share:
        for slot in range(start, end):
            marks_N[ids_K[slot]] = 1
        return
    for slot in range(start, slots):
        if q_K[slot] == share:
            lower = 0
            for other in range(start, slots):
                lower += q_K[other] == share and ids_K[other] < ids_K[slot]
            if lower < end - start:
                marks_N[ids_K[slot]] = 1


@compiled_without_allocations
def mark_above(active_A: Ints, importance_N: Ints, least: int, marks_N: Ints) -> None:
    """Rule ``score``: mark active experts with I ≥ ``least``; if there is none, the one of highest I."""
    highest, found = -1, 0
    for at in range(len(active_A)):
        expert = active_A[at]
        above = importance_N[expert] >= least
        marks_N[expert] = above
        found += above
        if highest < 0 or importance_N[expert] > importance_N[highest]:
            highest = expert
    if found == 0 and highest >= 0:
        marks_N[highest] = 1


@compiled_without_allocations
def make_keys(logits_N: Floats, experts_A: Ints, keys: Ints) -> None:
    """Distinct integers in the order of the experts' logits, float32 (ties: the one that comes first is higher).

    The low bits tell an expert's place, so that one loop over integers, in vector instructions, finds the highest.
    """
    values = keys.view(np.float64)
    for at in range(len(experts_A)):
        values[at] = np.float64(logits_N[experts_A[at]]) + 0.0  # no −0.0
    for at in range(len(experts_A)):
        keys[at] = ((keys[at] ^ ((keys[at] >> 63) & HIGHEST)) | SPARE) - at


@compiled_without_allocations
def highest_below(keys: Ints, bound: int) -> int:
    """The highest of ``keys`` that is lower than ``bound``."""
    best = LOWEST
    for at in range(len(keys)):
        best = max(best, keys[at] if keys[at] < bound else LOWEST)
    return best


@compiled_without_allocations
def refill(
    logits_N: Floats, kept_A: Ints, kept_N: Bools, place_N: Ints, keys: Ints, ids_K: Ints, best_K: Floats
) -> int:
    """A token's survivors, then the best other kept experts in its lost slots; how many, the other slots −1.

    ``kept_A`` ascends; ``place_N``: an expert's place in it, its length for lost ones. ``keys``: room for one more than
    ``kept_A``, what is beyond it ``LOWEST``. The choice ``ids_K`` was the best of all experts, so every other one comes
    after all of it.
    """
    slots = len(ids_K)
    make_keys(logits_N, kept_A, keys)
    held = 0
    for slot in range(slots):
        expert = ids_K[slot]
        keys[place_N[expert]] = LOWEST
        ids_K[held] = expert
        best_K[held] = logits_N[expert]
        held += kept_N[expert]
    count = min(slots, len(kept_A))
    key = HIGHEST
    for slot in range(held, count):
        key = highest_below(keys, key)
        ids_K[slot] = kept_A[SPARE - (key & SPARE)]
        best_K[slot] = logits_N[ids_K[slot]]
    for slot in range(count, slots):
        ids_K[slot] = -1
        best_K[slot] = 0.0
    return count


@compiled_without_allocations
def route_caee(
    logits_TN: Floats,
    rule: int,
    least: int,
    groups: int,
    work: Ints,
    kept_N: Bools,
    ids_TK: Ints,
    weights_TK: Floats,
) -> int:
    """The router and the decision; returns F_base. ``least``: round(θ·2³⁰), less K for ``CIR``.

    All rows are real tokens, and logits are finite. ``work``: as ``workspace`` makes it; its last D become the loads of
    the kept set. ``kept_N``, ``ids_TK`` and ``weights_TK`` are written, too.
    """
    if logits_TN.itemsize > FLOAT32:
        raise UsageError("the one-call router takes logits as float32")
    tokens, num_experts = logits_TN.shape
    slots = ids_TK.shape[1]
    device_N, paid_N = work[:num_experts], work[num_experts : 2 * num_experts]
    after = 2 * num_experts
    starts_G1, factors_G = work[after : after + groups + 1], work[after + groups + 1 : after + 2 * groups + 1]
    after += 2 * groups + 1
    members, work = work[after : after + starts_G1[groups]], work[after + starts_G1[groups] :]
    importance_N, marks_N = work[:num_experts], work[num_experts : 2 * num_experts]
    active_A, order = work[2 * num_experts : 3 * num_experts], work[3 * num_experts : 4 * num_experts]
    room, work = work[4 * num_experts : 7 * num_experts + TURN], work[7 * num_experts + TURN :]
    q_K, gates_K, load_D = work[:slots], work[slots : 2 * slots].view(np.float64), work[2 * slots :]

    importance_N[:] = -1  # not active
    marks_N[:] = 0
    for row in range(tokens):
        ids_K, weights_K = ids_TK[row], weights_TK[row]
        choose_top_k(logits_TN[row], ids_K, weights_K)
        total = exponentials(weights_K, slots, gates_K)
        for slot in range(slots):
            share = gates_K[slot] / total
            weights_K[slot] = share
            q_K[slot] = np.int64(np.rint(share * SHARE_UNIT))
            importance_N[ids_K[slot]] = max(importance_N[ids_K[slot]], 0) + q_K[slot]
        if rule == CIR:
            mark_prefix(ids_K, q_K, least, marks_N)

    active = 0
    for expert in range(num_experts):
        active_A[active] = expert
        active += importance_N[expert] >= 0
    active_A = active_A[:active]
    if rule == SCORE:
        mark_above(active_A, importance_N, least, marks_N)
    load_D[:] = 0
    for at in range(active):
        load_D[device_N[active_A[at]]] += paid_N[active_A[at]] * marks_N[active_A[at]]
    f_base = f_of(load_D, starts_G1, members, factors_G)

    kept_N[:] = False
    candidates = 0
    for at in range(active):
        expert = active_A[at]
        paid = paid_N[expert]
        kept_N[expert] = marks_N[expert] != 0 or paid == 0
        order[candidates] = expert
        # What does not fit at once never will: loads only grow.
        candidates += not kept_N[expert] and load_D[device_N[expert]] + paid <= f_base
    expand(
        order[:candidates], importance_N, device_N, paid_N, starts_G1, members, factors_G, f_base, room, load_D, kept_N
    )
    kept = 0
    for at in range(active):
        order[kept] = active_A[at]
        kept += kept_N[active_A[at]]
    if kept == active:
        return f_base
    kept_A, place_N = order[:kept], marks_N
    for at in range(active):
        place_N[active_A[at]] = kept
    for at in range(kept):
        place_N[kept_A[at]] = at
    keys = room[: (kept // TURN + 1) * TURN]
    keys[kept:] = LOWEST
    for row in range(tokens):
        ids_K, weights_K = ids_TK[row], weights_TK[row]
        lost = False
        for slot in range(slots):
            lost |= not kept_N[ids_K[slot]]
        if lost:
            count = refill(logits_TN[row], kept_A, kept_N, place_N, keys, ids_K, weights_K)
            total = exponentials(weights_K, count, gates_K)
            for slot in range(slots):
                weights_K[slot] = gates_K[slot] / total
    return f_base


def workspace(layer: Layer, top_k: int) -> Ints:
    """One array of all that ``route_caee`` needs besides its outputs: each one that is handed over costs.

    Device and R·c of every expert; starts, factors and members of the link groups; then room: N each for importance,
    marks, active experts and their order, 3·N + ``TURN`` for what is sought among them, 2·K, D.
    """
    groups = layer.groups
    known: Sequence[Ints] = (layer.device_N, layer.paid_N, groups.starts_G1, groups.factors_G, groups.members)
    room = np.zeros(7 * len(layer.device_N) + TURN + 2 * top_k + layer.devices, dtype=np.int64)
    return np.concatenate([*known, room]).astype(np.int64)


class SoftmaxCaee:
    """A softmax router with ``caee`` for one layer of one machine; call it with logits [T, N] float32 of real tokens.

    Returns ids [T, K] int64 and weights [T, K] float32 in buffers that the next call with as many tokens overwrites;
    then ``kept_N``, ``load_D`` and ``f_base`` (picoseconds) are those of the call. ``spec`` is a resolved ``caee`` with
    ``active``, ``affected``, ``survivors`` and without ``ceiling``. Raises ``UsageError`` for any other.
    """

    def __init__(self, spec: PolicySpec, machine: Machine, top_k: int) -> None:
        wanted = PolicySpec(name="caee", renormalize="survivors", routed_scaling_factor=1.0)
        if dataclasses.replace(spec, parameters={}) != wanted or "ceiling" in spec.parameters:
            raise UsageError(f"the one-call router does not do {format_policy(spec)}", hint="use make_policy")
        layer = cheapest_replicas(machine)
        cir = spec.parameters["rule"] == "cir"
        theta = threshold(float(spec.parameters["theta"]))
        least = theta - top_k if cir else min(theta, np.iinfo(np.int64).max)
        work = workspace(layer, top_k)
        self.kept_N: Bools = np.zeros(len(layer.device_N), dtype=np.bool_)
        self.load_D: Ints = work[len(work) - layer.devices :]
        self.f_base = 0
        self._top_k = top_k
        self._fixed = (CIR if cir else SCORE, least, len(layer.groups.factors_G), work, self.kept_N)
        self._outputs: dict[int, tuple[Ints, Floats]] = {}

    def __call__(self, logits_TN: Floats) -> tuple[Ints, Floats]:
        tokens = len(logits_TN)
        outputs = self._outputs.get(tokens)
        if outputs is None:
            shape = (tokens, self._top_k)
            outputs = self._outputs[tokens] = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        self.f_base = route_caee(logits_TN, *self._fixed, *outputs)
        return outputs
