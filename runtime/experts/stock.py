"""The model's own expert arithmetic, over slots, and its own order of reduction.

Bit-equal to the stock model: rows come to each matmul in the order in which the stock kernel takes them, and a token's
outputs are summed as it sums them.

Shape legend: T tokens (rows of the step), K slots per token, R = T·K rows, P rows of the experts at hand, E experts at
hand, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from runtime.experts.pool import SlotPool
from runtime.experts.rows import ExpertRows, rows_by_place
from runtime.policy.types import Ints

MOST_GROUPS = 1023
"""How many experts torch's grouped matmul takes at once on a GPU."""


class StockKernel:
    """The model's own expert arithmetic, over slots, and its own order of reduction."""

    def __init__(self, module: torch.nn.Module, pool: SlotPool) -> None:
        self._module: Any = module
        self._forward: Callable[..., torch.Tensor] = module.forward
        # The loop over experts ("eager") adds contributions one by one in ascending expert id, rows slot by slot; the
        # grouped kernels sum over a token's slots at once, rows token by token.
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        self._one_by_one = implementation in (None, "eager")
        matmuls = implementation in ("eager", "grouped_mm") and _plainly_gated(module, pool)
        self._outputs = self._loop if matmuls else self._windowed
        self._pool = pool
        self._matrices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._show(0, pool.places)

    def row_order(self, ids_TK: Ints) -> Ints:
        """[R] the order in which the stock kernel takes an expert's rows, since a row's place among them shows in the
        last bit of a matmul: slot by slot, or as torch sorts the ids, which moves equal ones about."""
        if self._one_by_one:
            return np.arange(ids_TK.size).reshape(ids_TK.shape).T.reshape(-1)
        return _torch_argsort(ids_TK.reshape(-1))

    def rows(
        self, hidden_TH: torch.Tensor, ids_TK: Ints, order_R: Ints, slot_of: dict[int, int], rows_RH: torch.Tensor
    ) -> None:
        """Fill ``rows_RH`` (row t·K + k) where expert ids_TK[t, k] is in ``slot_of``; unweighted outputs."""
        if slot_of:
            for place_of in self._pool.placed(slot_of):
                self._placed_rows(hidden_TH, ids_TK, order_R, place_of, rows_RH)

    def _placed_rows(
        self, hidden_TH: torch.Tensor, ids_TK: Ints, order_R: Ints, place_of: dict[int, int], rows_RH: torch.Tensor
    ) -> None:
        experts_E, places_E = np.array([*place_of], np.int64), np.array([*place_of.values()], np.int64)
        rows = rows_by_place(ids_TK, order_R, experts_E, places_E)
        device = hidden_TH.device
        taken_PH = hidden_TH.index_select(0, torch.from_numpy(rows.tokens_P).to(device))
        rows_RH.index_copy_(0, torch.from_numpy(rows.rows_P).to(device), self._outputs(taken_PH, rows))

    def _windowed(self, taken_PH: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """``_whole`` over few enough neighbouring slots at a time."""
        slots_P = rows.places_P
        starts = window_starts(slots_P, MOST_GROUPS)
        if self._pool.places <= MOST_GROUPS or not len(starts):
            return self._whole(taken_PH, slots_P)
        parts = []
        for start, stop in zip(starts, [*starts[1:], len(slots_P)], strict=True):
            first, last = int(slots_P[start]), int(slots_P[stop - 1])
            self._show(first, last + 1)
            parts.append(self._whole(taken_PH[start:stop], slots_P[start:stop] - first))
        self._show(0, self._pool.places)
        return torch.cat(parts)

    def _show(self, first: int, stop: int) -> None:
        """Let the module have places [first, stop) alone."""
        whole = stop - first == self._pool.places
        self._module.num_experts = stop - first
        for name, parameter in self._pool.parameters.items():
            self._module._parameters[name] = parameter if whole else parameter[first:stop]

    def _whole(self, taken_PH: torch.Tensor, slots_P: Ints) -> torch.Tensor:
        """Any family: the module's own forward, every (token, slot) as a token of its own with weight 1."""
        # The grouped kernels sort by slot once more, which must find each slot's rows in the order that they have here.
        place_P = np.arange(len(slots_P)) if self._one_by_one else _torch_argsort(slots_P)
        place = torch.from_numpy(place_P).to(taken_PH.device)
        slots = torch.from_numpy(slots_P).to(taken_PH.device)
        outputs_PH = self._forward(
            torch.empty_like(taken_PH).index_copy_(0, place, taken_PH),
            torch.empty_like(slots).index_copy_(0, place, slots)[:, None],
            taken_PH.new_ones((len(slots_P), 1)),
        )
        return outputs_PH[place]

    def _loop(self, taken_PH: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """Plainly gated experts one after the other: where this is used, the grouped kernel walks through all slots,
        and takes longer for the empty ones than for a decode step's few rows. Same matmuls, same bits."""
        slots, sizes = rows.segments()
        matrices = [self._matrices_of(slot) for slot in slots]
        gate_up_PI = taken_PH.new_empty((len(taken_PH), self._module.gate_up_proj.shape[1]))
        for taken, (first, _), into in zip(
            taken_PH.split_with_sizes(sizes), matrices, gate_up_PI.split_with_sizes(sizes), strict=True
        ):
            torch.mm(taken, first, out=into)
        hidden_PI = self._module._apply_gate(gate_up_PI)
        outputs_PH = torch.empty_like(taken_PH)
        for hidden, (_, second), into in zip(
            hidden_PI.split_with_sizes(sizes), matrices, outputs_PH.split_with_sizes(sizes), strict=True
        ):
            torch.mm(hidden, second, out=into)
        return outputs_PH

    def _matrices_of(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, 2·I] and [I, H], as they are multiplied; kept, since views take longer to make than a cache to find."""
        known = self._matrices.get(slot)
        if known is None:
            known = self._matrices[slot] = self._module.gate_up_proj[slot].t(), self._module.down_proj[slot].t()
        return known

    def reduce(self, rows_RH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: Ints) -> torch.Tensor:
        """[T, H]: the weighted sum over every token's slots."""
        tokens, width = ids_TK.shape
        rows_TKH = rows_RH.view(tokens, width, -1)
        if not self._one_by_one:
            return (rows_TKH * weights_TK[..., None]).sum(dim=1).to(rows_RH.dtype)
        # Empty slots go last, where adding their zero changes nothing.
        order_TK = torch.from_numpy(np.where(ids_TK < 0, np.iinfo(np.int64).max, ids_TK).argsort(1, kind="stable"))
        order_TK = order_TK.to(rows_RH.device)
        total_TH = torch.zeros_like(rows_TKH[:, 0])
        for k in range(width):
            at = order_TK[:, k : k + 1]
            row_TH = rows_TKH.gather(1, at[..., None].expand(-1, -1, rows_TKH.shape[-1]))[:, 0]
            total_TH += (row_TH * weights_TK.gather(1, at)).to(total_TH.dtype)
        return total_TH


def window_starts(slots_P: Ints, size: int) -> list[int]:
    """Where to cut ascending ``slots_P`` so that the slots of each part lie within ``size`` neighbours; none empty."""
    starts = []
    at = 0
    while at < len(slots_P):
        starts.append(at)
        at = int(np.searchsorted(slots_P, slots_P[at] + size))
    return starts


def _plainly_gated(module: torch.nn.Module, pool: SlotPool) -> bool:
    """Whether experts are gate_up_proj, a gate, down_proj and nothing else, where no grouped kernel serves them well:
    a GPU has one for bfloat16 alone, and goes through all slots for other numbers."""
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    return (
        all(getattr(module, name, None) is value for name, value in plain.items())
        and hasattr(module, "_apply_gate")
        and set(pool.parameters) == {"gate_up_proj", "down_proj"}
        and all(p.device.type == "cpu" or p.dtype is not torch.bfloat16 for p in pool.parameters.values())
    )


def _torch_argsort(keys: Ints) -> Ints:
    """``torch.sort`` of more than a few keys moves equal ones about, always in the same way."""
    order: Ints = torch.sort(torch.from_numpy(keys))[1].numpy()
    return order
