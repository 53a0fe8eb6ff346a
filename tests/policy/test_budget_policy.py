"""``budget``: optimal where it says so, near where it does not, and its controller on target."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.policy.inputs import make_machine, make_tokens
from runtime.policy.loads import cheapest_replicas
from runtime.policy.make import make_policy
from runtime.policy.reference import members, union_of_best
from runtime.policy.shares import shares
from runtime.policy.spec import parse_policy
from runtime.policy.types import SHARE_UNIT, Machine, Tokens


def small_layer(rng: np.random.Generator, *, equal: bool) -> tuple[Tokens, Machine]:
    num_experts, devices = int(rng.integers(2, 11)), int(rng.integers(1, 4))
    scores = rng.dirichlet(np.full(num_experts, 0.7), size=int(rng.integers(1, 6)))
    tokens = make_tokens(scores_TN=scores, top_k=int(rng.integers(1, min(num_experts, 4) + 1)), num_experts=num_experts)
    cost = np.full(num_experts, 1e-3) if equal else rng.uniform(0.5e-3, 2e-3, size=num_experts)
    resident = None if rng.random() < 0.3 else rng.random(num_experts) < 0.3
    placement = rng.integers(0, devices, size=num_experts)
    return tokens, make_machine(placement=placement, cost_seconds=cost, resident=resident, devices=devices)


def values(tokens: Tokens, machine: Machine, price: float) -> tuple[float, float]:
    """What the policy reaches, and the least that any set with every token's best expert reaches."""
    policy = make_policy(parse_policy(f"budget:price={price}"), offloading=machine.resident_NR is not None)
    summary = policy.summarise(tokens, machine)
    active, layer = members(summary.active_N), cheapest_replicas(machine)
    paid = [int(layer.paid_N[expert]) for expert in active if not layer.resident_N[expert]]
    mean = sum(paid) / len(paid) if paid else 0

    def value(kept: set[int]) -> float:
        removed = sum(int(summary.importance_N[expert]) for expert in active - kept)
        return (layer.f(kept) / mean if mean else 0.0) + price * removed / SHARE_UNIT

    always = union_of_best(tokens, shares(tokens), 1)
    others = sorted(active - always)
    subsets = (set(some) for size in range(len(others) + 1) for some in itertools.combinations(others, size))
    return value(members(policy.decide(summary, machine).kept_N)), min(value(always | some) for some in subsets)


def test_equals_brute_force_with_equal_costs() -> None:
    rng = np.random.default_rng(11)
    for _ in range(250):
        tokens, machine = small_layer(rng, equal=True)
        found, least = values(tokens, machine, float(rng.uniform(0, 8)))
        assert found == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_is_near_brute_force_with_unequal_costs() -> None:
    # Costs within a factor of four. The distances are stated in docs/policies.md.
    rng = np.random.default_rng(12)
    distances = []
    for _ in range(250):
        tokens, machine = small_layer(rng, equal=False)
        found, least = values(tokens, machine, float(rng.uniform(0, 8)))
        assert found >= least - 1e-9
        distances.append(found / least - 1 if least > 1e-9 else 0.0)
    assert np.mean(distances) < 0.005
    assert max(distances) < 0.2


def test_a_price_of_zero_prunes_to_the_mandatory_cost_and_a_high_one_prunes_nothing() -> None:
    rng = np.random.default_rng(13)
    for _ in range(50):
        tokens, machine = small_layer(rng, equal=True)
        layer = cheapest_replicas(machine)
        always = union_of_best(tokens, shares(tokens), 1)
        for price, expected in ((0, layer.f(always)), (1e12, None)):
            policy = make_policy(parse_policy(f"budget:price={price}"), offloading=machine.resident_NR is not None)
            decision = policy.decide(policy.summarise(tokens, machine), machine)
            assert decision.f_after == (decision.f_before if expected is None else expected)


# ---- the controller: removed importance per real token and layer meets epsilon


Traffic = Iterator[tuple[Tokens, Machine]]


