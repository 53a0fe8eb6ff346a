"""Speed and memory of the simulator, on one core; compile time apart.

    python benchmarks/simulate.py --trace decode.jsonl.gz [--json]

``--trace``: token-level routing of gpt-oss-20b (topk-jsonl, public; docs/paper.md says where). Measured:

- layer-steps per second of the compiled simulator and of the plain one, batch 8, 4 devices × 96 cached experts;
- batch 1 against the replay of moe-policylang, a public peer, where it is installed (``pip install moe-policylang``);
- 256 experts, top-8, 58 layers, batch 64, 8 devices × 1,024 cached experts, on made-up routing;
- time and memory of a trace ten times as long, each in a process of its own.

Times are the thread's own, since what other processes take does not count; the best of several runs is given.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from runtime.cache import parse_cache
from runtime.cost import uniform_costs
from runtime.policy.spec import parse_policy, resolve
from runtime.simulate.batches import plan
from runtime.simulate.index import index_of
from runtime.simulate.placement import make_placement
from runtime.simulate.prepare import prepare
from runtime.simulate.records import PassSpec, SimulatedMachine
from runtime.simulate.reference import PolicyPass
from runtime.simulate.run import simulate
from runtime.simulate.source import open_for_replay
from runtime.trace.chunking import new_chunk
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.reader import TraceReader, read_trace
from runtime.trace.records import Phase, RoutingTrace, TraceMeta, TraceSource
from runtime.trace.writer import write_trace

EXPERTS = 32
LONGER = 10
PLAIN_STEPS = 60
PEER_TOKENS = 4000
REPEATS = 5
POLICIES = ("router", "caee", "caee:theta=0.7", "budget")


class Copies:
    """A trace, its sequences several times under other names; or once."""

    def __init__(self, trace: RoutingTrace, times: int = 1) -> None:
        self.trace, self.times = trace, times
        self.meta, self.notes, self.fraction_read = trace.meta, (), 0.0

    def chunks(self) -> Iterator[RoutingTrace]:
        trace, names = self.trace, ()
        for number in range(self.times):
            names = (*names, *(f"{name} {number}" for name in trace.sequence_names))
            yield new_chunk(
                trace.meta,
                names,
                trace.token_sequence_T + number * len(trace.sequence_names),
                trace.ids_TLK,
                trace.gates_TLK,
                position=trace.token_position_T,
                phase=Phase.DECODE,
            )


def the_pass(meta: TraceMeta, policy: str, cache: str, devices: int, cache_experts: int) -> PassSpec:
    """A policy on contiguous experts that wait in host memory."""
    machine = SimulatedMachine(tier="host", costs=uniform_costs(1e-3, devices))
    placement = make_placement("contiguous", layers=meta.moe_layers, experts=meta.num_experts, devices=devices)
    return PassSpec(
        policy=resolve(parse_policy(policy), offloading=True),
        cache=parse_cache(cache),
        cache_experts=cache_experts,
        placement=placement,
        machine=machine,
    )


def thread_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The best of several runs, after one that may compile."""
    work()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def compiled_rate(source: TraceSource, each: PassSpec, batch_size: int) -> float:
    """Layer-steps per second, reading the trace included."""
    steps = simulate(source, [each], batch_size=batch_size).planned_steps
    layer_steps = steps * source.meta.moe_layers
    return layer_steps / thread_seconds(lambda: simulate(source, [each], batch_size=batch_size))


def plain_rate(source: TraceSource, each: PassSpec, batch_size: int) -> float:
    """Layer-steps per second of the plain pass with the plain policy, on the first steps."""
    block = next(plan(source, index_of(source), batch_size).blocks(PLAIN_STEPS))
    prepared = prepare(block.offsets_S1, block.rows.ids_RLK, block.rows.gates_RLK, source.meta.num_experts)
    seconds = thread_seconds(lambda: PolicyPass(each, compiled=False).run(block, prepared, None, 0), repeats=1)
    return block.steps * source.meta.moe_layers / seconds


def peer_rate(trace: RoutingTrace, policy: str) -> float | None:
    """Layer-steps per second of moe-policylang's replay of the first tokens; a cache for each layer and sequence."""
    if importlib.util.find_spec("moe_policylang") is None:
        return None
    from moe_policylang.benchmark.replay import replay_policies
    from moe_policylang.integrations.trace_recorder import TraceEntry, TraceRecording

    meta, tokens = trace.meta, min(PEER_TOKENS, trace.tokens)
    rows = np.zeros((tokens, meta.moe_layers, meta.num_experts), np.float32)
    np.put_along_axis(rows, trace.ids_TLK[:tokens].astype(np.int64), trace.gates_TLK[:tokens], axis=-1)
    recording = TraceRecording(
        model_name="", num_layers=meta.moe_layers, num_experts=meta.num_experts, top_k=meta.top_k
    )
    recording.records_full_softmax = True
    recording.entries = [
        TraceEntry(
            prompt_id=int(trace.token_sequence_T[token]),
            token_idx=int(trace.token_position_T[token]),
            layer_idx=layer,
            selected_experts=trace.ids_TLK[token, layer].tolist(),
            router_softmax=rows[token, layer].tolist(),
        )
        for token in range(tokens)
        for layer in range(meta.moe_layers)
    ]
    seconds = thread_seconds(lambda: replay_policies(recording, meta.top_k, [policy], [0.5]), repeats=1)
    return tokens * meta.moe_layers / seconds


