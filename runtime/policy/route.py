"""A softmax router and ``caee`` in one compiled call: from logits to the experts and weights that are dispatched.

The way of most models: the softmax of the top-k logits, renormalised over what is dispatched. So neither the softmax
over all experts nor its sum is needed: shares and weights are ratios of exp(logit − highest logit) of the experts at
hand. Decides as ``runtime.policy.fast.Caee`` does with those exponentials for scores (compensation ``active``,
reselect ``affected``, renormalize ``survivors``). Importing this module imports numba. Shapes as in
``runtime.policy.types``.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from probes.errors import UsageError
from runtime.compile import compiled
from runtime.policy.kernels import decide_caee, mark_above, mark_prefixes, shares, summarise
from runtime.policy.loads import cheapest_replicas
from runtime.policy.shares import threshold
from runtime.policy.spec import format_policy
from runtime.policy.types import Bools, Floats, Ints, Machine, PolicySpec

CIR, SCORE = 0, 1


@compiled
def choose_top_k(logits_TN: Floats, ids_TK: Ints, best_TK: Floats) -> None:
    """The K highest of each row, descending (ties: lower id), and their logits."""
    tokens, num_experts = logits_TN.shape
    slots = ids_TK.shape[1]
    for row in range(tokens):
        count = 0
        for expert in range(num_experts):
            value = logits_TN[row, expert]
            if count == slots:
                if value <= best_TK[row, slots - 1]:
                    continue
                count -= 1
            at = count
            while at > 0 and best_TK[row, at - 1] < value:
                best_TK[row, at] = best_TK[row, at - 1]
                ids_TK[row, at] = ids_TK[row, at - 1]
                at -= 1
            best_TK[row, at] = value
            ids_TK[row, at] = expert
            count += 1


@compiled
def choose_kept(logits_TN: Floats, row: int, kept: Ints, ids_TK: Ints, best_TK: Floats) -> int:
    """``choose_top_k`` of one row among the experts ``kept`` (ascending); how many, the other slots −1."""
    slots = ids_TK.shape[1]
    count = 0
    for at_kept in range(len(kept)):
        value = logits_TN[row, kept[at_kept]]
        if count == slots:
            if value <= best_TK[row, slots - 1]:
                continue
            count -= 1
        at = count
        while at > 0 and best_TK[row, at - 1] < value:
            best_TK[row, at] = best_TK[row, at - 1]
            ids_TK[row, at] = ids_TK[row, at - 1]
            at -= 1
        best_TK[row, at] = value
        ids_TK[row, at] = kept[at_kept]
        count += 1
    for slot in range(count, slots):
        ids_TK[row, slot] = -1
    return count


@compiled
def exponentials(best_TK: Floats, row: int, count: int, gates_TK: Floats) -> None:
    """exp(logit − the row's highest) of the first ``count`` logits, in descending order; 0 beyond."""
    for slot in range(best_TK.shape[1]):
        distance = np.float64(best_TK[row, slot]) - np.float64(best_TK[row, 0])
        gates_TK[row, slot] = math.exp(distance) if slot < count else 0.0


@compiled
def normalise(gates_TK: Floats, row: int, weights_TK: Floats) -> None:
    """A row's gates over their sum."""
    total = 0.0
    for slot in range(gates_TK.shape[1]):
        total += gates_TK[row, slot]
    for slot in range(gates_TK.shape[1]):
        weights_TK[row, slot] = gates_TK[row, slot] / total


@compiled
def route_plain(logits_TN: Floats, ids_TK: Ints, weights_TK: Floats) -> None:
    """The router alone: softmax, top-k, renormalise."""
    best_TK = np.empty(ids_TK.shape, logits_TN.dtype)
    gates_TK = np.empty(ids_TK.shape)
    choose_top_k(logits_TN, ids_TK, best_TK)
    for row in range(len(ids_TK)):
        exponentials(best_TK, row, ids_TK.shape[1], gates_TK)
        normalise(gates_TK, row, weights_TK)


@compiled
def route_caee(
    logits_TN: Floats,
    rule: int,
    least: int,
    device_N: Ints,
    paid_N: Ints,
    starts_G1: Ints,
    members: Ints,
    factors_G: Ints,
    load_D: Ints,
    kept_N: Bools,
    ids_TK: Ints,
    weights_TK: Floats,
) -> int:
    """The router and the decision; returns F_base. ``least``: round(θ·2³⁰), less K for ``CIR``.

    All rows are real tokens, and logits are finite. ``load_D``, ``kept_N``, ``ids_TK`` and ``weights_TK`` are written.
    """
    tokens, num_experts = logits_TN.shape
    slots = ids_TK.shape[1]
    own_TK = np.empty(ids_TK.shape, np.int64)
    best_TK = np.empty(ids_TK.shape, logits_TN.dtype)
    gates_TK = np.empty(ids_TK.shape)
    q_TK = np.empty(ids_TK.shape, np.int64)
    mask_T = np.ones(tokens, np.bool_)
    importance_N = np.zeros(num_experts, np.int64)
    active_N = np.zeros(num_experts, np.bool_)
    mandatory_N = np.zeros(num_experts, np.bool_)

    choose_top_k(logits_TN, own_TK, best_TK)
    for row in range(tokens):
        exponentials(best_TK, row, slots, gates_TK)
    shares(own_TK, gates_TK, mask_T, q_TK)
    summarise(own_TK, q_TK, mask_T, importance_N, active_N)
    if rule == CIR:
        mark_prefixes(own_TK, q_TK, mask_T, least, mandatory_N)

    # The decision over the active experts alone, in ascending id, which keeps every tie as it is: few tokens are quick.
    active = np.flatnonzero(active_N)
    importance_A, device_A, paid_A = importance_N[active], device_N[active], paid_N[active]
    mandatory_A, active_A = mandatory_N[active], np.ones(len(active), np.bool_)
    kept_A = np.empty(len(active), np.bool_)
    if rule == SCORE:
        mark_above(importance_A, active_A, least, mandatory_A)
    f_base = decide_caee(
        importance_A, mandatory_A, active_A, device_A, paid_A, starts_G1, members, factors_G, load_D, kept_A
    )
    kept = active[kept_A]
    kept_N[:] = False
    for at in range(len(kept)):
        kept_N[kept[at]] = True

    for row in range(tokens):
        lost = False
        for slot in range(slots):
            lost = lost or not kept_N[own_TK[row, slot]]
            ids_TK[row, slot] = own_TK[row, slot]
        if lost:
            # The choice was the best of all experts, so survivors and refills together are the best of the kept.
            count = choose_kept(logits_TN, row, kept, ids_TK, best_TK)
            exponentials(best_TK, row, count, gates_TK)
        normalise(gates_TK, row, weights_TK)
    return f_base


class SoftmaxCaee:
    """A softmax router with ``caee`` for one layer of one machine; call it with logits [T, N] of real tokens.

    Returns ids [T, K] int64 and weights [T, K] in the type of the logits, in buffers that the
    next call with as many tokens overwrites; then ``kept_N``, ``load_D`` and ``f_base`` (picoseconds) are those of the
    call. ``spec`` is a resolved ``caee`` with ``active``, ``affected``, ``survivors`` and without ``ceiling``.
    """

    def __init__(self, spec: PolicySpec, machine: Machine, top_k: int) -> None:
        wanted = PolicySpec(name="caee", renormalize="survivors", routed_scaling_factor=1.0)
        if dataclasses.replace(spec, parameters={}) != wanted or "ceiling" in spec.parameters:
            raise UsageError(f"the one-call router does not do {format_policy(spec)}", hint="use make_policy")
        layer = cheapest_replicas(machine)
        cir = spec.parameters["rule"] == "cir"
        theta = threshold(float(spec.parameters["theta"]))
        self.kept_N: Bools = np.zeros(len(layer.device_N), dtype=np.bool_)
        self.load_D: Ints = np.zeros(layer.devices, dtype=np.int64)
        self.f_base = 0
        self._top_k = top_k
        self._rule = (CIR, theta - top_k) if cir else (SCORE, min(theta, np.iinfo(np.int64).max))
        self._layer = layer
        self._buffers: dict[int, tuple[Ints, Floats]] = {}

    def __call__(self, logits_TN: Floats) -> tuple[Ints, Floats]:
        buffers = self._buffers.get(len(logits_TN))
        if buffers is None:
            shape = (len(logits_TN), self._top_k)
            buffers = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=logits_TN.dtype)
            self._buffers[len(logits_TN)] = buffers
        layer, groups = self._layer, self._layer.groups
        self.f_base = route_caee(
            logits_TN,
            *self._rule,
            layer.device_N,
            layer.paid_N,
            groups.starts_G1,
            groups.members,
            groups.factors_G,
            self.load_D,
            self.kept_N,
            *buffers,
        )
        return buffers
