"""Tiny models' shapes, tiny traces, and trace-driven runs of them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes.devices import find_devices
from runtime.models.config import MoeShape, moe_shape
from runtime.parallel import Ranks
from runtime.policy.spec import parse_policy
from runtime.trace.chunking import new_chunk, rechunk
from runtime.trace.records import Phase, RoutingTrace, TraceMeta
from runtime.tracerun.options import TraceRunOptions
from runtime.tracerun.session import TraceRunSession
from runtime.tracerun.traffic import TrafficRequest, read_traffic

LAYERS, EXPERTS, TOP_K = 3, 12, 3
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "torch_dtype": "bfloat16",
}
STORAGES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"torch_dtype": "float32"},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
}


class InMemory:
    """A trace that is already there, in chunks of a few tokens."""

    def __init__(self, trace: RoutingTrace) -> None:
        self.trace = trace
        self.meta = trace.meta
        self.notes: tuple[str, ...] = ()
        self.fraction_read = 0.0

    def chunks(self) -> Iterator[RoutingTrace]:
        return rechunk([self.trace], 7)


def _make_source(*, scores: bool = False, layers: int = LAYERS, experts: int = EXPERTS, seed: int = 0) -> InMemory:
    """Four sequences of 12 decode tokens; experts are skewed, so that caches and policies have work."""
    rng = np.random.default_rng(seed)
    sequence_T = np.repeat(np.arange(4), 12).astype(np.int32)
    logits = rng.gumbel(size=(48, layers, experts)) * 1.5 + np.linspace(2, 0, experts)
    full = (np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)).astype(np.float32)
    ids = np.argsort(-full, axis=-1, kind="stable")[..., :TOP_K].astype(np.int16)
    meta = TraceMeta(
        model="made up",
        num_experts=experts,
        top_k=TOP_K,
        layer_numbers=tuple(range(layers)),
        scores_recorded=scores,
    )
    trace = new_chunk(
        meta,
        tuple("abcd"),
        sequence_T,
        ids,
        np.take_along_axis(full, ids.astype(np.int64), axis=-1),
        position=np.tile(np.arange(12), 4),
        phase=Phase.DECODE,
        scores_TLN=full if scores else None,
    )
    return InMemory(trace)


@pytest.fixture(scope="session")
def make_source() -> Callable[..., InMemory]:
    return _make_source


@pytest.fixture(scope="session")
def make_shape() -> Callable[..., MoeShape]:
    """The tiny model's shape, stored in some way, with some of its config changed."""

    def make(storage: str = "bfloat16", **changes: Any) -> MoeShape:
        return moe_shape({**CONFIG, **STORAGES[storage], **changes})

    return make


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture
def make_options(tmp_path: Path, make_shape: Callable[..., MoeShape]) -> Callable[..., TraceRunOptions]:
    """Options of a run of a tiny trace."""

    def make(
        source: InMemory | None = None,
        *,
        storage: str = "bfloat16",
        policy: str = "caee:theta=0.6",
        devices: str = "cpu:1",
        layers: int | None = None,
        warmup_steps: int = 3,
        steps: int = 6,
        **options: Any,
    ) -> TraceRunOptions:
        shape = make_shape(storage)
        request = TrafficRequest(layers=layers, batch_size="3", warmup_steps=warmup_steps, steps=steps)
        defaults: dict[str, Any] = {"tier": "disk", "cache": "lfu", "pairs": 1, "cache_experts": 7}
        return TraceRunOptions(
            trace="tiny.parquet",
            shape=shape,
            traffic=read_traffic(source or _make_source(), shape, request),
            devices=find_devices(devices),
            policy=parse_policy(policy),
            folder=tmp_path,
            calibration=None,
            **{**defaults, **options},
        )

    return make


@pytest.fixture
def open_session() -> Iterator[Callable[[TraceRunOptions], TraceRunSession]]:
    """One rank in this process."""
    sessions = []

    def open_one(options: TraceRunOptions) -> TraceRunSession:
        sessions.append(TraceRunSession(options, Ranks(rank=0, world=1)))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed here, so that no disk need be read until its credit is gone."""
    monkeypatch.setattr("runtime.tracerun.session.DRAIN_SECONDS", (0.0, 0.01))
