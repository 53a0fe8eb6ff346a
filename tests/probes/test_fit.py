"""The estimators against simulated links whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.fit import fit_link
from probes.forms import predict
from probes.holdout import holdout_error
from probes.records import LinkMeasurement, LinkModel, LinkStatus, ModelForm, Sample, Segment
from probes.regression import Observations, Replicates, fit_line
from probes.simulated import Regime, SimulatedLink
from probes.simulated import simulated_sweep as sweep_over

SWEEPS = 200
SIZES = tuple(4096 * 2**step for step in range(14))


def simulated_sweep(link: SimulatedLink, sizes: tuple[int, ...] = SIZES, count: int = 15) -> LinkMeasurement:
    return sweep_over(link, sizes, count)


def two_regimes(*, faster_by: float = 4.0, noise: float = 0.03, seed: int = 0) -> SimulatedLink:
    """A link that has another latency and slope from 256 KiB on."""
    return SimulatedLink(
        Regime(from_bytes=0, slope_seconds_per_byte=1e-9, beta_seconds=2e-6),
        Regime(from_bytes=256 << 10, slope_seconds_per_byte=1e-9 / faster_by, beta_seconds=3e-4),
        noise=noise,
        outliers=0.05,
        seed=seed,
    )


def affine_link(seed: int) -> tuple[SimulatedLink, float, float]:
    generator = np.random.default_rng(seed)
    beta, rate = 10 ** generator.uniform(-5.3, -4.0), 10 ** generator.uniform(9.0, 10.7)
    regime = Regime(from_bytes=0, slope_seconds_per_byte=1 / rate, beta_seconds=beta)
    return SimulatedLink(regime, noise=0.03, outliers=0.05, seed=seed), beta, rate


def fitted(link: SimulatedLink, seed: int = 0, **sweep: int) -> LinkModel:
    model = fit_link(simulated_sweep(link, **sweep), seed=seed)
    assert model is not None
    return model


@pytest.fixture(scope="module")
def affine_fits() -> list[tuple[LinkModel, SimulatedLink, float, float]]:
    links = [affine_link(seed) for seed in range(SWEEPS)]
    return [(fitted(link, seed), link, beta, rate) for seed, (link, beta, rate) in enumerate(links)]


def test_parameters_come_back(affine_fits: list[tuple[LinkModel, SimulatedLink, float, float]]) -> None:
    beta_errors = [abs(model.beta_seconds / beta - 1) for model, _, beta, _ in affine_fits]
    slope_errors = [abs(model.alpha / model.bandwidth_bytes_per_s * rate - 1) for model, _, _, rate in affine_fits]
    assert np.median(beta_errors) <= 0.035
    assert np.median(slope_errors) <= 0.005
    assert all(model.form is ModelForm.AFFINE and model.status == "ok" for model, *_ in affine_fits)


def test_intervals_cover_as_often_as_they_say(
    affine_fits: list[tuple[LinkModel, SimulatedLink, float, float]],
) -> None:
    covered = {"beta": 0, "bandwidth": 0}
    for model, _, beta, rate in affine_fits:
        assert model.ci95 is not None
        covered["beta"] += model.ci95.beta_seconds[0] <= beta <= model.ci95.beta_seconds[1]
        low, high = model.ci95.effective_bandwidth_bytes_per_s
        covered["bandwidth"] += low <= rate <= high
    assert all(0.90 <= count / SWEEPS <= 0.99 for count in covered.values()), covered


def expected_error(model: LinkModel, link: SimulatedLink, sizes: tuple[int, ...] = SIZES, sweeps: int = 12) -> float:
    """What the model is really off by: mean |relative error| against the medians of new sweeps as long as the fitted
    one, over many of them. (One new sweep alone would scatter by a fifth.)
    """
    fresh = [sample for _ in range(sweeps) for sample in simulated_sweep(link, sizes).samples]
    return float(np.mean([abs(model.seconds(s.size_bytes) / np.median(s.seconds) - 1) for s in fresh]))


def test_the_hold_out_error_of_every_sweep_is_the_error_on_new_measurements(
    affine_fits: list[tuple[LinkModel, SimulatedLink, float, float]],
) -> None:
    ratios = [(model.holdout_mape or 0.0) / expected_error(model, link) for model, link, *_ in affine_fits]
    assert 0.9 <= np.median(ratios) <= 1.15
    assert np.mean([1 / 1.5 <= ratio <= 1.5 for ratio in ratios]) >= 0.99, sorted(ratios)


def test_the_hold_out_error_holds_between_the_sizes_and_in_two_regimes() -> None:
    """At sizes that no fit ever saw, half a step from those that were measured."""
    between = tuple(int(size * math.sqrt(2.0)) for size in SIZES[:-1])
    links = [two_regimes(faster_by=4.0, seed=seed) for seed in range(6)]
    models = [fitted(link, seed) for seed, link in enumerate(links)]
    for link, model in zip(links, models, strict=True):
        assert 1 / 1.5 <= (model.holdout_mape or 0.0) / expected_error(model, link, between) <= 1.5


def test_the_hold_out_error_is_far_above_that_of_the_noise_where_the_form_is_wrong() -> None:
    """A curve is no noise: the misses of a line are not put down to chance."""
    bent = [Sample(size_bytes=s, seconds=tuple(1e-9 * s**1.2 * (1 + 1e-3 * k) for k in range(9))) for s in SIZES]
    observed = Observations.of(bent)
    line = fit_line(observed, nonnegative_beta=True)
    misses = [
        (line.beta + line.slope * size) / median - 1 for size, median in zip(SIZES, observed.medians_K, strict=True)
    ]
    errors = Replicates.of(observed).errors_K.tolist()
    error = holdout_error(misses, errors, parameters=2, sizes=len(SIZES))
    assert error == pytest.approx(np.mean(np.abs(misses)), rel=0.01)


@given(misses=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=20), parameters=st.integers(1, 20))
def test_without_repeats_the_hold_out_error_is_the_mean_miss(misses: list[float], parameters: int) -> None:
    errors = [0.0] * len(misses)
    error = holdout_error(misses, errors, parameters=parameters, sizes=20)
    assert error == pytest.approx(np.mean(np.abs(misses)), abs=1e-12)


@given(error=st.floats(1e-4, 0.1), share=st.floats(0.0, 1.0))
def test_misses_within_chance_are_the_medians_own_error(error: float, share: float) -> None:
    found = holdout_error([share * error, -share * error] * 5, [error] * 10, parameters=0, sizes=14)
    assert found == pytest.approx(error * math.sqrt(2 / math.pi), rel=1e-6)


def test_nothing_held_out_has_no_error() -> None:
    assert holdout_error([], [], parameters=2, sizes=3) is None


@pytest.mark.parametrize("ratio", [0.5, 1.5, 4.0])
def test_the_mean_size_of_a_normal_agrees_with_draws(ratio: float) -> None:
    miss = math.sqrt(1.0 + ratio**2) * 1e-2  # shrunk by 1 / (1 + ratio²)
    expected = miss * ratio**2 / (1.0 + ratio**2) + 1e-2 * np.random.default_rng(0).standard_normal(200_000)
    found = holdout_error([miss] * 12, [1e-2] * 12, parameters=0, sizes=14)
    assert found == pytest.approx(np.abs(expected).mean(), rel=0.01)


def test_the_standard_error_of_the_medians_is_that_of_repeated_sweeps() -> None:
    link, *_ = affine_link(0)
    sweeps = [Observations.of(simulated_sweep(link).samples) for _ in range(120)]
    claimed = np.mean([Replicates.of(sweep).errors_K for sweep in sweeps])
    medians = np.array([sweep.medians_K for sweep in sweeps])
    assert claimed == pytest.approx((medians.std(0) / medians.mean(0)).mean(), rel=0.15)


@pytest.mark.parametrize("faster_by", [0.25, 0.5, 2.0, 10.0])
def test_two_regimes_are_always_detected(faster_by: float) -> None:
    for seed in range(8):
        link = two_regimes(faster_by=faster_by, seed=seed)
        model = fitted(link, seed)
        assert model.form is not ModelForm.AFFINE
        errors = [abs(model.seconds(size) / link.true_seconds(size) - 1) for size in SIZES]
        assert max(errors) < 0.06


def test_a_curve_without_regimes_becomes_a_table() -> None:
    sizes = [4096 * 2**step for step in range(14)]
    wavy = [1e-9 * size * (1 + 0.6 * (-1) ** at) + 1e-6 for at, size in enumerate(sizes)]
    rounds = [Sample(size_bytes=size, seconds=(t, t * 1.01, t * 0.99) * 3) for size, t in zip(sizes, wavy, strict=True)]
    smooth = [1e-6 + 1e-9 * size**1.25 / 40 for size in sizes]
    bent = [
        Sample(size_bytes=size, seconds=(t, t * 1.001, t * 0.999) * 3) for size, t in zip(sizes, smooth, strict=True)
    ]
    base = simulated_sweep(affine_link(0)[0])
    hopeless = fit_link(replace(base, samples=tuple(rounds)))
    curved = fit_link(replace(base, samples=tuple(bent)))
    assert hopeless is not None
    assert hopeless.status == "poor"
    assert curved is not None
    assert curved.form in (ModelForm.PIECEWISE, ModelForm.TABLE)
    assert all(abs(curved.seconds(size) / t - 1) < 0.15 for size, t in zip(sizes, smooth, strict=True))


def test_a_high_r_squared_does_not_save_a_line() -> None:
    """Latency-bound small sizes are off by half, which R² cannot see."""
    link = two_regimes(faster_by=1.0, noise=0.005)
    observed = Observations.of(simulated_sweep(link).samples)
    seconds = observed.medians_K
    design = np.column_stack([np.ones(len(SIZES)), SIZES])
    line, residual, *_ = np.linalg.lstsq(design, seconds, rcond=None)
    r_squared = 1 - residual[0] / ((seconds - seconds.mean()) ** 2).sum()
    assert r_squared > 0.995
    assert max(abs(design @ line / seconds - 1)) > 0.5
    assert fitted(link).form is ModelForm.PIECEWISE


@settings(max_examples=60, deadline=None)
@given(beta=st.floats(1e-7, 1e-2), rate=st.floats(1e7, 1e12))
def test_exact_lines_are_fitted_exactly(beta: float, rate: float) -> None:
    link = SimulatedLink.affine(alpha=1.0, bandwidth_bytes_per_s=rate, beta_seconds=beta)
    line = fit_line(Observations.of(simulated_sweep(link, count=3).samples), nonnegative_beta=True)
    assert beta + SIZES[0] / rate == pytest.approx(line.beta + SIZES[0] * line.slope, rel=1e-6)
    assert beta + SIZES[-1] / rate == pytest.approx(line.beta + SIZES[-1] * line.slope, rel=1e-6)


def test_alpha_is_relative_to_the_probed_peak_and_n_half_halves_the_rate() -> None:
    link = SimulatedLink.affine(alpha=1.25, bandwidth_bytes_per_s=10e9, beta_seconds=2e-5)
    model = fitted(link)
    assert model.bandwidth_bytes_per_s / model.alpha == pytest.approx(8e9, rel=1e-3)
    assert model.n_half_bytes == pytest.approx(2e-5 * 8e9, rel=1e-3)
    assert model.n_half_bytes / model.seconds(model.n_half_bytes) == pytest.approx(4e9, rel=1e-3)
    piecewise = fitted(two_regimes(faster_by=4.0))
    effective = piecewise.bandwidth_bytes_per_s / piecewise.alpha
    assert piecewise.n_half_bytes / piecewise.seconds(piecewise.n_half_bytes) >= 0.49 * effective


def test_latency_and_slope_are_never_negative() -> None:
    falling = [Sample(size_bytes=size, seconds=(1e-3 - 1e-10 * size,) * 8) for size in SIZES[:8]]
    model = fit_link(replace(simulated_sweep(affine_link(0)[0]), samples=tuple(falling)))
    assert model is not None
    assert model.alpha > 0
    assert model.ci95 is None
    assert any("do not grow" in warning for warning in model.warnings)
    no_latency = fitted(SimulatedLink.affine(alpha=1.0, bandwidth_bytes_per_s=1e9, beta_seconds=0.0, noise=0.05))
    assert no_latency.beta_seconds >= 0


@pytest.mark.parametrize("status", [LinkStatus.WAIVED, LinkStatus.BROKEN])
def test_what_was_not_measured_has_no_model(status: LinkStatus) -> None:
    assert fit_link(replace(simulated_sweep(affine_link(0)[0]), status=status, reason="because")) is None


def test_two_sizes_are_too_few_and_unstable_figures_say_so() -> None:
    link = affine_link(0)[0]
    assert fit_link(simulated_sweep(link, sizes=SIZES[:2])) is None
    model = fit_link(replace(simulated_sweep(link), status=LinkStatus.UNSTABLE, reason="it shook"))
    assert model is not None
    assert any("it shook" in warning for warning in model.warnings)


@settings(max_examples=50)
@given(
    slopes=st.lists(st.floats(1e-12, 1e-6), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=20),
)
def test_prediction_agrees_with_the_record(slopes: list[float], sizes: list[int]) -> None:
    segments = tuple(
        Segment(from_bytes=at * 100_000, slope_seconds_per_byte=slope, beta_seconds=at * 1e-6)
        for at, slope in enumerate(slopes)
    )
    model = replace(fitted(affine_link(0)[0], count=6), form=ModelForm.PIECEWISE, segments=segments)
    assert predict(segments, np.array(sizes, dtype=float)).tolist() == [model.seconds(size) for size in sizes]
