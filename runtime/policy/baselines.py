"""The policies that others proposed, in plain form, on the same interface and cost model.

Sources stand with each class. Shapes as in ``runtime.policy.types``.
"""

from __future__ import annotations

import math

import numpy as np

from runtime.policy.loads import Layer, cheapest_replicas
from runtime.policy.reference import Caee, SetPolicy, bitmap, decision, members, union_of_best
from runtime.policy.shares import best_first, chosen_slots, real_rows, shares
from runtime.policy.slots import drop_lost, gate, ranked, routed, selection
from runtime.policy.types import Bools, Decision, Floats, Ints, Machine, PolicySpec, Routed, Summary, Tokens

LIMB_BITS = 31
LIMBS = 4
LARGEST_SCORE = 2.0**31


class Oea(SetPolicy):
    """Opportunistic expert activation (arXiv:2511.02237): A_trans = the union of each token's ``k0`` best."""

    def _marked(self, tokens: Tokens, q_TK: Ints) -> set[int]:
        return union_of_best(tokens, q_TK, int(self.spec.parameters["k0"]))

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        return members(summary.mandatory_N)


class XShare(SetPolicy):
    """XShare (arXiv:2602.07265): every token's best, then by Σ_t G(t)_e while the total, or the device, has room."""

    needs_scores = True

    def _marked(self, tokens: Tokens, q_TK: Ints) -> set[int]:
        return union_of_best(tokens, q_TK, 1)

    def _votes(self, tokens: Tokens) -> Ints:
        """Σ_t G(t)_e in fixed point, so that the sum depends on no order; resolution 2⁻⁹³, scores up to 2³¹."""
        assert tokens.scores_TN is not None
        rest_TN = np.minimum(tokens.scores_TN[tokens.token_mask_T], LARGEST_SCORE)
        limbs = []
        for _ in range(LIMBS):
            whole_TN = np.floor(rest_TN)
            limbs.append(whole_TN.astype(np.int64).sum(axis=0))
            rest_TN = (rest_TN - whole_TN) * 2.0**LIMB_BITS
        return np.stack(limbs)

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        votes = votes_of(summary)
        kept = members(summary.mandatory_N)
        total, per_device = (self.spec.parameters.get(key) for key in ("budget", "per_device"))
        count_D = [0] * layer.devices
        for expert in kept:
            count_D[layer.device_N[expert]] += 1
        for expert in sorted(members(summary.active_N) - kept, key=lambda expert: (-votes[expert], expert)):
            device = layer.device_N[expert]
            has_room = len(kept) < int(total) if total is not None else count_D[device] < int(per_device or 0)
            if has_room:
                kept.add(expert)
                count_D[device] += 1
        return kept


class Lynx(SetPolicy):
    """Lynx (arXiv:2411.08982): vote(e) = Σ_t 2^bin, bin = clamp(⌊α·(ln G(t)_e − ln max_j G(t)_j)⌋, −β, 0).

    Every token's best stays, and the ``keep`` highest votes among the active. A token whose scores are all 0 votes
    alike for all.
    """

    needs_scores = True

    def _marked(self, tokens: Tokens, q_TK: Ints) -> set[int]:
        return union_of_best(tokens, q_TK, 1)

    def _votes(self, tokens: Tokens) -> Ints:
        """Votes in units of 2^−β."""
        assert tokens.scores_TN is not None
        alpha, beta = float(self.spec.parameters["alpha"]), int(self.spec.parameters["beta"])
        votes_N = np.zeros(tokens.scores_TN.shape[1], dtype=np.int64)
        for row in real_rows(tokens):
            highest = float(np.max(tokens.scores_TN[row]))
            for expert, score in enumerate(tokens.scores_TN[row]):
                votes_N[expert] += 1 << (beta + _bin(float(score), highest, alpha, beta))
        return votes_N[None, :]

    def _keep(self, summary: Summary, layer: Layer, mandatory: set[int] | None) -> set[int]:
        votes = votes_of(summary)
        by_votes = sorted(members(summary.active_N), key=lambda expert: (-votes[expert], expert))
        return members(summary.mandatory_N) | set(by_votes[: int(self.spec.parameters["keep"])])


