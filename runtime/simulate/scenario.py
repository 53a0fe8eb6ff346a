"""From what a user asks for to the passes that answer it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from probes.errors import UsageError
from runtime.cache import CacheSpec, parse_cache
from runtime.policy.spec import parse_policy, refuse_without_scores, resolve
from runtime.policy.types import PolicySpec
from runtime.simulate.batches import Batching, main_layers, plan
from runtime.simulate.index import TraceIndex, index_of
from runtime.simulate.placement import check_devices, make_placement, warmup_loads
from runtime.simulate.records import PassSpec, Placement, SimulatedMachine
from runtime.simulate.run import check_trace
from runtime.trace.records import LoadProfile, TraceMeta, TraceSource

TIERS = ("host", "disk", "device")
DEFAULT_BATCH_SIZE = 8
RECORDED = "recorded"

MakeMachine = Callable[[str], SimulatedMachine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything to simulate, as it is written on the command line; every combination becomes a pass.

    ``cache_experts`` empty: half of each device's experts. ``batch_size``: a number, ``recorded``, or None for the
    recorded steps where there are any. ``steps``: how many count at most, after the warm-up; None: all there are.
    ``seed``: of ``random``.
    """

    policies: tuple[str, ...] = ("router", "caee")
    caches: tuple[str, ...] = ("lfu",)
    cache_experts: tuple[int, ...] = ()
    placements: tuple[str, ...] = ("contiguous",)
    tiers: tuple[str, ...] = ("host",)
    batch_size: str | None = None
    warmup_steps: int = 0
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for tier in self.tiers:
            if tier not in TIERS:
                raise UsageError(f"unknown tier {tier!r}", hint=f"choose from {', '.join(TIERS)}")
        if any(slots < 0 for slots in self.cache_experts):
            raise UsageError(
                "a cache cannot hold fewer than 0 experts (--cache-experts)",
                hint="leave it out for half of each device's experts",
            )
        if self.warmup_steps < 0:
            raise UsageError("--warmup-steps cannot be below 0", hint="0 counts every step")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps {self.steps} is below 1", hint="leave it out for all steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Passes in order: tiers, then placements, policies, caches and sizes as they were given."""

    passes: tuple[PassSpec, ...]
    batch_size: int | None
    index: TraceIndex


def make_plan(
    scenario: Scenario, source: TraceSource, machine_of: MakeMachine, loads: LoadProfile | None = None
) -> Plan:
    """The passes of a scenario on a trace. ``machine_of``: the machine with experts in a tier.

    ``loads``: for balanced placements, else those of the warm-up steps. Raises ``UsageError`` and ``TraceError``.
    """
    meta = source.meta
    check_trace(meta)
    # Whatever can be wrong with the words is refused before the trace is read.
    policies = [_parsed(text, scenario.seed) for text in scenario.policies]
    for policy in policies:
        if not meta.scores_recorded:
            refuse_without_scores(policy, meta.top_k)
    caches = [parse_cache(text) for text in scenario.caches]
    machines = [machine_of(tier) for tier in scenario.tiers]
    for machine, written in itertools.product(machines, scenario.placements):
        check_devices(written, experts=meta.num_experts, devices=machine.devices)
    index = index_of(source)
    batch_size = batch_size_of(scenario.batch_size, index)
    batching = plan(source, index, batch_size)
    loads_LN = _loads(scenario, batching, loads)
    passes = [
        each
        for machine in machines
        for written in scenario.placements
        for each in _passes(policies, caches, scenario.cache_experts, _place(written, meta, machine, loads_LN), machine)
    ]
    return Plan(passes=tuple(passes), batch_size=batch_size, index=index)


def _parsed(written: str, seed: int) -> PolicySpec:
    """The policy; ``random`` draws by ``seed`` where it was not given one of its own."""
    policy = parse_policy(written)
    if policy.name != "random" or "seed=" in written.replace(" ", ""):
        return policy
    return replace(policy, parameters={**policy.parameters, "seed": seed})


def _passes(
    policies: Sequence[PolicySpec],
    caches: Sequence[CacheSpec],
    sizes: Sequence[int],
    placement: Placement,
    machine: SimulatedMachine,
) -> list[PassSpec]:
    resolved = [resolve(policy, offloading=machine.offloading) for policy in policies]
    if not machine.offloading:
        caching: list[tuple[CacheSpec | None, int | None]] = [(None, None)]
    else:
        caching = [(cache, size) for cache in caches for size in sizes or [half_of(placement, machine.devices)]]
    return [
        PassSpec(policy=policy, cache=cache, cache_experts=size, placement=placement, machine=machine)
        for policy in resolved
        for cache, size in caching
    ]


def half_of(placement: Placement, devices: int) -> int:
    """Half of the experts that the fullest device holds, all layers together; at least 1."""
    held = placement.devices_LNR[placement.devices_LNR >= 0]
    return max(1, int(np.bincount(held, minlength=devices).max()) // 2)


def batch_size_of(written: str | None, index: TraceIndex) -> int | None:
    """Sequences that advance together; None for the recorded steps, which is the default where there are any."""
    if written == RECORDED or (written is None and index.steps):
        return None
    if written is None:
        return max(1, min(DEFAULT_BATCH_SIZE, int(np.count_nonzero(index.decode_tokens_S))))
    if not written.isdecimal():
        raise UsageError(
            f"--batch-size {written!r} is neither a number nor 'recorded'",
            hint="give how many sequences run together, such as 8, or recorded for the trace's own steps",
        )
    return int(written)


def _place(
    written: str, meta: TraceMeta, machine: SimulatedMachine, loads_LN: npt.NDArray[np.int64] | None
) -> Placement:
    return make_placement(
        written,
        layers=len(main_layers(meta)),
        experts=meta.num_experts,
        devices=machine.devices,
        loads_LN=loads_LN,
    )


def _loads(scenario: Scenario, batching: Batching, profile: LoadProfile | None) -> npt.NDArray[np.int64] | None:
    """What balanced placements balance: a profile of the same model, or the warm-up steps."""
    if not any(written.startswith("balanced") for written in scenario.placements):
        return None
    meta = batching.source.meta
    layers = len(main_layers(meta))
    if profile is None:
        return warmup_loads(batching, layers, meta.num_experts, scenario.warmup_steps)
    if profile.counts_LN.shape != (layers, meta.num_experts):
        raise UsageError(
            "the load profile has {} layers of {} experts, the trace {} of {}".format(
                *profile.counts_LN.shape, layers, meta.num_experts
            ),
            hint="give the profile of the trace's model",
        )
    # Whole numbers that keep their proportions: engines' counts may be averages.
    scaled: npt.NDArray[np.int64] = np.rint(profile.counts_LN * 1024).astype(np.int64)
    return scaled
