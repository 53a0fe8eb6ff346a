"""The policies of ``runtime.policy.reference`` on compiled kernels: the same decisions, in microseconds.

Importing this module imports numba. Shapes as in ``runtime.policy.types``.
"""

from __future__ import annotations

import numpy as np

from runtime.policy import kernels, slot_kernels
from runtime.policy.controller import PriceController
from runtime.policy.loads import Layer
from runtime.policy.shares import threshold, worth
from runtime.policy.slots import selection
from runtime.policy.types import (
    SHARE_UNIT,
    Bools,
    Decision,
    Ints,
    Machine,
    PolicySpec,
    Routed,
    Summary,
    Tokens,
)

_RENORMALIZE = {"survivors": slot_kernels.SURVIVORS, "original": slot_kernels.ORIGINAL, "none": slot_kernels.UNSCALED}


class Router:
    """Nothing is pruned. Also the base of the others: subclasses say what is marked, kept and put in the slots.

    ``spec`` must be resolved (``runtime.policy.spec.resolve``).
    """

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self._renormalize = _RENORMALIZE[spec.renormalize or "survivors"]
        self._factor = 1.0 if spec.routed_scaling_factor is None else spec.routed_scaling_factor
        self._last: tuple[Tokens, Ints] | None = None
        self._layer: tuple[Machine, Layer] | None = None

    @property
    def state(self) -> dict[str, float]:
        return {}

    def summarise(self, tokens: Tokens, machine: Machine) -> Summary:
        num_experts = len(machine.placement_NR)
        q_TK = np.empty(tokens.topk_ids_TK.shape, dtype=np.int64)
        importance_N = np.zeros(num_experts, dtype=np.int64)
        active_N = np.zeros(num_experts, dtype=np.bool_)
        marks_N = np.zeros(num_experts, dtype=np.bool_)
        real = kernels.tally(tokens.topk_ids_TK, tokens.gates_TK, tokens.token_mask_T, q_TK, importance_N, active_N)
        self._last = (tokens, q_TK)
        self._mark(tokens, q_TK, marks_N)
        return Summary(importance_N=importance_N, mandatory_N=marks_N, active_N=active_N, tokens=real)

    def decide(self, summary: Summary, machine: Machine) -> Decision:
        layer = self._cheapest(machine)
        load_D = np.empty(layer.devices, dtype=np.int64)
        kept_N, mandatory_N, f_base = self._keep(summary, layer, load_D)
        before_D = np.empty(layer.devices, dtype=np.int64)
        f_before, f_after = kernels.costs_of(
            summary.active_N,
            kept_N,
            layer.device_N,
            layer.paid_N,
            layer.groups.starts_G1,
            layer.groups.members,
            layer.groups.factors_G,
            before_D,
            load_D,
        )
        return Decision(
            kept_N=kept_N,
            active_N=summary.active_N,
            device_N=layer.device_N,
            paid_N=layer.paid_N,
            mandatory_N=mandatory_N,
            f_base=f_base,
            f_before=f_before,
            f_after=f_after,
            load_before_D=before_D,
            load_after_D=load_D,
        )

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed:
        q_TK = self._shares(tokens)
        ids_TK = np.empty_like(tokens.topk_ids_TK)
        self._fill(tokens, q_TK, decision, machine, ids_TK)
        weights_TK = np.empty(ids_TK.shape)
        removed, rerouted = slot_kernels.settle(
            tokens.topk_ids_TK,
            tokens.gates_TK,
            np.empty((len(ids_TK), 0)) if tokens.scores_TN is None else tokens.scores_TN,
            q_TK,
            tokens.token_mask_T,
            ids_TK,
            self._renormalize,
            self._factor,
            weights_TK,
        )
        return Routed(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK, removed=removed, rerouted_slots=rerouted)

    def _shares(self, tokens: Tokens) -> Ints:
        """The shares; ``reroute`` finds those of ``summarise`` again."""
        if self._last is None or self._last[0] is not tokens:
            q_TK = np.empty(tokens.topk_ids_TK.shape, dtype=np.int64)
            kernels.shares(tokens.topk_ids_TK, tokens.gates_TK, tokens.token_mask_T, q_TK)
            self._last = (tokens, q_TK)
        return self._last[1]

    def _cheapest(self, machine: Machine) -> Layer:
        """``cheapest_replicas``, found once while the machine stays the same: on-device it always does."""
        if self._layer is None or self._layer[0] is not machine:
            self._layer = (machine, cheapest_replicas(machine))
        return self._layer[1]

    def _mark(self, tokens: Tokens, q_TK: Ints, marks_N: Bools) -> None:
        """Mark what the policy's per-token rule keeps."""

    def _keep(self, summary: Summary, layer: Layer, load_D: Ints) -> tuple[Bools, Bools | None, int | None]:
        """Kept set, mandatory set and F_base."""
        return summary.active_N.copy(), None, None

    def _fill(self, tokens: Tokens, q_TK: Ints, decision: Decision, machine: Machine, ids_TK: Ints) -> None:
        """The tokens' slots after the decision."""
        slot_kernels.drop_lost(tokens.topk_ids_TK, tokens.token_mask_T, decision.kept_N, ids_TK)


