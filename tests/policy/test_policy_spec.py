"""Policies by name: what is accepted, what is refused and how, and that reports show every parameter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from probes.errors import CaseError, UsageError
from runtime.policy.inputs import make_machine, make_tokens
from runtime.policy.make import make_policy
from runtime.policy.spec import (
    POLICIES,
    format_policy,
    parse_policy,
    policy_as_mapping,
    policy_from_mapping,
    refuse_without_scores,
    resolve,
)

WRITTEN = {
    "caee:theta=0.7": {"rule": "cir", "theta": 0.7},
    "caee": {"rule": "cir", "theta": 0.8},
    "importance:rule=score": {"rule": "score", "theta": 0.6},
    "budget": {"epsilon": 0.005},
    "budget:price=2": {"price": 2.0},
    "budget:epsilon=0.01,reuse=0.2": {"epsilon": 0.01, "reuse": 0.2},
    "xshare:per_device=3": {"per_device": 3},
    "lynx:keep=4": {"alpha": 1.0, "beta": 10, "keep": 4},
    "max-rank:m=6": {"j": 1, "m": 6},
    "random": {"rule": "cir", "theta": 0.8, "seed": 0},
}


@pytest.mark.parametrize(("text", "parameters"), WRITTEN.items())
def test_defaults_are_filled_in(text: str, parameters: dict[str, object]) -> None:
    assert resolve(parse_policy(text), offloading=True).parameters == parameters


def test_the_default_rule_follows_residency() -> None:
    assert resolve(parse_policy("caee"), offloading=False).parameters == {"rule": "score", "theta": 0.6}
    assert make_policy(parse_policy("caee"), offloading=True).spec.parameters == {"rule": "cir", "theta": 0.8}


def test_every_form_of_a_policy_says_the_same(cases: ModuleType) -> None:
    rng = np.random.default_rng(1)
    for name in [*cases.PARAMETERS, "random"] * 20:
        given = {"name": name} if name == "random" else cases.make_policy(rng, name, offloading=True)
        spec = resolve(policy_from_mapping(given), offloading=True)
        assert resolve(parse_policy(format_policy(spec)), offloading=True).parameters == spec.parameters
        again = policy_from_mapping(policy_as_mapping(spec))
        assert policy_as_mapping(resolve(again, offloading=True)) == policy_as_mapping(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cae", "did you mean caee"),
        ("caee:thta=1", "did you mean theta"),
        ("caee:rule=cir,theta=1.5", "out of range"),
        ("caee:theta", "key=value"),
        ("caee:theta=1,theta=1", "twice"),
        ("caee:theta=nan", "not finite"),
        ("caee:ceiling=1", "out of range"),
        ("budget:epsilon=0", "out of range"),
        ("budget:epsilon=0.1,price=1", "exclude"),
        ("budget:reuse=-1", "between 0 and 1000"),
        ("budget:reuse=1e9", "between 0 and 1000"),
        ("skip:beta=2", "out of range"),
        ("oea:k0=0", "out of range"),
        ("oea:k0=1.5", "not an integer"),
        ("xshare", "exactly one"),
        ("lynx", "needs keep"),
        ("router:theta=1", "unknown key"),
        ("", "unknown policy"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(text)
    assert caught.value.exit_code == 2
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_theta_is_checked_against_the_rule_that_the_machine_implies() -> None:
    spec = parse_policy("caee:theta=1.5")
    assert resolve(spec, offloading=False).parameters["theta"] == 1.5
    with pytest.raises(UsageError, match="cir"):
        resolve(spec, offloading=True)
    with pytest.raises(UsageError, match="resident"):
        resolve(parse_policy("caee:compensation=resident"), offloading=False)


NEED_SCORES = ("xshare:budget=2", "lynx:keep=2", "max-rank:m=3", "cache-prior:lambda=1", "random")
DO_WITHOUT = ("router", "caee", "importance", "budget", "top-k:k0=1", "skip:beta=0.5", "oea:k0=1", "max-rank:m=2")


def test_policies_that_need_full_scores_are_refused_without_them() -> None:
    tokens = make_tokens(topk_ids_TK=[[0, 1]], gates_TK=[[0.7, 0.3]], num_experts=4)
    machine = make_machine(placement=[0, 0, 1, 1], cost_seconds=[1e-3] * 4, resident=[False, True, False, True])
    for text in NEED_SCORES:
        with pytest.raises(UsageError, match="full scores"):
            refuse_without_scores(parse_policy(text), top_k=2)
        with pytest.raises(CaseError, match="full scores"):
            make_policy(parse_policy(text), offloading=True).summarise(tokens, machine)
    for text in DO_WITHOUT:
        refuse_without_scores(parse_policy(text), top_k=2)
        for compiled in (True, False):
            policy = make_policy(parse_policy(text), offloading=True, compiled=compiled)
            decision = policy.decide(policy.summarise(tokens, machine), machine)
            routed = policy.reroute(tokens, decision, machine)
            assert set(routed.topk_ids_TK[0]) <= {0, 1, -1}


def test_the_documentation_describes_every_policy_and_parameter() -> None:
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    described = {part.split("**", 1)[0]: part for part in page.split("\n**`")[1:]}
    for name, info in POLICIES.items():
        paragraph = described[f"{name}`"]
        assert all(f"`{key}`" in paragraph.split(":", 1)[0] for key in info.keys), name
