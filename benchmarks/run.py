"""``make bench``: every benchmark in turn, each in a process of its own, and one line at the end for each.

A benchmark prints ratios against a peer or a plain version taken in the same run. Traces and kernel tables do not ship
with the project: they are looked for in ``$CAEE_BENCH_DATA``, and what needs them is skipped where they are not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DATA = Path(os.environ.get("CAEE_BENCH_DATA", HERE.parent.parent / "shared" / "data"))
TRACE = DATA / "routing" / "gpt_oss_20b" / "decode.jsonl.gz"
LOADS = DATA / "routing" / "deepseek_v3_sglang" / "decode_in1000out1000.json"
GPT_OSS = DATA / "configs" / "aic__openai--gpt-oss-20b.json"
TABLES = tuple(DATA / "hw" / "moe_kernels" / f"{gpu}_sxm_moe_vllm_0.24.0_moe_perf.parquet" for gpu in ("h100", "h200"))


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script, what it shows, its arguments, and the data and modules without which it is skipped."""

    script: str
    shows: str
    arguments: tuple[str | Path, ...] = ()
    needs: tuple[Path, ...] = ()
    modules: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("decision.py", "decision time against plain routing, in torch and compiled"),
    Benchmark("simulate.py", "simulator against the plain reference, and how it scales", ("--trace", TRACE), (TRACE,)),
    Benchmark("policy_grid.py", "every policy on every cache, on real traffic", (TRACE,), (TRACE,)),
    Benchmark("engine.py", "decode step against the stock model; overlap; fetching against the probe's raw path"),
    Benchmark("offload.py", "decoding from disk against transformers' own disk offload", modules=("accelerate",)),
    Benchmark("memory.py", "memory of a run on a checkpoint of 6 GB"),
    Benchmark("frontier.py", "time against loss of caee and budget on the demo model, and what re-routing is worth"),
    Benchmark("dequantise.py", "dequantising an expert against transformers' own functions"),
    Benchmark("trace_record.py", "what recording costs"),
    Benchmark("signals.py", "what telling of every step costs"),
    Benchmark(
        "trace_run.py",
        "a trace-driven run beside its simulation, fetch by fetch and in time",
        ("--trace", TRACE, "--shape", GPT_OSS),
        (TRACE, GPT_OSS),
    ),
    Benchmark("kernel_tables.py", "layer times predicted from activated experts", TABLES, TABLES),
    Benchmark("probe_peers.py", "memory and disk beside STREAM and fio"),
    Benchmark(
        "paper.py", "the paper's figures beside the simulator's", ("--trace", TRACE, "--loads", LOADS), (TRACE, LOADS)
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names of benchmarks, without .py; default: all")
    only = parser.parse_args().only
    results = [_run(benchmark) for benchmark in BENCHMARKS if not only or benchmark.script[:-3] in only]
    sys.stdout.write("\n" + "\n".join(results) + "\n")
    return int(any(line.startswith("failed") for line in results))


def _run(benchmark: Benchmark) -> str:
    sys.stdout.write(f"\n== {benchmark.script}: {benchmark.shows}\n")
    sys.stdout.flush()
    missing = [path.name for path in benchmark.needs if not path.exists()]
    missing += [module for module in benchmark.modules if importlib.util.find_spec(module) is None]
    if missing:
        return f"skipped  {benchmark.script}: {missing[0]} is not here"
    start = time.perf_counter()
    code = subprocess.run([sys.executable, HERE / benchmark.script, *benchmark.arguments], check=False).returncode
    outcome = "ok     " if code == 0 else "failed "
    return f"{outcome}  {benchmark.script}: {benchmark.shows} ({time.perf_counter() - start:.0f} s)"


if __name__ == "__main__":
    raise SystemExit(main())
