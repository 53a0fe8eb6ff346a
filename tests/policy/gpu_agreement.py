"""Compares the GPU kernels with the reference; also a program, since Triton's interpreter needs a process of its own.

``python gpu_agreement.py random:150:1 edges:2:1``: runs by name, count and seed. Each prints how many cases agreed; the
first that does not ends the program. With TRITON_INTERPRET=1 the kernels run on the CPU, else on the first GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from runtime.kernels.decision import DeviceDecision
from runtime.policy.case import read_inputs
from runtime.policy.inputs import make_groups, make_machine, make_tokens
from runtime.policy.make import make_policy
from runtime.policy.spec import parse_policy, policy_from_mapping
from runtime.policy.types import Machine, PolicySpec, Tokens

POLICIES = ("router", "caee", "importance", "budget")
SPECS = (
    "router",
    "caee",
    "caee:rule=cir,theta=0.5,reselect=all",
    "caee:rule=score,theta=0.4,compensation=none",
    "caee:theta=0.6,ceiling=0.2,renormalize=none",
    "importance:rule=score,theta=1",
    "importance:rule=cir,theta=1,renormalize=original,routed_scaling_factor=2.5",
    "budget:price=1",
    "budget:price=4,reselect=all,ceiling=0.3",
)
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def tensor(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(np.asarray(array), dtype=dtype, device=DEVICE)


def numbers(values: torch.Tensor) -> Any:
    return values.cpu().numpy()


def assert_alike(
    spec: PolicySpec,
    tokens: Tokens,
    machine: Machine,
    *,
    choose: bool = False,
    ranks: int = 1,
    dtype: torch.dtype = torch.float64,
) -> None:
    """The kernels decide as the reference does. ``choose``: they pick the top k; ``ranks``: the tokens are split."""
    parts = np.array_split(np.arange(len(tokens.token_mask_T)), ranks)
    on_ranks = [
        DeviceDecision(spec, machine, top_k=tokens.topk_ids_TK.shape[1], max_tokens=max(1, len(part)), device=DEVICE)
        for part in parts
    ]
    launches = [
        each.launches(**arguments(tokens, part, choose, dtype)) for each, part in zip(on_ranks, parts, strict=True)
    ]
    for summarise, _, _ in launches:
        summarise()
    total = sum(each.buffers.summary for each in on_ranks)
    for each, (_, decide, reroute) in zip(on_ranks, launches, strict=True):
        each.buffers.summary.copy_(total)
        decide()
        reroute()
    assert_outcome(on_ranks, parts, spec, tokens, machine)


def assert_outcome(
    on_ranks: list[DeviceDecision], parts: list[Any], spec: PolicySpec, tokens: Tokens, machine: Machine
) -> None:
    """What the kernels left in their buffers is what the reference decides."""
    policy = make_policy(spec, offloading=machine.resident_NR is not None, compiled=False)
    summary = policy.summarise(tokens, machine)
    decision = policy.decide(summary, machine)
    routed = policy.reroute(tokens, decision, machine)
    for each in on_ranks:
        buffers, figures = each.buffers, each.figures()
        same("importance", numbers(buffers.importance_N), summary.importance_N)
        same("active", numbers(buffers.active_N), summary.active_N)
        if decision.mandatory_N is not None:
            same("mandatory", numbers(buffers.mandatory_N), decision.mandatory_N)
            same("f_base", figures["f_base"], decision.f_base)
        same("kept", numbers(buffers.kept_N), decision.kept_N)
        same("device", numbers(buffers.device_N), decision.device_N)
        same("paid", numbers(buffers.paid_N), decision.paid_N)
        same("loads", numbers(buffers.loads_2D), np.stack([decision.load_before_D, decision.load_after_D]))
        expected = (decision.f_before, decision.f_after, summary.tokens, 0)
        same("figures", [figures[name] for name in ("f_before", "f_after", "tokens", "faults")], expected)
        assert not buffers.summary.any(), "the summary was not cleared"
    same("ids", rows(on_ranks, parts, "ids_TK"), routed.topk_ids_TK)
    weights_TK = rows(on_ranks, parts, "weights_TK")
    tolerance = 1e-6 * max(1, np.abs(routed.topk_weights_TK).max(initial=0))
    assert np.allclose(weights_TK, routed.topk_weights_TK, rtol=0, atol=tolerance), (weights_TK, routed)
    same("removed", sum(each.figures()["removed"] for each in on_ranks), routed.removed)
    same("re-routed slots", sum(each.figures()["rerouted_slots"] for each in on_ranks), routed.rerouted_slots)


def same(name: str, found: Any, expected: Any) -> None:
    assert np.array_equal(found, expected), f"{name}: {found} and not {expected}"


def rows(on_ranks: list[DeviceDecision], parts: list[Any], name: str) -> Any:
    """A buffer's rows of all ranks."""
    return np.concatenate(
        [numbers(getattr(each.buffers, name))[: len(part)] for each, part in zip(on_ranks, parts, strict=True)]
    )


