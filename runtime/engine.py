"""Generating text with a policy, and measuring it: prefill and greedy decode of one batch of prompts.

Shape legend: B sequences, S positions of the padded prompts, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.execution import ExpertExecution, StepContext
from runtime.models.load import LoadedModel
from runtime.parallel import Ranks
from runtime.policy.types import Policy
from runtime.recording import PassRecord, StepRecord
from runtime.signals.collect import NoSignals, StepSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Which policy applies in prefill and which in decode."""

    prefill: Policy
    decode: Policy


class KeyValues:
    """A model's own key-value cache, which it makes itself at the first step: families differ in its kind."""

    def __init__(self) -> None:
        self.value: Any = None


class LockstepModel:
    """A causal language model with its key-value cache, advanced one step for a whole batch at a time."""

    def __init__(self, loaded: LoadedModel, execution: ExpertExecution, device: torch.device) -> None:
        self.device = device
        self.signals: StepSignals = NoSignals()
        self._model = loaded.model
        self._execution = execution
        parameters = inspect.signature(loaded.model.forward).parameters
        # Newer families of transformers call it `cache`.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._trims_logits = "logits_to_keep" in parameters

    def settle(self) -> None:
        """Complete the timers of the steps so far, whose results have reached the host."""
        self._execution.clock.settle()

    def begin(self) -> KeyValues:
        """An empty key-value cache."""
        return KeyValues()

    def step(
        self,
        input_ids_BS: torch.Tensor,
        attention_mask: torch.Tensor,
        key_values: KeyValues,
        policy: Policy,
        *,
        prefill: bool,
        bypass_cache: bool = False,
    ) -> tuple[torch.Tensor, StepRecord]:
        """Logits [B, V] after the last position, and what the experts did. ``attention_mask``: [B, past + S].

        Every rank gives the whole batch and gets all logits, also where it computes only its share of the sequences.
        """
        new, batch_size, dispatch = input_ids_BS.shape[1], len(input_ids_BS), self._execution.dispatch
        real_BS = attention_mask[:, -new:].bool().cpu().numpy()
        input_ids_BS, attention_mask = dispatch.rows(input_ids_BS), dispatch.rows(attention_mask)
        own_BS = attention_mask[:, -new:].bool().cpu().numpy() & dispatch.real(batch_size)[:, None]
        context = StepContext(
            own_BS.reshape(-1), policy, prefill=prefill, bypass_cache=bypass_cache, real_G=real_BS.reshape(-1)
        )
        self._execution.start_step(context)
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
        arguments: dict[str, Any] = {self._cache_name: key_values.value, "use_cache": True}
        if self._trims_logits:
            arguments["logits_to_keep"] = 1
        start = time.perf_counter()
        output = self._model(input_ids=input_ids_BS, attention_mask=attention_mask, position_ids=positions, **arguments)
        logits = dispatch.gathered(output.logits[:, -1], batch_size)
        key_values.value = output[self._cache_name]
        context.record.seconds = time.perf_counter() - start - context.record.timers.shadow
        return logits, context.record


@torch.inference_mode()
def generate(
    model: LockstepModel,
    prompts: Sequence[Sequence[int]],
    phases: Phases,
    *,
    max_new_tokens: int,
    pad_id: int,
    ranks: Ranks,
) -> PassRecord:
    """Greedy decode of one batch; sequences never end early, as in throughput benchmarks.

    TTFT: from the batch's submission to its first token. TPOT: (last − first) ÷ (new tokens − 1). The brake's shadow
    samples are in no time.
    """
    input_ids, mask = left_padded(prompts, pad_id, model.device)
    key_values = model.begin()
    ranks.barrier()
    submitted = time.perf_counter()
    logits, record = model.step(input_ids, mask, key_values, phases.prefill, prefill=True)
    chosen = logits.argmax(-1)
    token_ids = [chosen.tolist()]  # reaches the host: the token exists when the clock is read
    first = last = time.perf_counter()
    record.seconds = first - submitted - record.timers.shadow
    model.settle()
    steps = [record]
    model.signals.step(record, phases.prefill)
    shadow = 0.0
    while len(token_ids) < max_new_tokens:
        mask = torch.cat([mask, mask.new_ones((len(prompts), 1))], 1)
        logits, record = model.step(chosen[:, None], mask, key_values, phases.decode, prefill=False)
        chosen = logits.argmax(-1)
        token_ids.append(chosen.tolist())
        now = time.perf_counter()
        record.seconds, last = now - last - record.timers.shadow, now
        shadow += record.timers.shadow
        model.settle()
        steps.append(record)
        model.signals.step(record, phases.decode)
    return PassRecord(
        ttft_seconds=first - submitted,
        tpot_seconds=(last - first - shadow) / max(1, max_new_tokens - 1),
        token_ids=np.array(token_ids).T.tolist(),
        steps=steps,
    )


def left_padded(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, S]; padding stands on the left, so that all sequences end at the same position."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
