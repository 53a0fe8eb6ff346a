"""What must hold of every decision, whatever the input."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.case import explain_case, read_inputs
from runtime.policy.make import make_policy
from runtime.policy.spec import policy_from_mapping
from runtime.policy.types import Decision, LinkGroups, Machine, PolicySpec, Routed, Summary, Tokens

MANY = settings(max_examples=150, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
PER_TOKEN = ("top-k", "skip", "max-rank", "cache-prior")


@pytest.fixture(scope="module")
def drawn(cases: ModuleType) -> Any:
    """Inputs from a seed: ``drawn(seed, name)`` gives a policy's spec, tokens and a machine."""

    def draw(seed: int, name: str | None = None) -> tuple[PolicySpec, Tokens, Machine]:
        spec, tokens, machine = read_inputs(cases.make_case(np.random.default_rng(seed), name=name))
        if seed % 8 == 0:
            spec = policy_from_mapping({"name": "random", "theta": 0.3})
        return spec, tokens, machine

    return draw


def outcome(spec: PolicySpec, tokens: Tokens, machine: Machine) -> tuple[Summary, Decision, Routed]:
    policy = make_policy(spec, offloading=machine.resident_NR is not None)
    summary = policy.summarise(tokens, machine)
    decision = policy.decide(summary, machine)
    return summary, decision, policy.reroute(tokens, decision, machine)


@MANY
@given(seed=SEEDS)
def test_only_kept_experts_are_dispatched_and_none_twice(drawn: Any, seed: int) -> None:
    spec, tokens, machine = drawn(seed)
    _, decision, routed = outcome(spec, tokens, machine)
    allowed_N = decision.kept_N
    if spec.compensation == "resident" and machine.resident_NR is not None:
        allowed_N = allowed_N | machine.resident_NR[:, 0]
    for ids in routed.topk_ids_TK:
        real = ids[ids >= 0]
        assert allowed_N[real].all()
        assert len(set(real)) == len(real)
    assert (routed.topk_ids_TK[~tokens.token_mask_T] == -1).all()
    assert (routed.topk_weights_TK[routed.topk_ids_TK < 0] == 0).all()


@MANY
@given(seed=SEEDS, name=st.sampled_from(["caee", "importance", "budget"]))
def test_pruning_never_costs(drawn: Any, seed: int, name: str) -> None:
    spec, tokens, machine = drawn(seed - seed % 8 + 1, name)
    summary, decision, _ = outcome(spec, tokens, machine)
    assert decision.f_after <= decision.f_before
    assert not (decision.kept_N & ~summary.active_N).any()
    if name == "caee":
        assert decision.f_base is not None
        assert decision.f_after <= decision.f_base
    if name == "importance":
        assert decision.f_after == decision.f_base
    if summary.active_N.any():
        assert decision.kept_N.any()


@MANY
@given(seed=SEEDS)
def test_weights_sum_as_the_renormalisation_says(drawn: Any, seed: int) -> None:
    spec, tokens, machine = drawn(seed)
    _, _, routed = outcome(spec, tokens, machine)
    assert tokens.scores_TN is not None
    factor = 1.0 if spec.routed_scaling_factor is None else spec.routed_scaling_factor
    for row in np.flatnonzero(tokens.token_mask_T):
        new, own = routed.topk_ids_TK[row], tokens.topk_ids_TK[row]
        chosen = tokens.scores_TN[row, new[new >= 0]].sum()
        over = {"original": tokens.scores_TN[row, own[own >= 0]].sum(), "none": 1.0}.get(spec.renormalize or "", chosen)
        expected = chosen / over * factor if over > 0 else 0.0
        assert routed.topk_weights_TK[row].sum() == pytest.approx(expected, rel=1e-9)


@MANY
@given(
    seed=SEEDS, name=st.sampled_from(["router", "caee", "importance", "budget", "oea", "xshare", "lynx", *PER_TOKEN])
)
def test_permuting_tokens_changes_only_their_order(drawn: Any, seed: int, name: str) -> None:
    spec, tokens, machine = drawn(seed - seed % 8 + 1, name)
    order = np.random.default_rng(seed).permutation(len(tokens.token_mask_T))
    permuted = dataclasses.replace(
        tokens,
        topk_ids_TK=tokens.topk_ids_TK[order],
        gates_TK=tokens.gates_TK[order],
        scores_TN=None if tokens.scores_TN is None else tokens.scores_TN[order],
        selection_scores_TN=None if tokens.selection_scores_TN is None else tokens.selection_scores_TN[order],
        token_mask_T=tokens.token_mask_T[order],
    )
    summary, decision, routed = outcome(spec, tokens, machine)
    summary_p, decision_p, routed_p = outcome(spec, permuted, machine)
    assert np.array_equal(summary.importance_N, summary_p.importance_N)
    assert np.array_equal(decision.kept_N, decision_p.kept_N)
    assert np.array_equal(routed.topk_ids_TK[order], routed_p.topk_ids_TK)
    assert np.array_equal(routed.topk_weights_TK[order], routed_p.topk_weights_TK)
    assert routed.removed == routed_p.removed


