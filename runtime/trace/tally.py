"""One pass over a trace that adds up what ``caee trace show`` reports. Only real tokens count, except where said.

Shape legend: T tokens, L layers, K slots, N experts, D devices, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.trace.chunking import select
from runtime.trace.importers.dummies import DummyMarker
from runtime.trace.records import Bools, Float64s, Int16s, Int64s, Phase, RoutingTrace, TokenKind, TraceMeta


class Tally:
    """The sums; ``add_all`` makes the pass. A step that comes up again after another counts as a new one.

    ``counts_LN``: choices per expert. ``share_sums_LN``: the same choices weighted by their share of the token's gate
    weights. ``highest_L`` and ``lowest_L``: sums over tokens of the highest and the lowest share among the chosen
    experts. ``activated_LD``: distinct experts activated per device, summed over ``steps`` recorded steps.
    """

    def __init__(self, meta: TraceMeta, device_N: Int64s, devices: int) -> None:
        self.meta = meta
        self._device_N = device_N
        layers, experts = meta.moe_layers, meta.num_experts
        self.kinds = dict.fromkeys(TokenKind, 0)
        self.phases = dict.fromkeys(Phase, 0)
        self.counts_LN: Int64s = np.zeros((layers, experts), dtype=np.int64)
        self.share_sums_LN: Float64s = np.zeros((layers, experts))
        self.highest_L: Float64s = np.zeros(layers)
        self.lowest_L: Float64s = np.zeros(layers)
        self.weighed_L: Int64s = np.zeros(layers, dtype=np.int64)
        self.empty_slots = 0
        self.unnormalised = 0
        self.activated_LD: Int64s = np.zeros((layers, devices), dtype=np.int64)
        self.steps = 0
        self.ranks: set[int] = set()
        self.tokens_S: Int64s = np.zeros(0, dtype=np.int64)
        self.repeated = 0
        self.without_position = 0
        self._last_position_S: Int64s = np.zeros(0, dtype=np.int64)
        self._open_step: int | None = None
        self._open_LN: Bools = np.zeros((layers, experts), dtype=np.bool_)
        self._dummies = DummyMarker()

    def add_all(self, chunks: Iterable[RoutingTrace]) -> None:
        """Add a whole trace, in file order."""

        def seen() -> Iterable[RoutingTrace]:
            for chunk in chunks:
                self._add(chunk)
                yield _real_part(chunk)

        for _ in self._dummies.mark(iter(seen())):
            pass
        self._close_step()

    @property
    def unmarked_dummies(self) -> int:
        """Real tokens in long runs of identical rows."""
        return self._dummies.marked

    def _add(self, chunk: RoutingTrace) -> None:
        for kind in TokenKind:
            self.kinds[kind] += int((chunk.token_kind_T == kind).sum())
        real = _real_part(chunk)
        for phase in Phase:
            self.phases[phase] += int((real.token_phase_T == phase).sum())
        self.ranks.update(np.unique(real.token_rank_T).tolist())
        self._add_sequences(real)
        self._add_choices(real)
        self._add_steps(real)

    def _add_choices(self, real: RoutingTrace) -> None:
        layers, experts = self.counts_LN.shape
        used = real.ids_TLK >= 0
        self.empty_slots += int((~used).sum())
        place = (np.arange(layers)[None, :, None] * experts + real.ids_TLK)[used]
        self.counts_LN += np.bincount(place, minlength=layers * experts).reshape(layers, experts)
        if not self.meta.gates_recorded:
            return
        gates = np.where(used, real.gates_TLK.astype(np.float64), 0.0)
        total_TL = gates.sum(axis=2)
        self.unnormalised += int((np.abs(total_TL - 1.0) > 0.02).any(axis=1).sum())
        weighed_TL = (total_TL > 0) & used.any(axis=2)
        shares = gates / np.where(weighed_TL, total_TL, 1.0)[:, :, None]
        sums = np.bincount(place, weights=shares[used], minlength=layers * experts)
        self.share_sums_LN += sums.reshape(layers, experts)
        self.weighed_L += weighed_TL.sum(axis=0)
        self.highest_L += np.where(weighed_TL, shares.max(axis=2), 0.0).sum(axis=0)
        lowest = np.where(used, shares, np.inf).min(axis=2)
        self.lowest_L += np.where(weighed_TL, lowest, 0.0).sum(axis=0)

    def _add_sequences(self, real: RoutingTrace) -> None:
        known = len(real.sequence_names)
        grown = known - len(self.tokens_S)
        self.tokens_S = np.concatenate([self.tokens_S, np.zeros(grown, dtype=np.int64)])
        self._last_position_S = np.concatenate([self._last_position_S, np.full(grown, -1, dtype=np.int64)])
        self.tokens_S += np.bincount(real.token_sequence_T, minlength=known)
        has_position = real.token_position_T >= 0
        self.without_position += int((~has_position).sum())
        order = np.argsort(real.token_sequence_T[has_position], kind="stable")
        sequence = real.token_sequence_T[has_position][order]
        position = real.token_position_T[has_position][order].astype(np.int64)
        first = np.flatnonzero(np.diff(sequence, prepend=-1))
        before = np.concatenate([[-1], position[:-1]]) if len(position) else position
        before[first] = self._last_position_S[sequence[first]]
        self.repeated += int((position <= before).sum())
        last = np.flatnonzero(np.diff(sequence, append=-1))
        self._last_position_S[sequence[last]] = position[last]

    def _add_steps(self, real: RoutingTrace) -> None:
        """Whole steps are counted at once; the last one stays open, since the next chunk may go on with it."""
        recorded = real.token_step_T >= 0
        step_T, ids_TLK = real.token_step_T[recorded], real.ids_TLK[recorded]
        starts = np.flatnonzero(np.diff(step_T, prepend=-1))
        if len(starts) and step_T[0] == self._open_step:
            stop = starts[1] if len(starts) > 1 else len(step_T)
            self._mark_open(ids_TLK[:stop])
            starts = starts[1:]
        if not len(starts):
            return
        self._close_step()
        last = starts[-1]
        self._count_steps(ids_TLK[starts[0] : last], np.diff(starts))
        self._open_step = int(step_T[last])
        self._mark_open(ids_TLK[last:])

    def _mark_open(self, ids_TLK: Int16s) -> None:
        layer = np.broadcast_to(np.arange(ids_TLK.shape[1])[None, :, None], ids_TLK.shape)
        used = ids_TLK >= 0
        self._open_LN[layer[used], ids_TLK[used]] = True

    def _close_step(self) -> None:
        if self._open_step is None:
            return
        layer, expert = np.nonzero(self._open_LN)
        np.add.at(self.activated_LD, (layer, self._device_N[expert]), 1)
        self.steps += 1
        self._open_LN[:] = False
        self._open_step = None

    def _count_steps(self, ids_TLK: Int16s, lengths: Int64s) -> None:
        layers, experts = self.counts_LN.shape
        step_T = np.repeat(np.arange(len(lengths)), lengths)
        place = (step_T[:, None, None] * layers + np.arange(layers)[None, :, None]) * experts + ids_TLK
        activated = np.unique(place[ids_TLK >= 0])
        layer, expert = activated // experts % layers, activated % experts
        np.add.at(self.activated_LD, (layer, self._device_N[expert]), 1)
        self.steps += len(lengths)


def _real_part(chunk: RoutingTrace) -> RoutingTrace:
    return select(chunk, chunk.token_kind_T == TokenKind.REAL)
