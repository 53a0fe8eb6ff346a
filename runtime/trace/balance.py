"""How evenly a load is spread, by every formula that serving engines and papers use, each by its own name.

Shape legend: L layers, X bins of a layer (devices, or single experts), D devices, N experts. Every formula works within
a layer first: a sum over layers would let one layer's idle device hide another's busy one. All bins count, those
without any load too: figures over the experts *seen* would call an unused expert balanced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]

FORMULAS = {
    "mean_over_max": "mean ÷ max of a layer's bins, averaged over layers (SGLang's balancedness); 1 is even",
    "sum_of_means_over_sum_of_maxima": "Σ of the layers' means ÷ Σ of their maxima (vLLM's EPLB balancedness, per "
    "layer and rank); 1 is even, busy layers weigh more",
    "max_over_mean": "max ÷ mean of a layer's bins, averaged over layers; 1 is even, X is all on one",
    "excess_over_mean": "(max − mean) ÷ mean, averaged over layers (MaxVio, arXiv:2408.15664); 0 is even",
    "gini": "Gini coefficient of a layer's bins, averaged over layers; 0 is even, 1 − 1/X is all on one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBalance:
    """One layer's figures; None where the layer has no load at all. Names as in ``FORMULAS``."""

    mean: float
    max: float
    mean_over_max: float | None
    max_over_mean: float | None
    excess_over_mean: float | None
    gini: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """All layers' figures, and the averages over the layers that have a load; None where none has."""

    bins: int
    layers: tuple[LayerBalance, ...]
    mean_over_max: float | None
    sum_of_means_over_sum_of_maxima: float | None
    max_over_mean: float | None
    excess_over_mean: float | None
    gini: float | None


def balance(loads_LX: npt.ArrayLike) -> Balance:
    """Every formula for loads [layers, bins], in any unit (tokens, slots, seconds)."""
    loads = np.asarray(loads_LX, dtype=np.float64)
    layers = tuple(_layer(load_X) for load_X in loads)
    maxima = sum(layer.max for layer in layers)
    return Balance(
        bins=loads.shape[1],
        layers=layers,
        mean_over_max=_average([layer.mean_over_max for layer in layers]),
        sum_of_means_over_sum_of_maxima=sum(layer.mean for layer in layers) / maxima if maxima else None,
        max_over_mean=_average([layer.max_over_mean for layer in layers]),
        excess_over_mean=_average([layer.excess_over_mean for layer in layers]),
        gini=_average([layer.gini for layer in layers]),
    )


def device_of_expert(num_experts: int, devices: int) -> npt.NDArray[np.int64]:
    """[N] the contiguous placement: expert e lies on device e·D // N in every layer."""
    return np.arange(num_experts, dtype=np.int64) * devices // num_experts


def device_loads(counts_LN: npt.ArrayLike, device_N: npt.NDArray[np.int64], devices: int) -> Loads:
    """[L, D] the experts' loads summed by device."""
    counts = np.asarray(counts_LN, dtype=np.float64)
    return np.stack([np.bincount(device_N, weights=count_N, minlength=devices) for count_N in counts])


def _layer(load_X: Loads) -> LayerBalance:
    mean, highest = float(load_X.mean()), float(load_X.max())
    if not highest:
        return LayerBalance(mean=0.0, max=0.0, mean_over_max=None, max_over_mean=None, excess_over_mean=None, gini=None)
    return LayerBalance(
        mean=mean,
        max=highest,
        mean_over_max=mean / highest,
        max_over_mean=highest / mean,
        excess_over_mean=(highest - mean) / mean,
        gini=_gini(load_X),
    )


def _gini(load_X: Loads) -> float:
    """Mean absolute difference of all pairs ÷ (2 · mean), from the ordered loads."""
    ordered = np.sort(load_X)
    bins = len(ordered)
    weights = 2 * np.arange(1, bins + 1) - bins - 1
    return float(weights @ ordered / (bins * ordered.sum()))


def _average(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
