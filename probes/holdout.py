"""The error at sizes that a model was not fitted to: misses of held-out sizes, freed from chance where they are chance.

A handful of held-out sizes says little by itself: the mean of a dozen misses scatters by a fifth. What the repeated
timings say about the medians' own standard errors is known much better. So the misses are shrunk by how far they exceed
what those errors explain (James and Stein, 1961), and what a new median would add by chance is put back in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEAST_ERROR = 1e-15


def holdout_error(misses: Sequence[float], errors: Sequence[float], *, parameters: int, sizes: int) -> float | None:
    """Expected |relative error| of the model against a new median, as many timings long as the held-out ones.

    ``misses``: prediction ÷ median − 1 at each held-out size; ``errors``: relative standard errors of those medians, 0
    where nothing was repeated (the result is then the mean |miss|). ``parameters`` fitted to ``sizes`` sizes carry an
    error of their own into a prediction. None without misses.
    """
    if not misses:
        return None
    widened = [error * math.sqrt(1.0 + parameters / sizes) for error in errors]
    by_chance = sum(error * error for error in widened)
    squares = sum(miss * miss for miss in misses)
    systematic = max(0.0, 1.0 - by_chance / squares) if squares > 0 else 0.0
    return sum(_mean_size(miss * systematic, error) for miss, error in zip(misses, widened, strict=True)) / len(misses)


def _mean_size(mean: float, deviation: float) -> float:
    """E|x| of a normal x: the mean of the folded normal distribution."""
    if deviation < _LEAST_ERROR:
        return abs(mean)
    ratio = mean / deviation
    near = deviation * math.sqrt(2.0 / math.pi) * math.exp(-ratio * ratio / 2.0)
    return near + abs(mean) * math.erf(abs(ratio) / math.sqrt(2.0))