def made_up(sequences: int, tokens: int, layers: int = 58, experts: int = 256, top_k: int = 8) -> RoutingTrace:
    """Routing with lasting preferences of layers and sequences."""
    rng = np.random.default_rng(0)
    preference = rng.normal(size=(layers, experts)) + rng.normal(size=(sequences, 1, layers, experts))
    ids = np.empty((sequences, tokens, layers, top_k), np.int16)
    gates = np.empty((sequences, tokens, layers, top_k), np.float32)
    for sequence in range(sequences):
        logits = preference[sequence] + rng.gumbel(size=(tokens, layers, experts))
        order = np.argsort(-logits, axis=-1)[..., :top_k]
        best = np.exp(np.take_along_axis(logits, order, axis=-1))
        ids[sequence], gates[sequence] = order, best / best.sum(axis=-1, keepdims=True)
    meta = TraceMeta(model="made up", num_experts=experts, top_k=top_k, layer_numbers=tuple(range(layers)))
    return new_chunk(
        meta,
        tuple(map(str, range(sequences))),
        np.repeat(np.arange(sequences), tokens).astype(np.int32),
        ids.reshape(-1, layers, top_k),
        gates.reshape(-1, layers, top_k),
        position=np.tile(np.arange(tokens), sequences),
        phase=Phase.DECODE,
    )


def in_process(path: Path) -> dict[str, float]:
    """Seconds and peak memory of replaying a trace in a new process."""
    command = [sys.executable, __file__, "--measure", str(path)]
    measured: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return measured


def measure(path: Path) -> dict[str, float]:
    """What ``in_process`` asks for; here."""
    source = TraceReader(path)
    passes = [the_pass(source.meta, policy, "lfu", 4, 96) for policy in POLICIES]
    steps = simulate(source, passes, batch_size=8, warmup_steps=50).planned_steps
    seconds = thread_seconds(lambda: simulate(source, passes, batch_size=8, warmup_steps=50), repeats=3)
    return {"seconds": seconds, "steps": steps, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Most memory that this process has had. The kernel's own counter starts at the parent's, so not that one."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def figures(path: Path) -> dict[str, Any]:
    """All figures, rates in layer-steps per second."""
    with tempfile.TemporaryDirectory() as folder, open_for_replay(path, ImportOptions(num_experts=EXPERTS)) as source:
        short, long = Path(folder) / "short.parquet", Path(folder) / "long.parquet"
        write_trace(short, source)
        trace = read_trace(short)
        write_trace(long, Copies(trace, LONGER))
        memory = Copies(trace)
        found: dict[str, Any] = {"batch_8": {}, "batch_1": {}, "large": {}}
        for policy in ("router", "caee"):
            each = the_pass(trace.meta, policy, "lfu", 4, 96)
            compiled, plain = compiled_rate(memory, each, 8), plain_rate(memory, each, 8)
            found["batch_8"][policy] = {"compiled": compiled, "plain": plain, "ratio": compiled / plain}
        for cache in ("lru", "lfu"):
            compiled = compiled_rate(memory, the_pass(trace.meta, "router", cache, 4, 96), 1)
            peer = peer_rate(trace, f"topk_{cache}")
            found["batch_1"][cache] = {"compiled": compiled, "peer": peer, "ratio": peer and compiled / peer}
        large = Copies(made_up(64, 60))
        for policy in ("router", "caee", "budget"):
            found["large"][policy] = compiled_rate(large, the_pass(large.meta, policy, "lfu", 8, 1024), 64)
        once, longer = in_process(short), in_process(long)
        found["ten_times_longer"] = {
            "steps": longer["steps"] / once["steps"],
            "seconds": longer["seconds"] / once["seconds"],
            "memory": longer["peak_bytes"] / once["peak_bytes"],
            "peak_bytes": longer["peak_bytes"],
        }
    return found


def table(found: dict[str, Any]) -> Table:
    """The figures for reading."""
    result = Table(title="Simulator, layer-steps per second on one core", title_justify="left")
    for column in ("", "simulator", "against", "ratio"):
        result.add_column(column, justify="left" if not column else "right")
    for policy, rates in found["batch_8"].items():
        result.add_row(
            f"batch 8, {policy}; plain", f"{rates['compiled']:,.0f}", f"{rates['plain']:,.0f}", f"{rates['ratio']:.0f}"
        )
    for cache, rates in found["batch_1"].items():
        peer = ("not installed", "–") if rates["peer"] is None else (f"{rates['peer']:,.0f}", f"{rates['ratio']:.0f}")
        result.add_row(f"batch 1, {cache}; moe-policylang", f"{rates['compiled']:,.0f}", *peer)
    for policy, rate in found["large"].items():
        result.add_row(f"58 layers × 256 experts, top-8, batch 64, {policy}", f"{rate:,.0f}", "", "")
    longer = found["ten_times_longer"]
    result.add_row(
        f"a trace with {longer['steps']:.2f} × the steps",
        f"{longer['seconds']:.2f} × the time",
        f"{longer['memory']:.3f} × the memory",
        f"{longer['peak_bytes'] / 1e6:.0f} MB",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="token-level routing of gpt-oss-20b")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    if options.trace is None:
        parser.error("--trace is needed")
    found = figures(options.trace)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(table(found))


if __name__ == "__main__":
    main()
