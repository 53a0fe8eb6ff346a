"""Every policy on every cache: what it saves against the router, and at what loss of importance.

Run ``python benchmarks/policy_grid.py [TRACE]`` (``--json`` for the figures alone). TRACE is a routing trace in any
format that ``caee trace import`` reads, with decode tokens; the default is the gpt-oss-20b trace of the shared data
folder beside the checkout. Each machine is DEVICES × CACHED (experts that one device's cache holds) with a batch size.
Figures leave out 50 warm-up steps.

- *cut*: of the mean over steps of Σ_layers max_d paid movements, against ``router`` on the same cache.
- *same cache*: ``budget`` at the removed importance of ``caee`` on this cache: its cut over that of ``caee``.
- *against lfu*: ``budget`` at the removed importance of ``caee`` with ``lfu``: what it cuts with this cache over what
  ``caee`` cuts with ``lfu``, both counted from ``router`` with ``lfu``.
- *reuse*: the same of ``budget`` with ``reuse`` = 0.2.
- *fixed*: the same of ``budget`` at that fixed price which removes as much over the whole run: what its controller,
  which cannot know that price beforehand, is measured by. Of ``lfu``, plain, and aged and admitting.

``--half 0`` and ``--half 1`` take every other sequence, to tune on one and hold out the other.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from runtime.cache import parse_cache
from runtime.cost import CostTable
from runtime.policy.spec import parse_policy, resolve
from runtime.policy.types import NO_GROUPS
from runtime.simulate.placement import make_placement
from runtime.simulate.records import PassFigures, PassSpec, Placement, SimulatedMachine
from runtime.simulate.run import simulate
from runtime.trace.chunking import select
from runtime.trace.importers.detect import detect_and_open
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.records import LoadProfile, RoutingTrace, TraceSource

SHARED_TRACE = Path(__file__).parents[2] / "shared" / "data" / "routing" / "gpt_oss_20b" / "decode.jsonl.gz"
WARMUP_STEPS = 50
MACHINES = ("8:4x96", "16:8x48")
AGED = tuple(f"lfu:decay={decay},admit=1" for decay in (0.97, 0.98, 0.99))
CACHES = (
    "lfu",
    "lru",
    "lfu:decay=0.98",
    "lfu:admit=1",
    *AGED,
    "forecast",
    "forecast:prefetch=1",
    "belady",
)
THETAS = (0.8, 0.7)
PRICES = (0.1, 1000.0)
PRICE_STEPS = 14
REUSE = ("", ",reuse=0.2")
POLICIES = (
    "router",
    *(f"caee:theta={theta}" for theta in THETAS),
    *(f"importance:theta={theta}" for theta in THETAS),
    "budget:epsilon=0.005",
    "budget:epsilon=0.01",
    "budget:epsilon=0.02",
    "top-k:k0=3",
    "skip:beta=0.2",
    "oea:k0=2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A trace in memory; only the sequences whose number is ``half`` modulo 2, or all."""

    trace: tuple[RoutingTrace, ...]
    meta: Any
    notes: tuple[str, ...] = ()
    fraction_read: float = 1.0

    def chunks(self) -> Iterator[RoutingTrace]:
        return iter(self.trace)


def hold(source: TraceSource, half: int | None) -> Held:
    """Read ``source`` once, for all passes."""
    chunks = [
        chunk if half is None else select(chunk, np.flatnonzero(chunk.token_sequence_T % 2 == half))
        for chunk in source.chunks()
    ]
    return Held(trace=tuple(chunks), meta=source.meta)


@dataclass(slots=True, kw_only=True)
class Bench:
    """One trace on one machine."""

    source: Held
    batch_size: int
    machine: SimulatedMachine
    placement: Placement
    cached: int

    def run(self, pairs: list[tuple[str, str]]) -> list[PassFigures]:
        """The figures of each (policy, cache)."""
        passes = [
            PassSpec(
                policy=resolve(parse_policy(policy), offloading=True),
                cache=parse_cache(cache),
                cache_experts=self.cached,
                placement=self.placement,
                machine=self.machine,
            )
            for policy, cache in pairs
        ]
        result = simulate(self.source, passes, batch_size=self.batch_size, warmup_steps=WARMUP_STEPS)
        return list(result.passes)


def make_bench(source: Held, text: str) -> Bench:
    """The machine written ``BATCH:DEVICESxCACHED``."""
    batch, shape = text.split(":")
    devices, cached = (int(part) for part in shape.split("x"))
    return Bench(
        source=source,
        batch_size=int(batch),
        machine=SimulatedMachine(
            tier="host", costs=CostTable(seconds_per_expert=(1e-3,) * devices, groups=NO_GROUPS), origin="equal"
        ),
        placement=make_placement(
            "contiguous", layers=source.meta.moe_layers, experts=source.meta.num_experts, devices=devices
        ),
        cached=cached,
    )


