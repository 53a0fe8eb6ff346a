"""Movements ahead of need (cache ``forecast:prefetch=1``), over links that would idle while the slowest device fetches.

While a layer-step's busiest link moves what was decided, the others are free to exchange cached experts that are
expected late for absent ones that are expected soon, as long as the layer's cost F stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.cache import CacheBook, Prefetch
from runtime.policy.loads import f_of_loads
from runtime.policy.types import Ints, LinkGroups


def prefetch_idle(
    books: Sequence[CacheBook], moved_D: Ints, cost_D: Ints, groups: LinkGroups
) -> tuple[tuple[Prefetch, ...], ...]:
    """For each device, what it moves ahead, after a layer-step in which it moved ``moved_D`` experts.

    ``cost_D``: picoseconds for one. Device by device, as many exchanges as leave F of all movements unchanged. A
    function of the books and the movements alone, so that every rank finds the same for all devices.
    """
    load_D = [int(moved) * int(cost) for moved, cost in zip(moved_D, cost_D, strict=True)]
    level = f_of_loads(load_D, groups)
    found: list[tuple[Prefetch, ...]] = []
    for device, book in enumerate(books):
        cost, room = int(cost_D[device]), 0
        while book.spec.prefetch and room < book.slots:
            load_D[device] += cost
            if f_of_loads(load_D, groups) > level:
                load_D[device] -= cost
                break
            room += 1
        ahead = tuple(book.prefetch(room)) if room else ()
        load_D[device] -= cost * (room - len(ahead))
        found.append(ahead)
    return tuple(found)
