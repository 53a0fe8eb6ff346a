"""What a policy costs in quality, measured in the shape of decoding.

Held-out sequences are teacher-forced in lockstep, one token per sequence per step, on the policy's own evolving caches.
A forward over whole sequences would make nearly every expert mandatory and measure nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from runtime.engine import LockstepModel
from runtime.policy.types import Policy
from runtime.recording import StepRecord
from runtime.statistics import mean_difference_interval
from store.records import Quality


@torch.inference_mode()
def measure_quality(
    model: LockstepModel,
    sequences: Sequence[Sequence[int]],
    baseline: Policy,
    policy: Policy,
    *,
    batch_size: int,
    seed: int,
    on_batch: Callable[[], None] = lambda: None,
) -> Quality:
    """Loss of both, KL(baseline ‖ policy) and agreement of the most likely token, over equally long ``sequences``.

    The baseline's forward bypasses the caches, so that they evolve as they would with the policy alone.
    """
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for start in range(0, len(sequences), batch_size):
        ids = torch.tensor([list(s) for s in sequences[start : start + batch_size]], device=model.device)
        ours, theirs = model.begin(), model.begin()
        mask = torch.zeros_like(ids[:, :0])
        # Per step [B] each; gathered to [steps, B].
        rows: list[tuple[torch.Tensor, ...]] = []
        for position in range(ids.shape[1] - 1):
            mask = torch.cat([mask, mask.new_ones((len(ids), 1))], 1)
            token = ids[:, position : position + 1]
            expected, _ = model.step(token, mask, theirs, baseline, prefill=False, bypass_cache=True)
            actual, record = model.step(token, mask, ours, policy, prefill=False)
            model.signals.step(record, policy)
            rows.append(_compare(expected, actual, ids[:, position + 1]))
        for part, column in zip(parts, zip(*rows, strict=True), strict=True):
            part.append(torch.stack(column).mean(0))
        on_batch()
    baseline_B, policy_B, divergence_B, agreement_B = (torch.cat(part).double().cpu().numpy() for part in parts)
    difference = float((policy_B - baseline_B).mean())
    return Quality(
        nll_baseline=float(baseline_B.mean()),
        nll_policy=float(policy_B.mean()),
        nll_difference_ci95=mean_difference_interval(policy_B - baseline_B, seed=seed),
        perplexity_ratio=math.exp(difference),
        mean_kl=float(divergence_B.mean()),
        top1_agreement=float(agreement_B.mean()),
        tokens=sum(len(s) - 1 for s in sequences),
        sequences=len(sequences),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """``nll_B``: mean loss of each sequence, nats per token; ``steps``: what the experts did meanwhile."""

    nll_B: npt.NDArray[np.float64]
    steps: list[StepRecord]


@torch.inference_mode()
def measure_losses(
    model: LockstepModel,
    sequences: Sequence[Sequence[int]],
    policy: Policy,
    *,
    batch_size: int,
    bypass_cache: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> Losses:
    """The loss of one policy alone: what ``measure_quality`` finds for it from the same caches, in half the time.

    ``bypass_cache``: the caches stay as they are, which changes no loss of a policy that does not look at them.
    """
    losses: list[torch.Tensor] = []
    steps: list[StepRecord] = []
    for start in range(0, len(sequences), batch_size):
        ids = torch.tensor([list(s) for s in sequences[start : start + batch_size]], device=model.device)
        key_values = model.begin()
        mask = torch.zeros_like(ids[:, :0])
        rows: list[torch.Tensor] = []
        for position in range(ids.shape[1] - 1):
            mask = torch.cat([mask, mask.new_ones((len(ids), 1))], 1)
            token = ids[:, position : position + 1]
            logits, step = model.step(token, mask, key_values, policy, prefill=False, bypass_cache=bypass_cache)
            rows.append(_nll(logits.float().log_softmax(-1), ids[:, position + 1]))
            steps.append(step)
        losses.append(torch.stack(rows).mean(0))
        on_batch()
    return Losses(nll_B=torch.cat(losses).double().cpu().numpy(), steps=steps)


def _nll(log_shares_BV: torch.Tensor, next_B: torch.Tensor) -> torch.Tensor:
    return -log_shares_BV.gather(1, next_B[:, None])[:, 0]


def _compare(expected_BV: torch.Tensor, actual_BV: torch.Tensor, next_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(nll of baseline, nll of policy, KL, agreement), each [B]."""
    expected = expected_BV.float().log_softmax(-1)
    actual = actual_BV.float().log_softmax(-1)
    nll_expected, nll_actual = _nll(expected, next_B), _nll(actual, next_B)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    same = (expected.argmax(-1) == actual.argmax(-1)).float()
    return nll_expected, nll_actual, divergence, same
