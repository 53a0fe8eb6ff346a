"""A trace-driven run beside what was predicted for it: gpt-oss-20b's routing and expert sizes, two CPU ranks, disk.

    python benchmarks/trace_run.py --trace decode.jsonl.gz --shape gpt-oss-20b/config.json [--folder DIR]

In this order, each the installed command in a process of its own: `caee probe` and `caee calibrate` at the experts'
size; a trace-driven run with the router's own choice, which tells what one expert's matmuls take; `caee simulate`
on the calibrated disk with that compute, which is the prediction; then `caee run --trace` of the same steps and layers
for `caee` and `budget`, in interleaved pairs. Prints both side by side, and beside them what is predicted from the same
calibration with the matmuls of the run's own passes with the router's choice: a processor that has become faster or
slower since shows in the first error and not in the second. Four minutes on an idle machine; on a busy one, or a disk
that others use, the times say little. Exit code 1 where a run fetched anything else than simulated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.units import format_seconds, format_size
from runtime.models.config import read_moe_shape

CAEE = Path(sys.executable).with_name("caee")
DEVICES = 2
POLICIES = ("caee:theta=0.8", "budget:epsilon=0.05")
PART = ("--layers", 2, "--batch-size", 8, "--warmup-steps", 64)
STEPS = 10
PAIRS = 3
ROUTER_PAIRS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder's")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="caee-bench-") as folder:
        bench = Bench(Path(folder), options.trace.resolve(), options.shape.resolve(), options.pairs)
        return bench.run()


@dataclass(frozen=True, slots=True)
class Bench:
    """Commands with a store of their own in ``folder``, which lies on the disk that is measured."""

    folder: Path
    trace: Path
    shape: Path
    pairs: int

    def run(self) -> int:
        shape = read_moe_shape(self.shape)
        trace = self.folder / "trace.parquet"
        self.caee("trace", "import", self.trace, "-o", trace, "--num-experts", shape.num_experts)
        self.caee("probe", "--devices", f"cpu:{DEVICES}", "--sizes", shape.expert_bytes)
        calibration = str(self.json("calibrate")["calibration_id"])
        short = self.measured(trace, "router", STEPS, ROUTER_PAIRS)
        compute = short["replay"]["expert_compute_seconds"]
        before = self.predicted(trace, calibration, POLICIES, short)
        measured = {policy: self.measured(trace, policy, STEPS, self.pairs) for policy in POLICIES}
        beside = {policy: self.predicted(trace, calibration, (policy,), run) for policy, run in measured.items()}
        first = measured[POLICIES[0]]
        say(
            f"\n{first['model']}: experts of {format_size(shape.expert_bytes)} ({shape.storage.name}) on disk, "
            f"{first['workload']['cache_experts']} of {first['workload']['experts_per_device']} cached on each of "
            f"{DEVICES} CPU ranks; {STEPS} steps of 8 tokens, {first['workload']['moe_layers']} MoE layers, "
            f"pairs of passes: {self.pairs}. As calibrated one fetch takes "
            f"{format_seconds(first['predicted']['seconds_per_expert'][0])}, as measured before one expert's matmuls "
            f"{format_seconds(compute)}."
        )
        return 0 if show(measured, before, beside) else 1

    def measured(self, trace: Path, policy: str, steps: int, pairs: int) -> dict[str, Any]:
        part = (*PART, "--steps", steps, "--pairs", pairs, "--devices", f"cpu:{DEVICES}", "--tier", "disk")
        return self.json("run", "--trace", trace, "--shape", self.shape, "--policy", policy, *part)

    def predicted(
        self, trace: Path, calibration: str, policies: Sequence[str], run: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Figures by policy, ``router`` too, with matmuls as ``run`` measured them."""
        names = ("router", *policies)
        compute, rest = (run["replay"][name] for name in ("expert_compute_seconds", "rest_seconds"))
        machine = ("--machine", calibration, "--model", self.shape, "--devices", DEVICES, "--tier", "disk")
        times = ("--staged", "--expert-compute-seconds", f"{compute:.9f}", "--dense-seconds", f"{rest:.9f}")
        asked = [word for name in names for word in ("--policy", name)]
        document = self.json("simulate", trace, *asked, *PART, "--steps", STEPS, *machine, *times)
        return dict(zip(names, document["policies"], strict=True))

    def json(self, *arguments: object) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.caee(*arguments, "--json"))
        return document

    def caee(self, *arguments: object) -> str:
        words = [str(each) for each in arguments]
        say(f"caee {' '.join(words)}")
        environment = {**os.environ, "CAEE_STORE": str(self.folder / "store.db"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(CAEE), *words], stdout=subprocess.PIPE, text=True, env=environment, cwd=self.folder, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"caee {words[0]} ended with exit code {done.returncode}")
        return done.stdout


def show(
    measured: dict[str, dict[str, Any]],
    before: dict[str, dict[str, Any]],
    beside: dict[str, dict[str, dict[str, Any]]],
) -> bool:
    """A row for every kind of pass, and what was cut; whether all fetched what was simulated."""
    rows: list[Sequence[str]] = [
        ("pass", "TPOT measured", "predicted", "error", "own matmuls", "error", "cut measured", "predicted", "fetches")
    ]
    same = True
    for policy, run in measured.items():
        for name, key in (("router", "baseline"), (policy, "with_policy")):
            seconds = run[key]["tpot_seconds"]["median"]
            times = [_mean_seconds(figures[name]) for figures in (before, beside[policy])]
            totals = [misses * run["workload"]["pairs"] for misses in before[name]["misses_per_device"]]
            equal = totals == run[key]["misses_per_device"]
            same = same and equal
            cuts = ("", "")
            if key == "with_policy":
                low, high = run["gain"]["tpot"]["ci95"] or (math.nan, math.nan)  # of too few pairs
                cuts = (
                    f"{1 - run['gain']['tpot']['ratio']:.1%} [{1 - high:.1%}, {1 - low:.1%}]",
                    f"{1 - times[0] / _mean_seconds(before['router']):.1%}",
                )
            predictions = [cell for each in times for cell in (format_seconds(each), f"{each / seconds - 1:+.1%}")]
            fetches = "as simulated" if equal else f"{run[key]['misses_per_device']}, simulated {totals}"
            rows.append((name, format_seconds(seconds), *predictions, *cuts, fetches))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return same


def _mean_seconds(figures: dict[str, Any]) -> float:
    seconds: float = figures["time_per_step_seconds"]["mean"]
    return seconds


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
