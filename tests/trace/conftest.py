"""Small traces for the tests of the trace format, its statistics and its importers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.trace.chunking import new_chunk
from runtime.trace.records import Phase, RoutingTrace, TraceMeta

MakeTrace = Callable[..., RoutingTrace]


@pytest.fixture(scope="session")
def make_trace() -> MakeTrace:
    """A function that makes a random, valid decode trace; see ``_make_trace``."""
    return _make_trace


def _make_trace(
    *,
    tokens: int = 40,
    layers: int = 3,
    experts: int = 16,
    top_k: int = 4,
    sequences: int = 3,
    seed: int = 0,
    **meta: Any,
) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((tokens, layers, experts)), axis=-1)
    gates = -np.sort(-rng.random((tokens, layers, top_k)), axis=-1)
    sequence = np.sort(rng.integers(0, sequences, tokens)).astype(np.int32)
    _, sequence = np.unique(sequence, return_inverse=True)
    names = tuple(f"s{number}" for number in range(int(sequence.max(initial=-1)) + 1))
    full = {
        name: rng.random((tokens, layers, experts)).astype(np.float32)
        for name, flag in (("scores_TLN", "scores_recorded"), ("selection_TLN", "selection_recorded"))
        if meta.get(flag)
    }
    return new_chunk(
        TraceMeta(
            **{"model": "tiny", "num_experts": experts, "top_k": top_k, "layer_numbers": tuple(range(layers)), **meta}
        ),
        names,
        sequence.astype(np.int32),
        order[:, :, :top_k].astype(np.int16),
        (gates / gates.sum(-1, keepdims=True)).astype(np.float32),
        position=np.arange(tokens),
        phase=Phase.DECODE,
        **full,
    )
