"""The compiled loops of a layer-step around its decision: whose rows go where, and who has to move what.

Around a model's matmuls nothing is in the processor's caches any more, and a dozen calls of numpy take as many times
longer as they would on their own; a compiled loop does not.

Shape legend: T tokens, K slots per token, R = T·K rows, P rows of the experts at hand, E experts at hand, N experts, D
devices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.compile import compiled
from runtime.policy.slot_kernels import gather
from runtime.policy.types import Bools, Floats, Ints


class ExpertRows(NamedTuple):
    """The rows of some experts, by the places that these are in, ascending: ``rows_P``, the token ``tokens_P`` and the
    place ``places_P`` of each; ``places_E``, and how many rows each has, ``sizes_E``."""

    rows_P: Ints
    tokens_P: Ints
    places_P: Ints
    places_E: Ints
    sizes_E: Ints

    def segments(self) -> tuple[list[int], list[int]]:
        """The places that have rows, and how many; their rows follow each other."""
        places, sizes = self.places_E.tolist(), self.sizes_E.tolist()
        if 0 in sizes:
            places = [place for place, size in zip(places, sizes, strict=True) if size]
            sizes = [size for size in sizes if size]
        return places, sizes


@compiled
def rows_by_place(ids_TK: Ints, order_R: Ints, experts_E: Ints, places_E: Ints) -> ExpertRows:
    """The rows whose expert is in ``experts_E``, which are in ``places_E``: by place, and within one as in ``order_R``.

    Ids of −1 are empty slots.
    """
    width = ids_TK.shape[1]
    by_place = np.argsort(places_E)
    highest = -1
    for expert in experts_E:
        highest = max(highest, expert)
    group_N = np.full(highest + 1, -1, np.int64)
    for group in range(len(by_place)):
        group_N[experts_E[by_place[group]]] = group
    sizes_E = np.zeros(len(experts_E), np.int64)
    for expert in ids_TK.flat:
        if 0 <= expert <= highest and group_N[expert] >= 0:
            sizes_E[group_N[expert]] += 1
    ends_E = np.cumsum(sizes_E)
    next_E = ends_E - sizes_E
    total = ends_E[-1] if len(ends_E) else 0
    rows_P = np.empty(total, np.int64)
    tokens_P = np.empty(total, np.int64)
    places_P = np.empty(total, np.int64)
    for row in order_R:
        expert = ids_TK[row // width, row % width]
        if 0 <= expert <= highest and group_N[expert] >= 0:
            group = group_N[expert]
            at = next_E[group]
            rows_P[at] = row
            tokens_P[at] = row // width
            places_P[at] = places_E[by_place[group]]
            next_E[group] = at + 1
    return ExpertRows(rows_P, tokens_P, places_P, places_E[by_place], sizes_E)


@compiled
def experts_by_device(ids_TK: Ints, placement_N: Ints, devices: int) -> tuple[Ints, Ints]:
    """The experts in ``ids_TK``, each once: device after device, ascending within one; [D + 1] where each begins."""
    used_N = np.zeros(len(placement_N), np.bool_)
    starts_D1 = np.zeros(devices + 1, np.int64)
    for expert in ids_TK.flat:
        if expert >= 0 and not used_N[expert]:
            used_N[expert] = True
            starts_D1[placement_N[expert] + 1] += 1
    for device in range(devices):
        starts_D1[device + 1] += starts_D1[device]
    experts_E = np.empty(starts_D1[-1], np.int64)
    next_D = starts_D1.copy()
    for expert in np.flatnonzero(used_N):
        experts_E[next_D[placement_N[expert]]] = expert
        next_D[placement_N[expert]] += 1
    return experts_E, starts_D1


@compiled
def all_finite(values_TK: Floats, real_T: Bools) -> bool:
    """Whether every real token's values are numbers."""
    for t in range(len(values_TK)):
        if real_T[t]:
            for value in values_TK[t]:
                if not np.isfinite(value):
                    return False
    return True


@compiled
def of_real_tokens(ids_TK: Ints, real_T: Bools) -> Ints:
    """A copy with empty slots for tokens that are none."""
    own_TK = np.empty(ids_TK.shape, np.int64)
    for t in range(len(ids_TK)):
        for k in range(ids_TK.shape[1]):
            own_TK[t, k] = ids_TK[t, k] if real_T[t] else -1
    return own_TK


@compiled
def gates_of(scores_TN: Floats, ids_TK: Ints, real_T: Bools, gates_TK: Floats) -> bool:
    """Fill ``gates_TK`` with the scores of ``ids_TK``, 0 for empty slots; whether every real token's are numbers."""
    gather(scores_TN, ids_TK, gates_TK)
    return all_finite(gates_TK, real_T)


@compiled
def changed_tokens(before_TK: Ints, after_TK: Ints) -> tuple[Bools, bool]:
    """[T] whether a token's ids differ, and whether any token's do."""
    changed_T = np.zeros(len(before_TK), np.bool_)
    for t in range(len(before_TK)):
        for k in range(before_TK.shape[1]):
            if before_TK[t, k] != after_TK[t, k]:
                changed_T[t] = True
    return changed_T, bool(changed_T.any())


@compiled
def extremes(values_N: Ints, counted_N: Bools) -> tuple[int, int]:
    """The highest and the lowest of the values that are counted; 0 and 0 where none is."""
    count, highest, lowest = 0, 0, 0
    for value, counts in zip(values_N, counted_N):  # noqa: B905  # the compiler knows no strict
        if counts:
            highest = max(highest, value) if count else value
            lowest = min(lowest, value) if count else value
            count += 1
    return highest, lowest


@compiled
def count_by_device(
    ids_TK: Ints, placement_N: Ints, resident_N: Bools, devices: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """[D] experts in ``ids_TK`` that are not resident, and all of them, by the device that has them."""
    seen_N = np.zeros(len(placement_N), np.bool_)
    missing_D = np.zeros(devices, np.int32)
    dispatched_D = np.zeros(devices, np.int32)
    for expert in ids_TK.flat:
        if expert >= 0 and not seen_N[expert]:
            seen_N[expert] = True
            dispatched_D[placement_N[expert]] += 1
            if not resident_N[expert]:
                missing_D[placement_N[expert]] += 1
    return missing_D, dispatched_D


class LayerCounts(NamedTuple):
    """[D] paid movements of the router's own choice and of the decision's, experts dispatched; the highest and the
    lowest importance of an active expert."""

    misses_before_D: npt.NDArray[np.int32]
    misses_after_D: npt.NDArray[np.int32]
    dispatched_D: npt.NDArray[np.int32]
    highest: int
    lowest: int


@compiled
def count_layer(
    own_TK: Ints,
    ids_TK: Ints,
    placement_N: Ints,
    resident_N: Bools,
    devices: int,
    importance_N: Ints,
    active_N: Bools,
) -> LayerCounts:
    """``count_by_device`` before and after the decision, and ``extremes``, in one call."""
    before_D, _ = count_by_device(own_TK, placement_N, resident_N, devices)
    after_D, dispatched_D = count_by_device(ids_TK, placement_N, resident_N, devices)
    highest, lowest = extremes(importance_N, active_N)
    return LayerCounts(before_D, after_D, dispatched_D, highest, lowest)
