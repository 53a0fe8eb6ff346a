"""Times as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import UsageError
from probes.units import format_seconds, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("412us", 0.000412),
        ("412 \N{MICRO SIGN}s", 0.000412),
        ("412\N{GREEK SMALL LETTER MU}s", 0.000412),
        ("0.4ms", 0.0004),
        (" 0.4 MS ", 0.0004),
        ("2s", 2.0),
        ("2", 2.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e-4", 0.0001),
        ("1.5e3ns", 0.0000015),
        ("-3ms", -0.003),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "us", "fast", "1 h", "1m", "1,5", "nan", "inf", "1e999", "1 2", "0x10", "1_000"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        parse_seconds(text)


@given(st.just(0.0) | st.floats(1e-30, 1e15))
def test_a_number_of_python_s_is_read_as_it_is(seconds: float) -> None:
    assert parse_seconds(repr(seconds)) == seconds


@given(st.floats(1e-9, 999.4))
def test_what_is_shown_is_read_back(seconds: float) -> None:
    assert math.isclose(parse_seconds(format_seconds(seconds)), seconds, rel_tol=6e-3)
