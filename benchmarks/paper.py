"""The figures of arXiv:2606.29982 that a simulation can speak to, beside the paper's own, as Markdown.

    python benchmarks/paper.py --trace decode.jsonl.gz --loads decode_in2000out100.json > figures.md

``--trace``: token-level routing of gpt-oss-20b (topk-jsonl); ``--loads``: expert loads of DeepSeek-V3/R1 from SGLang.
Both are public; docs/paper.md says where. Takes some minutes on one core.

Shape legend: S steps, L layers, D devices, P passes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import paper_setting as setting

from runtime.cache import parse_cache
from runtime.cost import uniform_costs
from runtime.policy.spec import parse_policy, resolve
from runtime.policy.types import SHARE_UNIT
from runtime.profiles import profile_costs
from runtime.simulate.batches import Block, main_layers, plan
from runtime.simulate.index import index_of
from runtime.simulate.passes import make_pass
from runtime.simulate.placement import make_placement
from runtime.simulate.prepare import Prepared, prepare
from runtime.simulate.records import PassSpec, SimulatedMachine
from runtime.simulate.source import open_for_replay
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.records import TraceSource
from runtime.trace.synth.synthesise import SynthOptions, synthesise_file

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One policy's counted steps: experts moved, and the removed importance per token and layer."""

    moved_SLD: Counts
    removed: float

    @property
    def steps(self) -> int:
        return len(self.moved_SLD)

    @property
    def busiest(self) -> float:
        """Mean over steps of Σ over layers of the busiest device's movements."""
        return float(self.moved_SLD.max(axis=2).sum(axis=1).mean())


