"""The whole simulator on a part of the real gpt-oss trace against a plain one that shares no code with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from runtime.simulate.run import simulate
from runtime.trace.chunking import join
from runtime.trace.records import RoutingTrace, TraceSource

TOKENS, LAYERS = 14, 5


@pytest.fixture(scope="module")
def part(gpt_oss: TraceSource) -> RoutingTrace:
    """The first tokens and layers of every sequence."""
    trace = join(list(gpt_oss.chunks()))
    first = np.concatenate(
        [np.flatnonzero(trace.token_sequence_T == number)[:TOKENS] for number in range(len(trace.sequence_names))]
    )
    arrays = {
        name: getattr(trace, name)[first]
        for name in (field.name for field in dataclasses.fields(trace))
        if name.startswith("token_")
    }
    return dataclasses.replace(
        trace,
        meta=dataclasses.replace(trace.meta, layer_numbers=tuple(range(LAYERS))),
        ids_TLK=trace.ids_TLK[first, :LAYERS],
        gates_TLK=trace.gates_TLK[first, :LAYERS],
        **arrays,
    )


@pytest.mark.parametrize("cache", ["lfu", "lru", "belady", "lfu:decay=0.97,admit=1"])
@pytest.mark.parametrize("policy", ["router", "importance:theta=0.7", "caee:theta=0.8", "caee:theta=0.5"])
@pytest.mark.parametrize(("batch_size", "devices", "cache_experts"), [(8, 4, 20), (3, 5, 9), (16, 8, 11)])
def test_every_figure_is_the_plain_one(
    policy: str,
    cache: str,
    batch_size: int,
    devices: int,
    cache_experts: int,
    part: RoutingTrace,
    plain: Any,
    make_machine: Any,
    make_pass: Any,
    in_memory: Any,
) -> None:
    each = make_pass(policy, make_machine([1e-3] * devices), part, cache=cache, cache_experts=cache_experts)
    figures = simulate(in_memory(part, 100), [each], batch_size=batch_size, warmup_steps=9).passes[0]
    name, _, theta = policy.partition(":theta=")
    sequences = [
        [
            [(part.ids_TLK[t, layer], part.gates_TLK[t, layer]) for layer in range(LAYERS)]
            for t in np.flatnonzero(part.token_sequence_T == number)
        ]
        for number in range(len(part.sequence_names))
    ]
    expected = plain.simulate(
        sequences,
        experts=32,
        devices=devices,
        batch_size=batch_size,
        cache={"kind": each.cache.kind, "decay": each.cache.decay, "admit": each.cache.admit},
        slots=cache_experts,
        rule=(name, float(theta)) if theta else None,
        warmup=9,
    )
    assert figures.steps == expected.steps
    assert figures.layer_steps == expected.steps * LAYERS
    for layer in figures.layers:
        assert layer.device_misses_before == tuple(expected.before[layer.layer, d] for d in range(devices))
        assert layer.device_misses_after == tuple(expected.after[layer.layer, d] for d in range(devices))
    assert {gap: count for gap, count in enumerate(figures.gap_histogram) if count} == dict(expected.gaps)
    assert figures.max_device_misses_per_step == expected.max_misses / expected.steps
    assert figures.removed_importance == expected.removed / 2**30 / expected.tokens