class _Compensated(Router):
    """Lost slots are filled as ``compensation`` and ``reselect`` say."""

    def _fill(self, tokens: Tokens, q_TK: Ints, decision: Decision, machine: Machine, ids_TK: Ints) -> None:
        ranks_TN = selection(tokens)
        if self.spec.compensation == "none" or ranks_TN is None:
            super()._fill(tokens, q_TK, decision, machine, ids_TK)
            return
        candidates_N = decision.kept_N
        if self.spec.compensation == "resident":
            candidates_N = candidates_N | self._cheapest(machine).resident_N
        every_token = self.spec.reselect == "all"
        slot_kernels.compensate(
            tokens.topk_ids_TK, tokens.token_mask_T, decision.kept_N, candidates_N, ranks_TN, every_token, ids_TK
        )

    def _protect(self, tokens: Tokens, q_TK: Ints, marks_N: Bools) -> None:
        if "ceiling" in self.spec.parameters:
            self._mark_prefixes(tokens, q_TK, 1 - float(self.spec.parameters["ceiling"]), marks_N)

    def _mark_prefixes(self, tokens: Tokens, q_TK: Ints, share: float, marks_N: Bools) -> None:
        least = threshold(share) - tokens.topk_ids_TK.shape[1]
        kernels.mark_prefixes(tokens.topk_ids_TK, q_TK, tokens.token_mask_T, least, marks_N)


class Importance(_Compensated):
    """A_trans = A_must."""

    def _mark(self, tokens: Tokens, q_TK: Ints, marks_N: Bools) -> None:
        if self.spec.parameters["rule"] == "cir":
            self._mark_prefixes(tokens, q_TK, float(self.spec.parameters["theta"]), marks_N)
        self._protect(tokens, q_TK, marks_N)

    def _keep(self, summary: Summary, layer: Layer, load_D: Ints) -> tuple[Bools, Bools | None, int | None]:
        mandatory_N = summary.mandatory_N.copy()
        if self.spec.parameters["rule"] == "score":
            least = min(threshold(float(self.spec.parameters["theta"])), np.iinfo(np.int64).max)
            kernels.mark_above(summary.importance_N, summary.active_N, least, mandatory_N)
        kept_N, f_base = self._expand(summary, mandatory_N, layer, load_D)
        return kept_N, mandatory_N, f_base

    def _expand(self, summary: Summary, mandatory_N: Bools, layer: Layer, load_D: Ints) -> tuple[Bools, int]:
        kernels.load_of(mandatory_N, layer.device_N, layer.paid_N, load_D)
        return mandatory_N.copy(), kernels.f_of(
            load_D, layer.groups.starts_G1, layer.groups.members, layer.groups.factors_G
        )


class Caee(Importance):
    """Mandatory experts, then cost-invariant expansion."""

    def _expand(self, summary: Summary, mandatory_N: Bools, layer: Layer, load_D: Ints) -> tuple[Bools, int]:
        kept_N = np.empty_like(mandatory_N)
        f_base = kernels.decide_caee(
            summary.importance_N,
            mandatory_N,
            summary.active_N,
            layer.device_N,
            layer.paid_N,
            layer.groups.starts_G1,
            layer.groups.members,
            layer.groups.factors_G,
            load_D,
            kept_N,
        )
        return kept_N, f_base


