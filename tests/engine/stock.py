"""What transformers computes itself from a checkpoint, step by step, to hold the engine's logits against.

And a spy, which says what the engine's policy decided meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.engine import LockstepModel
from runtime.policy.types import Decision, Machine, Policy, PolicySpec, Routed, Summary, Tokens
from runtime.recording import StepRecord
from runtime.worker import RankSession

PAD = 256
Prompts = Sequence[Sequence[int]]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Weights [T, K] of logits [T, N] and of the ids [T, K] that are left, −1 for nothing."""


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

    return _greedy(step, prompts, steps, model.device)


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

    return _greedy(step, prompts, steps, model.device), records


@torch.inference_mode()
def _greedy(step: Step, prompts: Prompts, steps: int, device: torch.device) -> list[torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    found: list[torch.Tensor] = []
    for number in range(steps):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        found.append(step(ids, mask, positions, number == 0))
        ids = found[-1].argmax(-1)[:, None]
        mask = torch.cat([mask, mask.new_ones((len(prompts), 1))], 1)
    return found


def masked_logits(
    model: Any,
    prompts: Prompts,
    dispatched: Sequence[Sequence[torch.Tensor]],
    rule: Rule | None,
) -> list[torch.Tensor]:
    """The same of transformers' model when its experts are only those of ``dispatched`` [step][layer][T, K], −1 none.

    ``rule(logits, ids)``: the weights of those ids; None: those that the router itself gave them. Every (token, expert)
    is computed alone and added up plainly.
    """
    from runtime.models.skeleton import speaks_experts_protocol

    layers = [
        (module, parent)
        for parent in model.modules()
        for module in parent.children()
        if speaks_experts_protocol(module)
    ]
    at = {"step": -1}
    for number, (module, parent) in enumerate(layers):
        module.forward = _masked(module.forward, _logits_of(module, parent), dispatched, number, at, rule)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kept: dict[str, Any] = {}

    def step(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, prefill: bool) -> torch.Tensor:
        at["step"] += 1
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **kept
        )
        kept[name] = output[name]
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    return _greedy(step, prompts, len(dispatched), model.device)


def _logits_of(module: torch.nn.Module, parent: torch.nn.Module) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def see(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3:
            seen[:] = [output[0]]

    for child in parent.children():
        if child is not module:
            child.register_forward_hook(see)
    return seen


def _masked(
    expert_forward: Callable[..., torch.Tensor],
    logits: list[torch.Tensor],
    dispatched: Sequence[Sequence[torch.Tensor]],
    layer: int,
    at: dict[str, int],
    rule: Rule | None,
) -> Callable[..., torch.Tensor]:
    def forward(hidden: torch.Tensor, own_ids: torch.Tensor, own_weights: torch.Tensor) -> torch.Tensor:
        ids = dispatched[at["step"]][layer]
        if rule is None:
            weights = ((ids[:, :, None] == own_ids[:, None, :]) * own_weights[:, None, :]).sum(-1)
        else:
            weights = rule(logits[0].float(), ids)
        total = torch.zeros_like(hidden)
        for token, slots in enumerate(ids.tolist()):
            for slot, expert in enumerate(slots):
                if expert >= 0:
                    one = expert_forward(hidden[token : token + 1], torch.tensor([[expert]]), torch.ones(1, 1))
                    total[token] += one[0] * weights[token, slot]
        return total

    return forward


def softmax(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return _chosen(logits.softmax(-1), ids)


def softmax_of_chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = _chosen(logits.softmax(-1), ids)
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-30)


def sigmoid_of_chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = _chosen(logits.sigmoid(), ids)
    return 2.5 * weights / weights.sum(1, keepdim=True).clamp(min=1e-30)


def _chosen(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids >= 0, scores.gather(1, ids.clamp(min=0)), 0.0)


RULES: dict[str, Rule | None] = {
    "qwen3_moe": softmax_of_chosen,
    "qwen2_moe": softmax,
    "gpt_oss": softmax_of_chosen,
    "deepseek_v3": sigmoid_of_chosen,
    # sparsemixer, which no score explains: the router's own weights are all that is known.
    "phimoe": None,
}
"""By family, how its router weighs what it chose."""


@dataclass
class Spy:
    """A policy that does as ``policy`` does and remembers it."""

    policy: Policy
    decisions: list[Decision] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)

    @property
    def spec(self) -> PolicySpec:
        return self.policy.spec

    @property
    def state(self) -> dict[str, float]:
        return self.policy.state

    def summarise(self, tokens: Tokens, machine: Machine) -> Summary:
        self.tokens.append(tokens)
        return self.policy.summarise(tokens, machine)

    def decide(self, summary: Summary, machine: Machine) -> Decision:
        self.decisions.append(self.policy.decide(summary, machine))
        return self.decisions[-1]

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed:
        self.routed.append(self.policy.reroute(tokens, decision, machine))
        return self.routed[-1]

    def dispatched(self, layers: int) -> list[list[torch.Tensor]]:
        """[step][layer] ids [T, K]."""
        ids = [torch.from_numpy(routed.topk_ids_TK) for routed in self.routed]
        return [ids[at : at + layers] for at in range(0, len(ids), layers)]


def warmed_up(session: RankSession, prompts: Prompts) -> Spy:
    """The session's policy, once the router's rule is known; the caches are left as the prompts made them."""
    session.run_pass(prompts, session.router, new_tokens=2)
    return Spy(session.asked_policy())
