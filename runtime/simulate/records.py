"""What is simulated and what comes out. Times in seconds, lists per device in order of the devices' numbers.

Shape legend: L MoE layers, N experts, R replicas, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from runtime.cache import CacheSpec
from runtime.cost import CostTable
from runtime.policy.types import PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """``tier``: where experts come from: ``host`` or ``disk`` into each device's cache, or ``device``: all are in
    device memory and every dispatched one is read. ``overlap``: all compute runs beside the movements; ``staged``: as
    in a live run, experts that are there compute beside the movements, those that were moved after them. ``origin``:
    where the costs are from, in words.
    """

    tier: str
    costs: CostTable
    expert_compute_seconds: float = 0.0
    overlap: bool = False
    staged: bool = False
    dense_seconds: float = 0.0
    origin: str = "given"

    @property
    def devices(self) -> int:
        return len(self.costs.seconds_per_expert)

    @property
    def offloading(self) -> bool:
        return self.tier != "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``devices_LNR``: the devices that hold each expert, ascending, then −1."""

    name: str
    devices_LNR: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSpec:
    """One policy on one cache, placement and machine. ``policy`` is resolved (``runtime.policy.spec.resolve``).

    ``cache`` and ``cache_experts`` (slots of each device) are None where experts are in device memory.
    """

    policy: PolicySpec
    cache: CacheSpec | None
    cache_experts: int | None
    placement: Placement
    machine: SimulatedMachine


@dataclass(slots=True, kw_only=True)
class Counts:
    """Exact sums over the layer-steps that count; shares in 2⁻³⁰, times in picoseconds.

    ``gaps``: layer-steps by max_d − min_d paid movements.
    """

    before_LD: npt.NDArray[np.int64]
    after_LD: npt.NDArray[np.int64]
    gaps: npt.NDArray[np.int64]
    max_misses: int = 0
    removed: int = 0
    tokens: int = 0
    rerouted_slots: int = 0
    layer_steps: int = 0
    step_times: list[npt.NDArray[np.int64]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """Paid movements of one layer by device, over all counted steps. ``before``: what the router's own choice would
    have cost on the very same caches."""

    layer: int
    device_misses_before: tuple[int, ...]
    device_misses_after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of a step; percentiles interpolate linearly."""

    mean: float
    p50: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFigures:
    """What one pass predicts. ``removed_importance``: per real token and layer.

    ``max_device_misses_per_step``: mean over steps of Σ_layers max_d paid movements. ``gap_histogram``: layer-steps by
    max_d − min_d paid movements. ``compensated``: False where lost slots stay empty for want of full scores.
    """

    plan: PassSpec
    steps: int
    layer_steps: int
    time_per_step: StepTime
    misses_per_device: tuple[int, ...]
    max_device_misses_per_step: float
    gap_mean: float
    gap_histogram: tuple[int, ...]
    removed_importance: float
    rerouted_slots: int
    layers: tuple[LayerFigures, ...]
    compensated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """All passes over one trace. ``tokens``: rows of the trace, padding included; ``interrupted``: stopped early, and
    every figure covers the same steps. ``notes``: what the reader should know, in sentences."""

    model: str | None
    tokens: int
    sequences: int
    moe_layers: int
    num_experts: int
    top_k: int
    has_scores: bool
    batch_size: int | None
    warmup_steps: int
    planned_steps: int
    interrupted: bool
    passes: tuple[PassFigures, ...]
    notes: tuple[str, ...]