@MANY
@given(seed=SEEDS)
def test_relabelling_devices_changes_only_their_labels(drawn: Any, seed: int) -> None:
    spec, tokens, machine = drawn(seed - seed % 8 + 1)
    label_D = np.random.default_rng(seed).permutation(machine.devices)
    groups = machine.groups
    relabelled = dataclasses.replace(
        machine,
        placement_NR=label_D[machine.placement_NR],
        groups=LinkGroups(starts_G1=groups.starts_G1, members=label_D[groups.members], factors_G=groups.factors_G),
    )
    _, decision, routed = outcome(spec, tokens, machine)
    _, decision_l, routed_l = outcome(spec, tokens, relabelled)
    assert np.array_equal(decision.kept_N, decision_l.kept_N)
    assert (decision.f_before, decision.f_after) == (decision_l.f_before, decision_l.f_after)
    assert np.array_equal(decision.load_after_D, decision_l.load_after_D[label_D])
    assert np.array_equal(routed.topk_ids_TK, routed_l.topk_ids_TK)


THETAS = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted)


def assert_one_way(rule: str, low: set[int], high: set[int], least_is_met: bool) -> None:
    """``low``, ``high``: the mandatory sets at a lower and a higher θ."""
    if rule == "cir":
        assert low <= high
    elif least_is_met:
        assert high <= low
    else:
        # Nothing reaches the higher θ: one expert stands in.
        assert len(high) <= 1


@MANY
@given(
    seed=SEEDS,
    thetas=THETAS,
    rule=st.sampled_from(["cir", "score"]),
    name=st.sampled_from(["caee", "importance"]),
    compiled=st.booleans(),
)
def test_theta_moves_the_mandatory_set_one_way(
    drawn: Any, seed: int, thetas: list[float], rule: str, name: str, compiled: bool
) -> None:
    _, tokens, machine = drawn(seed)
    mandatory = []
    for theta in thetas:
        spec = policy_from_mapping({"name": name, "rule": rule, "theta": theta})
        policy = make_policy(spec, offloading=machine.resident_NR is not None, compiled=compiled)
        summary = policy.summarise(tokens, machine)
        decision = policy.decide(summary, machine)
        assert decision.mandatory_N is not None
        mandatory.append(set(np.flatnonzero(decision.mandatory_N).tolist()))
    assert_one_way(rule, *mandatory, bool((summary.importance_N >= round(thetas[1] * 2**30)).any()))


def test_theta_moves_what_explain_shows_one_way(cases: ModuleType) -> None:
    rng = np.random.default_rng(11)
    for at in range(150):
        case = cases.make_case(rng, name="caee")
        rule = ("cir", "score")[at % 2]
        thetas = sorted(float(theta) for theta in rng.uniform(0.01, 1, size=2))
        found = []
        for theta in thetas:
            policy = {"name": ("caee", "importance")[at // 2 % 2], "rule": rule, "theta": theta}
            found.append(explain_case(case | {"policy": policy}))
        highest = max(found[1]["importance"], default=0.0)
        met = round(highest * 2**30) >= round(thetas[1] * 2**30)
        assert_one_way(rule, set(found[0]["mandatory"]), set(found[1]["mandatory"]), met)


@MANY
@given(seed=SEEDS, ceiling=st.floats(0, 0.9), name=st.sampled_from(["caee", "importance", "budget"]))
def test_no_token_loses_more_than_the_ceiling(drawn: Any, seed: int, ceiling: float, name: str) -> None:
    _, tokens, machine = drawn(seed)
    parameters = {"price": 0.0} if name == "budget" else {"rule": "score", "theta": 3.0}
    spec = policy_from_mapping({"name": name, "ceiling": ceiling, "compensation": "none", **parameters})
    _, _, routed = outcome(spec, tokens, machine)
    for own, new, gates in zip(tokens.topk_ids_TK, routed.topk_ids_TK, tokens.gates_TK, strict=True):
        total = gates[own >= 0].sum()
        lost = gates[(own >= 0) & (new < 0)].sum()
        if total > 0:
            assert lost / total <= ceiling + 2 * len(own) / 2**30
