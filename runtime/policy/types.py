"""What goes into and comes out of a decision, in its three stages.

Shape legend: T tokens, N logical experts, K slots per token (top-k), R replicas of an expert, D devices, G link groups.
Shares and importance are int64 in units of 2⁻³⁰; costs and loads are int64 picoseconds; so sums do not depend on order
and every rank and every implementation takes the same decision.
"""

from __future__ import annotations

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
    ``votes_N``: a policy's own additional sum (Lynx votes), else None.
    """

    importance_N: Ints
    mandatory_N: Bools
    active_N: Bools
    tokens: int
    votes_N: Ints | None = None

    def __add__(self, other: Summary) -> Summary:
        votes = None
        if self.votes_N is not None and other.votes_N is not None:
            votes = self.votes_N + other.votes_N
        return Summary(
            importance_N=self.importance_N + other.importance_N,
            mandatory_N=self.mandatory_N | other.mandatory_N,
            active_N=self.active_N | other.active_N,
            tokens=self.tokens + other.tokens,
            votes_N=votes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the layer's experts are and what they cost now.

    ``placement_NR``: device of each replica, −1 where an expert has fewer. ``cost_NR``: picoseconds. ``resident_NR``:
    in that device's cache, or None for on-device inference (every dispatched expert is paid for).
    ``group_devices``: one array of device indices per link group, ``group_factors``: its factor × 1024, rounded.
    """

    placement_NR: Ints
    cost_NR: Ints
    resident_NR: Bools | None
    devices: int
    group_devices: tuple[Ints, ...] = ()
    group_factors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The kept set A_trans and how it was reached. Loads and F in picoseconds; ``f_base``: where the policy has one."""

    kept_N: Bools
    device_N: Ints
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy by name with its parameters, and how lost slots are compensated (``None``: the policy's default)."""

    name: str
    parameters: dict[str, float | int | str] = field(default_factory=dict)
    compensation: str = "active"
    reselect: str = "affected"
    renormalize: str = "survivors"
    routed_scaling_factor: float = 1.0


class Policy(Protocol):
    """One policy, in three stages that a data-parallel run places around its all-reduce.

    ``decide`` never modifies its arguments. Stateless, except where ``spec`` says otherwise (the controller of
    ``budget``, the running mean of ``cache-prior``); that state is a function of the decisions taken, so all ranks
    hold the same.
    """

    spec: PolicySpec

    def summarise(self, tokens: Tokens, num_experts: int) -> Summary: ...

    def decide(self, summary: Summary, machine: Machine) -> Decision: ...

    def reroute(self, tokens: Tokens, decision: Decision, machine: Machine) -> Routed: ...
