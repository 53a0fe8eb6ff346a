"""What one pass did, layer by layer and step by step: the numbers that the run's record is made of.

Shape legend: S steps, L MoE layers, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BrakeStep:
    """What the automatic brake did in one layer-step.

    ``braked``: the router's own choice was in force. ``error``: of a shadow sample, None where none was taken;
    ``fetches``: what that sample fetched, over all devices, which no other figure includes. ``tripped``: the sample
    made the brake act.
    """

    braked: bool
    error: float | None = None
    fetches: int = 0
    tripped: bool = False


@dataclass(slots=True)
class LayerStep:
    """One layer of one forward pass. ``misses_before_D``: what the router's own choice would have fetched.

    ``brake``: None where no brake watches the policy.
    """

    layer: int
    misses_before_D: Counts
    misses_after_D: Counts
    dispatched_D: Counts
    removed: int
    rerouted_slots: int
    importance_highest: float
    importance_lowest: float
    fell_back: bool
    brake: BrakeStep | None = None


@dataclass(slots=True)
class Timers:
    """Seconds spent in the MoE layers of one forward pass on this rank, by where they went.

    ``shadow``: in the brake's shadow samples; it is in none of the others, nor in the times of its step and pass.
    """

    decide: float = 0.0
    fetch_wait: float = 0.0
    experts: float = 0.0
    exchange: float = 0.0
    shadow: float = 0.0


@dataclass(slots=True)
class StepRecord:
    """One forward pass of the model. ``tokens``: real tokens in it."""

    tokens: int
    prefill: bool
    layers: list[LayerStep] = field(default_factory=list)
    timers: Timers = field(default_factory=Timers)
    seconds: float = 0.0


@dataclass(slots=True)
class PassRecord:
    """One pass over one batch: prefill, then decode steps. ``token_ids``: [sequences][new tokens].

    ``ttft_seconds`` is None, and ``token_ids`` empty, where a trace is replayed: nothing is generated.
    """

    ttft_seconds: float | None
    tpot_seconds: float
    token_ids: list[list[int]]
    steps: list[StepRecord]

    def decode_steps(self) -> list[StepRecord]:
        return [step for step in self.steps if not step.prefill]

    def decode_misses(self, *, before: bool = False) -> Counts:
        """[S, L, D] paid fetches of the decode steps."""
        return np.array(
            [
                [layer.misses_before_D if before else layer.misses_after_D for layer in step.layers]
                for step in self.decode_steps()
            ],
            np.int32,
        )

    def decode_dispatched(self) -> Counts:
        """[S, L, D] dispatched experts of the decode steps, fetched or not."""
        return np.array([[layer.dispatched_D for layer in step.layers] for step in self.decode_steps()], np.int32)
