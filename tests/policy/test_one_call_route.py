"""The router and the decision in one compiled call: the same as in three stages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.errors import UsageError
from runtime.policy.inputs import make_machine, make_tokens
from runtime.policy.make import make_policy
from runtime.policy.route import SoftmaxCaee, route_plain
from runtime.policy.spec import parse_policy, resolve


def logits_of(rng: np.random.Generator, tokens: int, num_experts: int) -> Any:
    logits = rng.normal(size=(tokens, num_experts)) * rng.choice([0.1, 2, 30])
    if rng.random() < 0.4:
        logits = np.round(logits)
    return logits.astype(np.float32)


def exponentials(logits_TN: Any) -> Any:
    """exp(logit − the row's highest), value by value."""
    rows = [[math.exp(float(value) - float(max(row))) for value in row] for row in logits_TN]
    return np.array(rows).reshape(logits_TN.shape)


POLICIES = ["caee:rule=cir,theta=0.5", "caee:rule=score,theta=0.9", "caee:rule=score,theta=99", "caee"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), text=st.sampled_from(POLICIES), resident=st.booleans())
def test_decides_as_the_three_stages(seed: int, text: str, resident: bool) -> None:
    check_against_the_stages(seed, text, resident=resident, most_experts=40, most_tokens=8)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), text=st.sampled_from(POLICIES), resident=st.booleans())
def test_decides_as_the_three_stages_on_large_layers(seed: int, text: str, resident: bool) -> None:
    check_against_the_stages(seed, text, resident=resident, most_experts=400, most_tokens=80)


def check_against_the_stages(seed: int, text: str, *, resident: bool, most_experts: int, most_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    num_experts, devices = int(rng.integers(2, most_experts)), int(rng.integers(1, 5))
    top_k = int(rng.integers(1, min(num_experts, 9) + 1))
    logits_TN = logits_of(rng, int(rng.integers(0, most_tokens + 1)), num_experts)
    machine = make_machine(
        placement=rng.integers(0, devices, size=num_experts),
        cost_seconds=rng.integers(0, 4, size=num_experts) * 1e-3,
        resident=rng.random(num_experts) < 0.4 if resident else None,
        link_groups=[(list(range(devices)), 0.6)],
        devices=devices,
    )
    spec = resolve(parse_policy(text), offloading=resident)
    tokens = make_tokens(
        scores_TN=exponentials(logits_TN), selection_scores_TN=logits_TN, top_k=top_k, num_experts=num_experts
    )
    policy = make_policy(spec, offloading=resident)
    decision = policy.decide(policy.summarise(tokens, machine), machine)
    routed = policy.reroute(tokens, decision, machine)

    route = SoftmaxCaee(spec, machine, top_k)
    ids_TK, weights_TK = route(logits_TN)
    assert np.array_equal(ids_TK, routed.topk_ids_TK)
    assert np.allclose(weights_TK, routed.topk_weights_TK, rtol=1e-6, atol=1e-6)
    assert weights_TK.dtype == np.float32
    assert np.array_equal(route.kept_N, decision.kept_N)
    assert np.array_equal(route.load_D, decision.load_after_D)
    assert route.f_base == decision.f_base


def test_the_router_alone_is_softmax_top_k_renormalised() -> None:
    import torch

    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), 8, dim=-1)
    own_ids, own_weights = np.empty((20, 8), dtype=np.int64), np.empty((20, 8), dtype=np.float32)
    route_plain(logits.numpy(), np.empty(8), own_ids, own_weights)
    assert np.array_equal(own_ids, ids.numpy())
    assert np.allclose(own_weights, (weights / weights.sum(dim=-1, keepdim=True)).numpy(), atol=1e-6)


@pytest.mark.parametrize("text", ["importance", "caee:ceiling=0.1", "caee:reselect=all", "caee:renormalize=none"])
def test_what_the_one_call_does_not_do_is_refused(text: str) -> None:
    machine = make_machine(placement=[0, 0], cost_seconds=[1e-3, 1e-3])
    with pytest.raises(UsageError, match="one-call"):
        SoftmaxCaee(resolve(parse_policy(text), offloading=False), machine, 1)


def test_logits_that_are_not_float32_are_refused() -> None:
    machine = make_machine(placement=[0, 0], cost_seconds=[1e-3, 1e-3])
    route = SoftmaxCaee(resolve(parse_policy("caee"), offloading=False), machine, 1)
    with pytest.raises(UsageError, match="float32"):
        route(np.zeros((1, 2)))
