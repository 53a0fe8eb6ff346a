"""Time of routing with the decision against routing without it, on one core, tensors in and tensors out.

Run ``python benchmarks/decision.py`` (``--json`` for the figures alone). N = 256 experts, top-8, 8 devices. Each round
times every contender once on the same batches, so that drift of the machine falls on all alike. Times are the thread's
own, since what other processes take does not count; medians are given, and ratios of medians. The contenders:

- torch's softmax → topk → renormalise;
- the same router compiled, with the shortcut that renormalised weights need no softmax over all experts;
- the router and ``caee`` in one compiled call: offloading (``cir``, half of the experts cached), on-device (``score``);
- ``caee`` in three stages after torch's softmax and topk, with its inputs checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from runtime.policy.inputs import make_machine, make_tokens
from runtime.policy.make import make_policy
from runtime.policy.route import SoftmaxCaee, route_plain
from runtime.policy.spec import parse_policy, resolve
from runtime.policy.types import Machine

EXPERTS, TOP_K, DEVICES = 256, 8, 8
TOKENS = (1, 16, 64, 128)
BATCHES, ROUNDS, WARMUP = 20, 80, 10

Contender = Callable[[torch.Tensor], object]


def contenders(tokens: int) -> dict[str, Contender]:
    """What is timed on a batch of logits [T, N]; outputs are tensors (the compiled ones refill the same)."""
    ids, weights = torch.empty((tokens, TOP_K), dtype=torch.int64), torch.empty((tokens, TOP_K))
    ids_view, weights_view, room = ids.numpy(), weights.numpy(), np.empty(TOP_K)

    def plain_torch(logits: torch.Tensor) -> object:
        best, chosen = torch.topk(torch.softmax(logits, dim=-1), TOP_K, dim=-1)
        return chosen, best / best.sum(dim=-1, keepdim=True)

    def plain_compiled(logits: torch.Tensor) -> object:
        route_plain(logits.numpy(), room, ids_view, weights_view)
        return ids, weights

    return {
        "torch": plain_torch,
        "compiled": plain_compiled,
        "caee offloading": one_call("caee:rule=cir,theta=0.8", machine(offloading=True), tokens),
        "caee on-device": one_call("caee:rule=score,theta=0.6", machine(offloading=False), tokens),
        "caee in stages": in_stages("caee:rule=cir,theta=0.8", machine(offloading=True)),
    }


def machine(*, offloading: bool) -> Machine:
    """Experts in equal parts over the devices, equal costs."""
    rng = np.random.default_rng(0)
    return make_machine(
        placement=np.arange(EXPERTS) * DEVICES // EXPERTS,
        cost_seconds=np.full(EXPERTS, 1e-3),
        resident=rng.random(EXPERTS) < 0.5 if offloading else None,
    )


def one_call(text: str, layer: Machine, tokens: int) -> Contender:
    route = SoftmaxCaee(resolve(parse_policy(text), offloading=layer.resident_NR is not None), layer, TOP_K)
    ids, weights = route(np.zeros((tokens, EXPERTS), dtype=np.float32))
    refilled = torch.from_numpy(ids), torch.from_numpy(weights)

    def call(logits: torch.Tensor) -> object:
        route(logits.numpy())
        return refilled

    return call


def in_stages(text: str, layer: Machine) -> Contender:
    policy = make_policy(parse_policy(text), offloading=True)

    def call(logits: torch.Tensor) -> object:
        scores = torch.softmax(logits.double(), dim=-1)
        chosen = torch.topk(scores, TOP_K, dim=-1).indices
        tokens = make_tokens(scores_TN=scores.numpy(), topk_ids_TK=chosen.numpy(), num_experts=EXPERTS)
        routed = policy.reroute(tokens, policy.decide(policy.summarise(tokens, layer), layer), layer)
        return torch.from_numpy(routed.topk_ids_TK), torch.from_numpy(routed.topk_weights_TK)

    return call


def measure(tokens: int) -> dict[str, Any]:
    """Median microseconds a call of every contender, with the 5th and 95th percentile of the rounds."""
    generator = torch.Generator().manual_seed(0)
    popular = torch.randn(EXPERTS, generator=generator)
    batches = [2 * torch.randn(tokens, EXPERTS, generator=generator) + popular for _ in range(BATCHES)]
    timed = contenders(tokens)
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(WARMUP + ROUNDS):
        for name, call in timed.items():
            start = time.thread_time()
            for logits in batches:
                call(logits)
            samples[name].append((time.thread_time() - start) / BATCHES * 1e6)
    figures = {}
    for name, values in samples.items():
        kept = sorted(values[WARMUP:])
        figures[name] = {"median": statistics.median(kept), "p05": kept[ROUNDS // 20], "p95": kept[-ROUNDS // 20]}
    return {"tokens": tokens, "microseconds": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = [measure(tokens) for tokens in TOKENS]
    if as_json:
        document = {"schema": "caee.benchmark.decision/1", "experts": EXPERTS, "top_k": TOP_K, "devices": DEVICES}
        json.dump(document | {"results": results}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    Console(width=max(Console().width, 120)).print(table(results))


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"Routing {EXPERTS} experts, top-{TOP_K}, {DEVICES} devices: µs a call (of torch, of compiled)")
    shown.add_column("tokens", justify="right")
    for name in results[0]["microseconds"]:
        shown.add_column(name, justify="right")
    for result in results:
        figures = result["microseconds"]
        torch_time, compiled_time = figures["torch"]["median"], figures["compiled"]["median"]
        cells = [
            f"{value['median']:.1f} ({value['median'] / torch_time:.2f}, {value['median'] / compiled_time:.2f})"
            for value in figures.values()
        ]
        shown.add_row(str(result["tokens"]), *cells)
    return shown


if __name__ == "__main__":
    main()
