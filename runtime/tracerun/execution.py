"""The MoE layers of a model that is not there: the live engine's own execution, with a trace as the router.

Shape legend: T tokens (rows of the step), K slots per token, H hidden size, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from runtime.cache import CacheBook
from runtime.execution import ExpertExecution, StepContext
from runtime.experts.rows import all_finite
from runtime.experts.transfer import TransferEngine
from runtime.layout import Layout
from runtime.models.load import LoadedModel
from runtime.parallel import Ranks
from runtime.policy.types import Ints, Policy, Tokens
from runtime.recording import StepRecord
from runtime.simulate.batches import Rows
from runtime.simulate.reference import tokens_of
from runtime.tracerun.kernel import BytePool, ExpertWeights, ReplayKernel


class ReplayExecution(ExpertExecution):
    """Decide, fetch, compute, exchange and reduce as in a live run; ids and gate weights come from a trace's rows."""

    def __init__(
        self,
        weights: ExpertWeights,
        pool: BytePool,
        transfers: TransferEngine,
        books: Sequence[CacheBook],
        layout: Layout,
        ranks: Ranks,
        *,
        layers: int,
        hidden_size: int,
        most_rows: int,
    ) -> None:
        bare = LoadedModel(
            model=SimpleNamespace(),
            tokenizer=None,
            family="",
            experts=tuple(torch.nn.Module() for _ in range(layers)),
            num_experts=len(layout.placement_N),
        )
        self._kernel = ReplayKernel(weights, pool)
        super().__init__(bare, pool, transfers, books, layout, ranks)
        self._rows: Rows | None = None
        device = pool.stored.device
        generator = torch.Generator(device).manual_seed(0)
        # What the rows hold does not change what they cost.
        self._hidden_TH = torch.empty((most_rows, hidden_size), dtype=weights.dtype, device=device)
        self._hidden_TH.normal_(generator=generator)

    def _attach(self, loaded: LoadedModel, pool: object) -> None:
        """There is no model: a step calls the layers itself."""
        self.kernels.extend(self._kernel for _ in loaded.experts)

    def _tokens(
        self,
        layer: int,
        context: StepContext,
        own_TK: Ints,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> tuple[Tokens, bool]:
        assert self._rows is not None, "a step comes first"
        tokens = tokens_of(self._rows, layer)
        return tokens, all_finite(tokens.gates_TK, context.real_T)

    @torch.inference_mode()
    def step(self, rows: Rows, policy: Policy) -> StepRecord:
        """One decode step of all layers: bytes move and are multiplied."""
        context = StepContext(np.ones(len(rows), np.bool_), policy, prefill=False)
        self._rows = rows
        self.start_step(context)
        hidden_TH = self._hidden_TH[: len(rows)]
        for layer in range(self.num_layers):
            self._forward(layer, self._kernel, hidden_TH, *self._routing(rows, layer))
        return context.record

    def held(self) -> list[tuple[int, int, int]]:
        """(slot, layer, expert) of every cache slot that holds one."""
        return [
            (int(slot), *divmod(int(self._held[slot]), self.num_experts)) for slot in np.flatnonzero(self._held >= 0)
        ]

    def _routing(self, rows: Rows, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a router would return: ids and weights [T, K], on the device."""
        device = self._hidden_TH.device
        ids = torch.from_numpy(rows.ids_RLK[:, layer].astype(np.int64)).to(device)
        weights = torch.from_numpy(np.ascontiguousarray(rows.gates_RLK[:, layer])).to(device, self._hidden_TH.dtype)
        return ids, weights