def traffic(seed: int, steps: int, *, tokens: int = 8, sharp: tuple[float, float] = (1, 1), **machine: Any) -> Traffic:
    """Layer-steps of 12 layers with their own popular experts; ``sharp``: of the gates, before and after half-way."""
    rng = np.random.default_rng(seed)
    num_experts, devices = 32, machine.get("devices", 4)
    popular = rng.normal(size=(12, num_experts))
    placement = np.arange(num_experts) * devices // num_experts
    cost = rng.uniform(0.5e-3, 2e-3, size=num_experts) if machine.get("unequal") else np.full(num_experts, 1e-3)
    base = make_machine(placement=placement, cost_seconds=cost, resident=np.zeros(num_experts, dtype=bool))
    for step in range(steps):
        logits = sharp[step >= steps // 2] * (rng.normal(size=(tokens, num_experts)) + popular[step % 12])
        ids = np.argsort(-logits, axis=1)[:, :4]
        gates = np.exp(np.take_along_axis(logits, ids, axis=1) - logits.max())
        resident_NR = rng.random((num_experts, 1)) < 0.6
        chosen = make_tokens(topk_ids_TK=ids, gates_TK=gates, num_experts=num_experts)
        yield (
            chosen,
            Machine(
                placement_NR=base.placement_NR, cost_NR=base.cost_NR, resident_NR=resident_NR, devices=base.devices
            ),
        )


def ratios(layer_steps: Traffic, epsilon: float) -> tuple[float, float, float]:
    """Removed importance over the target: of the whole run, and least and most of any 500 layer-steps after 500."""
    policy = make_policy(parse_policy(f"budget:epsilon={epsilon}"), offloading=True)
    removed, tokens = [0.0], [0]
    for chosen, machine in layer_steps:
        summary = policy.summarise(chosen, machine)
        routed = policy.reroute(chosen, policy.decide(summary, machine), machine)
        removed.append(routed.removed / SHARE_UNIT)
        tokens.append(summary.tokens)
    removed_sum, token_sum = np.cumsum(removed), np.cumsum(tokens)
    windows = (removed_sum[1000:] - removed_sum[500:-500]) / (token_sum[1000:] - token_sum[500:-500])
    return removed_sum[-1] / token_sum[-1] / epsilon, windows.min() / epsilon, windows.max() / epsilon


@pytest.mark.parametrize(
    ("epsilon", "kind"),
    [
        (0.005, {}),
        (0.02, {}),
        (0.005, {"tokens": 2}),
        (0.01, {"tokens": 16, "devices": 8}),
        (0.01, {"unequal": True}),
        (0.01, {"sharp": (1, 2.5)}),
        (0.005, {"sharp": (2, 0.5)}),
    ],
    ids=str,
)
def test_removed_importance_meets_its_target(epsilon: float, kind: dict[str, Any]) -> None:
    whole, least, most = ratios(traffic(3, 2500, **kind), epsilon)
    assert 0.95 <= whole <= 1.05
    assert least >= 0.75
    assert most <= 1.25


def test_removed_importance_meets_its_target_on_real_routing(shared_data: Path) -> None:
    rows = []
    with gzip.open(shared_data / "routing" / "gpt_oss_20b" / "decode.jsonl.gz", "rt") as lines:
        for line in itertools.islice(lines, 0, 8 * 140):
            token = json.loads(line)
            rows.append((token["ids"], token["p"]))
    ids, gates = np.array([row[0] for row in rows]), np.array([row[1] for row in rows], dtype=np.float32)
    machine = make_machine(placement=np.arange(32) // 8, cost_seconds=np.full(32, 1e-3), resident=np.zeros(32, bool))

    def layer_steps() -> Traffic:
        rng = np.random.default_rng(4)
        for step, layer in itertools.product(range(140), range(24)):
            own = slice(8 * step, 8 * step + 8)
            chosen = make_tokens(topk_ids_TK=ids[own, layer], gates_TK=gates[own, layer], num_experts=32)
            yield (
                chosen,
                Machine(
                    placement_NR=machine.placement_NR,
                    cost_NR=machine.cost_NR,
                    resident_NR=rng.random((32, 1)) < 0.5,
                    devices=4,
                ),
            )

    whole, least, most = ratios(layer_steps(), 0.005)
    assert 0.95 <= whole <= 1.05
    assert least >= 0.75
    assert most <= 1.25


def test_a_target_out_of_reach_removes_what_it_can() -> None:
    # Every token has one expert of weight: nothing may go that counts, and the price falls without end.
    ids = np.array([[0, 1], [2, 3]])
    tokens = make_tokens(topk_ids_TK=ids, gates_TK=np.array([[1.0, 0.0], [1.0, 0.0]]), num_experts=4)
    machine = make_machine(placement=[0, 0, 1, 1], cost_seconds=[1e-3] * 4, resident=[False] * 4)
    policy = make_policy(parse_policy("budget:epsilon=0.1"), offloading=True)
    for _ in range(2000):
        decision = policy.decide(policy.summarise(tokens, machine), machine)
    assert members(decision.kept_N) == {0, 2}
    assert 0 < policy.state["price"] < 1e-3


def test_of_two_experts_alike_the_one_that_is_used_more_often_stays() -> None:
    tokens = make_tokens(scores_TN=[[0.6, 0.2, 0.2]] * 2, top_k=3, num_experts=3)
    for rate, lost in (([0, 0, 0], 2), ([0, 0.1, 0.4], 1), ([0, 0.4, 0.1], 2)):
        machine = make_machine(placement=[1, 0, 0], cost_seconds=[1e-3] * 3, resident=[False] * 3, rate=rate)
        policy = make_policy(parse_policy("budget:price=2,reuse=0.2"), offloading=True)
        decision = policy.decide(policy.summarise(tokens, machine), machine)
        assert list(np.flatnonzero(~decision.kept_N)) == [lost]


def test_reuse_is_worth_its_share_of_a_token() -> None:
    # 0.2 tokens of weight at a price of 4 save 0.8 of a fetch; used in every second step, 0.5 · 0.2 more: 1.2.
    tokens = make_tokens(scores_TN=[[0.8, 0.2]], top_k=2, num_experts=2)
    machine = make_machine(placement=[0, 0], cost_seconds=[1e-3] * 2, resident=[True, False], rate=[0, 0.5])
    for text, kept in (("budget:price=4", [0]), ("budget:price=4,reuse=0.2", [0, 1])):
        policy = make_policy(parse_policy(text), offloading=True)
        decision = policy.decide(policy.summarise(tokens, machine), machine)
        assert list(np.flatnonzero(decision.kept_N)) == kept
