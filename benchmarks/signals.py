"""What telling of a step takes: rank 0's own clock per step, by layers and devices, and what a scrape takes.

A step record is made once and told many times, to a file in a temporary folder. Medians of several rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from runtime.policy.make import make_policy
from runtime.policy.spec import parse_policy
from runtime.recording import LayerStep, StepRecord
from runtime.signals.collect import LineSignals, StepLines
from runtime.signals.prometheus import exposition
from runtime.signals.step import StepsHeader, parse_line
from runtime.signals.totals import StepTotals

SHAPES = ((4, 2), (48, 4), (58, 16))
"""MoE layers and devices: the demo model, Qwen3-30B-A3B, DeepSeek-R1."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for layers, devices in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.jsonl"
            telling = statistics.median(tell(path, layers, devices, options.steps) for _ in range(options.rounds))
            scrape = scraping(path)
        sys.stdout.write(
            f"{layers} layers, {devices} devices: {telling * 1e6:.0f} µs to tell of a step, "
            f"{scrape * 1e6:.0f} µs to write out the metrics\n"
        )
    return 0


def tell(path: Path, layers: int, devices: int, steps: int) -> float:
    """Seconds per step, by the collector's own clock."""
    header = StepsHeader(
        model="m", devices=("d",) * devices, tier="host", policy="caee", moe_layers=layers, num_experts=128
    )
    policy = make_policy(parse_policy("caee"), offloading=True)
    counts = np.arange(devices, dtype=np.int32)
    record = StepRecord(tokens=8, prefill=False, seconds=0.02)
    record.layers = [LayerStep(n, counts, counts, counts + 1, 1 << 20, 1, 0.2, 0.01, False) for n in range(layers)]
    signals = LineSignals([StepLines(path, header)])
    for _ in range(steps):
        signals.step(record, policy)
    signals.close()
    return signals.seconds / signals.steps


def scraping(path: Path) -> float:
    """Seconds to make one answer of the endpoint."""
    totals = StepTotals()
    for line in path.read_bytes().splitlines():
        totals.add(parse_line(line))
    start = time.perf_counter()
    for _ in range(50):
        exposition(totals.snapshot())
    return (time.perf_counter() - start) / 50


if __name__ == "__main__":
    sys.exit(main())
