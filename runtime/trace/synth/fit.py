"""What a token-level trace tells of routing over time: how often choices repeat, how shares fall, how long answers are.

Shape legend: T tokens, S sequences, L layers, N experts, K slots, G lags.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probes.errors import TraceError
from runtime.trace.chunking import join, select
from runtime.trace.records import (
    Bools,
    Float32s,
    Float64s,
    Int16s,
    Int32s,
    Int64s,
    LoadProfile,
    Phase,
    RoutingTrace,
    TokenKind,
    TraceSource,
)

LAGS = (1, 2, 4, 8, 16, 32, 64, 128)
# Of a long trace so many tokens × layers × experts are used: more would hardly change the fit.
MAX_MARKS = 1 << 27
MAX_SHARES = 1 << 14
_SMALLEST_SHARE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """The part of a trace that another model's synthetic trace takes over, layer by layer.

    ``persistence_GL``: chance-corrected probability that an expert that a token chose is chosen again ``LAGS`` tokens
    later in the same sequence: 0 as between tokens of different sequences, 1 always. ``shares_LMK``: M tokens' shares
    of the gate weights, highest first. ``spread_L``: how much experts differ in the mean share that they get.
    ``lengths_S``: decode tokens of each sequence. ``tokens``: how many were used.
    """

    persistence_GL: Float64s
    shares_LMK: Float32s
    spread_L: Float64s
    lengths_S: Int64s
    counts_LN: Float64s
    tokens: int


def fit_rhythm(source: TraceSource | LoadProfile) -> Rhythm:
    """Read a token-level trace with gate weights; decode tokens if there are any, else all real ones.

    Raises ``TraceError`` where the trace has no weights, no two tokens in a sequence, or a layer in which all tokens
    choose alike.
    """
    if isinstance(source, LoadProfile):
        raise TraceError("a load profile has no tokens to fit on", hint="give --like a trace with tokens and weights")
    if not source.meta.gates_recorded:
        raise TraceError("the trace has ids, but no gate weights", hint="give --like a trace with gate weights")
    trace = _tokens_to_fit(source)
    lengths_S = np.bincount(trace.token_sequence_T)
    chosen_TLN = _bitmap(trace)
    _refuse_uniform(trace, chosen_TLN)
    return Rhythm(
        persistence_GL=_persistence(trace, chosen_TLN),
        shares_LMK=sorted_shares(trace, MAX_SHARES),
        spread_L=share_spread(trace),
        lengths_S=lengths_S[lengths_S > 0],
        counts_LN=chosen_TLN.sum(axis=0, dtype=np.float64),
        tokens=trace.tokens,
    )


def repeats(trace: RoutingTrace, lag: int) -> Float64s:
    """[L] probability that an expert chosen by a token is chosen again ``lag`` tokens later in its sequence, or nan."""
    return _repeats(_bitmap(trace), trace.token_sequence_T, lag, trace.meta.top_k)


def repeats_between_sequences(trace: RoutingTrace) -> Float64s:
    """[L] probability that an expert chosen by a token is chosen by a token of another sequence, over all pairs."""
    return _repeats_between(_bitmap(trace), trace.token_sequence_T, trace.meta.top_k)


def sorted_shares(trace: RoutingTrace, limit: int) -> Float32s:
    """[L, M, K] shares of at most ``limit`` tokens, evenly taken, highest first."""
    taken = np.linspace(0, trace.tokens - 1, min(limit, trace.tokens)).astype(np.int64)
    gates = np.maximum(trace.gates_TLK[taken], _SMALLEST_SHARE)
    shares = -np.sort(-gates / gates.sum(axis=2, keepdims=True), axis=2)
    return np.ascontiguousarray(shares.transpose(1, 0, 2), dtype=np.float32)


def share_spread(trace: RoutingTrace) -> Float64s:
    """[L] standard deviation of the experts' mean shares, weighted by their choices, in units of 1/k."""
    gates = trace.gates_TLK.astype(np.float64)
    shares_TLK = gates / np.maximum(gates.sum(axis=2, keepdims=True), _SMALLEST_SHARE)
    experts = trace.meta.num_experts
    return np.array(
        [spread_of(trace.ids_TLK[:, layer], shares_TLK[:, layer], experts) for layer in range(trace.meta.moe_layers)]
    )


