"""How far this device's experts are from its limits: the expert matmuls by number of tokens (paper, Fig. 1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from probes.backend import Backend
from runtime.experts.pool import SlotPool
from runtime.experts.stock import StockKernel
from store.records import Roofline, RooflinePoint

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
REPEATS = 9
PEAK_SIZE = {"cpu": 768}
"""Side of the square matmul that stands for peak compute; other devices need a larger one to be busy."""
PEAK_SIZE_ELSEWHERE = 4096


@torch.inference_mode()
def measure_roofline(
    backend: Backend,
    kernel: StockKernel,
    pool: SlotPool,
    *,
    hidden_size: int,
    fetch_seconds: float | None,
    memory_bytes_per_s: float | None,
) -> Roofline:
    """Time one expert, already in its slot, on 1 to 128 tokens, and a large square matmul for the peak; best of some.

    ``fetch_seconds``: what bringing the expert there costs, for the offloading points; None when all are resident.
    """
    parameters = list(pool.parameters.values())
    weights = sum(parameter[0].numel() for parameter in parameters)
    expert_bytes = sum(parameter[0].numel() * parameter.element_size() for parameter in parameters)
    points = []
    for tokens in TOKENS:
        hidden_TH = torch.randn((tokens, hidden_size), device=backend.device).to(parameters[0].dtype)
        rows_RH = torch.zeros_like(hidden_TH)
        work = partial(kernel.rows, hidden_TH, np.zeros((tokens, 1), np.int64), np.arange(tokens), {0: 0}, rows_RH)
        seconds = _best_seconds(backend, work)
        points.append(RooflinePoint(tokens=tokens, flops=2.0 * tokens * weights, seconds=seconds))
    # No square matmul of one size is the fastest there is.
    peak = max(_peak(backend, parameters[0].dtype), *(point.flops / point.seconds for point in points))
    return Roofline(
        device=str(backend.device),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        peak_flops_per_s=peak,
        memory_bytes_per_s=memory_bytes_per_s,
        expert_bytes=expert_bytes,
        fetch_seconds=fetch_seconds,
        points=tuple(points),
    )


def _peak(backend: Backend, dtype: torch.dtype) -> float:
    size = PEAK_SIZE.get(backend.device.type, PEAK_SIZE_ELSEWHERE)
    matrix = torch.randn((size, size), device=backend.device).to(dtype)
    return 2.0 * size**3 / _best_seconds(backend, lambda: torch.mm(matrix, matrix))


def _best_seconds(backend: Backend, work: Callable[[], object]) -> float:
    """Of a few repeats, warmed up and synchronised on both sides: a roof is what can be reached, not what is usual."""
    work()
    samples = []
    for _ in range(REPEATS):
        backend.synchronize()
        start = time.perf_counter()
        work()
        backend.synchronize()
        samples.append(time.perf_counter() - start)
    return min(samples)
