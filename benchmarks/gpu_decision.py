"""Time of routing with the decision's GPU kernels against torch's softmax → topk → renormalise, and against the CPU.

``python benchmarks/gpu_decision.py`` (``--json`` for the figures alone). N = 256 experts, top-8, 8 devices, half of the
experts cached. GPU contenders start from logits and end in ids and weights; each is captured in a CUDA graph over
several batches, replayed between events, in turn with the others, and also timed launch by launch. The CPU contender
copies the logits to the host, decides there and copies the outcome back, as an engine without the kernels would.

``--cpu`` runs the same code without a GPU: a clock on the host instead of graphs and events, and the kernels, where
triton is installed, in its interpreter, on the smallest batches, of which no time means anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

EXPERTS, TOP_K, DEVICES = 256, 8, 8
POLICIES = {"router": "router", "caee": "caee:rule=cir,theta=0.8", "budget": "budget:price=2"}

Contender = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What is measured: sizes of the batches, how many different ones a sample covers, samples, and those before."""

    device: str
    tokens: tuple[int, ...]
    batches: int
    rounds: int
    warmup: int


ON_GPU = Effort(device="cuda", tokens=(1, 16, 64, 128, 512), batches=8, rounds=50, warmup=5)
ON_CPU = Effort(device="cpu", tokens=(1, 3), batches=1, rounds=1, warmup=0)


def machine() -> Any:
    """Experts in equal parts over the devices, equal costs."""
    from runtime.policy.inputs import make_machine

    return make_machine(
        placement=np.arange(EXPERTS) * DEVICES // EXPERTS,
        cost_seconds=np.full(EXPERTS, 1e-3),
        resident=np.random.default_rng(0).random(EXPERTS) < 0.5,
    )


def plain_torch(logits: torch.Tensor) -> object:
    """The router alone."""
    best, chosen = torch.topk(torch.softmax(logits, dim=-1), TOP_K, dim=-1)
    return chosen, best / best.sum(dim=-1, keepdim=True)


def with_kernels(text: str, tokens: int, device: str) -> Contender:
    """Softmax and the kernels, which choose the top k themselves; checked against the plain reference."""
    from runtime.kernels.decision import DeviceDecision
    from runtime.policy.spec import parse_policy

    decision = DeviceDecision(parse_policy(text), machine(), top_k=TOP_K, max_tokens=tokens, device=device)

    def call(logits: torch.Tensor) -> object:
        return decision(torch.softmax(logits, dim=-1))

    logits = batches(1, tokens, device)[0]
    call(logits)
    check(text, torch.softmax(logits, dim=-1), decision.buffers.ids_TK)
    return call


def check(text: str, scores: torch.Tensor, ids: torch.Tensor) -> None:
    """The kernels chose what the reference chooses. Raises ``SystemExit``."""
    from runtime.policy.inputs import make_tokens
    from runtime.policy.make import make_policy
    from runtime.policy.spec import parse_policy

    policy = make_policy(parse_policy(text), offloading=True, compiled=False)
    tokens = make_tokens(scores_TN=scores.cpu().double().numpy(), top_k=TOP_K, num_experts=EXPERTS)
    decided = policy.decide(policy.summarise(tokens, machine()), machine())
    if not np.array_equal(policy.reroute(tokens, decided, machine()).topk_ids_TK, ids.cpu().numpy()):
        raise SystemExit(f"{text}: the kernels disagree with the reference")


def over_the_host(text: str) -> Contender:
    """Logits to the host, the compiled CPU path, ids and weights back."""
    from runtime.policy.route import SoftmaxCaee
    from runtime.policy.spec import parse_policy, resolve

    route = SoftmaxCaee(resolve(parse_policy(text), offloading=True), machine(), TOP_K)

    def call(logits: torch.Tensor) -> object:
        ids, weights = route(logits.cpu().numpy())
        return torch.from_numpy(ids).to(logits.device), torch.from_numpy(weights).to(logits.device)

    return call


def batches(count: int, tokens: int, device: str) -> list[torch.Tensor]:
    """Logits of tokens that share a taste."""
    generator = torch.Generator().manual_seed(0)
    popular = torch.randn(EXPERTS, generator=generator)
    return [(2 * torch.randn(tokens, EXPERTS, generator=generator) + popular).to(device) for _ in range(count)]


def measure(tokens: int, effort: Effort) -> dict[str, Any]:
    """Median microseconds a layer of every contender, in turn: captured in a graph, and launch by launch."""
    inputs = batches(effort.batches, tokens, effort.device)
    contenders: dict[str, Contender] = {"torch": plain_torch}
    if importlib.util.find_spec("triton"):
        contenders |= {name: with_kernels(text, tokens, effort.device) for name, text in POLICIES.items()}
    eager = {name: over_all(call, inputs) for name, call in contenders.items()}
    graphs = {name: capture(run) for name, run in eager.items()} if effort.device == "cuda" else {}
    eager["over the host"] = over_all(over_the_host(POLICIES["caee"]), inputs)
    return {
        "tokens": tokens,
        "graph_microseconds": timed(graphs, effort),
        "eager_microseconds": timed(eager, effort),
    }


def over_all(call: Contender, inputs: list[torch.Tensor]) -> Callable[[], object]:
    return lambda: [call(logits) for logits in inputs]


def capture(run: Callable[[], object]) -> Callable[[], object]:
    """``run`` as a CUDA graph. What it compiles or allocates at its first call is done before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(runs: dict[str, Callable[[], object]], effort: Effort) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(effort.warmup + effort.rounds):
        for name, run in runs.items():
            seconds = seconds_on_gpu(run) if effort.device == "cuda" else seconds_on_host(run)
            if round_ >= effort.warmup:
                samples[name].append(seconds / effort.batches * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def seconds_on_gpu(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def seconds_on_host(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def table(results: list[dict[str, Any]]) -> Table:
    """Each time with its ratio to torch's, measured alike."""
    shown = Table(title=f"Routing {EXPERTS} experts, top-{TOP_K}, {DEVICES} devices: µs a layer (of torch)")
    for heading in ("tokens", "measured", *results[0]["eager_microseconds"]):
        shown.add_column(heading, justify="left" if heading == "measured" else "right")
    for result in results:
        for how in ("graph", "eager"):
            figures = result[f"{how}_microseconds"]
            cells = [f"{value:.1f} ({value / figures['torch']:.2f})" for value in figures.values()]
            if cells:
                shown.add_row(str(result["tokens"]), how, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    parser.add_argument("--cpu", action="store_true", help="run the same code without a GPU")
    arguments = parser.parse_args()
    if arguments.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    elif not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU that torch can use; --cpu runs the same code without one")
    effort = ON_CPU if arguments.cpu else ON_GPU
    results = [measure(tokens, effort) for tokens in effort.tokens]
    if arguments.json:
        document = {"schema": "caee.benchmark.gpu-decision/1", "device": effort.device}
        json.dump(document | {"results": results}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    Console(width=max(Console().width, 120)).print(table(results))


if __name__ == "__main__":
    main()
