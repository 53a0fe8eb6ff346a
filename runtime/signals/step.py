"""One step's figures as they are told, and how they are written: JSON lines, schema ``caee.steps/1``.

The first line of a file is the header, ``{"schema": "caee.steps/1", …}``; each further line is one forward pass of the
model. What is unknown is null.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from probes.errors import InputError
from runtime.passes import Pruned
from runtime.recording import Counts, StepRecord

SCHEMA = "caee.steps/1"
PASSES = ("warm-up", "search", "baseline", "policy", "quality", "tasks")
"""What a step may be part of: ``search`` tries settings of the policy; ``baseline`` and ``policy`` are the measured
passes of the interleaved pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsHeader:
    """What holds for all steps. ``policy``: the one that was asked for, as the command line writes it."""

    model: str
    devices: tuple[str, ...]
    tier: str
    policy: str
    moe_layers: int
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrakeState:
    """The automatic brake after the step; it starts anew, at 0, where measuring does."""

    engaged: bool
    trips: int
    braked_layer_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignal:
    """One forward pass. ``step`` counts all of them from 1, ``pass_number`` the passes.

    ``fetches`` and ``dispatches``: experts by device, over all MoE layers. ``removed_importance``: per real token and
    layer. ``fallbacks``: layers whose scores were no numbers. Seconds are rank 0's.
    """

    step: int
    pass_kind: str
    pass_number: int
    phase: str
    policy: str
    tokens: int
    seconds: float
    fetches: tuple[int, ...]
    dispatches: tuple[int, ...]
    hit_rate: float | None
    removed_importance: float | None
    rerouted_slots: int
    fallbacks: int
    decide_seconds: float
    fetch_wait_seconds: float
    experts_seconds: float
    exchange_seconds: float
    brake: BrakeState | None = None


_STEP_FIELDS = tuple(field.name for field in fields(StepSignal))


def step_signal(
    record: StepRecord, *, step: int, pass_kind: str, pass_number: int, policy: str, brake: BrakeState | None
) -> StepSignal:
    """The figures of ``record``, which is complete."""
    layers, timers = record.layers, record.timers
    fetches = _by_device([layer.misses_after_D for layer in layers])
    dispatches = _by_device([layer.dispatched_D for layer in layers])
    dispatched, pruned = sum(dispatches), Pruned.of([record])
    return StepSignal(
        step=step,
        pass_kind=pass_kind,
        pass_number=pass_number,
        phase="prefill" if record.prefill else "decode",
        policy=policy,
        tokens=record.tokens,
        seconds=record.seconds,
        fetches=fetches,
        dispatches=dispatches,
        hit_rate=1 - sum(fetches) / dispatched if dispatched else None,
        removed_importance=pruned.importance if pruned.shares else None,
        rerouted_slots=sum(layer.rerouted_slots for layer in layers),
        fallbacks=sum(layer.fell_back for layer in layers),
        decide_seconds=timers.decide,
        fetch_wait_seconds=timers.fetch_wait,
        experts_seconds=timers.experts,
        exchange_seconds=timers.exchange,
        brake=brake,
    )


def _by_device(layers: Sequence[Counts]) -> tuple[int, ...]:
    """The sum over layers."""
    return tuple(np.array(layers, np.int64).sum(axis=0).tolist()) if layers else ()


def header_line(header: StepsHeader) -> str:
    """The first line of a file, with its line break."""
    return json.dumps({"schema": SCHEMA, **asdict(header)}, ensure_ascii=True) + "\n"


def step_line(signal: StepSignal) -> str:
    """One step's line, with its line break."""
    # ``asdict`` copies what it finds, which takes longer than all the rest.
    values = {name: getattr(signal, name) for name in _STEP_FIELDS}
    values["brake"] = None if signal.brake is None else asdict(signal.brake)
    return json.dumps(values, allow_nan=False) + "\n"


def parse_line(line: str | bytes) -> StepsHeader | StepSignal:
    """What ``header_line`` or ``step_line`` wrote. Raises ``InputError`` for anything else."""
    try:
        value: dict[str, Any] = json.loads(line)
        if "schema" in value:
            if value.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            return StepsHeader(**{**value, "devices": tuple(value["devices"])})
        brake = None if value["brake"] is None else BrakeState(**value["brake"])
        counts = {name: tuple(value[name]) for name in ("fetches", "dispatches")}
        return StepSignal(**{**value, **counts, "brake": brake})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"a line is no step of {SCHEMA}: {error}", hint="write it with caee run --steps-jsonl"
        ) from error
