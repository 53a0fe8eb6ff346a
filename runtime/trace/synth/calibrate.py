"""Setting the latent model of one layer so that what it chooses has given marginals and given repeats.

A token's K experts are the K highest of level_e + ε_e, ε_e standard normal: a probit form of the router's competition.
Shape legend: N experts, K slots, M draws, G lags, A parts of the noise.
"""

from __future__ import annotations

import numpy as np

from runtime.trace.records import Bools, Float32s, Float64s, Int64s
from runtime.trace.synth.fit import spread_of

# ε has four parts: fresh at every token, decaying fast, decaying slowly, and lasting through a sequence. A single
# decay misses what real traces show: a steep fall over the first tokens, then a long slope (gpt-oss-20b).
PARTS = 4
_FAST_DECAYS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
_SLOW_DECAYS = (0.95, 0.98, 0.99, 0.995)
_DRAWS = 1024
_ROUNDS = 8
_CORRELATIONS = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0])
_OFFSET_SCALES = np.array([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0])
_NEVER = -1e3


def levels_for(chance_N: Float64s, top_k: int, rng: np.random.Generator) -> Float32s:
    """[N] levels with which expert e is among the ``top_k`` highest with probability ``chance_N[e]`` (Σ = top_k).

    Each round estimates the probabilities and moves every level by the difference of the normal quantiles. Given the
    others, e is chosen with probability Φ(level_e − threshold), so that a thousand draws of the thresholds suffice
    for rare experts too.
    """
    from scipy.special import ndtr, ndtri

    possible = chance_N > 0
    target = np.clip(chance_N, 1e-9, 1 - 1e-6)
    level = np.where(possible, ndtri(target), _NEVER)
    for _ in range(_ROUNDS):
        threshold_MN = _thresholds(level, top_k, rng)
        reached = np.clip(ndtr(level - threshold_MN).mean(axis=0), 1e-12, 1 - 1e-9)
        level = np.where(possible, level + ndtri(target) - ndtri(reached), _NEVER)
    return level.astype(np.float32)


def repeat_curve(level_N: Float32s, top_k: int, rng: np.random.Generator) -> Float64s:
    """[C] probability that a chosen expert is chosen again by a token whose ε correlates by each of _CORRELATIONS."""
    one = rng.standard_normal((_DRAWS, len(level_N)), dtype=np.float32)
    other = rng.standard_normal((_DRAWS, len(level_N)), dtype=np.float32)
    first = chosen(level_N + one, top_k)
    overlap = [
        float((first & chosen(level_N + np.float32(c) * one + np.float32(np.sqrt(1 - c * c)) * other, top_k)).sum())
        for c in _CORRELATIONS
    ]
    return np.maximum.accumulate(np.array(overlap) / (_DRAWS * top_k))


def noise_parts(repeat_G: Float64s, lags: tuple[int, ...], curve: Float64s) -> tuple[Float64s, Float64s]:
    """[A] decay per token and [A] variance (Σ = 1) of the parts of ε that make the repeats at the lags as given.

    The correlations that the repeats ask for are fitted, with non-negative weights, by the best pair of decays.
    """
    from scipy.optimize import nnls

    wanted = np.array([1.0, *np.interp(repeat_G, curve, _CORRELATIONS)])
    at = np.array([0, *lags])[:, None]
    best: tuple[float, Float64s, Float64s] = (np.inf, np.zeros(PARTS), np.zeros(PARTS))
    for fast in _FAST_DECAYS:
        for slow in _SLOW_DECAYS:
            decays = np.array([0.0, fast, slow, 1.0])
            variances, error = nnls(decays[None, :] ** at, wanted)
            if error < best[0]:
                best = (error, decays, variances / variances.sum())
    return best[1], best[2]


def order_offsets(
    level_N: Float32s, top_k: int, mean_share_K: Float64s, spread: float, rng: np.random.Generator
) -> Float32s:
    """[N] what is added to propensities when shares are handed out, so that experts' mean shares differ by ``spread``.

    The offsets are random: an expert's mean share then depends little on how often it is chosen. Where the spread
    cannot be reached, the offsets are those that come nearest.
    """
    from runtime.trace.synth.kernels import highest, order

    experts = len(level_N)
    propensity = level_N + rng.standard_normal((_DRAWS, experts), dtype=np.float32)
    ids: Int64s = np.empty((_DRAWS, top_k), dtype=np.int64)
    highest(propensity, ids)
    direction = rng.standard_normal(experts).astype(np.float32)
    shares = np.broadcast_to(mean_share_K, ids.shape)
    reached = []
    for scale in _OFFSET_SCALES:
        order(propensity, np.float32(scale) * direction, ids)
        reached.append(spread_of(ids, shares, experts))
    scale = np.interp(spread, np.maximum.accumulate(reached), _OFFSET_SCALES)
    return np.float32(scale) * direction


def chosen(propensity_MN: Float32s, top_k: int) -> Bools:
    """[M, N] whether the expert is among the row's ``top_k`` highest."""
    from runtime.trace.synth.kernels import highest

    ids: Int64s = np.empty((len(propensity_MN), top_k), dtype=np.int64)
    highest(propensity_MN, ids)
    marked = np.zeros(propensity_MN.shape, dtype=np.bool_)
    np.put_along_axis(marked, ids, True, axis=1)
    return marked


def _thresholds(level_N: Float64s, top_k: int, rng: np.random.Generator) -> Float64s:
    """[M, N] what e must exceed: the K-th highest of the others, in each of M draws."""
    propensity = level_N + rng.standard_normal((_DRAWS, len(level_N)))
    if top_k == len(level_N):
        return np.full_like(propensity, -np.inf)
    ordered = np.partition(propensity, [-top_k - 1, -top_k], axis=1)
    kth, next_ = ordered[:, -top_k, None], ordered[:, -top_k - 1, None]
    return np.where(propensity >= kth, next_, kth)
