"""What every implementation of a pass does, and which one a policy gets."""

from __future__ import annotations

from typing import Protocol

from runtime.policy.types import PolicySpec
from runtime.simulate.batches import Block
from runtime.simulate.lookahead import NextUse
from runtime.simulate.prepare import Prepared
from runtime.simulate.records import Counts, PassSpec


class Pass(Protocol):
    """One policy on one cache, placement and machine, going on from block to block with the caches it has."""

    def run(self, block: Block, prepared: Prepared, next_use: NextUse | None, uncounted: int) -> None:
        """Replay a block, of which the first ``uncounted`` steps are warm-up. ``next_use``: for ``belady``."""

    def counts(self) -> Counts:
        """The sums so far."""


def can_compile(policy: PolicySpec, *, has_scores: bool) -> bool:
    """Whether the compiled kernel knows the policy.

    Where lost slots go to the kept experts that a token ranks best, the dispatched experts are the kept ones. Every
    other compensation needs full scores to know them.
    """
    if policy.name == "router":
        return True
    if policy.name not in ("caee", "importance", "budget", "oea", "top-k", "skip"):
        return False
    plain = policy.compensation == "active" and policy.reselect == "affected"
    return plain or policy.compensation == "none" or not has_scores


def make_pass(plan: PassSpec, *, top_k: int, has_scores: bool) -> Pass:
    """The compiled pass where there is one, else one that asks the policy at every layer-step."""
    if can_compile(plan.policy, has_scores=has_scores):
        from runtime.simulate.compiled import CompiledPass

        return CompiledPass(plan, top_k=top_k, has_scores=has_scores)
    from runtime.simulate.reference import PolicyPass

    return PolicyPass(plan)