def replay(
    source: TraceSource, policies: Sequence[str], machine: SimulatedMachine, *, batch: int, slots: int | None
) -> list[Replayed]:
    """Every policy over the same steps, one step at a time so that each step's movements are known."""
    layers, experts = len(main_layers(source.meta)), source.meta.num_experts
    placement = make_placement("contiguous", layers=layers, experts=experts, devices=machine.devices)
    specs = [
        PassSpec(
            policy=resolve(parse_policy(policy), offloading=machine.offloading),
            cache=parse_cache("lfu") if machine.offloading else None,
            cache_experts=slots,
            placement=placement,
            machine=machine,
        )
        for policy in policies
    ]
    passes = [make_pass(spec, top_k=source.meta.top_k, has_scores=source.meta.scores_recorded) for spec in specs]
    warmup = max(1, setting.WARMUP_TOKENS // batch) if machine.offloading else 0
    totals: list[list[Counts]] = [[np.zeros((layers, machine.devices), np.int64)] for _ in passes]
    for number, (block, prepared) in enumerate(steps_of(source, batch)):
        if number == warmup + setting.STEPS:
            break
        for each, total in zip(passes, totals, strict=True):
            each.run(block, prepared, None, int(number < warmup))
            if number >= warmup:
                total.append(each.counts().after_LD.copy())
    return [
        Replayed(
            moved_SLD=np.stack(total[1:]) - np.stack(total[:-1]),
            removed=each.counts().removed / SHARE_UNIT / each.counts().tokens,
        )
        for each, total in zip(passes, totals, strict=True)
    ]


def steps_of(source: TraceSource, batch: int) -> Iterator[tuple[Block, Prepared]]:
    """Step by step, ``batch`` sequences together."""
    for block in plan(source, index_of(source), batch).blocks(1):
        rows = block.rows
        yield block, prepare(block.offsets_S1, rows.ids_RLK, rows.gates_RLK, source.meta.num_experts)


def offloading_machine() -> SimulatedMachine:
    """8 devices behind a host link each."""
    seconds = setting.EXPERT_BYTES / setting.HOST_BYTES_PER_S
    return SimulatedMachine(tier="host", costs=uniform_costs(seconds, setting.DEVICES))


def on_device_machine() -> SimulatedMachine:
    """16 devices that read every dispatched expert from their own memory."""
    costs = profile_costs(setting.ON_DEVICE_MACHINE, "device", setting.ON_DEVICE_DEVICES, setting.EXPERT_BYTES)
    return SimulatedMachine(tier="device", costs=costs)


def slots_for(source: TraceSource) -> int:
    """Cached experts of a device: 1,024 for DeepSeek-R1, for another model the same share of all its experts."""
    share = setting.CACHE_EXPERTS / (setting.LAYERS * setting.EXPERTS)
    return round(share * len(main_layers(source.meta)) * source.meta.num_experts)


# The tables -----------------------------------------------------------------------------------------------------------


def figure_4(source: TraceSource) -> None:
    """Highest and lowest importance among the activated experts, layer by layer."""
    layers = len(main_layers(source.meta))
    extremes = np.zeros((setting.FIGURE_4_STEPS, layers, 2))
    shares = np.zeros((setting.FIGURE_4_STEPS, layers, 2))
    for number, (_, prepared) in enumerate(steps_of(source, setting.FIGURE_4_BATCH)):
        if number == setting.FIGURE_4_STEPS:
            break
        for layer in range(layers):
            start, stop = prepared.active_start[layer : layer + 2]
            importance = prepared.importance[start:stop]
            extremes[number, layer] = importance.max(), importance.min()
        shares_LTK = prepared.shares.reshape(layers, -1, prepared.slots)
        shares[number] = np.stack([shares_LTK[..., 0].mean(axis=1), shares_LTK[..., -1].mean(axis=1)], axis=1)
    by_step, by_token = extremes.mean(axis=0) / SHARE_UNIT, shares.mean(axis=0) / SHARE_UNIT
    print("| layer | highest I(e) | lowest I(e) | ratio | a token's highest share | lowest | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layer in np.unique(np.linspace(0, layers - 1, 9).astype(int)):
        (high, low), (best, last) = by_step[layer], by_token[layer]
        print(
            f"| {source.meta.layer_numbers[layer]} | {high:.3f} | {low:.4f} | {high / low:.1f} "
            f"| {best:.3f} | {last:.3f} | {best / last:.1f} |"
        )


def figure_5(router: Replayed) -> None:
    """How far the busiest device is from the least busy one, within a layer and over a whole step."""
    by_layer = router.moved_SLD.max(axis=2) - router.moved_SLD.min(axis=2)
    moved_SD = router.moved_SLD.sum(axis=1)
    by_step = moved_SD.max(axis=1) - moved_SD.min(axis=1)
    print("| difference in experts moved | median | mean | 5 % | 95 % | largest | share of zero |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, gaps in (("one layer of one step", by_layer.reshape(-1)), ("one step, all layers", by_step)):
        low, middle, high = np.percentile(gaps, (5, 50, 95))
        print(
            f"| {name} | {middle:.0f} | {gaps.mean():.2f} | {low:.0f} | {high:.0f} | {gaps.max()} "
            f"| {np.mean(gaps == 0):.1%} |"
        )


def figure_10(router: Replayed, caee: Replayed) -> None:
    """Experts moved per device in some layers, mean over the steps, and in the step where the busiest moved most."""
    print("| MoE layer | router, mean per device | caee, mean per device | busiest: mean | busiest: highest |")
    print("| --- | --- | --- | --- | --- |")
    for layer in setting.FIGURE_10_LAYERS:
        if layer >= router.moved_SLD.shape[1]:
            continue
        before_SD, after_SD = (each.moved_SLD[:, layer] for each in (router, caee))
        means = [" ".join(f"{mean:.1f}" for mean in moved_SD.mean(axis=0)) for moved_SD in (before_SD, after_SD)]
        busiest = [moved_SD.max(axis=1) for moved_SD in (before_SD, after_SD)]
        print(
            f"| {layer} | {means[0]} | {means[1]} | {busiest[0].mean():.2f} → {busiest[1].mean():.2f} "
            f"| {busiest[0].max()} → {busiest[1].max()} |"
        )


def table_2(results: dict[int, list[Replayed]], seconds_per_expert: float) -> None:
    """TPOT reductions when experts are offloaded; the dense part is what the baseline's TPOT leaves."""
    fitted_cost, fitted_dense = fit_baseline({batch: passes[0].busiest for batch, passes in results.items()})
    print(f"Fitted on the baseline row together: {fitted_cost * 1e3:.2f} ms per expert, {fitted_dense:.3f} s dense.\n")
    print("| batch | θ | removed importance | movements of the busiest | movement time | TPOT | both fitted | paper |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for batch, (router, *treated) in results.items():
        baseline, *measured = setting.TABLE_2[batch]
        dense = baseline - router.busiest * seconds_per_expert
        row = f"| {batch} | router, {router.steps} steps | 0 | {router.busiest:.1f} "
        print(f"{row}| dense {dense:.3f} s | {baseline:.3f} s | | |")
        for theta, each, paper in zip(setting.THETAS, treated, measured, strict=True):
            saved = router.busiest - each.busiest
            print(
                f"| {batch} | {theta} | {each.removed:.4f} | {each.busiest:.1f} | {-saved / router.busiest:+.1%} "
                f"| {-saved * seconds_per_expert / baseline:+.1%} "
                f"| {-saved * fitted_cost / (fitted_dense + fitted_cost * router.busiest):+.1%} "
                f"| {paper / baseline - 1:+.1%} |"
            )


def fit_baseline(busiest: dict[int, float]) -> tuple[float, float]:
    """Seconds per expert and dense seconds that explain the paper's baseline TPOT by batch size, not below 0."""
    from scipy.optimize import nnls

    columns = np.array([[movements, 1.0] for movements in busiest.values()])
    (cost, dense), _ = nnls(columns, np.array([setting.TABLE_2[batch][0] for batch in busiest]))
    return float(cost), float(dense)


def movement_cuts(results: dict[int, list[Replayed]]) -> None:
    """The same without the paper's model: what θ does to movements."""
    print("| batch | θ | removed importance | movements of the busiest | movement time |")
    print("| --- | --- | --- | --- | --- |")
    for batch, (router, *treated) in results.items():
        print(f"| {batch} | router, {router.steps} steps | 0 | {router.busiest:.1f} | |")
        for theta, each in zip(setting.THETAS, treated, strict=True):
            change = each.busiest / router.busiest - 1
            print(f"| {batch} | {theta} | {each.removed:.4f} | {each.busiest:.1f} | {change:+.1%} |")


def table_4(source: TraceSource, machine: SimulatedMachine) -> None:
    """TPOT by θ when all experts are on the devices."""
    seconds = machine.costs.seconds_per_expert[0]
    print("| concurrency | θ | removed importance | reads of the busiest | reading time | TPOT, ms | paper, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for batch, measured in setting.TABLE_4.items():
        thetas = [theta for theta in measured if theta is not None]
        policies = ["router", *(f"caee:rule=score,theta={theta}" for theta in thetas)]
        router, *treated = replay(source, policies, machine, batch=batch, slots=None)
        baseline = measured[None]
        dense = baseline / 1e3 - router.busiest * seconds
        row = f"| {batch} | router, {router.steps} steps | 0 | {router.busiest:.1f} "
        print(f"{row}| dense {dense * 1e3:.2f} ms | {baseline} | {baseline} |")
        for theta, each in zip(thetas, treated, strict=True):
            tpot = 1e3 * (dense + each.busiest * seconds)
            print(
                f"| {batch} | {theta} | {each.removed:.4f} | {each.busiest:.1f} "
                f"| {each.busiest / router.busiest - 1:+.1%} | {tpot:.2f} ({tpot / baseline - 1:+.1%}) "
                f"| {measured[theta]} ({measured[theta] / baseline - 1:+.1%}) |"
            )


def offloaded(source: TraceSource) -> dict[int, list[Replayed]]:
    """By batch size: the router's pass, then caee's by θ."""
    policies = ["router", *(f"caee:rule=cir,theta={theta}" for theta in setting.THETAS)]
    return {
        batch: replay(source, policies, offloading_machine(), batch=batch, slots=slots_for(source))
        for batch in setting.BATCHES
    }


def report(name: str, source: TraceSource, *, as_paper: bool) -> None:
    """All tables of one trace; those with times only for the paper's model."""
    machine = offloading_machine()
    results = offloaded(source)
    at_batch = results[setting.FIGURE_BATCH]
    print(f"\n## {name}: Figure 4, importance of the activated experts\n")
    figure_4(source)
    print(f"\n## {name}: Figure 5, imbalance of transfers over {setting.DEVICES} devices\n")
    figure_5(at_batch[0])
    print(f"\n## {name}: Figure 10, missed experts by device (θ = {setting.FIGURE_10_THETA})\n")
    figure_10(at_batch[0], at_batch[1 + setting.THETAS.index(setting.FIGURE_10_THETA)])
    print(f"\n## {name}: Table II, offloading\n")
    if as_paper:
        table_2(results, machine.costs.seconds_per_expert[0])
        print(f"\n## {name}: Table IV, on-device\n")
        table_4(source, on_device_machine())
    else:
        movement_cuts(results)


@contextlib.contextmanager
def deepseek_r1(trace: Path, loads: Path) -> Iterator[TraceSource]:
    """The synthetic trace, in a temporary file."""
    options = SynthOptions(sequences=setting.SEQUENCES, tokens=setting.TOKENS, top_k=setting.TOP_K, seed=setting.SEED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deepseek-r1.parquet"
        synthesise_file(trace, loads, path, options)
        with open_for_replay(path) as source:
            yield source


def main() -> int:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="gpt-oss-20b, topk-jsonl or imported")
    parser.add_argument("--loads", type=Path, required=True, metavar="FILE", help="DeepSeek's expert loads from SGLang")
    given = parser.parse_args()
    with open_for_replay(given.trace, ImportOptions(num_experts=32)) as source:
        report("gpt-oss-20b, recorded", source, as_paper=False)
    with deepseek_r1(given.trace, given.loads) as source:
        report("DeepSeek-R1, synthetic", source, as_paper=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
