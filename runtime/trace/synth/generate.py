"""A synthetic trace as a stream: latent propensities per expert run through time, each token takes the highest.

Shape legend: T tokens, S sequences, L layers, N experts, K slots, A parts of the noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runtime.trace.chunking import new_chunk, rechunk, tokens_per_chunk
from runtime.trace.records import Float32s, Float64s, Int16s, Int64s, Phase, RoutingTrace, TraceMeta
from runtime.trace.synth.calibrate import PARTS

_BLOCK = 256
# Sequences whose lasting parts are stratified together, so that few sequences already have the marginals asked for.
_STRATUM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentModel:
    """``levels_LN``: what a token adds its noise to. ``decays_LA``, ``variances_LA``: of the parts of that noise.

    The last part has decay 1: it stays through a sequence. ``shares_LMK``: pools of share vectors, highest first, from
    which each token draws one per layer; they go to the chosen experts in the order of propensity + ``offsets_LN``.
    """

    levels_LN: Float32s
    offsets_LN: Float32s
    decays_LA: Float64s
    variances_LA: Float64s
    shares_LMK: Float32s


class SyntheticTrace:
    """A ``TraceSource`` that draws the trace anew, and alike, at every pass. ``lengths_S``: tokens by sequence."""

    def __init__(
        self, meta: TraceMeta, model: LatentModel, lengths_S: Int64s, seed: int, *, notes: tuple[str, ...] = ()
    ) -> None:
        self.meta = meta
        self.notes = ("synthetic: drawn from a fitted model, not recorded", *notes)
        self._model = model
        self._lengths_S = lengths_S
        self._seed = seed
        self._drawn = 0

    @property
    def fraction_read(self) -> float:
        return self._drawn / int(self._lengths_S.sum())

    @property
    def sequences(self) -> int:
        """How many sequences the trace has."""
        return len(self._lengths_S)

    def chunks(self) -> Iterator[RoutingTrace]:
        """The trace, sequence after sequence, all decode tokens."""
        self._drawn = 0
        for chunk in rechunk(self._blocks(), tokens_per_chunk(self.meta)):
            self._drawn += chunk.tokens
            yield chunk

    def _blocks(self) -> Iterator[RoutingTrace]:
        rng = np.random.default_rng(self._seed)
        names: tuple[str, ...] = tuple(f"synthetic-{number}" for number in range(len(self._lengths_S)))
        lasting = _Lasting(len(self._lengths_S), self._model.levels_LN.shape, rng)
        for sequence, length in enumerate(self._lengths_S):
            walk = _Walk(self._model, lasting.of(sequence), self.meta.top_k, rng)
            for start in range(0, int(length), _BLOCK):
                tokens = min(_BLOCK, int(length) - start)
                ids, gates = walk.go_on(tokens)
                yield new_chunk(
                    self.meta,
                    names[: sequence + 1],
                    np.full(tokens, sequence, dtype=np.int32),
                    ids,
                    gates,
                    position=np.arange(start, start + tokens),
                    phase=Phase.DECODE,
                )


class _Lasting:
    """The parts of ε that stay through a sequence: standard normal, stratified over groups of sequences."""

    def __init__(self, sequences: int, shape: tuple[int, int], rng: np.random.Generator) -> None:
        self._sequences = sequences
        self._shape = shape
        self._rng = rng
        self._group: Float32s | None = None

    def of(self, sequence: int) -> Float32s:
        """[L, N] of the sequence; ask in order."""
        from scipy.special import ndtri

        place = sequence % _STRATUM
        if place == 0 or self._group is None:
            size = min(_STRATUM, self._sequences - sequence)
            strata = self._rng.permuted(np.broadcast_to(np.arange(size)[:, None, None], (size, *self._shape)), axis=0)
            self._group = ndtri((strata + self._rng.random(strata.shape)) / size).astype(np.float32)
        lasting: Float32s = self._group[place]
        return lasting


class _Walk:
    """One sequence: the states of all layers, and the choices that follow from them."""

    def __init__(self, model: LatentModel, lasting_LN: Float32s, top_k: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._top_k = top_k
        self._shares = model.shares_LMK
        deviations = np.sqrt(model.variances_LA).astype(np.float32)
        self._offsets = model.offsets_LN
        self._decays = model.decays_LA[:, :-1].astype(np.float32)
        self._weights = deviations[:, :-1]
        self._levels = model.levels_LN + deviations[:, -1:] * lasting_LN
        layers, experts = model.levels_LN.shape
        self._states = rng.standard_normal((layers, PARTS - 1, experts), dtype=np.float32)

    def go_on(self, tokens: int) -> tuple[Int16s, Float32s]:
        """ids and gate weights [T, L, K] of the next tokens."""
        from runtime.trace.synth.kernels import choose

        layers, experts = self._levels.shape
        ids = np.empty((layers, tokens, self._top_k), dtype=np.int16)
        gates = np.empty((layers, tokens, self._top_k), dtype=np.float32)
        for layer in range(layers):
            noise = self._rng.standard_normal((tokens, PARTS - 1, experts), dtype=np.float32)
            model = (self._levels[layer], self._offsets[layer], self._weights[layer], self._decays[layer])
            choose(*model, self._states[layer], noise, ids[layer])
            gates[layer] = self._shares[layer][self._rng.integers(0, self._shares.shape[1], tokens)]
        return ids.transpose(1, 0, 2), gates.transpose(1, 0, 2)
