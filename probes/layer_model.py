"""Seconds of one MoE layer by the number of experts that are activated on the device: T(n) = β + n·αS/B, or a table.

αS/B is what one more expert costs: its weights are read once, however few tokens it serves (arXiv:2606.29982, on-device
inference). Kernels change tiles and schedules with the load, so that a line is only taken where it reaches every
point; else the points themselves are the model.

Legend: n counts of activated experts, M rows of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from probes.records import LayerFit, ModelForm

Floats = npt.NDArray[np.float64]
# A line that misses a row it was fitted to by more than this is refused.
LINE_ERROR = 0.02
# Fewer counts than this do not tell a line from a bend.
MIN_COUNTS = 5


def fit_layer(experts_M: Sequence[float], seconds_M: Sequence[float]) -> LayerFit:
    """The line of least relative squares if no row is further off than ``LINE_ERROR``, else the table of the rows.

    At least two different counts (asserted). Rows of the same count stand for their median.
    """
    experts, seconds = np.asarray(experts_M, dtype=np.float64), np.asarray(seconds_M, dtype=np.float64)
    assert len(np.unique(experts)) > 1
    beta, slope = _line(experts, seconds, 1.0 / seconds)
    if slope > 0 and np.max(np.abs((beta + slope * experts) / seconds - 1.0)) <= LINE_ERROR:
        return LayerFit(form=ModelForm.AFFINE, beta_seconds=beta, seconds_per_expert=slope)
    counts = np.unique(experts)
    medians = np.array([float(np.median(seconds[experts == count])) for count in counts])
    middle = len(counts) // 2 if len(counts) > 2 else 0
    upper = max(float((medians[-1] - medians[middle]) / (counts[-1] - counts[middle])), 0.0)
    return LayerFit(
        form=ModelForm.TABLE,
        beta_seconds=max(float(medians[-1] - upper * counts[-1]), 0.0),
        seconds_per_expert=upper,
        knots=tuple(zip(counts.tolist(), medians.tolist(), strict=True)),
    )


def naive_line(experts_M: Sequence[float], seconds_M: Sequence[float]) -> LayerFit:
    """Ordinary least squares, as a yardstick: what is large decides, and nobody asks whether a line fits."""
    experts, seconds = np.asarray(experts_M, dtype=np.float64), np.asarray(seconds_M, dtype=np.float64)
    beta, slope = _line(experts, seconds, np.ones_like(seconds))
    return LayerFit(form=ModelForm.AFFINE, beta_seconds=beta, seconds_per_expert=slope)


def holdout_errors(
    experts_M: Sequence[float], seconds_M: Sequence[float], *, naive: bool = False
) -> tuple[float, ...] | None:
    """|relative error| at every second row, predicted from the others; None where these hold fewer than two counts.

    Form and parameters are chosen on the rows that are fitted, alone.
    """
    if len(set(experts_M[::2])) < 2:
        return None
    fit = (naive_line if naive else fit_layer)(experts_M[::2], seconds_M[::2])
    held = zip(experts_M[1::2], seconds_M[1::2], strict=True)
    return tuple(abs(fit.seconds(count) / seconds - 1.0) for count, seconds in held)


def _line(experts_M: Floats, seconds_M: Floats, weight_M: Floats) -> tuple[float, float]:
    design_M2 = np.stack([weight_M, experts_M * weight_M], axis=1)
    solution, *_ = np.linalg.lstsq(design_M2, seconds_M * weight_M, rcond=None)
    return float(solution[0]), float(solution[1])
