"""Where the tokens go once the kept set is known: compensation, order of the slots, weights, and what was lost.

Masking is by exclusion, never by a zero score, which would beat negative selection scores. No token gets one expert
twice. Shapes as in ``runtime.policy.types``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.policy.shares import chosen_slots, real_rows, shares
from runtime.policy.types import Bools, Floats, Ints, PolicySpec, Routed, Tokens


def selection(tokens: Tokens) -> Floats | None:
    """What the router ranks by [T, N], or None where only its choice was recorded."""
    return tokens.scores_TN if tokens.selection_scores_TN is None else tokens.selection_scores_TN


def gate(tokens: Tokens, row: int, expert: int) -> float:
    """G(t)_e; where only the choice was recorded, of an expert of that choice."""
    if tokens.scores_TN is not None:
        return float(tokens.scores_TN[row, expert])
    slot = int(np.flatnonzero(tokens.topk_ids_TK[row] == expert)[0])
    return float(tokens.gates_TK[row, slot])


def ranked(selection_N: Floats, experts: Iterable[int]) -> list[int]:
    """``experts`` by selection score descending (ties: lower id)."""
    return sorted(experts, key=lambda expert: (-selection_N[expert], expert))


def drop_lost(tokens: Tokens, kept_N: Bools) -> Ints:
    """The tokens' own slots [T, K], −1 in the place of what is not kept; padding −1 throughout."""
    ids_TK = np.full(tokens.topk_ids_TK.shape, -1, dtype=np.int64)
    for row in real_rows(tokens):
        for slot in chosen_slots(tokens, row):
            expert = tokens.topk_ids_TK[row, slot]
            if kept_N[expert]:
                ids_TK[row, slot] = expert
    return ids_TK


def compensate(tokens: Tokens, kept_N: Bools, resident_N: Bools, spec: PolicySpec) -> Ints:
    """The tokens' slots [T, K] after lost ones were filled as ``compensation`` and ``reselect`` say."""
    ids_TK = drop_lost(tokens, kept_N)
    selection_TN = selection(tokens)
    if spec.compensation == "none" or selection_TN is None:
        return ids_TK
    candidates_N = kept_N | resident_N if spec.compensation == "resident" else kept_N
    candidates = [int(expert) for expert in np.flatnonzero(candidates_N)]
    for row in real_rows(tokens):
        chosen = len(chosen_slots(tokens, row))
        survivors = [int(expert) for expert in ids_TK[row] if expert >= 0]
        if spec.reselect == "all":
            slots = ranked(selection_TN[row], candidates)[: ids_TK.shape[1]]
        elif len(survivors) == chosen:
            continue
        else:
            others = [expert for expert in candidates if expert not in survivors]
            filled = survivors + ranked(selection_TN[row], others)[: chosen - len(survivors)]
            slots = ranked(selection_TN[row], filled)
        ids_TK[row] = -1
        ids_TK[row, : len(slots)] = slots
    return ids_TK


def weigh(tokens: Tokens, ids_TK: Ints, spec: PolicySpec) -> Floats:
    """w(t,e) = G(t)_e over the denominator of ``renormalize``, × ``routed_scaling_factor``; 0 where that is 0."""
    weights_TK = np.zeros(ids_TK.shape, dtype=np.float64)
    for row in real_rows(tokens):
        denominator = 1.0
        if spec.renormalize != "none":
            over = ids_TK if spec.renormalize == "survivors" else tokens.topk_ids_TK
            denominator = 0.0
            for expert in over[row]:
                if expert >= 0:
                    denominator += gate(tokens, row, expert)
        for slot, expert in enumerate(ids_TK[row]):
            if expert >= 0 and denominator > 0:
                factor = 1.0 if spec.routed_scaling_factor is None else spec.routed_scaling_factor
                weights_TK[row, slot] = gate(tokens, row, expert) / denominator * factor
    return weights_TK


def routed(tokens: Tokens, ids_TK: Ints, spec: PolicySpec) -> Routed:
    """Weights for ``ids_TK``, and what the tokens lost and gained against the router's own choice."""
    q_TK = shares(tokens)
    removed = rerouted_slots = 0
    for row in real_rows(tokens):
        own, new = tokens.topk_ids_TK[row], ids_TK[row]
        removed += sum(int(q_TK[row, slot]) for slot in chosen_slots(tokens, row) if own[slot] not in new)
        rerouted_slots += sum(1 for expert in new if expert >= 0 and expert not in own)
    return Routed(
        topk_ids_TK=ids_TK,
        topk_weights_TK=weigh(tokens, ids_TK, spec),
        removed=removed,
        rerouted_slots=rerouted_slots,
    )
