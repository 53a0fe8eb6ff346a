"""When the router next chooses each expert: what ``belady`` knows of the future."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from runtime.cache import NEVER
from runtime.compile import compiled
from runtime.simulate.prepare import Prepared

NextUse = npt.NDArray[np.int64]


def next_uses(blocks: Iterable[Prepared], experts: int) -> Iterator[NextUse]:
    """For each block in turn, [A] the layer-step at which each of its active experts is next chosen by the router.

    Layer-steps count from 0 through the whole run; ``NEVER`` if there is none. Holds the active experts of the whole
    run (10 bytes each), unlike anything else in the simulator.
    """
    starts, actives = [], []
    for block in blocks:
        layers = block.layers
        starts.append(block.active_start)
        actives.append(block.active)
    if not actives:
        return
    found = [np.empty(len(active), np.int64) for active in actives]
    upcoming = np.full(layers * experts, NEVER)
    moment = sum(len(start) - 1 for start in starts)
    for start, active, target in zip(reversed(starts), reversed(actives), reversed(found), strict=True):
        moment -= len(start) - 1
        _backwards(start, active, layers, experts, moment, upcoming, target)
    yield from found


@compiled
def _backwards(
    start: npt.NDArray[np.int64],
    active: npt.NDArray[np.int16],
    layers: int,
    experts: int,
    moment: int,
    upcoming: npt.NDArray[np.int64],
    found: npt.NDArray[np.int64],
) -> None:
    """Fills ``found`` for a block that begins at layer-step ``moment``; ``upcoming``: next use after the block, by
    expert, and at return after ``moment``."""
    for at in range(len(start) - 2, -1, -1):
        for place in range(start[at], start[at + 1]):
            expert = (at % layers) * experts + active[place]
            found[place] = upcoming[expert]
            upcoming[expert] = moment + at
