"""The compiled pass's machine, policy and scratch memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.compile import inlined

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Rule(NamedTuple):
    """A policy in numbers. ``keeps``: one of the constants of ``runtime.simulate.keep``.

    A token marks its ``best`` first slots, and further ones while the shares before them sum to less than ``least``.
    ``score``: every expert of at least this importance is marked (below 0: not used). ``ratio``: a token's slot stays
    from this share of its best one's on. ``price`` below 0: steered towards ``epsilon``. ``reuse``: what an expert's
    rate adds to its importance. ``fills``: lost slots go to other kept experts.
    """

    keeps: int
    best: int
    least: int
    score: int
    ratio: float
    price: float
    epsilon: float
    reuse: float
    fills: bool


class Layout(NamedTuple):
    """The machine. ``device``: [copies], −1 where an expert has fewer replicas, which stand by device. ``cost``: [D].
    Link groups as in ``runtime.policy.types.LinkGroups``. ``layer``: a layer's time by the experts that a device moves
    or reads in it, empty where every one costs the same. ``compute``: per dispatched expert; ``dense``: per step.
    """

    devices: int
    experts: int
    replicas: int
    offloading: bool
    device: Int32s
    cost: Int64s
    group_starts: Int64s
    group_members: Int64s
    group_factors: Int64s
    layer: Int64s
    compute: int
    overlap: bool
    staged: bool
    dense: int


class Totals(NamedTuple):
    """Sums over the layer-steps that count; ``sums`` by the constants of ``runtime.simulate.kernel``. ``controller``:
    the state of ``runtime.policy.controller``, for ``budget``."""

    before_LD: Int64s
    after_LD: Int64s
    gaps: Int64s
    sums: Int64s
    controller: Floats


class LayerStep(NamedTuple):
    """Scratch for one layer-step, by place in its list of active experts: the ``copy`` that would be used, its
    ``device``, whether it is ``resident`` and what is ``paid`` for moving it there, and whether it is ``kept``.
    ``marked``: by expert, the moment at which it was last marked. ``order``, ``worth``, ``chosen``, ``active`` (all
    True): for policies. The rest by device."""

    copy: Int64s
    device: Int64s
    resident: Bools
    paid: Int64s
    kept: Bools
    marked: Int64s
    order: Int64s
    worth: Int64s
    chosen: Bools
    active: Bools
    load: Int64s
    misses_before: Int64s
    misses: Int64s
    dispatched: Int64s


def new_layer_step(layout: Layout) -> LayerStep:
    """Scratch of the machine's size."""
    experts, devices = layout.experts, layout.devices
    return LayerStep(
        copy=np.zeros(experts, np.int64),
        device=np.zeros(experts, np.int64),
        resident=np.zeros(experts, np.bool_),
        paid=np.zeros(experts, np.int64),
        kept=np.zeros(experts, np.bool_),
        marked=np.full(experts, -1, np.int64),
        order=np.zeros((3, experts), np.int64),
        worth=np.zeros(experts, np.int64),
        chosen=np.zeros(experts, np.bool_),
        active=np.ones(experts, np.bool_),
        load=np.zeros(devices, np.int64),
        misses_before=np.zeros(devices, np.int64),
        misses=np.zeros(devices, np.int64),
        dispatched=np.zeros(devices, np.int64),
    )


@inlined
def clear(values: Int64s) -> None:
    """All to 0."""
    for at in range(len(values)):
        values[at] = 0
