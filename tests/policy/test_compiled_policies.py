"""The compiled policies decide exactly as the plain ones, on random cases and on every edge case."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.case import read_inputs
from runtime.policy.inputs import make_machine, make_tokens
from runtime.policy.make import make_policy
from runtime.policy.spec import parse_policy, policy_from_mapping
from runtime.policy.types import Decision, Machine, Policy, PolicySpec, Routed, Summary, Tokens

COMPILED = ("router", "caee", "importance", "budget", "top-k", "skip", "oea")
SPECS = (
    "router",
    "caee",
    "caee:rule=score,theta=0.4,compensation=none",
    "caee:rule=cir,theta=0.5,reselect=all",
    "caee:theta=0.6,ceiling=0.2,renormalize=none",
    "importance:rule=score,theta=1",
    "importance:rule=cir,theta=1,renormalize=original,routed_scaling_factor=2.5",
    "budget:price=1",
    "budget:price=4,reselect=all",
    "budget:epsilon=0.05,ceiling=0.3",
    "budget:price=2,reuse=0.7",
    "budget:epsilon=0.05,reuse=0.2",
    "top-k:k0=2",
    "skip:beta=0.6",
    "oea:k0=1",
)


def outcome(policy: Policy, tokens: Tokens, machine: Machine) -> tuple[Summary, Decision, Routed]:
    summary = policy.summarise(tokens, machine)
    decision = policy.decide(summary, machine)
    return summary, decision, policy.reroute(tokens, decision, machine)


def assert_alike(spec: PolicySpec, tokens: Tokens, machine: Machine) -> None:
    offloading = machine.resident_NR is not None
    plain = make_policy(spec, offloading=offloading, compiled=False)
    compiled = make_policy(spec, offloading=offloading)
    assert type(plain).__module__ != type(compiled).__module__
    expected, found = outcome(plain, tokens, machine), outcome(compiled, tokens, machine)
    assert plain.state == compiled.state
    for one, other in zip(expected, found, strict=True):
        for field in dataclasses.fields(one):
            value, against = getattr(one, field.name), getattr(other, field.name)
            if field.name == "topk_weights_TK":
                assert np.allclose(value, against, rtol=0, atol=1e-6 * max(1, np.abs(value).max(initial=0)))
            else:
                assert np.array_equal(value, against), (spec, field.name, value, against)


def test_agree_on_ten_thousand_random_cases(cases: ModuleType) -> None:
    rng = np.random.default_rng(7)
    for index in range(10_000 // len(COMPILED) + 1):
        case = cases.make_case(rng, large=index % 50 == 0)
        _, tokens, machine = read_inputs(case)
        for name in COMPILED:
            policy = cases.make_policy(rng, name, offloading=machine.resident_NR is not None)
            assert_alike(policy_from_mapping(policy), tokens, machine)


@st.composite
def inputs(draw: st.DrawFn, edge: str) -> tuple[Tokens, Machine]:
    """Tokens and a machine that show the named edge; everything else is left to hypothesis."""
    wide = edge in ("ids above 255", "more than 8 slots")
    num_experts = draw(st.integers(260, 280) if wide else st.integers(1, 13))
    devices = 1 if edge == "one device" else draw(st.integers(1, 5))
    if edge == "uneven placement":
        num_experts, devices = 2 * devices + 1, devices + (devices == 1)
    top_k = draw(st.integers(9, 12) if wide else st.integers(1, num_experts))
    top_k = num_experts if edge == "all chosen" else top_k
    tokens = 0 if edge == "no tokens" else draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 3, 1000]))
    scores = rng.integers(0, levels + 1, size=(tokens, num_experts)) / levels
    if edge == "equal scores":
        scores[:] = draw(st.sampled_from([1.0, 1 / 3, 1e-300, 1e300]))
    if edge == "zero scores":
        scores[:] = 0
    ranks = ids = resident = None
    if edge == "negative selection scores":
        ranks = rng.integers(-levels, 0, size=scores.shape) / levels
    if edge in ("empty slots", "ids above 255"):
        ids = np.argsort(rng.random(scores.shape), axis=1)[:, :top_k]
        ids[rng.random(ids.shape) < 0.4] = -1
        if edge == "ids above 255":
            ids = np.where(ids < 200, -1, ids)
    mask = rng.random(tokens) < 0.5 if edge == "padding" else np.ones(tokens, dtype=bool)
    if edge == "padding":
        scores[~mask] = np.nan
    if edge == "everything resident":
        resident = np.ones(num_experts, dtype=bool)
    elif edge == "nothing resident":
        resident = np.zeros(num_experts, dtype=bool)
    elif draw(st.booleans()):
        resident = rng.random(num_experts) < 0.5
    cost = np.full(num_experts, 1e-3)
    if edge == "unequal costs":
        cost = rng.integers(0, 9, size=num_experts) * 2.5e-4
    groups = []
    if edge == "link groups":
        groups = [(list(range(size + 1)), 1 / (size + 1)) for size in range(devices)]
    placement = rng.integers(0, devices, size=num_experts)
    if edge == "replicas":
        placement = np.stack([placement, rng.integers(-1, devices, size=num_experts)], axis=1)
        cost = rng.integers(0, 3, size=placement.shape) * 1e-3
        resident = None if resident is None else rng.random(placement.shape) < 0.4
    chosen = make_tokens(
        scores_TN=scores,
        selection_scores_TN=ranks,
        topk_ids_TK=ids,
        token_mask_T=mask,
        top_k=top_k,
        num_experts=num_experts,
    )
    if edge == "weights only":
        chosen = dataclasses.replace(chosen, scores_TN=None)
    machine = make_machine(
        placement=placement,
        cost_seconds=cost,
        resident=resident,
        link_groups=groups,
        devices=devices,
        rate=rng.integers(0, 5, size=num_experts) / 4,
    )
    return chosen, machine


EDGES = (
    "one device",
    "uneven placement",
    "all chosen",
    "equal scores",
    "zero scores",
    "negative selection scores",
    "empty slots",
    "padding",
    "no tokens",
    "unequal costs",
    "link groups",
    "everything resident",
    "nothing resident",
    "ids above 255",
    "more than 8 slots",
    "replicas",
    "weights only",
)


@pytest.mark.parametrize("edge", EDGES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_agree_on_every_edge_case(edge: str, data: st.DataObject) -> None:
    tokens, machine = data.draw(inputs(edge))
    for text in SPECS:
        assert_alike(parse_policy(text), tokens, machine)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("compiled", [True, False])
def test_splitting_the_tokens_over_ranks_changes_nothing(ranks: int, compiled: bool, cases: ModuleType) -> None:
    rng = np.random.default_rng(ranks)
    apart = ("cache-prior",)  # its running mean is over a rank's own tokens
    for name in [name for name in cases.PARAMETERS if name not in apart]:
        for _ in range(25):
            spec, tokens, machine = read_inputs(cases.make_case(rng, name=name))
            offloading = machine.resident_NR is not None
            whole = outcome(make_policy(spec, offloading=offloading, compiled=compiled), tokens, machine)
            parts = [part(tokens, rows) for rows in np.array_split(np.arange(len(tokens.token_mask_T)), ranks)]
            policies = [make_policy(spec, offloading=offloading, compiled=compiled) for _ in parts]
            summaries = [policy.summarise(own, machine) for policy, own in zip(policies, parts, strict=True)]
            total = summaries[0]
            for summary in summaries[1:]:
                total = total + summary
            decisions = [policy.decide(total, machine) for policy in policies]
            for decision in decisions:
                assert np.array_equal(decision.kept_N, whole[1].kept_N)
                assert (decision.f_base, decision.f_after) == (whole[1].f_base, whole[1].f_after)
            routed = [
                policy.reroute(own, decision, machine)
                for policy, own, decision in zip(policies, parts, decisions, strict=True)
            ]
            assert np.array_equal(np.concatenate([each.topk_ids_TK for each in routed]), whole[2].topk_ids_TK)
            weights = np.concatenate([each.topk_weights_TK for each in routed])
            assert np.array_equal(weights, whole[2].topk_weights_TK)
            assert sum(each.removed for each in routed) == whole[2].removed


def part(tokens: Tokens, rows: Any) -> Tokens:
    """Some of the tokens, as one rank has them."""
    fields = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    return Tokens(**{name: None if array is None else array[rows] for name, array in fields.items()})