class Random(Caee):
    """The kept set of ``caee``; a lost slot goes to a kept expert drawn uniformly among those the token does not hold.

    Ablation of compensation (arXiv:2606.29982, Fig. 9). The draws continue from call to call.
    """

    needs_scores = True

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(spec)
        self._draws = np.random.default_rng(int(spec.parameters["seed"]))

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed:
        self._check(tokens)
        ids_TK = drop_lost(tokens, decision.kept_N)
        kept = np.flatnonzero(decision.kept_N)
        for row in real_rows(tokens):
            for slot in chosen_slots(tokens, row):
                if ids_TK[row, slot] < 0:
                    others = np.setdiff1d(kept, ids_TK[row])
                    if len(others):
                        ids_TK[row, slot] = others[self._draws.integers(len(others))]
        return routed(tokens, ids_TK, self.spec)


class TokenPolicy(SetPolicy):
    """A policy that decides token by token; the kept set is what is dispatched."""

    def summarise(self, tokens: Tokens, machine: Machine) -> Summary:
        summary = super().summarise(tokens, machine)
        ids_TK = self._choose(tokens, cheapest_replicas(machine).resident_N)
        return Summary(
            importance_N=summary.importance_N,
            mandatory_N=bitmap({int(expert) for expert in ids_TK.flat if expert >= 0}, len(summary.active_N)),
            active_N=summary.active_N,
            tokens=summary.tokens,
        )

    def decide(self, summary: Summary, machine: Machine) -> Decision:
        layer = cheapest_replicas(machine)
        return decision(layer, active_N=summary.active_N, kept_N=summary.mandatory_N, mandatory_N=None)

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed:
        self._check(tokens)
        return routed(tokens, self._choose(tokens, cheapest_replicas(machine).resident_N), self.spec)

    def _choose(self, tokens: Tokens, resident_N: Bools) -> Ints:
        """The tokens' slots [T, K]: each row from ``_choose_row``, padding −1 throughout."""
        q_TK = shares(tokens)
        ids_TK = np.full(tokens.topk_ids_TK.shape, -1, dtype=np.int64)
        for row in real_rows(tokens):
            for slot, expert in self._choose_row(tokens, q_TK, row, resident_N).items():
                ids_TK[row, slot] = expert
        return ids_TK

    def _choose_row(self, tokens: Tokens, q_TK: Ints, row: int, resident_N: Bools) -> dict[int, int]:
        """The experts of one token by slot; slots left out are empty."""
        raise NotImplementedError


class TopK(TokenPolicy):
    """Static reduction: every token keeps its ``k0`` best."""

    def _choose_row(self, tokens: Tokens, q_TK: Ints, row: int, resident_N: Bools) -> dict[int, int]:
        kept = best_first(tokens, q_TK, row)[: int(self.spec.parameters["k0"])]
        return {slot: int(tokens.topk_ids_TK[row, slot]) for slot in kept}


class Skip(TokenPolicy):
    """A token drops experts with q < ``beta`` × its highest q (arXiv:2402.14800, generalised from k = 2)."""

    def _choose_row(self, tokens: Tokens, q_TK: Ints, row: int, resident_N: Bools) -> dict[int, int]:
        least = float(self.spec.parameters["beta"]) * int(q_TK[row].max(initial=0))
        kept = [slot for slot in chosen_slots(tokens, row) if q_TK[row, slot] >= least]
        return {slot: int(tokens.topk_ids_TK[row, slot]) for slot in kept}


