"""What a model's router decided, as the scores that a policy needs, without a line of code per family.

A router returns ``(logits [T,N], weights [T,K], integer ids [T,K])``. From the logits the gate scores follow by softmax
or by sigmoid, plus a bias on the selection where the router has one. Which of them, and how the weights are normalised
and scaled, is inferred from the first real tokens, and checked against what the router itself chose: a router that
does not fit is refused rather than guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probes.errors import CheckpointError

WEIGHT_TOLERANCE = 2e-2
"""Relative; bfloat16 weights carry 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """How the router makes weights of scores: ``function`` then ``renormalize`` (survivors | none) then ``scaling``."""

    function: str
    renormalize: str
    scaling: float


class RouterView:
    """Follows one router by a forward hook and yields its scores."""

    def __init__(self, experts: torch.nn.Module, parent: torch.nn.Module, layer_name: str) -> None:
        self._layer_name = layer_name
        self._logits: torch.Tensor | None = None
        self._rule: WeightRule | None = None
        self._bias: torch.Tensor | None = None
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
            bias = getattr(module, "e_score_correction_bias", None)
            self._bias = bias if isinstance(bias, torch.Tensor) else None

    def scores(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate scores and selection scores, float32 [T, N], of the router's last call.

        Raises ``CheckpointError`` where they do not explain what the router chose.
        """
        if self._logits is None:
            raise self._refused("its router does not return (logits, weights, ids)")
        logits = self._logits.reshape(-1, self._logits.shape[-1]).float()
        if self._rule is None:
            self._rule = self._infer(logits, top_k_index, top_k_weights)
        scores = _gate(self._rule.function, logits)
        return scores, scores if self._bias is None else scores + self._bias.float()

    def _infer(self, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> WeightRule:
        given = weights.float()
        functions = ("sigmoid", "softmax") if self._bias is not None else ("softmax", "sigmoid")
        for function in functions:
            chosen = _gate(function, logits).gather(1, ids)
            for renormalize in ("survivors", "none"):
                plain = chosen / chosen.sum(1, keepdim=True) if renormalize == "survivors" else chosen
                scaling = float((given.sum() / plain.sum()).item())
                if torch.allclose(given, plain * scaling, rtol=WEIGHT_TOLERANCE, atol=1e-6):
                    # A factor within the weights' own rounding of 1 is 1.
                    near_one = abs(scaling - 1.0) < WEIGHT_TOLERANCE / 4
                    return WeightRule(function=function, renormalize=renormalize, scaling=1.0 if near_one else scaling)
        raise self._refused("its weights are neither softmax nor sigmoid of its logits")

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the router of {self._layer_name} is not understood: {why}",
            hint="this family can only be run as it is; please report its name",
        )


def _gate(function: str, logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1) if function == "softmax" else logits.sigmoid()


def as_float64(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A float64 copy on the host: the decision widens float32 scores, so that all ranks compute on the same values."""
    return tensor.detach().to("cpu", torch.float32).numpy().astype(np.float64)
