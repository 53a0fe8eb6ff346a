"""Which copy of a replicated expert is used in a layer-step.

The rule: a resident copy, else the copy whose device would then carry the least, counting what the active experts so
far have to be paid for; ties go to the lower device. Experts with one copy come first, then the others, by id. It is
taken from the router's own choice, before anything is pruned.
"""

from __future__ import annotations

import numpy as np

from runtime.policy.types import Bools, Ints


def choose_replicas(
    placement_NR: Ints, cost_NR: Ints, resident_NR: Bools | None, active_N: Bools, devices: int
) -> Ints:
    """[N] the replica (column) of each expert; of experts that are not active, a resident one or the first.

    ``placement_NR``: devices ascending, then -1. ``resident_NR`` None: nothing is cached, all are paid for.
    """
    replica_N = np.zeros(len(placement_NR), np.int64)
    load_D = [0] * devices
    copies_N = (placement_NR >= 0).sum(axis=1)
    for expert in sorted(range(len(placement_NR)), key=lambda expert: (copies_N[expert] > 1, expert)):
        offers = []
        for replica in range(copies_N[expert]):
            device = placement_NR[expert, replica]
            resident = resident_NR is not None and bool(resident_NR[expert, replica])
            load = -1 if resident else load_D[device] + int(cost_NR[expert, replica])
            offers.append((load if active_N[expert] else -int(resident), replica))
        load, replica_N[expert] = min(offers)
        if active_N[expert] and load >= 0:
            load_D[placement_NR[expert, replica_N[expert]]] = load
    return replica_N
