"""The brake: when it acts, for how long, and that it is a function of what it was told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.errors import UsageError
from runtime.policy.guard import Brake, BrakeSettings, parse_brake

SETTINGS = BrakeSettings(budget=0.1, sample_every=4, mean_over=3, hold=10, longest_hold=40, trial=5)


def drive(brake: Brake, errors: list[float], steps: int) -> list[bool]:
    """``steps`` layer-steps, the samples taken from ``errors`` in turn (its last one for ever)."""
    allowed = []
    for _ in range(steps):
        allowed.append(brake.advance())
        if brake.sample_due:
            brake.observe(errors.pop(0) if len(errors) > 1 else errors[0])
    return allowed


def test_small_errors_never_brake() -> None:
    brake = Brake(SETTINGS)
    assert all(drive(brake, [0.09], 400))
    assert (brake.trips, brake.braked_steps, brake.engaged) == (0, 0, False)
    assert brake.mean_error == pytest.approx(0.09)


def test_samples_come_at_their_distance() -> None:
    brake = Brake(SETTINGS)
    due = []
    for _ in range(12):
        brake.advance()
        due.append(brake.sample_due)
    assert due == [False, False, False, True] * 3


def test_a_mean_over_budget_brakes_for_the_hold_and_then_tries_again() -> None:
    brake = Brake(SETTINGS)
    allowed = drive(brake, [0.15, 0.15, 0.15, 0.0], 12 + 10 + 40)
    assert allowed[:12] == [True] * 12
    assert allowed[12:22] == [False] * 10
    assert allowed[22:] == [True] * 40
    assert (brake.trips, brake.braked_steps) == (1, 10)


def test_one_sample_over_budget_is_no_reason_and_one_alarm_is() -> None:
    brake = Brake(SETTINGS)
    drive(brake, [0.25, 0.0], 40)
    assert brake.trips == 0
    for error in (0.41, math.nan, math.inf):
        brake = Brake(SETTINGS)
        drive(brake, [error, 0.0], 4)
        assert brake.engaged
        assert not brake.advance()


def test_relapses_brake_longer_up_to_a_limit_and_a_quiet_time_forgets_them() -> None:
    brake = Brake(SETTINGS)
    holds = []
    for _ in range(4):
        drive(brake, [1.0], 4)
        assert brake.engaged
        braked = brake.braked_steps
        while not brake.advance():
            pass
        holds.append(brake.braked_steps - braked)
        drive(brake, [0.0], 3)  # finishes the distance to the next sample
    assert holds == [10, 20, 40, 40]
    drive(brake, [0.0], 4 * SETTINGS.trial)
    drive(brake, [1.0], 4)
    braked = brake.braked_steps
    while not brake.advance():
        pass
    assert brake.braked_steps - braked == 10


@settings(max_examples=50, deadline=None)
@given(errors=st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_ranks_that_observe_the_same_brake_alike(errors: list[float]) -> None:
    first, second = Brake(SETTINGS), Brake(SETTINGS)
    assert drive(first, list(errors), 300) == drive(second, list(errors), 300)


@pytest.mark.parametrize("layers", [1, 4, 24, 32, 58, 64])
def test_all_layers_are_sampled_in_turn(layers: int) -> None:
    brake = Brake(BrakeSettings(budget=0.1), layers=layers)
    assert 64 <= brake.distance < 70
    sampled = []
    for step in range(layers * brake.distance):
        brake.advance()
        if brake.sample_due:
            brake.observe(0.0)
            sampled.append(step % layers)
    assert sorted(sampled) == list(range(layers))
    assert (brake.samples, brake.layer_steps) == (layers, layers * brake.distance)


def test_a_brake_is_written_as_a_budget_and_settings() -> None:
    assert parse_brake("0.1") == BrakeSettings(budget=0.1)
    assert parse_brake("5e-2:sample_every=16,alarm=2.5,hold=8") == BrakeSettings(
        budget=0.05, sample_every=16, alarm=2.5, hold=8
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "could not convert"),
        ("much", "could not convert"),
        ("-1", "not a positive number"),
        ("nan", "not a positive number"),
        ("0.1:hold", "invalid literal"),
        ("0.1:hold=2.5", "invalid literal"),
        ("0.1:hold=0", "not at least 1"),
        ("0.1:budget=2", "no setting 'budget'"),
        ("0.1:patience=3", "no setting 'patience'"),
    ],
)
def test_a_brake_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        parse_brake(text)
    assert refused.value.hint is not None
    assert "--brake 0.1" in refused.value.hint


@pytest.mark.parametrize(
    "wrong", [{"budget": 0}, {"budget": math.nan}, {"alarm": 1}, {"hold": 0}, {"sample_every": 0}], ids=str
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        BrakeSettings(**{"budget": 0.1, **wrong})  # type: ignore[arg-type]  # wrong on purpose
