"""The one parameter that a search turns, and the search itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import UsageError
from runtime.policy.knob import furthest, is_given, knob_of, turned
from runtime.policy.make import make_policy
from runtime.policy.spec import format_policy, parse_policy


@given(count=st.integers(1, 40), good=st.integers(0, 40))
def test_the_furthest_acceptable_setting_in_few_tries(count: int, good: int) -> None:
    settings = tuple(float(number) for number in range(count))
    tried = []

    def acceptable(setting: float) -> bool:
        tried.append(setting)
        return setting < good

    plain = [setting for setting in settings if setting < good]
    assert furthest(settings, acceptable) == (plain[-1] if plain else None)
    assert len(tried) == len(set(tried)) <= count.bit_length()


def test_nothing_after_an_unacceptable_setting_is_tried() -> None:
    tried: list[float] = []

    def acceptable(setting: float) -> bool:
        tried.append(setting)
        return False

    assert furthest((1.0, 2.0, 3.0, 4.0), acceptable) is None
    assert tried == sorted(tried, reverse=True)
    assert tried[-1] == 1.0, "the mildest is always among them"


@pytest.mark.parametrize(
    ("policy", "offloading", "key", "mildest", "furthest_setting"),
    [
        ("caee", True, "theta", 0.98, 0.2),
        ("importance", True, "theta", 0.98, 0.2),
        ("caee", False, "theta", 0.05, 3.0),
        ("caee:rule=cir", False, "theta", 0.98, 0.2),
        ("random:rule=score", True, "theta", 0.05, 3.0),
        ("budget", True, "epsilon", 0.0005, 0.2),
    ],
)
def test_every_setting_is_one_that_the_policy_takes(
    policy: str, offloading: bool, key: str, mildest: float, furthest_setting: float
) -> None:
    spec = parse_policy(policy)
    knob = knob_of(spec, offloading=offloading)
    assert (knob.key, knob.settings[0], knob.settings[-1]) == (key, mildest, furthest_setting)
    assert len(set(knob.settings)) == len(knob.settings)
    for value in knob.settings:
        made = make_policy(turned(spec, knob, value), offloading=offloading)
        assert made.spec.parameters[key] == value
        assert parse_policy(format_policy(made.spec)).parameters[key] == value


@pytest.mark.parametrize("policy", ["router", "top-k:k0=2", "budget:price=3", "skip:beta=0.1"])
def test_a_policy_without_a_knob_is_refused(policy: str) -> None:
    with pytest.raises(UsageError, match="has no theta or epsilon to search"):
        knob_of(parse_policy(policy), offloading=True)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("caee", False),
        ("caee:compensation=none", False),
        ("caee:theta=0.7", True),
        ("caee: theta = 0.7", True),
        ("budget", False),
        ("budget:ceiling=0.3", False),
        ("budget:epsilon=0.01", True),
        ("budget:price=2", True),
        ("router", True),
        ("oea:k0=2", True),
    ],
)
def test_what_is_given_is_not_searched(written: str, expected: bool) -> None:
    assert is_given(written) is expected
