"""Small traces, machines and passes for the tests of the simulator."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from runtime.cache import parse_cache
from runtime.cost import CostTable
from runtime.policy.inputs import make_groups
from runtime.policy.spec import parse_policy, resolve
from runtime.simulate.placement import make_placement
from runtime.simulate.records import PassSpec, Placement, SimulatedMachine
from runtime.simulate.source import open_for_replay
from runtime.trace.chunking import new_chunk, rechunk
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.records import Phase, RoutingTrace, TraceMeta, TraceSource


class InMemory:
    """A trace that is already there, handed out in chunks of any size."""

    def __init__(self, trace: RoutingTrace, chunk_tokens: int = 7) -> None:
        self.trace = trace
        self.meta = trace.meta
        self.notes: tuple[str, ...] = ()
        self.fraction_read = 0.0
        self.chunk_tokens = chunk_tokens

    def chunks(self) -> Iterator[RoutingTrace]:
        return rechunk([self.trace], self.chunk_tokens)


def _make_trace(
    *,
    lengths: Sequence[int] = (6, 9, 4, 7, 5),
    layers: int = 3,
    experts: int = 12,
    top_k: int = 3,
    seed: int = 0,
    scores: bool = False,
    interleaved: bool = False,
    empty_slots: bool = False,
) -> RoutingTrace:
    """Decode tokens of sequences of ``lengths``; experts are skewed, so that caches and policies have work.

    ``interleaved``: sequences take turns in the file, and tokens have step ids, as an engine records them.
    """
    rng = np.random.default_rng(seed)
    sequence_T = np.repeat(np.arange(len(lengths)), lengths)
    position_T = np.concatenate([np.arange(length) for length in lengths]) if len(lengths) else np.zeros(0, int)
    if interleaved:
        order = np.lexsort((sequence_T, position_T))
        sequence_T, position_T = sequence_T[order], position_T[order]
    tokens = len(sequence_T)
    logits = rng.gumbel(size=(tokens, layers, experts)) * 1.5 + np.linspace(2, 0, experts)
    full = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    ids = np.argsort(-full, axis=-1, kind="stable")[..., :top_k].astype(np.int16)
    if empty_slots:
        ids[rng.random(ids.shape) < 0.2] = -1
    gates = np.where(ids >= 0, np.take_along_axis(full, np.maximum(ids, 0), axis=-1), 0).astype(np.float32)
    meta = TraceMeta(
        model="made up",
        num_experts=experts,
        top_k=top_k,
        layer_numbers=tuple(range(layers)),
        scores_recorded=scores,
    )
    return new_chunk(
        meta,
        tuple(f"sequence {number}" for number in range(len(lengths))),
        sequence_T.astype(np.int32),
        ids,
        gates,
        position=position_T,
        step=position_T if interleaved else -1,
        phase=Phase.DECODE,
        scores_TLN=full.astype(np.float32) if scores else None,
    )


def _make_machine(
    seconds: Sequence[float] = (1e-3, 1e-3),
    *,
    tier: str = "host",
    groups: Sequence[tuple[Sequence[int], float]] = (),
    **others: float | bool,
) -> SimulatedMachine:
    costs = CostTable(seconds_per_expert=tuple(seconds), groups=make_groups(groups, len(seconds)))
    return SimulatedMachine(tier=tier, costs=costs, **others)


def _make_pass(
    policy: str,
    machine: SimulatedMachine,
    trace: RoutingTrace,
    *,
    cache: str = "lfu",
    cache_experts: int = 6,
    placement: Placement | str = "contiguous",
) -> PassSpec:
    if isinstance(placement, str):
        placement = make_placement(
            placement, layers=trace.meta.moe_layers, experts=trace.meta.num_experts, devices=machine.devices
        )
    return PassSpec(
        policy=resolve(parse_policy(policy), offloading=machine.offloading),
        cache=parse_cache(cache) if machine.offloading else None,
        cache_experts=cache_experts if machine.offloading else None,
        placement=placement,
        machine=machine,
    )


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., RoutingTrace]:
    return _make_trace


@pytest.fixture(scope="session")
def make_machine() -> Callable[..., SimulatedMachine]:
    return _make_machine


@pytest.fixture(scope="session")
def make_pass() -> Callable[..., PassSpec]:
    return _make_pass


@pytest.fixture(scope="session")
def in_memory() -> type[InMemory]:
    return InMemory


@pytest.fixture(scope="session")
def gpt_oss(shared_data: Path) -> Iterator[TraceSource]:
    """The real token-level trace of gpt-oss-20b."""
    path = shared_data / "routing/gpt_oss_20b/decode.jsonl.gz"
    with open_for_replay(path, ImportOptions(num_experts=32)) as source:
        yield source


@pytest.fixture(scope="session")
def plain() -> ModuleType:
    """The plain simulator beside these tests, which are no package."""
    name = "simulate_plain"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("plain.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
