"""From samples to a cost model C(S) = α·S/B + β (arXiv:2606.29982, eq. 3), with intervals and hold-out error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from probes.forms import Candidate, choose_form
from probes.ids import new_id
from probes.records import Intervals, LinkMeasurement, LinkModel, LinkStatus, ModelForm, Segment
from probes.regression import Floats, Observations, bootstrap_lines
from probes.units import format_size

MIN_SIZES = 3
REPLICATES = 400
# Beyond these a model is `poor`: usable, but not to be trusted without a look.
POOR_HOLDOUT = 0.10
POOR_ERROR = 0.25
# A slope below this share of the peak's says that the times did not grow with size: the sizes were too small.
_LEAST_ALPHA = 1e-3


def fit_link(measured: LinkMeasurement, *, seed: int = 0) -> LinkModel | None:
    """The cost model of one link, or None where there is nothing to fit: waived, broken, or fewer than three sizes.

    B is the highest median rate that was measured; α and B are not separately identifiable, so B is fixed and the slope
    gives α. For a piecewise model or a table, α is that of the largest sizes and β the time of the smallest.
    """
    samples = [sample for sample in measured.samples if sample.seconds]
    if measured.status not in (LinkStatus.OK, LinkStatus.UNSTABLE) or len(samples) < MIN_SIZES:
        return None
    observed = Observations.of(samples)
    chosen = choose_form(observed)
    peak = float((observed.sizes_K / observed.medians_K).max())
    alpha = max(chosen.segments[-1].slope_seconds_per_byte * peak, _LEAST_ALPHA)
    beta = max(chosen.segments[0].beta_seconds, 0.0)
    intervals = _intervals(observed, chosen, seed)
    warnings = [*_warnings(measured, observed, chosen)]
    if alpha == _LEAST_ALPHA:
        warnings.append("the times do not grow with size: measure larger sizes to learn the bandwidth")
        intervals = None
    return LinkModel(
        model_id=new_id(),
        kind=measured.kind,
        source=measured.source,
        destination=measured.destination,
        mode=measured.mode,
        concurrency=measured.concurrency,
        form=chosen.form,
        alpha=alpha,
        bandwidth_bytes_per_s=peak,
        beta_seconds=beta,
        n_half_bytes=_half_bandwidth_size(chosen, alpha, peak, beta, observed.sizes_K),
        segments=None if chosen.form is ModelForm.AFFINE else chosen.segments,
        ci95=intervals,
        holdout_mape=chosen.holdout_mape,
        max_relative_error=chosen.max_relative_error,
        status="poor" if _is_poor(chosen) else "ok",
        warnings=tuple(warnings),
    )


def _is_poor(chosen: Candidate) -> bool:
    return (chosen.holdout_mape or 0.0) > POOR_HOLDOUT or chosen.max_relative_error > POOR_ERROR


def _warnings(measured: LinkMeasurement, observed: Observations, chosen: Candidate) -> list[str]:
    found = []
    if measured.status is LinkStatus.UNSTABLE:
        found.append(f"fitted to an unstable measurement: {measured.reason}")
    if chosen.max_relative_error > POOR_ERROR:
        found.append(f"off by {chosen.max_relative_error:.0%} at some size between {_range(observed.sizes_K)}")
    if (chosen.holdout_mape or 0.0) > POOR_HOLDOUT:
        found.append(f"sizes left out of the fit are predicted with a mean error of {chosen.holdout_mape:.0%}")
    return found


def _range(sizes_K: Floats) -> str:
    return f"{format_size(float(sizes_K[0]))} and {format_size(float(sizes_K[-1]))}"


def _intervals(observed: Observations, chosen: Candidate, seed: int) -> Intervals | None:
    """95 % percentile intervals of the last segment's 1/slope and the first segment's β; a table has none."""
    if chosen.form is ModelForm.TABLE:
        return None
    starts = _starts(chosen.segments)
    segment_of_K = np.searchsorted(np.array(starts), observed.sizes_K, side="right") - 1
    first, last = (observed.at(np.flatnonzero(segment_of_K == at).tolist()) for at in (0, len(starts) - 1))
    beta_R, slope_R = bootstrap_lines(first, nonnegative_beta=True, replicates=REPLICATES, seed=seed)
    if len(starts) > 1:
        _, slope_R = bootstrap_lines(last, nonnegative_beta=False, replicates=REPLICATES, seed=seed)
    slope_low, slope_high = np.quantile(slope_R, [0.025, 0.975])
    beta_low, beta_high = np.quantile(beta_R, [0.025, 0.975])
    if slope_low <= 0:
        return None
    return Intervals(
        effective_bandwidth_bytes_per_s=(float(1 / slope_high), float(1 / slope_low)),
        beta_seconds=(float(beta_low), float(beta_high)),
    )


def _half_bandwidth_size(
    chosen: Candidate,
    alpha: float,
    peak: float,
    beta: float,
    sizes_K: Floats,
) -> float:
    """The smallest size that moves at half the effective bandwidth B/α: β·B/α for a line."""
    if chosen.form is ModelForm.AFFINE:
        return beta * peak / alpha
    slope = alpha / peak
    for segment, end in zip(chosen.segments, [*_starts(chosen.segments[1:]), float("inf")], strict=True):
        # S / (β + s·S) = 1 / (2·slope)  ⇔  S = β / (2·slope − s)
        gain = 2 * slope - segment.slope_seconds_per_byte
        size = segment.beta_seconds / gain if gain > 0 else float("inf")
        if size < end:
            return max(size, float(segment.from_bytes))
    return float(sizes_K[-1])


def _starts(segments: Sequence[Segment]) -> list[float]:
    return [float(segment.from_bytes) for segment in segments]
