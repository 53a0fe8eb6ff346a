"""What a block of steps means for every policy alike, computed once and shared by all passes.

Shares are q = round-half-even(g·2³⁰) of g(t,e) = G(t)_e / Σ_{j∈K_t} G(t)_j (arXiv:2606.29982, section IV), in float64,
summed in slot order; the importance of an expert is their sum.

Shape legend: S steps, L layers, R rows (real tokens), K slots; a layer-step is one step of one layer, numbered
step · L + layer; A active experts of all layer-steps, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.compile import compiled_without_allocations, inlined
from runtime.policy.types import SHARE_UNIT


class Prepared(NamedTuple):
    """``offsets``: [S + 1] rows by step. ``ids`` and ``shares``: [R·L·K] by layer-step, then token; a token's slots by
    share descending (ties: lower id), empty ones (−1) last. ``active_start``: [S·L + 1] into the next two, [A]: active
    experts by id, and their importance.
    """

    steps: int
    layers: int
    slots: int
    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int16]
    shares: npt.NDArray[np.int32]
    active_start: npt.NDArray[np.int64]
    active: npt.NDArray[np.int16]
    importance: npt.NDArray[np.int64]


def prepare(
    offsets: npt.NDArray[np.int64],
    ids_RLK: npt.NDArray[np.int16],
    gates_RLK: npt.NDArray[np.float32],
    experts: int,
) -> Prepared:
    """The block of rows as ``Prepared``; ids and gates must be valid (``runtime.trace.check``)."""
    steps = len(offsets) - 1
    _, layers, slots = ids_RLK.shape
    choices = ids_RLK.size
    # The kernel writes one entry beyond the last.
    room = choices + 1
    prepared = Prepared(
        steps=steps,
        layers=layers,
        slots=slots,
        offsets=offsets,
        ids=np.empty(choices, np.int16),
        shares=np.empty(choices, np.int32),
        active_start=np.zeros(steps * layers + 1, np.int64),
        active=np.empty(room, np.int16),
        importance=np.empty(room, np.int64),
    )
    # Flat arrays throughout: a view for each token would cost more than the work on it.
    _fill(
        prepared, ids_RLK.reshape(-1), gates_RLK.reshape(-1), np.zeros(experts, np.int64), np.zeros(experts, np.bool_)
    )
    count = int(prepared.active_start[-1])
    return prepared._replace(active=prepared.active[:count].copy(), importance=prepared.importance[:count].copy())


@compiled_without_allocations
def _fill(
    prepared: Prepared,
    given_ids: npt.NDArray[np.int16],
    given_gates: npt.NDArray[np.float32],
    sums: npt.NDArray[np.int64],
    seen: npt.NDArray[np.bool_],
) -> None:
    """Fills ``prepared``. ``sums``, ``seen``: [N] of zeros, and zeros again at the end."""
    layers, slots = prepared.layers, prepared.slots
    ids, shares = prepared.ids, prepared.shares
    active, importance = prepared.active, prepared.importance
    place, count = 0, 0
    for step in range(prepared.steps):
        for layer in range(layers):
            for row in range(prepared.offsets[step], prepared.offsets[step + 1]):
                chosen = _sort_slots(given_ids, given_gates, (row * layers + layer) * slots, slots, ids, shares, place)
                for slot in range(place, place + chosen):
                    sums[ids[slot]] += shares[slot]
                    seen[ids[slot]] = True
                place += slots
            # Written for every expert, and left there for those seen: a branch here could not be predicted.
            for expert in range(len(sums)):
                active[count] = expert
                importance[count] = sums[expert]
                count += seen[expert]
                sums[expert] = 0
                seen[expert] = False
            prepared.active_start[step * layers + layer + 1] = count


@inlined
def _sort_slots(
    given_ids: npt.NDArray[np.int16],
    given_gates: npt.NDArray[np.float32],
    start: int,
    slots: int,
    ids: npt.NDArray[np.int16],
    shares: npt.NDArray[np.int32],
    place: int,
) -> int:
    """Writes one token's slots from ``place`` on, best first; returns how many hold an expert."""
    total = 0.0
    chosen = 0
    for slot in range(start, start + slots):
        if given_ids[slot] >= 0:
            total += np.float64(given_gates[slot])
            chosen += 1
    end = place
    for slot in range(start, start + slots):
        expert = given_ids[slot]
        if expert < 0:
            continue
        share = np.float64(given_gates[slot]) / total if total > 0 else 1.0 / chosen
        q = np.int32(np.rint(share * SHARE_UNIT))
        at = end
        while at > place and (shares[at - 1] < q or (shares[at - 1] == q and ids[at - 1] > expert)):
            shares[at] = shares[at - 1]
            ids[at] = ids[at - 1]
            at -= 1
        shares[at] = q
        ids[at] = expert
        end += 1
    for at in range(end, place + slots):
        shares[at] = 0
        ids[at] = -1
    return chosen
