"""What a set of experts costs: F(S) = max( max_d load_d(S), max_g (factor_g · Σ_{d∈g} load_d(S)) // 1024 ).

F is the layer cost of arXiv:2606.29982, section IV-A, with a term for devices behind one shared link. All in integer
picoseconds. Shapes as in ``runtime.policy.types``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from runtime.policy.types import GROUP_UNIT, Bools, Floats, Ints, LinkGroups, Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A machine with one replica chosen for each expert.

    ``paid_N``: R·c, 0 where the expert is resident. ``resident_N``: all False in on-device inference. ``rate_N``: as
    in ``Machine``.
    """

    device_N: Ints
    paid_N: Ints
    resident_N: Bools
    devices: int
    groups: LinkGroups
    rate_N: Floats | None = None

    @classmethod
    def of(cls, machine: Machine, *, device_N: Ints, paid_N: Ints, resident_N: Bools) -> Self:
        """``machine`` with these replicas chosen."""
        return cls(
            device_N=device_N,
            paid_N=paid_N,
            resident_N=resident_N,
            devices=machine.devices,
            groups=machine.groups,
            rate_N=machine.rate_N,
        )

    def loads(self, experts: Iterable[int]) -> list[int]:
        """``load_d`` [D] of a set of experts."""
        load_D = [0] * self.devices
        for expert in experts:
            load_D[self.device_N[expert]] += int(self.paid_N[expert])
        return load_D

    def f(self, experts: Iterable[int]) -> int:
        """F of a set of experts."""
        return f_of_loads(self.loads(experts), self.groups)


def f_of_loads(load_D: list[int], groups: LinkGroups) -> int:
    """F from the loads of the devices; 0 without devices."""
    shared = (factor * sum(load_D[device] for device in devices) // GROUP_UNIT for devices, factor in groups)
    return max([*load_D, *shared], default=0)


def cheapest_replicas(machine: Machine) -> Layer:
    """Each expert on the replica that costs the least now (ties: a resident one, then the lower device)."""
    num_experts, replicas = machine.placement_NR.shape
    device_N = np.zeros(num_experts, dtype=np.int64)
    paid_N = np.zeros(num_experts, dtype=np.int64)
    resident_N = np.zeros(num_experts, dtype=np.bool_)
    for expert in range(num_experts):
        offers = []
        for replica in range(replicas):
            device = int(machine.placement_NR[expert, replica])
            if device < 0:
                continue
            resident = machine.resident_NR is not None and bool(machine.resident_NR[expert, replica])
            paid = 0 if resident else int(machine.cost_NR[expert, replica])
            offers.append((paid, not resident, device))
        paid_N[expert], absent, device_N[expert] = min(offers)
        resident_N[expert] = not absent
    return Layer.of(machine, device_N=device_N, paid_N=paid_N, resident_N=resident_N)
