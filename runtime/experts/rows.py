"""The compiled loops of a layer-step around its decision: whose rows go where, and who has to move what.

Around a model's matmuls nothing is in the processor's caches any more, and a dozen calls of numpy take as many times
longer as they would on their own; a compiled loop does not.

Shape legend: T tokens, K slots per token, R = T·K rows, P rows of the experts at hand, E experts at hand, N experts, D
devices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.compile import compiled
from runtime.policy.types import Bools, Ints


@compiled
def rows_by_place(ids_R: Ints, order_R: Ints, experts_E: Ints, places_E: Ints) -> tuple[Ints, Ints]:
    """The rows whose expert is in ``experts_E``, by place and within one as in ``order_R``; and the place of each.

    ``places_E`` ascends. Ids of −1 are empty slots.
    """
    highest = -1
    for expert in experts_E:
        highest = max(highest, expert)
    group_N = np.full(highest + 1, -1, np.int64)
    for group in range(len(experts_E)):
        group_N[experts_E[group]] = group
    starts_E = np.zeros(len(experts_E) + 1, np.int64)
    for expert in ids_R:
        if 0 <= expert <= highest and group_N[expert] >= 0:
            starts_E[group_N[expert] + 1] += 1
    for group in range(len(experts_E)):
        starts_E[group + 1] += starts_E[group]
    rows_P = np.empty(starts_E[-1], np.int64)
    places_P = np.empty(starts_E[-1], np.int64)
    for row in order_R:
        expert = ids_R[row]
        if 0 <= expert <= highest and group_N[expert] >= 0:
            group = group_N[expert]
            rows_P[starts_E[group]] = row
            places_P[starts_E[group]] = places_E[group]
            starts_E[group] += 1
    return rows_P, places_P


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