def spread_of(ids_TK: Int16s | Int64s, shares_TK: Float64s, experts: int) -> float:
    """``share_spread`` of one layer."""
    used = ids_TK >= 0
    choices = np.bincount(ids_TK[used], minlength=experts)
    mean = np.bincount(ids_TK[used], weights=shares_TK[used], minlength=experts) / np.maximum(choices, 1)
    overall = np.average(mean, weights=choices)
    return float(np.sqrt(np.average((mean - overall) ** 2, weights=choices)) * ids_TK.shape[1])


def _tokens_to_fit(source: TraceSource) -> RoutingTrace:
    limit = max(2, MAX_MARKS // (source.meta.moe_layers * source.meta.num_experts))
    kept: list[RoutingTrace] = []
    for chunk in source.chunks():
        kept.append(select(chunk, chunk.token_kind_T == TokenKind.REAL))
        if sum(part.tokens for part in kept) >= limit:
            break
    if not kept:
        raise TraceError("the trace holds no token", hint="give --like a longer trace")
    trace = join(kept)
    decode = trace.token_phase_T == Phase.DECODE
    trace = select(trace, decode) if decode.any() else trace
    # Sequences may be interleaved in the file: lags count along each of them.
    order = np.argsort(trace.token_sequence_T, kind="stable")
    trace = select(trace, order)
    if trace.tokens < 2 or not (np.diff(trace.token_sequence_T) == 0).any():
        raise TraceError("no sequence of the trace has two tokens to compare", hint="give --like a longer trace")
    return trace


def _bitmap(trace: RoutingTrace) -> Bools:
    """[T, L, N] whether the token chose the expert."""
    chosen = np.zeros((trace.tokens, trace.meta.moe_layers, trace.meta.num_experts + 1), dtype=np.bool_)
    # An empty slot (−1) marks the last place, which is cut off.
    np.put_along_axis(chosen, trace.ids_TLK.astype(np.int64), True, axis=2)
    return chosen[:, :, :-1]


def _refuse_uniform(trace: RoutingTrace, chosen_TLN: Bools) -> None:
    """Choices that never differ say nothing of how often they repeat more than by chance."""
    alike_L = (chosen_TLN == chosen_TLN[:1]).all(axis=(0, 2))
    if alike_L.any():
        number = trace.meta.layer_numbers[int(np.argmax(alike_L))]
        raise TraceError(
            f"the trace is too short or too uniform to fit: in layer {number} all {trace.tokens} tokens choose the "
            "same experts",
            hint="give --like a trace of more tokens, whose choices differ in every layer",
        )


def _persistence(trace: RoutingTrace, chosen_TLN: Bools) -> Float64s:
    by_chance_L = _repeats_between(chosen_TLN, trace.token_sequence_T, trace.meta.top_k)
    rows: list[Float64s] = []
    for lag in LAGS:
        repeated_L = _repeats(chosen_TLN, trace.token_sequence_T, lag, trace.meta.top_k)
        # Where no sequence is that long, the longest known lag stands.
        rows.append(rows[-1] if np.isnan(repeated_L).all() else (repeated_L - by_chance_L) / (1.0 - by_chance_L))
    persistence: Float64s = np.clip(np.array(rows), 0.0, 1.0)
    return persistence


def _repeats(chosen_TLN: Bools, sequence_T: Int32s, lag: int, top_k: int) -> Float64s:
    same_T = sequence_T[lag:] == sequence_T[:-lag]
    if not same_T.any():
        return np.full(chosen_TLN.shape[1], np.nan)
    again_TLN = chosen_TLN[lag:][same_T] & chosen_TLN[:-lag][same_T]
    repeated_L: Float64s = np.count_nonzero(again_TLN, axis=(0, 2)) / (len(again_TLN) * top_k)
    return repeated_L


def _repeats_between(chosen_TLN: Bools, sequence_T: Int32s, top_k: int) -> Float64s:
    """All pairs at once: Σ over pairs of all tokens less Σ over pairs within a sequence."""
    sequences, tokens_S = np.unique(sequence_T, return_counts=True)
    sums_SLN = np.stack([chosen_TLN[sequence_T == sequence].sum(axis=0, dtype=np.float64) for sequence in sequences])
    all_L: Float64s = np.square(sums_SLN.sum(axis=0)).sum(axis=1)
    within_L: Float64s = np.square(sums_SLN).sum(axis=(0, 2))
    tokens = float(tokens_S.sum())
    pairs = tokens**2 - float(np.square(tokens_S.astype(np.float64)).sum())
    # In a single sequence, chance is what its own frequencies give.
    return (all_L - within_L) / (pairs * top_k) if pairs else all_L / (tokens**2 * top_k)
