"""What a model's router decided, as the scores that a policy needs, without a line of code per family.

A router returns ``(logits [T,N], weights [T,K], integer ids [T,K])``. From the logits the gate scores follow by softmax
or by sigmoid, plus a bias on the selection where the router has one. Which of them, and how the weights are normalised
and scaled, is inferred from the first tokens, and checked against what the router itself chose. Nothing is guessed: of
a router that does not fit (PhiMoE's sparsemixer), only the weights that it gave its choice are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probes.errors import CheckpointError

WEIGHT_TOLERANCE = 2e-2
"""Relative; bfloat16 weights carry 8 bits."""

_BIAS_NAMES = ("correction_bias", "expert_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """How the router makes weights of scores: ``function`` then ``renormalize`` (survivors | none) then ``scaling``.

    ``function``: softmax, sigmoid, or unknown: then there are weights of the choice alone, and survivors keep theirs.
    """

    function: str
    renormalize: str
    scaling: float

    @property
    def is_known(self) -> bool:
        return self.function != "unknown"

    def agrees(self, other: WeightRule) -> bool:
        """Whether both rules are the same but for the rounding of the weights that the scaling was inferred from."""
        same = (self.function, self.renormalize) == (other.function, other.renormalize)
        return same and abs(self.scaling / other.scaling - 1.0) < WEIGHT_TOLERANCE


class RouterView:
    """Follows one router by a forward hook and yields its scores. ``name``: of its layer and family, for messages."""

    def __init__(self, experts: torch.nn.Module, parent: torch.nn.Module, name: str) -> None:
        self._name = name
        self._logits: torch.Tensor | None = None
        self._rule: WeightRule | None = None
        self._bias = _selection_bias(experts, parent)
        self._limits_groups = any((getattr(module, "num_group", 1) or 1) > 1 for module in (parent, *parent.children()))
        self._biased = "scores"
        for child in parent.children():
            if child is not experts:
                child.register_forward_hook(self._see)

    @property
    def rule(self) -> WeightRule:
        assert self._rule is not None, "scores() comes first"
        return self._rule

    def _see(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(o, torch.Tensor) for o in output):
            return
        if output[2].dtype in (torch.int64, torch.int32):
            self._logits = output[0]

    def scores(
        self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gate scores and selection scores, float32 [T, N], of the router's last call; None where its rule is unknown.

        Raises ``CheckpointError`` where it shows no scores, or none that are numbers.
        """
        if self._logits is None:
            raise self._refused("it does not return (logits, weights, ids)")
        logits = self._logits.reshape(-1, self._logits.shape[-1]).float()
        if self._rule is None:
            self._rule = self._infer(logits, top_k_index, top_k_weights)
        if not self._rule.is_known:
            return None
        scores = _gate(self._rule.function, logits)
        if self._bias is None:
            return scores, scores
        return scores, (scores if self._biased == "scores" else logits) + self._bias

    def _infer(self, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> WeightRule:
        sound = logits.isfinite().all(1) & weights.isfinite().all(1)
        if not sound.any():
            raise CheckpointError(
                f"the router of {self._name} gives scores that are no numbers: weights in its layer or before it are "
                "NaN or infinite",
                hint="the checkpoint is damaged; download it again, or try --dtype float32 if it runs in float16",
            )
        logits, ids, given = logits[sound], ids[sound], weights[sound].float()
        functions = ("sigmoid", "softmax") if self._bias is not None else ("softmax", "sigmoid")
        for function in functions:
            scores = _gate(function, logits)
            chosen = scores.gather(1, ids)
            for renormalize in ("survivors", "none"):
                plain = chosen / chosen.sum(1, keepdim=True) if renormalize == "survivors" else chosen
                scaling = float((given.sum() / plain.sum()).item())
                if torch.allclose(given, plain * scaling, rtol=WEIGHT_TOLERANCE, atol=1e-6):
                    # A factor within the weights' own rounding of 1 is 1.
                    near_one = abs(scaling - 1.0) < WEIGHT_TOLERANCE / 4
                    self._biased = self._what_is_biased(scores, logits, ids)
                    return WeightRule(function=function, renormalize=renormalize, scaling=1.0 if near_one else scaling)
        if (given < 0).any():
            raise self._refused("its weights are neither softmax nor sigmoid of its logits, and some are negative")
        return WeightRule(function="unknown", renormalize="none", scaling=1.0)

    def _what_is_biased(self, scores: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> str:
        """Where the bias is added: to the scores, unless the logits explain more of the router's choice.

        A choice that is limited to groups is explained by neither, and would be by either as the tokens have it; so
        far, routers that limit it rank the scores.
        """
        if self._bias is None or self._limits_groups:
            return "scores"
        found = {
            name: _found(ids, (values + self._bias).topk(ids.shape[1]).indices)
            for name, values in (("scores", scores), ("logits", logits))
        }
        return max(found, key=lambda name: found[name])

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the router of {self._name} is not understood: {why}",
            hint="this family cannot be run with a policy; please report its name",
        )


def _selection_bias(experts: torch.nn.Module, parent: torch.nn.Module) -> torch.Tensor | None:
    """The correction that a router adds to its ranking [N], wherever in the MoE block it is kept."""
    for name, tensor in [*parent.named_parameters(), *parent.named_buffers()]:
        if name.endswith(_BIAS_NAMES) and tensor.numel() == experts.num_experts:
            return tensor.detach().reshape(-1).float()
    return None


def _found(ids: torch.Tensor, expected: torch.Tensor) -> int:
    return int((ids[:, :, None] == expected[:, None, :]).any(2).sum())


def _gate(function: str, logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1) if function == "softmax" else logits.sigmoid()


def as_float64(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A float64 copy on the host: the decision widens float32 scores, so that all ranks compute on the same values."""
    return tensor.detach().double().cpu().numpy()