class MaxRank(TokenPolicy):
    """Cache-aware routing of public engines: the ``j`` best stay; each other slot, best first, takes the token's
    best-ranked resident expert within its top ``m`` that no other slot holds, else its own.

    Ranks are by selection score; where only the router's choice was recorded, by its weights, and ``m`` ≤ K.
    """

    def _check(self, tokens: Tokens) -> None:
        refuse = tokens.scores_TN is None and int(self.spec.parameters["m"]) > tokens.topk_ids_TK.shape[1]
        if refuse:
            raise self._without_scores()

    def _choose_row(self, tokens: Tokens, q_TK: Ints, row: int, resident_N: Bools) -> dict[int, int]:
        ids = tokens.topk_ids_TK[row]
        selection_TN = selection(tokens)
        if selection_TN is not None:
            ranks_N = selection_TN[row]
            reachable = ranked(ranks_N, range(len(ranks_N)))
        else:
            ranks_N = np.zeros(len(resident_N))
            for slot in chosen_slots(tokens, row):
                ranks_N[ids[slot]] = tokens.gates_TK[row, slot]
            reachable = ranked(ranks_N, (int(ids[slot]) for slot in chosen_slots(tokens, row)))
        preferred = [expert for expert in reachable[: int(self.spec.parameters["m"])] if resident_N[expert]]

        held = {slot: int(ids[slot]) for slot in chosen_slots(tokens, row)}
        slots = sorted(held, key=lambda slot: (-ranks_N[held[slot]], held[slot]))
        for slot in slots[int(self.spec.parameters["j"]) :]:
            own = held.pop(slot)
            held[slot] = next((expert for expert in preferred if expert not in held.values()), own)
        return held


class CachePrior(TokenPolicy):
    """Cache-conditional experts (arXiv:2412.00099): rank by z′ = ln G + λ·Δ̄·resident; the ``j`` best stay.

    Δ̄ is the running mean over tokens of max ln G − min ln G, over this rank's tokens so far, those at hand included;
    scores of 0 count in neither and rank last. Weights come from G.
    """

    needs_scores = True

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(spec)
        self._range_sum = 0.0
        self._range_count = 0

    @property
    def state(self) -> dict[str, float]:
        return {"mean_range": self._mean_range}

    @property
    def _mean_range(self) -> float:
        return self._range_sum / self._range_count if self._range_count else 0.0

    def summarise(self, tokens: Tokens, machine: Machine) -> Summary:
        self._check(tokens)
        assert tokens.scores_TN is not None
        for row in real_rows(tokens):
            positive = [float(score) for score in tokens.scores_TN[row] if score > 0]
            if positive:
                self._range_sum += math.log(max(positive)) - math.log(min(positive))
            self._range_count += 1
        return super().summarise(tokens, machine)

    def _choose_row(self, tokens: Tokens, q_TK: Ints, row: int, resident_N: Bools) -> dict[int, int]:
        ids = tokens.topk_ids_TK[row]
        order = best_first(tokens, q_TK, row)
        stay = [int(ids[slot]) for slot in order[: int(self.spec.parameters["j"])]]
        prior = float(self.spec.parameters["lambda"]) * self._mean_range
        scores_N = np.array([gate(tokens, row, expert) for expert in range(len(resident_N))])
        ranks_N = _log(scores_N) + prior * resident_N
        others = [expert for expert in ranked(ranks_N, range(len(resident_N))) if expert not in stay]
        return dict(zip(chosen_slots(tokens, row), stay + others, strict=False))


def votes_of(summary: Summary) -> list[int]:
    """The votes [N] as exact integers, their limbs put together."""
    assert summary.votes_VN is not None
    votes = [0] * summary.votes_VN.shape[1]
    for limb_N in summary.votes_VN:
        votes = [(vote << LIMB_BITS) + int(limb) for vote, limb in zip(votes, limb_N, strict=True)]
    return votes


def _bin(score: float, highest: float, alpha: float, beta: int) -> int:
    if score == highest:
        return 0
    if score <= 0:
        return -beta
    distance = alpha * (math.log(score) - math.log(highest))
    return max(-beta, min(0, math.floor(distance)))


def _log(scores_N: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(scores_N)
