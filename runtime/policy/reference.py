"""The plain implementation of the decision: clarity first, and what every faster one must agree with.

Source: arXiv:2606.29982, sections IV and V; where it is silent, ``docs/policies.md`` decides. Here are the router, the
paper's policy, its ablation without the cost model, and ``budget``; the other baselines are in
``runtime.policy.baselines``. Shapes as in ``runtime.policy.types``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from probes.errors import CaseError
from runtime.policy.controller import PriceController
from runtime.policy.loads import Layer, cheapest_replicas, f_of_loads
from runtime.policy.shares import best_first, chosen_slots, prefix, real_rows, shares, threshold, worth
from runtime.policy.slots import compensate, routed
from runtime.policy.types import SHARE_UNIT, Bools, Decision, Ints, Machine, PolicySpec, Routed, Summary, Tokens


class SetPolicy:
    """A policy that keeps one set of experts for all tokens; subclasses say which.

    ``spec`` must be resolved (``runtime.policy.spec.resolve``).
    """

    needs_scores = False

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec

    @property
    def state(self) -> dict[str, float]:
        return {}

    def summarise(self, tokens: Tokens, machine: Machine) -> Summary:
        """Importance I(e) = Σ_{t: e∈K_t} q(t,e), A_act = ∪ K_t, and the policy's own per-token marks."""
        self._check(tokens)
        num_experts = len(machine.placement_NR)
        q_TK = shares(tokens)
        importance_N = np.zeros(num_experts, dtype=np.int64)
        active_N = np.zeros(num_experts, dtype=np.bool_)
        for row in real_rows(tokens):
            for slot in chosen_slots(tokens, row):
                expert = tokens.topk_ids_TK[row, slot]
                importance_N[expert] += q_TK[row, slot]
                active_N[expert] = True
        return Summary(
            importance_N=importance_N,
            mandatory_N=bitmap(self._marked(tokens, q_TK), num_experts),
            active_N=active_N,
            tokens=int(np.count_nonzero(tokens.token_mask_T)),
            votes_VN=self._votes(tokens),
        )

    def decide(self, summary: Summary, machine: Machine) -> Decision:
        """The kept set, with the loads and F of the router's own choice and of the kept set."""
        layer = cheapest_replicas(machine)
        mandatory = self._mandatory(summary)
        kept = self._keep(summary, layer, mandatory)
        return decision(
            layer,
            active_N=summary.active_N,
            kept_N=bitmap(kept, len(layer.device_N)),
            mandatory_N=None if mandatory is None else bitmap(mandatory, len(layer.device_N)),
        )

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed:
        """Compensation of lost slots, weights, and what was lost."""
        self._check(tokens)
        ids_TK = compensate(tokens, decision.kept_N, cheapest_replicas(machine).resident_N, self.spec)
        return routed(tokens, ids_TK, self.spec)

    def _check(self, tokens: Tokens) -> None:
        if self.needs_scores and tokens.scores_TN is None:
            raise self._without_scores()

    def _without_scores(self) -> CaseError:
        return CaseError(
            f"policy {self.spec.name} needs full scores, and only the chosen experts' weights are known",
            hint="record a trace with full scores, or choose another policy",
        )

    def _marked(self, tokens: Tokens, q_TK: Ints) -> set[int]:
        """The union of the experts that the policy's per-token rule marks."""
        return set()

    def _votes(self, tokens: Tokens) -> Ints | None:
        return None

    def _mandatory(self, summary: Summary) -> set[int] | None:
        """The mandatory set from the summary of all ranks; None where the policy has none."""
        return None

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        raise NotImplementedError


class Router(SetPolicy):
    """Nothing is pruned: the model's own routing."""

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        return members(summary.active_N)

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed:
        ids_TK = np.where(tokens.token_mask_T[:, None], tokens.topk_ids_TK, -1)
        return routed(tokens, ids_TK, self.spec)


class Importance(SetPolicy):
    """A_trans = A_must: the paper's policy without its cost model."""

    def _marked(self, tokens: Tokens, q_TK: Ints) -> set[int]:
        """Rule ``cir``: each token's shortest prefix that carries θ of its weight. ``ceiling``: that carries 1 − it."""
        marked: set[int] = set()
        if self.spec.parameters["rule"] == "cir":
            marked |= union_of_prefixes(tokens, q_TK, float(self.spec.parameters["theta"]))
        return marked | protected(self.spec, tokens, q_TK)

    def _mandatory(self, summary: Summary) -> set[int]:
        """Rule ``score``: I(e) ≥ θ; if there is none, the expert of highest importance."""
        marked = members(summary.mandatory_N)
        if self.spec.parameters["rule"] == "score":
            least = threshold(float(self.spec.parameters["theta"]))
            active = members(summary.active_N)
            marked |= {expert for expert in active if summary.importance_N[expert] >= least}
            if not marked and active:
                marked = {by_importance(summary, active)[0]}
        return marked

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        return mandatory or set()


class Caee(Importance):
    """The paper's policy: mandatory experts, then cost-invariant expansion."""

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        kept = set(mandatory or ())
        load_D = layer.loads(kept)
        f_base = f_of_loads(load_D, layer.groups)
        for expert in by_importance(summary, members(summary.active_N) - kept):
            device, paid = layer.device_N[expert], int(layer.paid_N[expert])
            load_D[device] += paid
            if f_of_loads(load_D, layer.groups) <= f_base:
                kept.add(expert)
            else:
                load_D[device] -= paid
        return kept


