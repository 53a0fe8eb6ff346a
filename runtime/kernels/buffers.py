"""The decision's memory on one device, allocated once: CUDA graphs replay on these very addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runtime.policy.types import GROUP_UNIT, Ints, Machine

FIGURES = ("f_base", "f_before", "f_after", "tokens", "faults", "removed", "rerouted_slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A machine on the device. ``crosses_DL``: the transfers to device d cross link l; the first D links are the
    devices' own, with factor 1024, then come the groups' shared ones."""

    placement_NR: torch.Tensor
    cost_NR: torch.Tensor
    resident_NR: torch.Tensor
    crosses_DL: torch.Tensor
    factors_L: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What the launches hand to each other and to the caller. ``summary``: see ``runtime.kernels.summarise``;
    ``figures``: FIGURES in their order; ``loads_2D``: before and after; the rest as in ``runtime.policy.types``."""

    summary: torch.Tensor
    own_TK: torch.Tensor
    shares_TK: torch.Tensor
    importance_N: torch.Tensor
    device_N: torch.Tensor
    paid_N: torch.Tensor
    held_N: torch.Tensor
    active_N: torch.Tensor
    mandatory_N: torch.Tensor
    kept_N: torch.Tensor
    keys_N: torch.Tensor
    order_N: torch.Tensor
    sums_N: torch.Tensor
    figures: torch.Tensor
    loads_2D: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    mask_T: torch.Tensor
    price: torch.Tensor


def layer_on(machine: Machine, device: torch.device) -> Layer:
    """``machine`` on ``device``."""
    crosses_DL, factors_L = links(machine)
    resident_NR = np.zeros(machine.placement_NR.shape, bool) if machine.resident_NR is None else machine.resident_NR
    return Layer(
        placement_NR=torch.tensor(machine.placement_NR, dtype=torch.int32, device=device),
        cost_NR=torch.tensor(machine.cost_NR, dtype=torch.int64, device=device),
        resident_NR=torch.tensor(resident_NR, dtype=torch.bool, device=device),
        crosses_DL=torch.tensor(crosses_DL, dtype=torch.int8, device=device),
        factors_L=torch.tensor(factors_L, dtype=torch.int64, device=device),
    )


def links(machine: Machine) -> tuple[Ints, Ints]:
    """Which links each device's transfers cross [D, L], and the links' factors [L]."""
    groups = list(machine.groups)
    crosses_DL = np.zeros((machine.devices, machine.devices + len(groups)), dtype=np.int64)
    crosses_DL[:, : machine.devices] = np.eye(machine.devices, dtype=np.int64)
    for link, (members, _) in enumerate(groups, start=machine.devices):
        crosses_DL[members, link] = 1
    factors_L = [GROUP_UNIT] * machine.devices + [factor for _, factor in groups]
    return crosses_DL, np.array(factors_L, dtype=np.int64)


def allocate(*, experts: int, top_k: int, max_tokens: int, devices: int, device: torch.device) -> Buffers:
    """Buffers for up to ``max_tokens`` tokens; the summary starts out clear, as every decision leaves it."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Buffers(
        summary=zeros(3 * experts + 2, dtype=torch.int64),
        own_TK=zeros(max_tokens, top_k, dtype=torch.int32),
        shares_TK=zeros(max_tokens, top_k, dtype=torch.int64),
        importance_N=zeros(experts, dtype=torch.int64),
        device_N=zeros(experts, dtype=torch.int32),
        paid_N=zeros(experts, dtype=torch.int64),
        held_N=zeros(experts, dtype=torch.int8),
        active_N=zeros(experts, dtype=torch.int8),
        mandatory_N=zeros(experts, dtype=torch.int8),
        kept_N=zeros(experts, dtype=torch.int8),
        keys_N=zeros(padded(experts), dtype=torch.int64),
        order_N=zeros(padded(experts), dtype=torch.int32),
        sums_N=zeros(padded(experts), dtype=torch.int64),
        figures=zeros(len(FIGURES), dtype=torch.int64),
        loads_2D=zeros(2, devices, dtype=torch.int64),
        ids_TK=zeros(max_tokens, top_k, dtype=torch.int32),
        weights_TK=zeros(max_tokens, top_k, dtype=torch.float32),
        mask_T=torch.ones(max_tokens, dtype=torch.bool, device=device),
        price=zeros(1, dtype=torch.float64),
    )


def padded(size: int, least: int = 16) -> int:
    """The next power of two, at least ``least``."""
    return max(least, 1 << (size - 1).bit_length())