def arguments(tokens: Tokens, part: Any, choose: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Some tokens as tensors."""
    ranks = tokens.selection_scores_TN
    assert tokens.scores_TN is not None
    return {
        "scores_TN": tensor(tokens.scores_TN[part], dtype),
        "selection_scores_TN": None if ranks is None else tensor(ranks[part], dtype),
        "topk_ids_TK": None if choose else tensor(tokens.topk_ids_TK[part]),
        "token_mask_T": tensor(tokens.token_mask_T[part]),
    }


# ---- what can be run


def random_cases(count: int, seed: int) -> int:
    """Small cases of every kind of router and machine; every tenth is split over two ranks."""
    cases = sibling("cases")
    rng = np.random.default_rng(seed)
    for index in range(count):
        case = cases.make_case(rng, large=index % 50 == 0)
        _, tokens, machine = read_inputs(case)
        tokens = some_rows(tokens, slice(0, index % 4))
        policy = cases.make_policy(rng, str(rng.choice(POLICIES)), offloading=machine.resident_NR is not None)
        policy.pop("reuse", None)
        choose = case.get("topk_ids") is None
        assert_alike(policy_from_mapping(policy), tokens, machine, choose=choose, ranks=1 + (index % 10 == 0))
    return count


def edge_cases(count: int, seed: int) -> int:
    """Every edge with every policy in turn, ``count`` cases of each edge."""
    rng = np.random.default_rng(seed)
    for index, edge in enumerate(EDGES):
        for turn in range(count):
            tokens, machine = edge_case(rng, edge)
            assert_alike(parse_policy(SPECS[(index + turn) % len(SPECS)]), tokens, machine)
    return count * len(EDGES)


EDGES = (
    "one device",
    "uneven placement",
    "all chosen",
    "equal scores",
    "zero scores",
    "huge scores",
    "negative selection scores",
    "empty slots",
    "padding",
    "only padding",
    "no tokens",
    "unequal costs",
    "free experts",
    "link groups",
    "everything resident",
    "nothing resident",
    "replicas",
)


def edge_case(rng: np.random.Generator, edge: str) -> tuple[Tokens, Machine]:
    """A random case that shows ``edge``."""
    num_experts, devices, top_k, count = 13, 4, 3, 3
    if edge == "the largest layer":
        num_experts, devices, top_k, count = 512, 64, 16, 2
    if edge == "one device":
        devices = 1
    if edge == "all chosen":
        num_experts = top_k = 7
    if edge == "no tokens":
        count = 0
    scores = rng.random((count, num_experts)) ** 4
    if edge in ("equal scores", "zero scores", "huge scores"):
        scores[:] = {"equal scores": 1 / 3, "zero scores": 0.0, "huge scores": 1e300}[edge]
    ranks = scores - 2 if edge == "negative selection scores" else None
    ids = np.argsort(rng.random(scores.shape), axis=1)[:, :top_k]
    ids = np.where(rng.random(ids.shape) < 0.4, -1, ids) if edge == "empty slots" else ids
    mask = np.ones(count, dtype=bool)
    if edge in ("padding", "only padding"):
        mask = np.arange(count) == (1 if edge == "padding" else count)
        scores[~mask] = np.nan
    cost = np.full(num_experts, 1e-3)
    if edge in ("unequal costs", "free experts", "the largest layer", "link groups"):
        cost = rng.integers(0 if edge == "free experts" else 1, 9, size=num_experts) * 2.5e-4
    groups: list[tuple[list[int], float]] = []
    if edge == "link groups":
        groups = [(list(range(size + 1)), 1 / (size + 1)) for size in range(devices)]
    placement: Any = rng.integers(0, devices, size=num_experts)
    resident: Any = rng.random(num_experts) < {"everything resident": 1, "nothing resident": 0}.get(edge, 0.4)
    if edge == "replicas":
        placement = np.stack([placement, rng.integers(-1, devices, size=num_experts)], axis=1)
        cost = rng.integers(0, 3, size=placement.shape) * 1e-3
        resident = rng.random(placement.shape) < 0.4
    if edge == "one device":
        resident = None
    tokens = make_tokens(
        scores_TN=scores, selection_scores_TN=ranks, topk_ids_TK=ids, token_mask_T=mask, num_experts=num_experts
    )
    return tokens, make_machine(
        placement=placement, cost_seconds=cost, resident=resident, link_groups=groups, devices=devices
    )


def ties(count: int, seed: int) -> int:
    """Sums that equal a threshold, levels of equal value, and experts on several devices that want one shared link."""
    rng = np.random.default_rng(seed)
    equal = make_tokens(scores_TN=np.full((2, 8), 0.25), topk_ids_TK=[[0, 1, 2, 3], [6, 3, 2, 5]], num_experts=8)
    one_device = make_machine(placement=[0] * 8, cost_seconds=[1e-3] * 8, resident=[False] * 8)
    for text in (
        "importance:rule=score,theta=0.5",
        f"importance:rule=cir,theta={(2**29 + 4) / 2**30!r}",
        "budget:price=4",
        "budget:price=2",
    ):
        assert_alike(parse_policy(text), equal, one_device)
    for _ in range(count):
        tokens, machine = edge_case(rng, "unequal costs")
        ids = np.argsort(-tokens.scores_TN, axis=1)[:, :3]
        tokens = dataclasses.replace(
            tokens, topk_ids_TK=ids, gates_TK=np.take_along_axis(tokens.scores_TN, ids, axis=1)
        )
        groups = make_groups([([0, 1, 2, 3], 0.4)], 4)
        machine = dataclasses.replace(machine, resident_NR=None, groups=groups)
        assert_alike(parse_policy("caee:rule=score,theta=0.8"), tokens, machine)
    return 4 + count


def largest_layers(count: int, seed: int) -> int:
    """Layers at the limits of the kernels, all but their number of tokens."""
    rng = np.random.default_rng(seed)
    for text in ("caee:theta=0.5", "budget:price=3", "importance:rule=score,reselect=all")[:count]:
        tokens, machine = edge_case(rng, "the largest layer")
        assert_alike(parse_policy(text), tokens, machine)
    return count


def narrow_scores(count: int, seed: int) -> int:
    """Scores as engines have them: the kernels widen, and never round."""
    rng = np.random.default_rng(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for spec in SPECS[1 : 1 + count]:
            tokens, machine = edge_case(rng, "unequal costs")
            scores = torch.tensor(tokens.scores_TN).to(dtype).double().numpy()
            tokens = make_tokens(scores_TN=scores, top_k=3, num_experts=scores.shape[1])
            assert_alike(parse_policy(spec), tokens, machine, choose=True, dtype=dtype)
    return 3 * count


def one_object_for_all_layers(count: int, seed: int) -> int:
    """Every call leaves the buffers as the next one needs them, whatever it found in them."""
    rng = np.random.default_rng(seed)
    tokens, machine = edge_case(rng, "unequal costs")
    for text in ("caee", "budget:price=2"):
        spec = parse_policy(text)
        decision = DeviceDecision(spec, machine, top_k=3, max_tokens=5, device=DEVICE)
        for _ in range(count):
            tokens, _ = edge_case(rng, "unequal costs")
            resident = rng.random(13) < 0.5
            ids_TK, weights_TK = decision(
                **arguments(tokens, slice(None), False, torch.float64), resident_NR=tensor(resident)
            )
            assert (ids_TK.shape, weights_TK.shape) == ((3, 3), (3, 3))
            layer = dataclasses.replace(machine, resident_NR=resident[:, None])
            assert_outcome([decision], [np.arange(3)], spec, tokens, layer)
    return 2 * count


def faulty_scores(count: int, seed: int) -> int:
    """A score that is no number, negative or infinite, or an id out of range: the router's own choice stands."""
    rng = np.random.default_rng(seed)
    for text in SPECS[:count]:
        tokens, machine = edge_case(rng, "nothing resident")
        spec = parse_policy(text)
        for fault in (float("nan"), float("inf"), -1.0, "rank", "id"):
            found = arguments(tokens, slice(None), False, torch.float32)
            choice = found["topk_ids_TK"]
            if fault == "id":
                choice[1, 2] = 99
            elif fault == "rank":
                found["selection_scores_TN"] = found["scores_TN"].clone()
                found["selection_scores_TN"][0, 5] = float("nan")
            else:
                found["scores_TN"][2, 3] = fault
            decision = DeviceDecision(spec, machine, top_k=3, max_tokens=3, device=DEVICE)
            ids_TK, _ = decision(**found)
            expected = numbers(choice)
            same("ids", numbers(ids_TK), np.where(expected == 99, -1, expected))
            same("faults", decision.figures()["faults"], 1)
            same("kept", numbers(decision.buffers.kept_N), numbers(decision.buffers.active_N))
            same("removed", decision.figures()["removed"], 0)
            same("f_after", decision.figures()["f_after"], decision.figures()["f_before"])
    return 5 * count


def replayed_graphs(count: int, seed: int) -> int:
    """A captured layer decides anew from what its inputs hold at each replay, and nothing in it waits for the host."""
    rng = np.random.default_rng(seed)
    for text in ("router", "caee", "importance:rule=score", "budget:price=2"):
        spec = parse_policy(text)
        tokens, machine = edge_case(rng, "unequal costs")
        held = arguments(tokens, slice(None), False, torch.float64)
        decision = DeviceDecision(spec, machine, top_k=3, max_tokens=3, device=DEVICE)
        decision(**held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decision(**held)
        for _ in range(count):
            tokens, _ = edge_case(rng, "unequal costs")
            for name, value in arguments(tokens, slice(None), False, torch.float64).items():
                if value is not None:
                    held[name].copy_(value)
            graph.replay()
            assert_outcome([decision], [np.arange(3)], spec, tokens, machine)
    return 4 * count


RUNS = {
    "random": random_cases,
    "edges": edge_cases,
    "ties": ties,
    "largest": largest_layers,
    "narrow": narrow_scores,
    "again": one_object_for_all_layers,
    "faults": faulty_scores,
    "graphs": replayed_graphs,
}


def some_rows(tokens: Tokens, part: Any) -> Tokens:
    """Some of the tokens."""
    fields = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    return Tokens(**{name: None if array is None else array[part] for name, array in fields.items()})


def sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of divisions whose results are masked out
    for _run in sys.argv[1:]:
        _name, _count, _seed = _run.split(":")
        print(RUNS[_name](int(_count), int(_seed)), _name, "cases agree")