class Budget(SetPolicy):
    """Minimise F(kept)/c̄ + λ·Σ_{pruned} I(e) over levels of cost; λ is fixed (``price``) or steered (``epsilon``).

    ``reuse`` adds to I(e) what later uses are worth (``runtime.policy.shares.worth``).
    Exactly optimal among the sets that hold every token's best expert when costs are equal and no link is shared.
    """

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(spec)
        epsilon = spec.parameters.get("epsilon")
        self._controller = None if epsilon is None else PriceController(float(epsilon))

    @property
    def state(self) -> dict[str, float]:
        return {"price": self._price}

    @property
    def _price(self) -> float:
        return float(self.spec.parameters["price"]) if self._controller is None else self._controller.price

    def _marked(self, tokens: Tokens, q_TK: Ints) -> set[int]:
        return union_of_best(tokens, q_TK, 1) | protected(self.spec, tokens, q_TK)

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        worth_N = worth(summary.importance_N, layer.rate_N, float(self.spec.parameters.get("reuse", 0.0)))
        kept = self._cheapest(dataclasses.replace(summary, importance_N=worth_N), layer)
        if self._controller is not None and summary.tokens:
            removed = sum(int(summary.importance_N[expert]) for expert in members(summary.active_N) - kept)
            self._controller.observe(removed / SHARE_UNIT, summary.tokens)
        return kept

    def _cheapest(self, summary: Summary, layer: Layer) -> set[int]:
        active, always = members(summary.active_N), members(summary.mandatory_N)
        resident = {expert for expert in active if layer.resident_N[expert]}
        paid_for = active - resident
        if not paid_for:
            return active
        ordered = by_importance(summary, paid_for & always) + by_importance(summary, paid_for - always)
        mean = float(sum(int(layer.paid_N[expert]) for expert in paid_for)) / len(paid_for)

        floor = layer.f(always)
        levels = {floor}
        load_D = [0] * layer.devices
        for expert in ordered:
            device = layer.device_N[expert]
            load_D[device] += int(layer.paid_N[expert])
            levels.add(max(load_D[device], floor))

        best: tuple[float, set[int]] | None = None
        for level in sorted(levels):
            kept = resident | prefixes_within(ordered, layer, level)
            removed = sum(int(summary.importance_N[expert]) for expert in active - kept)
            value = (layer.f(kept) / mean if mean > 0 else 0.0) + self._price * (removed / SHARE_UNIT)
            if best is None or value <= best[0]:
                best = (value, kept)
        assert best is not None
        return best[1]


def prefixes_within(ordered: list[int], layer: Layer, level: int) -> set[int]:
    """On each device the longest prefix of ``ordered`` whose load is at most ``level``: stop at the first beyond it."""
    kept: set[int] = set()
    load_D = [0] * layer.devices
    for expert in ordered:
        device = layer.device_N[expert]
        load_D[device] += int(layer.paid_N[expert])
        if load_D[device] <= level:
            kept.add(expert)
    return kept


def union_of_prefixes(tokens: Tokens, q_TK: Ints, share: float) -> set[int]:
    """The union of each token's shortest prefix that carries ``share`` of its weight, less one unit for each slot."""
    least = threshold(share) - tokens.topk_ids_TK.shape[1]
    return _union(tokens, (prefix(tokens, q_TK, row, least) for row in real_rows(tokens)))


def union_of_best(tokens: Tokens, q_TK: Ints, count: int) -> set[int]:
    """The union of each token's ``count`` experts of highest share (ties: lower id)."""
    return _union(tokens, (best_first(tokens, q_TK, row)[:count] for row in real_rows(tokens)))


def protected(spec: PolicySpec, tokens: Tokens, q_TK: Ints) -> set[int]:
    """What must stay so that no token loses more than the share ``ceiling``; empty without one."""
    ceiling = spec.parameters.get("ceiling")
    return set() if ceiling is None else union_of_prefixes(tokens, q_TK, 1 - float(ceiling))


def by_importance(summary: Summary, experts: Iterable[int]) -> list[int]:
    """``experts`` by importance descending (ties: lower id)."""
    return sorted(experts, key=lambda expert: (-summary.importance_N[expert], expert))


def decision(layer: Layer, *, active_N: Bools, kept_N: Bools, mandatory_N: Bools | None) -> Decision:
    """The decision to keep ``kept_N``, with its figures."""
    before, after = layer.loads(members(active_N)), layer.loads(members(kept_N))
    return Decision(
        kept_N=kept_N,
        active_N=active_N,
        device_N=layer.device_N,
        paid_N=layer.paid_N,
        mandatory_N=mandatory_N,
        f_base=None if mandatory_N is None else layer.f(members(mandatory_N)),
        f_before=f_of_loads(before, layer.groups),
        f_after=f_of_loads(after, layer.groups),
        load_before_D=np.array(before, dtype=np.int64),
        load_after_D=np.array(after, dtype=np.int64),
    )


def members(marks_N: Bools) -> set[int]:
    """The experts of a bitmap."""
    return {int(expert) for expert in np.flatnonzero(marks_N)}


def bitmap(experts: Iterable[int], num_experts: int) -> Bools:
    """The bitmap [N] of a set of experts."""
    marks_N = np.zeros(num_experts, dtype=np.bool_)
    marks_N[list(experts)] = True
    return marks_N


def _union(tokens: Tokens, slots_of_rows: Iterable[list[int]]) -> set[int]:
    return {
        int(tokens.topk_ids_TK[row, slot])
        for row, slots in zip(real_rows(tokens), slots_of_rows, strict=True)
        for slot in slots
    }
