"""Compares the GPU kernels with the reference; also a program, since Triton's interpreter needs a process of its own.

``python gpu_agreement.py random 300``, ``python gpu_agreement.py edges`` and so on print how many cases agreed, and
stop at the first that does not. With TRITON_INTERPRET=1 the kernels run on the CPU, else on the first GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from runtime.policy.case import read_inputs
from runtime.policy.inputs import make_machine, make_tokens
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


def assert_alike(spec: PolicySpec, tokens: Tokens, machine: Machine, *, choose: bool = False, ranks: int = 1) -> None:
    """The kernels decide as the reference does. ``choose``: the kernels pick the top k; ``ranks``: tokens are split."""
    from runtime.kernels.decision import DeviceDecision

    policy = make_policy(spec, offloading=machine.resident_NR is not None, compiled=False)
    summary = policy.summarise(tokens, machine)
    decision = policy.decide(summary, machine)
    routed = policy.reroute(tokens, decision, machine)
    rows, top_k = tokens.topk_ids_TK.shape
    parts = np.array_split(np.arange(rows), ranks)
    kernels = [
        DeviceDecision(spec, machine, top_k=top_k, max_tokens=max(1, len(part)), device=DEVICE) for part in parts
    ]
    for _ in range(2):  # buffers are left as the next layer needs them
        launches = [each.launches(**_rows(tokens, part, choose)) for each, part in zip(kernels, parts, strict=True)]
        for summarise, _, _ in launches:
            summarise()
        total = sum(each.buffers.summary.clone() for each in kernels)
        for each, (_, decide, reroute) in zip(kernels, launches, strict=True):
            each.buffers.summary.copy_(total)
            decide()
            reroute()

    for each in kernels:
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
    ids_TK = np.concatenate(
        [numbers(each.buffers.ids_TK)[: len(part)] for each, part in zip(kernels, parts, strict=True)]
    )
    weights_TK = np.concatenate(
        [numbers(each.buffers.weights_TK)[: len(part)] for each, part in zip(kernels, parts, strict=True)]
    )
    same("ids", ids_TK, routed.topk_ids_TK)
    expected_TK = routed.topk_weights_TK
    # float32 ends at 3e38, and the scores of some cases do not.
    expected_TK = expected_TK.astype(np.float32)
    assert np.allclose(weights_TK, expected_TK, rtol=0, atol=1e-6 * max(1, np.abs(expected_TK).max(initial=0))), (
        weights_TK,
        expected_TK,
    )
    same("removed", sum(each.figures()["removed"] for each in kernels), routed.removed)
    same("rerouted slots", sum(each.figures()["rerouted_slots"] for each in kernels), routed.rerouted_slots)


def same(name: str, found: Any, expected: Any) -> None:
    assert np.array_equal(found, expected), f"{name}: {found} and not {expected}"


def _rows(tokens: Tokens, part: Any, choose: bool) -> dict[str, Any]:
    ranks = tokens.selection_scores_TN
    return {
        "scores_TN": tensor(tokens.scores_TN[part]),
        "selection_scores_TN": None if ranks is None else tensor(ranks[part]),
        "topk_ids_TK": None if choose else tensor(tokens.topk_ids_TK[part]),
        "token_mask_T": tensor(tokens.token_mask_T[part]),
    }


def random_cases(count: int) -> int:
    """Small cases of every kind of router and machine, as many policies as cases."""
    cases = sibling("cases")
    rng = np.random.default_rng(11)
    for index in range(count):
        case = cases.make_case(rng, large=index % 30 == 0)
        _, tokens, machine = read_inputs(case)
        policy = cases.make_policy(rng, str(rng.choice(POLICIES)), offloading=machine.resident_NR is not None)
        choose = case.get("topk_ids") is None
        assert_alike(policy_from_mapping(policy), tokens, machine, choose=choose, ranks=1 + index % 3)
    return count


def sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(random_cases(int(sys.argv[2])), "cases agree")
