"""The expert loads that a synthetic trace is to have, from counts of the same or another shape.

Shape legend: L layers, N experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probes.errors import TraceError, UsageError
from runtime.trace.records import Float64s, Int64s, LoadProfile, TraceSource
from runtime.trace.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """``chance_LN``: probability that a token chooses the expert; every layer's sum is top-k.

    ``capped``: how many loads were above one choice per token, which no router can give, and were set to 1.
    """

    chance_LN: Float64s
    layer_numbers: tuple[int, ...]
    capped: int


def counts_of(profile: TraceSource | LoadProfile) -> Float64s:
    """[L, N] choices of each expert, of a profile or by counting a trace."""
    if isinstance(profile, LoadProfile):
        return profile.counts_LN
    tally = Tally(profile.meta, np.zeros(profile.meta.num_experts, dtype=np.int64), 1)
    tally.add_all(profile.chunks())
    counts: Float64s = tally.counts_LN.astype(np.float64)
    return counts


def loads_of(
    counts_LN: Float64s,
    layer_numbers: tuple[int, ...],
    *,
    layers: int | None,
    experts: int | None,
    top_k: int,
    rng: np.random.Generator,
) -> Loads:
    """Loads in the proportions of the counts, for another number of ``layers`` or ``experts`` where one is given.

    Raises ``UsageError`` where top-k is more than the experts, ``TraceError`` where a layer uses too few.
    """
    if layers is not None and layers != len(counts_LN):
        counts_LN = counts_LN[same_depth(layers, len(counts_LN))]
        layer_numbers = tuple(range(layers))
    if experts is not None and experts != counts_LN.shape[1]:
        counts_LN = _other_width(counts_LN, experts, rng)
    if top_k > counts_LN.shape[1]:
        raise UsageError(f"--top-k {top_k} is more than the {counts_LN.shape[1]} experts")
    used_L = np.count_nonzero(counts_LN, axis=1)
    if (used_L < top_k).any():
        number = layer_numbers[int(np.argmin(used_L))]
        raise TraceError(
            f"layer {number} of what gives the loads uses fewer than top-k = {top_k} experts",
            hint="give counts of more tokens with --profile, or a longer trace with --like",
        )
    chance_LN = top_k * counts_LN / counts_LN.sum(axis=1, keepdims=True)
    return Loads(
        chance_LN=np.stack([_at_most_one(chance_N, top_k) for chance_N in chance_LN]),
        layer_numbers=layer_numbers,
        capped=int((chance_LN > 1.0 + 1e-9).sum()),
    )


def same_depth(layers: int, known: int) -> Int64s:
    """For each of ``layers`` layers, the one of ``known`` layers at the same relative depth."""
    return np.rint(np.linspace(0, known - 1, layers)).astype(np.int64)


def _at_most_one(chance_N: Float64s, top_k: int) -> Float64s:
    """What is above 1 goes to the other experts in proportion."""
    chance = chance_N.copy()
    while (chance > 1.0 + 1e-12).any():
        full = chance >= 1.0
        rest = chance[~full].sum()
        chance = np.where(full, 1.0, chance * (top_k - full.sum()) / rest if rest else chance)
    return np.minimum(chance, 1.0)


def _other_width(counts_LN: Float64s, experts: int, rng: np.random.Generator) -> Float64s:
    """The layers' popularity curves (sorted counts) read at another number of experts, in random order."""
    place = (np.arange(experts) + 0.5) / experts
    known = (np.arange(counts_LN.shape[1]) + 0.5) / counts_LN.shape[1]
    curves = [np.interp(place, known, np.sort(row)) for row in counts_LN]
    return np.stack([rng.permutation(curve) for curve in curves])
