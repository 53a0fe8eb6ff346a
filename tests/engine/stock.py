"""What transformers computes itself from a checkpoint, step by step, to hold the engine's logits against."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.engine import LockstepModel
from runtime.policy.types import Policy
from runtime.recording import StepRecord

PAD = 256
Prompts = Sequence[Sequence[int]]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def load(folder: Path, dtype: torch.dtype, experts: str | None = None) -> Any:
    """The model as transformers loads it; ``experts``: which implementation runs them."""
    from transformers import AutoModelForCausalLM

    chosen = {} if experts is None else {"experts_implementation": experts}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **chosen).eval()


def stock_logits(model: Any, prompts: Prompts, steps: int) -> list[torch.Tensor]:
    """[B, V] after the prefill and after every greedily chosen token."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kept: dict[str, Any] = {}

    def step(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, prefill: bool) -> torch.Tensor:
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **kept
        )
        kept[name] = output[name]
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    return _greedy(step, prompts, steps)


def engine_logits(
    model: LockstepModel, policy: Policy, prompts: Prompts, steps: int
) -> tuple[list[torch.Tensor], list[StepRecord]]:
    """The same of the engine, and what its experts did."""
    key_values = model.begin()
    records = []

    def step(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, prefill: bool) -> torch.Tensor:
        logits, record = model.step(ids, mask, key_values, policy, prefill=prefill)
        records.append(record)
        return logits

    return _greedy(step, prompts, steps), records


@torch.inference_mode()
def _greedy(step: Step, prompts: Prompts, steps: int) -> list[torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found: list[torch.Tensor] = []
    for number in range(steps):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        found.append(step(ids, mask, positions, number == 0))
        ids = found[-1].argmax(-1)[:, None]
        mask = torch.cat([mask, mask.new_ones((len(prompts), 1))], 1)
    return found
