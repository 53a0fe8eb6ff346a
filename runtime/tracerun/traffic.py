"""What is replayed: the first steps and layers of a trace, batched as the simulator batches them.

Shape legend: R rows (real tokens, step by step), S steps, warm-up included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from probes.errors import TraceError, UsageError
from probes.text import plural
from runtime.models.config import MoeShape
from runtime.simulate.batches import Block, Rows, join_rows, main_layers, plan
from runtime.simulate.index import index_of
from runtime.simulate.run import check_trace
from runtime.simulate.scenario import batch_size_of
from runtime.trace.layers import FirstLayers
from runtime.trace.records import Int64s, TraceMeta, TraceSource

DEFAULT_STEPS = 16
DEFAULT_WARMUP_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRequest:
    """Which part of a trace. ``layers`` None: all MoE layers. ``batch_size`` as of the simulator. ``steps``: how many
    are measured, after ``warmup_steps``; None: 16, and as many as there are before them, at most 64."""

    layers: int | None = None
    batch_size: str | None = None
    warmup_steps: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("steps", self.steps, 1), ("warmup-steps", self.warmup_steps, 0)):
            if value is not None and value < least:
                raise UsageError(f"--{name} {value} is too small", hint=f"give at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """``rows`` of all steps; step s holds rows ``offsets_S1[s]`` to ``offsets_S1[s + 1]``. ``meta``: of the layers that
    are replayed. ``batch_size`` None: as recorded."""

    meta: TraceMeta
    batch_size: int | None
    warmup_steps: int
    steps: int
    offsets_S1: Int64s
    rows: Rows
    notes: tuple[str, ...]

    def step(self, number: int) -> Rows:
        """The rows of one step, counted from the first of the warm-up."""
        return self.rows.cut(int(self.offsets_S1[number]), int(self.offsets_S1[number + 1]))

    @property
    def warmup(self) -> Block:
        """The steps of the warm-up."""
        offsets = self.offsets_S1[: self.warmup_steps + 1]
        return Block(offsets_S1=offsets, rows=self.rows.cut(0, int(offsets[-1])))

    @property
    def most_rows(self) -> int:
        """Rows of the largest step."""
        return int(np.diff(self.offsets_S1).max())


def read_traffic(source: TraceSource, shape: MoeShape, request: TrafficRequest) -> Traffic:
    """The traffic of ``source`` for a model of ``shape``. Raises ``UsageError`` where a batch cannot be filled or no
    step is left, and ``TraceError`` for a trace of another model, or one that cannot be replayed."""
    check_trace(source.meta)
    check_shape(shape, source.meta, request.layers)
    first = FirstLayers(source, shape.moe_layers if request.layers is None else request.layers)
    index = index_of(first)
    batch_size = batch_size_of(request.batch_size, index)
    there = plan(first, index, batch_size).steps
    warmup, steps = _how_many(request, there)
    blocks = list(plan(first, index, batch_size, most_steps=warmup + steps).blocks())
    return Traffic(
        meta=first.meta,
        batch_size=batch_size,
        warmup_steps=warmup,
        steps=steps,
        offsets_S1=np.concatenate([[0], *_ends(blocks)]).astype(np.int64),
        rows=join_rows([block.rows for block in blocks]),
        notes=tuple(source.notes),
    )


def check_shape(shape: MoeShape, meta: TraceMeta, layers: int | None) -> None:
    """Raise ``TraceError`` where a trace is not of a model of ``shape``. ``layers``: how many are replayed, None: all,
    which must then be as many as the model has; ``UsageError`` where they are none, or more than it has."""
    recorded = len(main_layers(meta))
    for what, wanted, given in (
        ("experts per layer", shape.num_experts, meta.num_experts),
        ("experts per token", shape.top_k, meta.top_k),
        *((("MoE layers", shape.moe_layers, recorded),) if layers is None else ()),
    ):
        if wanted != given:
            raise TraceError(
                f"the trace is of another model than the config: it has {given} {what}, the config {wanted}",
                hint="give --layers N to replay the first N layers of both"
                if what == "MoE layers"
                else "give the config.json of the model that the trace was recorded from, or make a trace for this one "
                "with caee trace synth",
            )
    if layers is not None and not 1 <= layers <= shape.moe_layers:
        raise UsageError(
            f"--layers {layers} is not possible: the config has {shape.moe_layers} MoE layers",
            hint=f"give 1 to {shape.moe_layers}, or leave it out to replay all",
        )


def _how_many(request: TrafficRequest, there: int) -> tuple[int, int]:
    """Warm-up steps and measured steps of ``there``."""
    if request.warmup_steps is None:
        steps = min(request.steps or DEFAULT_STEPS, there)
        warmup = min(DEFAULT_WARMUP_STEPS, there - steps)
    else:
        warmup = request.warmup_steps
        steps = min(request.steps or DEFAULT_STEPS, there - warmup)
    if steps < 1 or (request.steps is not None and steps < request.steps):
        raise UsageError(
            f"the trace has {plural(there, 'step')} in batches of this size, fewer than the {warmup} of the warm-up "
            f"and {request.steps or 1} to measure",
            hint="give fewer --steps or --warmup-steps, or a smaller --batch-size",
        )
    return warmup, steps


def _ends(blocks: list[Block]) -> Iterator[Int64s]:
    at = 0
    for block in blocks:
        yield block.offsets_S1[1:] + at
        at += int(block.offsets_S1[-1])