def grid(bench: Bench) -> dict[str, Any]:
    """All policies on all caches, then ``budget`` at the removed importance of ``caee``."""
    pairs = [(policy, cache) for cache in CACHES for policy in POLICIES]
    found = dict(zip(pairs, bench.run(pairs), strict=True))
    matched = [
        (matching(found[f"caee:theta={theta}", source], reuse), cache)
        for cache in CACHES
        for theta in THETAS
        for source in (cache, "lfu")
        for reuse in REUSE
    ]
    matched = list(dict.fromkeys(matched))
    found |= dict(zip(matched, bench.run(matched), strict=True))
    fixed = {
        (theta, cache, source): at_fixed_price(bench, cache, found[f"caee:theta={theta}", source].removed_importance)
        for cache in ("lfu", *AGED)
        for theta in THETAS
        for source in {cache, "lfu"}
    }

    def misses(policy: str, cache: str) -> float:
        return found[policy, cache].max_device_misses_per_step

    def ratio(theta: float, cache: str, baseline: str, reuse: str = "") -> float:
        caee = f"caee:theta={theta}"
        before = misses("router", baseline)
        budget = matching(found[caee, baseline], reuse)
        return (before - misses(budget, cache)) / (before - misses(caee, baseline))

    def fixed_ratio(theta: float, cache: str, baseline: str) -> float | None:
        figures = fixed.get((theta, cache, baseline))
        if figures is None:
            return None
        before = misses("router", baseline)
        return (before - figures.max_device_misses_per_step) / (before - misses(f"caee:theta={theta}", baseline))

    return {
        "cells": [
            {
                "policy": policy,
                "cache": cache,
                "max_device_misses_per_step": figures.max_device_misses_per_step,
                "movements_per_step": sum(figures.misses_per_device) / figures.steps,
                "removed_importance": figures.removed_importance,
                "cut": 1 - figures.max_device_misses_per_step / misses("router", cache),
            }
            for (policy, cache), figures in found.items()
        ],
        "ratios": [
            {
                "theta": theta,
                "cache": cache,
                "same_cache": ratio(theta, cache, cache),
                "against_lfu": ratio(theta, cache, "lfu"),
                "same_cache_reuse": ratio(theta, cache, cache, REUSE[1]),
                "against_lfu_reuse": ratio(theta, cache, "lfu", REUSE[1]),
                "same_cache_fixed": fixed_ratio(theta, cache, cache),
                "against_lfu_fixed": fixed_ratio(theta, cache, "lfu"),
            }
            for theta in THETAS
            for cache in CACHES
        ],
    }


def matching(caee: PassFigures, reuse: str) -> str:
    """``budget`` that removes as much as ``caee`` did."""
    return f"budget:epsilon={caee.removed_importance:.9g}{reuse}"


def at_fixed_price(bench: Bench, cache: str, removed: float) -> PassFigures:
    """``budget`` at the price that removes most nearly ``removed``, found by halving the interval of log prices."""
    low, high = (math.log(price) for price in PRICES)
    tried: list[PassFigures] = []
    for _ in range(PRICE_STEPS):
        middle = (low + high) / 2
        tried += bench.run([(f"budget:price={math.exp(middle):.9g}", cache)])
        too_much = tried[-1].removed_importance > removed
        low, high = (middle, high) if too_much else (low, middle)
    return min(tried, key=lambda figures: abs(figures.removed_importance - removed))


def show(console: Console, machine: str, figures: dict[str, Any]) -> None:
    """The two tables of one machine."""
    cells = {(cell["policy"], cell["cache"]): cell for cell in figures["cells"]}
    table = Table(title=f"batch:devices×cached {machine}: cut, removed importance", title_justify="left")
    table.add_column("policy")
    for cache in CACHES:
        table.add_column(cache, justify="right")
    router = [cells["router", cache]["max_device_misses_per_step"] for cache in CACHES]
    table.add_row("router, movements of the busiest device", *(f"{value:.2f}" for value in router))
    for policy in POLICIES[1:]:
        row = [cells[policy, cache] for cache in CACHES]
        table.add_row(policy, *(f"{cell['cut']:.1%} {cell['removed_importance']:.4f}" for cell in row))
    console.print(table)
    ratios = Table(title="budget at the removed importance of caee, cut over its cut", title_justify="left")
    columns = [f"{what}{how}" for how in ("", "_reuse", "_fixed") for what in ("same_cache", "against_lfu")]
    for name in ("theta", "cache", *columns):
        ratios.add_column(name.replace("_", " "), justify="right")
    for row in figures["ratios"]:
        shown = ("–" if row[column] is None else f"{row[column]:.3f} ×" for column in columns)
        ratios.add_row(f"{row['theta']:g}", row["cache"], *shown)
    console.print(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="default: the gpt-oss-20b trace of the shared data")
    parser.add_argument("--num-experts", type=int, help="experts of a layer, where the file does not say")
    parser.add_argument("--machine", action="append", metavar="BATCH:DEVICESxCACHED", help=f"default: {MACHINES}")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every other sequence only")
    parser.add_argument("--json", action="store_true", help="figures only")
    options = parser.parse_args()
    path, experts = options.trace, options.num_experts
    if path is None:
        if not SHARED_TRACE.exists():
            parser.error("give a trace: the shared data folder is not beside this checkout")
        path, experts = SHARED_TRACE, experts or 32
    source = detect_and_open(path, ImportOptions(num_experts=experts))
    if isinstance(source, LoadProfile):
        parser.error(f"{path} holds loads, not tokens")
    held = hold(source, options.half)
    figures = {machine: grid(make_bench(held, machine)) for machine in options.machine or MACHINES}
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    console = Console(width=220)
    for machine, one in figures.items():
        show(console, machine, one)


if __name__ == "__main__":
    main()