class Budget(_Compensated):
    """The level of cost that saves the most time at a price on importance, fixed or steered."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(spec)
        epsilon = spec.parameters.get("epsilon")
        self._reuse = float(spec.parameters.get("reuse", 0.0))
        self._controller = None if epsilon is None else PriceController(float(epsilon))

    @property
    def state(self) -> dict[str, float]:
        return {"price": self._price}

    @property
    def _price(self) -> float:
        return float(self.spec.parameters["price"]) if self._controller is None else self._controller.price

    def _mark(self, tokens: Tokens, q_TK: Ints, marks_N: Bools) -> None:
        kernels.mark_best(tokens.topk_ids_TK, q_TK, tokens.token_mask_T, 1, marks_N)
        self._protect(tokens, q_TK, marks_N)

    def _keep(self, summary: Summary, layer: Layer, load_D: Ints) -> tuple[Bools, Bools | None, int | None]:
        kept_N = np.empty_like(summary.active_N)
        kernels.decide_budget(
            worth(summary.importance_N, layer.rate_N, self._reuse),
            summary.mandatory_N,
            summary.active_N,
            layer.resident_N,
            layer.device_N,
            layer.paid_N,
            layer.groups.starts_G1,
            layer.groups.members,
            layer.groups.factors_G,
            self._price,
            np.empty((3, len(kept_N)), dtype=np.int64),
            load_D,
            kept_N,
        )
        if self._controller is not None and summary.tokens:
            removed = int(summary.importance_N[summary.active_N & ~kept_N].sum())
            self._controller.observe(removed / SHARE_UNIT, summary.tokens)
        return kept_N, None, None


class Oea(_Compensated):
    """The union of each token's ``k0`` best."""

    def _mark(self, tokens: Tokens, q_TK: Ints, marks_N: Bools) -> None:
        count = min(int(self.spec.parameters["k0"]), tokens.topk_ids_TK.shape[1])
        kernels.mark_best(tokens.topk_ids_TK, q_TK, tokens.token_mask_T, count, marks_N)

    def _keep(self, summary: Summary, layer: Layer, load_D: Ints) -> tuple[Bools, Bools | None, int | None]:
        return summary.mandatory_N.copy(), None, None


class _PerToken(Router):
    """Decided token by token, from the token alone; the kept set is what is dispatched."""

    def _choose(self, tokens: Tokens, q_TK: Ints, ids_TK: Ints) -> None:
        raise NotImplementedError

    def _mark(self, tokens: Tokens, q_TK: Ints, marks_N: Bools) -> None:
        ids_TK = np.empty_like(tokens.topk_ids_TK)
        self._choose(tokens, q_TK, ids_TK)
        marks_N[ids_TK[ids_TK >= 0]] = True

    def _keep(self, summary: Summary, layer: Layer, load_D: Ints) -> tuple[Bools, Bools | None, int | None]:
        return summary.mandatory_N.copy(), None, None

    def _fill(self, tokens: Tokens, q_TK: Ints, decision: Decision, machine: Machine, ids_TK: Ints) -> None:
        self._choose(tokens, q_TK, ids_TK)


class TopK(_PerToken):
    """Every token keeps its ``k0`` best."""

    def _choose(self, tokens: Tokens, q_TK: Ints, ids_TK: Ints) -> None:
        count = min(int(self.spec.parameters["k0"]), ids_TK.shape[1])
        slot_kernels.keep_best(tokens.topk_ids_TK, q_TK, tokens.token_mask_T, count, ids_TK)


class Skip(_PerToken):
    """A token drops experts below ``beta`` times its best."""

    def _choose(self, tokens: Tokens, q_TK: Ints, ids_TK: Ints) -> None:
        beta = float(self.spec.parameters["beta"])
        slot_kernels.keep_strong(tokens.topk_ids_TK, q_TK, tokens.token_mask_T, beta, ids_TK)


def cheapest_replicas(machine: Machine) -> Layer:
    """``runtime.policy.loads.cheapest_replicas``, compiled."""
    num_experts = len(machine.placement_NR)
    device_N = np.empty(num_experts, dtype=np.int64)
    paid_N = np.empty(num_experts, dtype=np.int64)
    resident_N = np.empty(num_experts, dtype=np.bool_)
    resident_NR = np.empty((num_experts, 0), dtype=np.bool_) if machine.resident_NR is None else machine.resident_NR
    kernels.cheapest_replicas(machine.placement_NR, machine.cost_NR, resident_NR, device_N, paid_N, resident_N)
    return Layer.of(machine, device_N=device_N, paid_N=paid_N, resident_N=resident_N)
