"""Shares of the tokens' chosen experts, as integers in units of 2⁻³⁰, and the per-token rules on them.

g(t,e) = G(t)_e / Σ_{j∈K_t} G(t)_j in float64, summed in slot order; q = round-half-even(g · 2³⁰).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from runtime.policy.types import SHARE_UNIT, Floats, Ints, Tokens


def real_rows(tokens: Tokens) -> Iterator[int]:
    """Indices of the tokens that are no padding."""
    return (row for row, real in enumerate(tokens.token_mask_T) if real)


def chosen_slots(tokens: Tokens, row: int) -> list[int]:
    """The slots of a token that hold an expert."""
    return [slot for slot, expert in enumerate(tokens.topk_ids_TK[row]) if expert >= 0]


def shares(tokens: Tokens) -> Ints:
    """q(t, slot) [T, K]; 0 for empty slots and padding; equal shares where a token's scores sum to 0."""
    q_TK = np.zeros(tokens.topk_ids_TK.shape, dtype=np.int64)
    for row in real_rows(tokens):
        slots = chosen_slots(tokens, row)
        total = 0.0
        for slot in slots:
            total += float(tokens.gates_TK[row, slot])
        for slot in slots:
            share = float(tokens.gates_TK[row, slot]) / total if total > 0 else 1 / len(slots)
            q_TK[row, slot] = round(share * SHARE_UNIT)
    return q_TK


def best_first(tokens: Tokens, q_TK: Ints, row: int) -> list[int]:
    """A token's slots by share descending (ties: lower id)."""
    ids = tokens.topk_ids_TK[row]
    return sorted(chosen_slots(tokens, row), key=lambda slot: (-q_TK[row, slot], ids[slot]))


def threshold(share: float) -> int:
    """round(share · 2³⁰)."""
    return round(share * SHARE_UNIT)


def prefix(tokens: Tokens, q_TK: Ints, row: int, least: int) -> list[int]:
    """The shortest non-empty prefix of the token's best slots with Σq ≥ ``least`` (all, if there is none)."""
    total, kept = 0, []
    for slot in best_first(tokens, q_TK, row):
        kept.append(slot)
        total += int(q_TK[row, slot])
        if total >= least:
            break
    return kept


def worth(importance_N: Ints, rate_N: Floats | None, reuse: float) -> Ints:
    """I(e) + round-half-even(``reuse`` · rate(e) · 2³⁰): what keeping an expert is worth, later uses included."""
    if rate_N is None or reuse == 0:
        return importance_N
    return importance_N + np.rint(reuse * rate_N * SHARE_UNIT).astype(np.int64)
