"""A decision's inputs from arrays, checked: every fault is a ``CaseError`` that names field, row and value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from probes.errors import CaseError
from runtime.policy.types import (
    GROUP_UNIT,
    NO_GROUPS,
    PICOSECONDS,
    Bools,
    Floats,
    Ints,
    LinkGroups,
    Machine,
    Tokens,
)

LARGEST_LOAD = 2**63 - 1
MOST_DEVICES = 1 << 16

Entry = TypeVar("Entry", bound=np.generic)


def make_tokens(
    *,
    scores_TN: npt.ArrayLike | None = None,
    selection_scores_TN: npt.ArrayLike | None = None,
    topk_ids_TK: npt.ArrayLike | None = None,
    gates_TK: npt.ArrayLike | None = None,
    token_mask_T: npt.ArrayLike | None = None,
    top_k: int | None = None,
    num_experts: int,
) -> Tokens:
    """Tokens with the router's choice filled in where it is not given, checked.

    Either ``scores_TN`` or ``topk_ids_TK`` with ``gates_TK``. Rows of padding may hold anything. Raises ``CaseError``.
    """
    scores = None if scores_TN is None else np.ascontiguousarray(scores_TN, dtype=np.float64)
    ranks = None if selection_scores_TN is None else np.ascontiguousarray(selection_scores_TN, dtype=np.float64)
    ids = None if topk_ids_TK is None else np.ascontiguousarray(topk_ids_TK, dtype=np.int64)
    gates = None if gates_TK is None else np.ascontiguousarray(gates_TK, dtype=np.float64)
    rows = next((len(array) for array in (scores, ids, ranks) if array is not None), 0)
    mask = np.ones(rows, dtype=np.bool_) if token_mask_T is None else np.ascontiguousarray(token_mask_T, dtype=np.bool_)
    _check_shape("token_mask", mask, (rows,))
    for name, array in (("scores", scores), ("selection_scores", ranks)):
        if array is not None:
            _check_shape(name, array, (rows, num_experts))
            check_finite(name, array, mask)
    if scores is not None:
        _check_not_negative("scores", scores, mask)
    if ids is None:
        ranking = scores if ranks is None else ranks
        if top_k is None or ranking is None:
            raise CaseError("top_k is missing", hint="give top_k, or the router's own choice as topk_ids")
        check_top_k(top_k, num_experts)
        ids = choose_top_k(ranking, mask, top_k)
    slots = ids.shape[1] if top_k is None else top_k
    check_top_k(slots, num_experts)
    _check_shape("topk_ids", ids, (rows, slots))
    ids = np.where(mask[:, None], ids, -1)
    check_ids(ids, num_experts)
    if scores is not None:
        gates = np.where(ids >= 0, scores[np.arange(rows)[:, None], ids], 0.0)
    elif gates is None:
        raise CaseError("scores are missing", hint="give scores, or topk_ids with their weights")
    else:
        _check_shape("weights", gates, ids.shape)
        gates = np.where(ids >= 0, gates, 0.0)
        check_finite("weights", gates, mask)
        _check_not_negative("weights", gates, mask)
    return Tokens(topk_ids_TK=ids, gates_TK=gates, scores_TN=scores, selection_scores_TN=ranks, token_mask_T=mask)


def make_machine(
    *,
    placement: npt.ArrayLike,
    cost_seconds: npt.ArrayLike,
    resident: npt.ArrayLike | None = None,
    link_groups: Sequence[tuple[Sequence[int], float]] = (),
    devices: int | None = None,
    rate: npt.ArrayLike | None = None,
) -> Machine:
    """A machine from costs in seconds: [N], or [N, R] with replicas (device −1: no such replica). Raises ``CaseError``.

    ``devices``: how many there are, where some hold no expert; ``link_groups``: pairs of devices and factor; ``rate``:
    [N], from 0 to 1.
    """
    placement_NR = _with_replicas(np.ascontiguousarray(placement, dtype=np.int64))
    cost_NR = _with_replicas(np.ascontiguousarray(cost_seconds, dtype=np.float64))
    _check_shape("cost", cost_NR, placement_NR.shape)
    lowest = -1 if placement_NR.shape[1] > 1 else 0
    for row, replica in np.argwhere(placement_NR < lowest)[:1]:
        raise CaseError(f"placement, row {row}: {placement_NR[row, replica]} is negative")
    for row in np.flatnonzero(placement_NR.max(axis=1, initial=-1) < 0)[:1]:
        raise CaseError(f"placement, row {row}: the expert is on no device")
    count = max(int(placement_NR.max(initial=-1)) + 1, devices or 0)
    if count > MOST_DEVICES:
        raise CaseError(f"placement, row {int(placement_NR.max(axis=1).argmax())}: device {count - 1} is too high")
    resident_NR = None
    if resident is not None:
        resident_NR = _with_replicas(np.ascontiguousarray(resident, dtype=np.bool_))
        _check_shape("resident", resident_NR, placement_NR.shape)
    rate_N = None
    if rate is not None:
        rate_N = np.ascontiguousarray(rate, dtype=np.float64)
        _check_shape("rate", rate_N, (len(placement_NR),))
        for row in np.flatnonzero(~((rate_N >= 0) & (rate_N <= 1)))[:1]:
            raise CaseError(f"rate, row {row}: {_number(rate_N[row])} is not between 0 and 1")
    return Machine(
        placement_NR=placement_NR,
        cost_NR=picoseconds(cost_NR),
        resident_NR=resident_NR,
        devices=count,
        groups=make_groups(link_groups, count),
        rate_N=rate_N,
    )


def picoseconds(cost_seconds: Floats) -> Ints:
    """round-half-even(C · 10¹²), int64; refuses what is negative, not finite, or whose sum does not fit in int64."""
    check_finite("cost", cost_seconds, np.ones(len(cost_seconds), dtype=np.bool_))
    _check_not_negative("cost", cost_seconds, np.ones(len(cost_seconds), dtype=np.bool_))
    if float(cost_seconds.sum()) * PICOSECONDS >= LARGEST_LOAD:
        row = int(np.unravel_index(int(cost_seconds.argmax()), cost_seconds.shape)[0])
        raise CaseError(f"cost, row {row}: {cost_seconds.max():g} s is too long for sums of int64 picoseconds")
    return np.rint(cost_seconds * float(PICOSECONDS)).astype(np.int64)


def make_groups(link_groups: Sequence[tuple[Sequence[int], float]], devices: int) -> LinkGroups:
    """Link groups from pairs of devices and factor, 0 < factor ≤ 1. Raises ``CaseError``."""
    if not link_groups:
        return NO_GROUPS
    for row, (group, factor) in enumerate(link_groups):
        for device in group:
            if not 0 <= device < devices:
                raise CaseError(f"link_groups, row {row}: unknown device {device}, there are {devices}")
        if len(set(group)) != len(group):
            raise CaseError(f"link_groups, row {row}: a device appears twice in {list(group)}")
        if not 0 < factor <= 1:
            raise CaseError(f"link_groups, row {row}: factor {_number(factor)} is not between 0 and 1")
    sizes = [len(group) for group, _ in link_groups]
    return LinkGroups(
        starts_G1=np.cumsum([0, *sizes], dtype=np.int64),
        members=np.array([device for group, _ in link_groups for device in group], dtype=np.int64),
        factors_G=np.array([round(factor * GROUP_UNIT) for _, factor in link_groups], dtype=np.int64),
    )


def choose_top_k(ranks_TN: Floats, token_mask_T: Bools, top_k: int) -> Ints:
    """The ``top_k`` highest [T, K] of each real row (ties: lower id); −1 throughout for padding."""
    ids_TK = np.full((len(ranks_TN), top_k), -1, dtype=np.int64)
    ids_TK[token_mask_T] = np.argsort(-ranks_TN[token_mask_T], axis=1, kind="stable")[:, :top_k]
    return ids_TK


def check_top_k(top_k: int, num_experts: int) -> None:
    """Refuse a ``top_k`` beyond the experts."""
    if not 1 <= top_k <= num_experts:
        raise CaseError(f"top_k: {top_k} is not between 1 and the number of experts, {num_experts}")


def check_ids(topk_ids_TK: Ints, num_experts: int) -> None:
    """Refuse ids below −1, beyond the experts, or twice in one token."""
    if topk_ids_TK.size == 0:
        return
    if topk_ids_TK.min() < -1 or topk_ids_TK.max() >= num_experts:
        row, slot = np.argwhere((topk_ids_TK < -1) | (topk_ids_TK >= num_experts))[0]
        raise CaseError(
            f"topk_ids, row {row}: {topk_ids_TK[row, slot]} is no expert",
            hint=f"ids go from 0 to {num_experts - 1}; -1 is an empty slot",
        )
    ordered = np.sort(topk_ids_TK, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row, slot = np.argwhere(twice)[0]
        raise CaseError(f"topk_ids, row {row}: expert {ordered[row, slot]} appears twice")


def check_finite(name: str, values: Floats, rows: Bools) -> None:
    """Refuse a NaN or an infinity in a row that counts."""
    finite = np.isfinite(values)
    if not finite.all():
        _refuse_first(name, values, ~finite, rows, "is not finite")


def _check_not_negative(name: str, values: Floats, rows: Bools) -> None:
    negative = values < 0
    if negative.any():
        _refuse_first(name, values, negative, rows, "is negative")


def _refuse_first(name: str, values: Floats, faulty: Bools, rows: Bools, problem: str) -> None:
    """Raise for the first faulty value in a row that counts, if there is one."""
    counted = faulty & rows.reshape(-1, *[1] * (values.ndim - 1))
    for row, *column in np.argwhere(counted)[:1]:
        raise CaseError(f"{name}, {_where(row, column, values)}: {_number(values[(row, *column)])} {problem}")


def _number(value: float) -> str:
    """As JSON spells it, which has no words of its own for what is not finite but those of JavaScript."""
    return json.dumps(float(value))


def _where(row: int, column: Sequence[int], values: Floats) -> str:
    return f"row {row}, column {column[0]}" if column and values.shape[1] > 1 else f"row {row}"


def _check_shape(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise CaseError(
            f"{name} has shape {list(array.shape)}, and {list(shape)} was expected",
            hint="tokens × experts, or tokens × top_k; placement, cost and resident: one entry an expert",
        )


def _with_replicas(array: npt.NDArray[Entry]) -> npt.NDArray[Entry]:
    return array[:, None] if array.ndim == 1 else array
