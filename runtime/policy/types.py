"""What goes into and comes out of a decision, in its three stages.

Shape legend: T tokens, N logical experts, K slots per token (top-k), R replicas of an expert, D devices, G link groups.
Shares and importance are int64 in units of 2⁻³⁰; costs and loads are int64 picoseconds; so sums do not depend on order
and every rank and every implementation takes the same decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

SHARE_UNIT = 1 << 30
PICOSECONDS = 10**12
GROUP_UNIT = 1024

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One rank's tokens at one layer and step.

    ``topk_ids_TK``: the router's own choice, −1 an empty slot. ``gates_TK``: G(t)_e of that choice, float64.
    ``scores_TN`` and ``selection_scores_TN``: full scores, or None where only the choice was recorded: then nothing
    can be re-routed. ``token_mask_T``: False for padding, of which nothing is read.
    """

    topk_ids_TK: Ints
    gates_TK: Floats
    scores_TN: Floats | None
    selection_scores_TN: Floats | None
    token_mask_T: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one rank's tokens say of the experts; ranks combine by ``+`` (sum of importance, or of the bitmaps).

    ``importance_N``: Σ_t q(t,e). ``mandatory_N``: bitmap of the policy's per-token rule. ``active_N``: ∪ K_t.
    ``tokens``: real ones. ``votes_VN``: a policy's own additional sums, V rows, most significant first, else None.
    """

    importance_N: Ints
    mandatory_N: Bools
    active_N: Bools
    tokens: int
    votes_VN: Ints | None = None

    def __add__(self, other: Summary) -> Summary:
        votes = None
        if self.votes_VN is not None and other.votes_VN is not None:
            votes = self.votes_VN + other.votes_VN
        return Summary(
            importance_N=self.importance_N + other.importance_N,
            mandatory_N=self.mandatory_N | other.mandatory_N,
            active_N=self.active_N | other.active_N,
            tokens=self.tokens + other.tokens,
            votes_VN=votes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGroups:
    """Devices behind shared links: group g holds ``members[starts[g]:starts[g + 1]]``; factors × 1024, rounded."""

    starts_G1: Ints
    members: Ints
    factors_G: Ints

    def __iter__(self) -> Iterator[tuple[Ints, int]]:
        """Each group's devices and its factor."""
        for group, factor in enumerate(self.factors_G):
            yield self.members[self.starts_G1[group] : self.starts_G1[group + 1]], int(factor)


NO_GROUPS = LinkGroups(
    starts_G1=np.zeros(1, dtype=np.int64),
    members=np.zeros(0, dtype=np.int64),
    factors_G=np.zeros(0, dtype=np.int64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the layer's experts are and what they cost now.

    ``placement_NR``: device of each replica, −1 where an expert has fewer. ``cost_NR``: picoseconds. ``resident_NR``:
    in that device's cache, or None for on-device inference (every dispatched expert is paid for). ``rate_N``: the share
    of recent steps, 0 to 1, in which each expert was used, as its device's cache counts; None: not known.
    ``runtime.policy.inputs.make_machine`` builds one from seconds; ``dataclasses.replace`` gives it new residency.
    """

    placement_NR: Ints
    cost_NR: Ints
    resident_NR: Bools | None
    devices: int
    groups: LinkGroups = NO_GROUPS
    rate_N: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The kept set A_trans (per-token policies: what is dispatched) and how it was reached.

    ``device_N``: the device of each expert's cheapest replica, ``paid_N`` what moving it costs there now (R·c).
    Loads and F in picoseconds; ``mandatory_N`` and ``f_base``: where the policy has them.
    """

    kept_N: Bools
    active_N: Bools
    device_N: Ints
    paid_N: Ints
    mandatory_N: Bools | None
    f_base: int | None
    f_before: int
    f_after: int
    load_before_D: Ints
    load_after_D: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Every token's slots after the decision. ``removed``: Σ of the shares of undispatched choices, in 2⁻³⁰."""

    topk_ids_TK: Ints
    topk_weights_TK: Floats
    removed: int
    rerouted_slots: int


ParameterValue = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy by name with its parameters, and how lost slots are compensated.

    ``None`` for ``renormalize`` and ``routed_scaling_factor`` is the model's own rule in a live run, and elsewhere
    ``survivors`` and 1. ``runtime.policy.spec.resolve`` fills in whatever depends on the machine.
    """

    name: str
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    compensation: str = "active"
    reselect: str = "affected"
    renormalize: str | None = None
    routed_scaling_factor: float | None = None


class Policy(Protocol):
    """One policy, in three stages that a data-parallel run places around its all-reduce.

    Each rank calls ``summarise`` on its own tokens, the summaries are added up, every rank calls ``decide`` on the sum
    and then ``reroute`` on its own tokens. Arguments are never modified. Not safe for concurrent calls on one object.
    ``state`` is empty, except for the price of ``budget`` and the mean range of ``cache-prior``: what was learned from
    the calls so far. The price follows from the decisions alone, so all ranks hold the same.

    Raises ``CaseError`` where the policy needs full scores and ``tokens`` has none.
    """

    @property
    def spec(self) -> PolicySpec: ...

    @property
    def state(self) -> dict[str, float]: ...

    def summarise(self, tokens: Tokens, machine: Machine) -> Summary: ...

    def decide(self, summary: Summary, machine: Machine) -> Decision: ...

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed: ...
