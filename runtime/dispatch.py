"""Which rank has which tokens: all of them on every rank, or a share of the batch's sequences each.

Replicated tokens need no communication before the experts run: every rank computes the dense layers of the whole batch.
Data-parallel ranks compute those of their own sequences alone. Before a decision they add up their summaries, in one
all-reduce per layer; after it every rank gathers the others' rows and choices, runs its own experts on them, and keeps
its own tokens' outputs. So every rank knows what was dispatched anywhere, and the mirrored books stay equal.

Shape legend: B sequences, T rows of this rank's tokens, G rows of all ranks' (G = T where tokens are replicated), K
slots per token, R = G·K rows of experts' outputs, H hidden size, N experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from runtime.parallel import Ranks
from runtime.policy.types import Bools, Ints, Routed, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """What all ranks together dispatch at one layer: the routers' choice ``own_GK``, the decision's ``ids_GK``, and the
    rows they are for. ``removed`` and ``rerouted_slots`` as in ``Routed``, of all tokens."""

    own_GK: Ints
    ids_GK: Ints
    hidden_GH: torch.Tensor
    removed: int
    rerouted_slots: int


class TokenDispatch(Protocol):
    """How the ranks share a batch. All ranks make the same calls in the same order. ``seconds``: spent exchanging.

    ``rows``: this rank's share of a tensor whose first dimension is the batch; ``real``: which of them are sequences of
    the batch, the others stand in so that all shares are equally large. ``gathered``: the whole batch again.
    ``combine``: the sum of all ranks' summaries, and whether all were ``sound``. ``output_rows``: of all rows [R, H] of
    experts' outputs, those of this rank's tokens. ``whole``: all ranks' rows of a tensor [T, …], the G that count.
    """

    seconds: float
    replicated: bool

    def rows(self, batch: torch.Tensor) -> torch.Tensor: ...

    def real(self, batch_size: int) -> Bools: ...

    def gathered(self, rows: torch.Tensor, batch_size: int) -> torch.Tensor: ...

    def combine(self, summary: Summary, sound: bool) -> tuple[Summary, bool]: ...

    def exchange(self, own_TK: Ints, routed: Routed, hidden_TH: torch.Tensor, rows: int) -> Dispatched: ...

    def whole(self, rows_TH: torch.Tensor, rows: int) -> torch.Tensor: ...

    def output_rows(self, rows_RH: torch.Tensor, rows: int, tokens: int) -> torch.Tensor: ...


class Replicated:
    """Every rank has all tokens: nothing is exchanged."""

    seconds = 0.0
    replicated = True

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def real(self, batch_size: int) -> Bools:
        return np.ones(batch_size, np.bool_)

    def gathered(self, rows: torch.Tensor, batch_size: int) -> torch.Tensor:
        return rows

    def combine(self, summary: Summary, sound: bool) -> tuple[Summary, bool]:
        return summary, sound

    def exchange(self, own_TK: Ints, routed: Routed, hidden_TH: torch.Tensor, rows: int) -> Dispatched:
        return Dispatched(
            own_GK=own_TK,
            ids_GK=routed.topk_ids_TK,
            hidden_GH=hidden_TH,
            removed=routed.removed,
            rerouted_slots=routed.rerouted_slots,
        )

    def whole(self, rows_TH: torch.Tensor, rows: int) -> torch.Tensor:
        return rows_TH

    def output_rows(self, rows_RH: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
        return rows_RH


class DataParallel:
    """Rank r has the sequences r·c … of a batch, c = ⌈B / ranks⌉ each; where that is too many, the last one stands in.

    In the order of the ranks the rows are those of the batch, and what stands in comes last and is cut off: experts see
    the very rows, in the very order, that they see where tokens are replicated.
    """

    replicated = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.seconds = 0.0

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        return batch[torch.from_numpy(np.minimum(self._places(len(batch)), len(batch) - 1)).to(batch.device)]

    def real(self, batch_size: int) -> Bools:
        real: Bools = self._places(batch_size) < batch_size
        return real

    def _places(self, batch_size: int) -> Ints:
        """[c] where this rank's sequences stand in the batch."""
        share = -(-batch_size // self._ranks.world)
        return np.arange(share) + self._ranks.rank * share

    def gathered(self, rows: torch.Tensor, batch_size: int) -> torch.Tensor:
        return self.whole(rows, batch_size)

    def combine(self, summary: Summary, sound: bool) -> tuple[Summary, bool]:
        parts = [summary.importance_N, summary.mandatory_N, summary.active_N]
        if summary.votes_VN is not None:
            parts += list(summary.votes_VN)
        sums = torch.from_numpy(np.concatenate([*parts, [summary.tokens, not sound]]).astype(np.int64))
        start = time.perf_counter()
        self._ranks.sum_(sums)
        self.seconds += time.perf_counter() - start
        *totals, tokens, unsound = np.split(sums.numpy(), [*np.cumsum([len(part) for part in parts]), len(sums) - 1])
        return (
            Summary(
                importance_N=totals[0],
                mandatory_N=totals[1] > 0,
                active_N=totals[2] > 0,
                tokens=int(tokens[0]),
                votes_VN=np.stack(totals[3:]) if totals[3:] else None,
            ),
            not unsound[0],
        )

    def exchange(self, own_TK: Ints, routed: Routed, hidden_TH: torch.Tensor, rows: int) -> Dispatched:
        counts = [routed.removed, routed.rerouted_slots]
        told = np.concatenate([own_TK.reshape(-1), routed.topk_ids_TK.reshape(-1), counts])[None]
        start = time.perf_counter()
        told_W = self._ranks.gather_rows(torch.from_numpy(told)).numpy()
        self.seconds += time.perf_counter() - start
        own_GK, ids_GK = told_W[:, :-2].reshape(len(told_W), 2, -1, own_TK.shape[1]).swapaxes(0, 1)
        return Dispatched(
            own_GK=own_GK.reshape(-1, own_TK.shape[1])[:rows],
            ids_GK=ids_GK.reshape(-1, own_TK.shape[1])[:rows],
            hidden_GH=self.whole(hidden_TH, rows),
            removed=int(told_W[:, -2].sum()),
            rerouted_slots=int(told_W[:, -1].sum()),
        )

    def whole(self, rows_TH: torch.Tensor, rows: int) -> torch.Tensor:
        start = time.perf_counter()
        gathered = self._ranks.gather_rows(rows_TH)
        self.seconds += time.perf_counter() - start
        return gathered[:rows]

    def output_rows(self, rows_RH: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
        """``tokens``: T; what stands in gets zeros."""
        slots = len(rows_RH) // rows
        own = rows_RH[self._ranks.rank * tokens * slots :][: tokens * slots]
        missing = tokens * slots - len(own)
        return torch.cat([own, own.new_zeros((missing, own.shape[1]))]) if missing else own
