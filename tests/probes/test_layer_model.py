"""Layer times by activated experts: lines, tables, and what is held out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.layer_model import LINE_ERROR, fit_layer, holdout_errors, naive_line
from probes.records import LayerFit, ModelForm

COUNTS = [1, 2, 4, 8, 16, 32, 64]


@given(beta=st.floats(1e-6, 1e-3), slope=st.floats(1e-6, 1e-4))
def test_a_line_is_found_again(beta: float, slope: float) -> None:
    fit = fit_layer(COUNTS, [beta + slope * n for n in COUNTS])
    assert fit.form is ModelForm.AFFINE
    assert fit.beta_seconds == pytest.approx(beta, rel=1e-6, abs=1e-12)
    assert fit.seconds_per_expert == pytest.approx(slope, rel=1e-6)
    assert fit.seconds(100) == pytest.approx(beta + 100 * slope, rel=1e-6)


def test_a_floor_is_no_line() -> None:
    """Below some load a kernel is bound by its launch: the line is refused, the rows are the model."""
    times = [max(30e-6, 2e-6 * n) for n in COUNTS]
    fit = fit_layer(COUNTS, times)
    assert fit.form is ModelForm.TABLE
    assert [fit.seconds(n) for n in COUNTS] == pytest.approx(times)
    assert fit.seconds(48) == pytest.approx(96e-6)
    assert fit.seconds(128) == pytest.approx(256e-6), "beyond the last row it goes on as it ended"
    assert fit.seconds(0.5) == pytest.approx(30e-6), "before the first it does not fall"
    assert fit.seconds_per_expert == pytest.approx((128e-6 - 30e-6) / (64 - 8)), "its upper half"


@given(
    counts=st.lists(st.integers(1, 500), min_size=2, max_size=12).filter(lambda found: len(set(found)) > 1),
    data=st.data(),
)
def test_a_fit_either_reaches_every_row_or_is_the_rows(counts: list[int], data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(1e-6, 1e-1), min_size=len(counts), max_size=len(counts)))
    fit = fit_layer(counts, times)
    if fit.form is ModelForm.AFFINE:
        assert all(abs(fit.seconds(n) / t - 1) <= LINE_ERROR + 1e-9 for n, t in zip(counts, times, strict=True))
    else:
        for count in set(counts):
            median = float(np.median([t for n, t in zip(counts, times, strict=True) if n == count]))
            assert fit.seconds(count) == pytest.approx(median, rel=1e-9)
    assert fit.seconds_per_expert >= 0
    assert all(math.isfinite(fit.seconds(n)) and fit.seconds(n) >= 0 for n in (0, *counts)) or not fit.knots


def test_a_table_agrees_with_plain_interpolation() -> None:
    knots = ((1.0, 3.0), (4.0, 5.0), (10.0, 4.0))
    fit = LayerFit(form=ModelForm.TABLE, beta_seconds=0.0, seconds_per_expert=0.0, knots=knots)
    for n in np.linspace(0.0, 10.0, 41):
        assert fit.seconds(float(n)) == pytest.approx(float(np.interp(n, [1, 4, 10], [3, 5, 4])))
    assert fit.seconds(20.0) == 4.0, "a last slope that falls is not followed below zero"


def test_held_out_rows_do_not_reach_the_fit() -> None:
    times = [1e-5 + 1e-6 * n for n in COUNTS]
    spoilt = [time * (2.0 if at % 2 else 1.0) for at, time in enumerate(times)]
    assert holdout_errors(COUNTS, times) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    assert holdout_errors(COUNTS, spoilt) == pytest.approx((0.5, 0.5, 0.5))
    assert holdout_errors([3, 1, 3, 2], [1.0, 1.0, 1.0, 1.0]) is None


def test_the_naive_line_lets_large_rows_decide() -> None:
    times = [max(30e-6, 2e-6 * n) for n in COUNTS]
    line = naive_line(COUNTS, times)
    assert line.form is ModelForm.AFFINE
    slope, beta = np.polyfit(COUNTS, times, 1)
    assert (line.seconds_per_expert, line.beta_seconds) == pytest.approx((slope, beta))
