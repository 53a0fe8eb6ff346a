"""Figures of the real gpt-oss-20b trace that two independent implementations agree on."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.simulate.run import simulate
from runtime.trace.records import TraceSource

# Batch size, devices, cached experts, steps; then policy, cache, Σ_layers max_d misses a step, removed importance.
KNOWN = [
    (
        (8, 4, 96, 1857),
        [
            ("router", "lfu", 53.6440, 0.0),
            ("caee:theta=0.8", "lfu", 44.3037, 0.010162),
            ("caee:theta=0.7", "lfu", 40.5800, 0.016272),
            ("router", "lfu:decay=0.97,admit=1", 48.5137, 0.0),
            ("caee:theta=0.8", "lfu:decay=0.97,admit=1", 38.5229, 0.010295),
            ("router", "belady", 38.0258, 0.0),
        ],
    ),
    ((3, 5, 40, 5562), [("router", "lru", 73.6918, 0.0), ("caee:theta=0.6", "lru", 48.6810, 0.062716)]),
    (
        (16, 8, 48, 835),
        [
            ("router", "lfu", 53.6802, 0.0),
            ("caee:theta=0.8", "lfu", 48.0443, 0.003669),
            ("caee:theta=0.7", "lfu", 45.4946, 0.006243),
        ],
    ),
]


@pytest.mark.parametrize(("setting", "known"), KNOWN)
def test_known_figures(
    setting: tuple[int, int, int, int], known: Any, gpt_oss: TraceSource, make_machine: Any, make_pass: Any
) -> None:
    batch_size, devices, cache_experts, steps = setting
    machine = make_machine([1e-3] * devices)
    trace = next(iter(gpt_oss.chunks()))
    passes = [
        make_pass(policy, machine, trace, cache=cache, cache_experts=cache_experts) for policy, cache, *_ in known
    ]
    simulation = simulate(gpt_oss, passes, batch_size=batch_size, warmup_steps=50)
    for figures, (_, _, misses, removed) in zip(simulation.passes, known, strict=True):
        assert figures.steps == steps
        assert round(figures.max_device_misses_per_step, 4) == misses
        assert round(figures.removed_importance, 6) == removed
        # A millisecond for each movement: the step's time is the same sum.
        assert figures.time_per_step.mean == pytest.approx(misses * 1e-3, abs=1e-7)
