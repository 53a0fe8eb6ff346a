"""Whether a chunk of a trace holds what it claims: everything from outside passes here before it is kept or used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probes.errors import TraceError
from runtime.trace.records import MAX_EXPERTS, Bools, Float32s, Int16s, RoutingTrace, TokenKind, TraceMeta


def check_meta(meta: TraceMeta) -> None:
    """Raise ``TraceError`` where the sizes cannot be."""
    if not 1 <= meta.num_experts <= MAX_EXPERTS:
        raise TraceError(f"num_experts is {meta.num_experts}, not between 1 and {MAX_EXPERTS}")
    if not 0 <= meta.top_k <= meta.num_experts:
        raise TraceError(f"top_k is {meta.top_k}, not between 1 and num_experts = {meta.num_experts}")
    if not meta.layer_numbers:
        raise TraceError("no MoE layer is recorded", hint="record at least one layer of a Mixture-of-Experts model")
    if len(set(meta.layer_numbers)) != meta.moe_layers:
        raise TraceError(f"layer numbers repeat: {list(meta.layer_numbers)}")


def check_chunk(chunk: RoutingTrace, *, first_token: int = 0) -> None:
    """Raise ``TraceError`` naming the token, layer and value of the first thing that is wrong.

    Shapes must agree with ``meta``. In real tokens ids lie in −1 … N−1 without repeats, and weights and scores are
    finite, weights and gate scores not negative. Padding and dummy rows are not looked at: nothing in them is read.
    ``first_token``: how many tokens of the trace came before this chunk.
    """
    _check_shapes(chunk)
    real_T = chunk.token_kind_T == TokenKind.REAL
    where = _Place(chunk, first_token)
    ids_TLK, gates_TLK = chunk.ids_TLK, chunk.gates_TLK
    real_T11 = real_T[:, None, None]
    experts = chunk.meta.num_experts
    outside = (ids_TLK < -1) | (ids_TLK >= experts)
    where.refuse("expert id", ids_TLK, outside & real_T11, f"is not in -1..{experts - 1}")
    where.refuse("expert id", ids_TLK, _repeats(ids_TLK) & real_T11, "appears twice in one token")
    used = (ids_TLK >= 0) & real_T11
    where.refuse("gate weight", gates_TLK, ~np.isfinite(gates_TLK) & used, "is not finite")
    where.refuse("gate weight", gates_TLK, (gates_TLK < 0) & used, "is negative")
    if (scores := chunk.scores_TLN) is not None:
        where.refuse(
            "gate score", scores, (~np.isfinite(scores) | (scores < 0)) & real_T11, "is negative or not finite"
        )
    if (selection := chunk.selection_TLN) is not None:
        where.refuse("selection score", selection, ~np.isfinite(selection) & real_T11, "is not finite")


def _check_shapes(chunk: RoutingTrace) -> None:
    meta = chunk.meta
    slots = (chunk.tokens, meta.moe_layers, meta.top_k)
    experts = (chunk.tokens, meta.moe_layers, meta.num_experts)
    _check_shape("ids", chunk.ids_TLK, slots)
    _check_shape("gates", chunk.gates_TLK, slots)
    _check_shape("scores", chunk.scores_TLN, experts if meta.scores_recorded else None)
    _check_shape("selection scores", chunk.selection_TLN, experts if meta.selection_recorded else None)
    sequences = chunk.token_sequence_T
    if chunk.tokens and not (sequences.min() >= 0 and sequences.max() < len(chunk.sequence_names)):
        raise TraceError("a token's sequence number has no name")


def _check_shape(what: str, array: Float32s | Int16s | None, shape: tuple[int, ...] | None) -> None:
    if (array is None) != (shape is None):
        raise TraceError(f"{what} are {'missing' if array is None else 'given'}, against the trace's metadata")
    if array is not None and array.shape != shape:
        raise TraceError(f"{what} have shape {array.shape}, the trace's metadata says {shape}")


def _repeats(ids_TLK: Int16s) -> Bools:
    """Marks every slot whose expert another slot of the same token and layer holds too."""
    bad = np.zeros(ids_TLK.shape, dtype=np.bool_)
    slots = ids_TLK.shape[2]
    ordered = np.sort(ids_TLK, axis=-1)
    if not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        return bad
    for slot in range(slots):
        for other in range(slot):
            bad[..., slot] |= (ids_TLK[..., slot] == ids_TLK[..., other]) & (ids_TLK[..., slot] >= 0)
    return bad


@dataclass(frozen=True, slots=True)
class _Place:
    """Says where in the trace a value stands."""

    chunk: RoutingTrace
    first_token: int

    def refuse(self, what: str, values: Int16s | Float32s, bad: Bools, why: str) -> None:
        """Raise ``TraceError`` for the first of ``values`` [T, L, …] that is marked in ``bad``."""
        if not bad.any():
            return
        token, layer, place = (int(index) for index in np.argwhere(bad)[0])
        chunk = self.chunk
        raise TraceError(
            f"token {self.first_token + token} (sequence {chunk.sequence_names[chunk.token_sequence_T[token]]!r}, "
            f"position {chunk.token_position_T[token]}), layer {chunk.meta.layer_numbers[layer]}, place {place}: "
            f"{what} {values[token, layer, place]} {why}",
            hint="the recording is damaged, or its number of experts was given wrongly (--num-experts)",
        )
