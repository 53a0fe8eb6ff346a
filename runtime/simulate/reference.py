"""A pass in plain form: at every layer-step the policy is asked, the cache books are kept, and the figures counted.

It runs every policy, and is what the compiled pass must equal in every figure.

Shape legend: T tokens, L layers, K slots, N experts, R replicas, D devices, A active experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.cache import NEVER, CacheBook
from runtime.policy.loads import f_of_loads
from runtime.policy.make import make_policy
from runtime.policy.types import GROUP_UNIT, PICOSECONDS, Machine, Policy, Tokens
from runtime.prefetch import prefetch_idle
from runtime.simulate.batches import Block, Rows
from runtime.simulate.lookahead import NextUse
from runtime.simulate.prepare import Prepared
from runtime.simulate.records import Counts, PassSpec, SimulatedMachine
from runtime.simulate.replicas import choose_replicas

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


class PolicyPass:
    """One pass; its caches and the policy's state go on from block to block.

    ``compiled``: let the policy use its compiled implementation.
    """

    def __init__(self, plan: PassSpec, *, compiled: bool = True) -> None:
        machine = plan.machine
        layers, experts, _ = plan.placement.devices_LNR.shape
        self._plan = plan
        self._policy = make_policy(plan.policy, offloading=machine.offloading, compiled=compiled)
        self._layer_times = machine.costs.layer_picoseconds(experts)
        self._machines = [_machine_of_layer(plan, layer) for layer in range(layers)]
        self._next_use_LN = np.full((layers, experts), NEVER)
        slots = min(plan.cache_experts or 0, layers * experts)  # more would stay empty
        self._books = [
            CacheBook(plan.cache, slots, layers, experts, next_use_LN=self._next_use_LN)
            for _ in range(machine.devices)
            if plan.cache is not None
        ]
        self._counts = Counts(
            before_LD=np.zeros((layers, machine.devices), np.int64),
            after_LD=np.zeros((layers, machine.devices), np.int64),
            gaps=np.zeros(experts + 1, np.int64),
        )

    @property
    def policy(self) -> Policy:
        """With whatever it has learned so far."""
        return self._policy

    @property
    def books(self) -> tuple[CacheBook, ...]:
        """Every device's cache as it is now; none where experts are in device memory."""
        return tuple(self._books)

    def counts(self) -> Counts:
        return self._counts

    def run(self, block: Block, prepared: Prepared, next_use: NextUse | None, uncounted: int) -> None:
        times = np.zeros(block.steps, np.int64)
        for step in range(block.steps):
            rows = block.rows.cut(int(block.offsets_S1[step]), int(block.offsets_S1[step + 1]))
            for book in self._books:
                book.start_step()
            times[step] = round(self._plan.machine.dense_seconds * PICOSECONDS)
            for layer in range(len(self._machines)):
                if next_use is not None:
                    start, stop = prepared.active_start[step * prepared.layers + layer :][:2]
                    self._next_use_LN[layer, prepared.active[start:stop]] = next_use[start:stop]
                times[step] += self._layer_step(layer, tokens_of(rows, layer), step >= uncounted)
        self._counts.step_times.append(times[uncounted:])

    def _layer_step(self, layer: int, tokens: Tokens, counted: bool) -> int:
        """Decide, dispatch, count; returns the layer's time in picoseconds."""
        machine = self._machine_now(layer, tokens)
        decision = self._policy.decide(self._policy.summarise(tokens, machine), machine)
        routed = self._policy.reroute(tokens, decision, machine)
        absent_N = absent(machine)
        dispatched = np.unique(routed.topk_ids_TK[routed.topk_ids_TK >= 0])
        devices = machine.devices
        misses_D = np.bincount(decision.device_N[dispatched[absent_N[dispatched]]], minlength=devices)
        for device, book in enumerate(self._books):
            demanded = np.flatnonzero(decision.active_N & (decision.device_N == device))
            fetches = book.dispatch(layer, dispatched[decision.device_N[dispatched] == device], demanded)
            assert len(fetches) == misses_D[device]
        if self._books:
            ahead = prefetch_idle(self._books, misses_D, self._plan.machine.costs.picoseconds, machine.groups)
            misses_D += [len(each) for each in ahead]
        if counted:
            counts = self._counts
            counts.before_LD[layer] += np.bincount(decision.device_N[decision.active_N & absent_N], minlength=devices)
            counts.after_LD[layer] += misses_D
            counts.gaps[misses_D.max() - misses_D.min()] += 1
            counts.max_misses += int(misses_D.max())
            counts.removed += routed.removed
            counts.tokens += int(tokens.token_mask_T.sum())
            counts.rerouted_slots += routed.rerouted_slots
            counts.layer_steps += 1
        return self._layer_time(machine, misses_D, np.bincount(decision.device_N[dispatched], minlength=devices))

    def _machine_now(self, layer: int, tokens: Tokens) -> Machine:
        """The layer's machine with what is resident now, and of each expert the copy that would be used."""
        machine = self._one_copy(layer, tokens)
        if not self._books or not self._plan.policy.parameters.get("reuse"):
            return machine
        rate_DN = np.stack([book.rate(layer) for book in self._books])
        device_N = machine.placement_NR[:, 0]
        return dataclasses.replace(machine, rate_N=rate_DN[device_N, np.arange(len(device_N))])

    def _one_copy(self, layer: int, tokens: Tokens) -> Machine:
        machine = self._machines[layer]
        resident_NR = None
        if self._books:
            resident_NR = np.zeros(machine.placement_NR.shape, np.bool_)
            for device, book in enumerate(self._books):
                resident_NR |= (machine.placement_NR == device) & book.resident(layer)[:, None]
        if machine.placement_NR.shape[1] == 1:
            return dataclasses.replace(machine, resident_NR=resident_NR)
        active_N = np.zeros(len(machine.placement_NR), np.bool_)
        active_N[tokens.topk_ids_TK[tokens.topk_ids_TK >= 0]] = True
        replica_N = choose_replicas(machine.placement_NR, machine.cost_NR, resident_NR, active_N, machine.devices)[
            :, None
        ]
        return dataclasses.replace(
            machine,
            placement_NR=np.take_along_axis(machine.placement_NR, replica_N, axis=1),
            cost_NR=np.take_along_axis(machine.cost_NR, replica_N, axis=1),
            resident_NR=None if resident_NR is None else np.take_along_axis(resident_NR, replica_N, axis=1),
        )

    def _device_times(self, misses_D: Int64s) -> list[int]:
        """[D] what each device's paid movements take: the measured layer's time, else so many times one's."""
        if len(self._layer_times):
            return [int(self._layer_times[count]) for count in misses_D]
        return [int(load) for load in misses_D * self._plan.machine.costs.picoseconds]

    def _layer_time(
        self, machine: Machine, misses_D: npt.NDArray[np.int64], dispatched_D: npt.NDArray[np.int64]
    ) -> int:
        about = self._plan.machine
        if about.staged:
            return _staged_time(about, self._device_times(misses_D), misses_D, dispatched_D)
        movements = f_of_loads(self._device_times(misses_D), machine.groups)
        compute = int(dispatched_D.max()) * round(about.expert_compute_seconds * PICOSECONDS)
        return max(movements, compute) if about.overlap else movements + compute


def _staged_time(about: SimulatedMachine, load_D: Sequence[int], misses_D: Int64s, dispatched_D: Int64s) -> int:
    """Experts that are there compute beside the movements, those that were moved after them."""
    done_D = list(load_D)
    for members, factor in about.costs.groups:
        shared = factor * sum(load_D[device] for device in members) // GROUP_UNIT
        for device in members:
            if load_D[device] > 0:
                done_D[device] = max(done_D[device], shared)
    compute = round(about.expert_compute_seconds * PICOSECONDS)
    moved_D = np.minimum(misses_D, dispatched_D)  # what was moved ahead of need is not used yet
    return max(
        max(done, int(used - moved) * compute) + int(moved) * compute
        for done, used, moved in zip(done_D, dispatched_D, moved_D, strict=True)
    )


def absent(machine: Machine) -> Bools:
    """[N] whether using the expert means moving it; ``machine`` has one copy of each."""
    if machine.resident_NR is None:
        return np.ones(len(machine.placement_NR), np.bool_)
    return ~machine.resident_NR[:, 0]


def tokens_of(rows: Rows, layer: int) -> Tokens:
    """One layer of some rows, as a policy takes it."""
    ids_TK = rows.ids_RLK[:, layer].astype(np.int64)
    return Tokens(
        topk_ids_TK=ids_TK,
        gates_TK=np.where(ids_TK >= 0, rows.gates_RLK[:, layer], np.float32(0)).astype(np.float64),
        scores_TN=None if rows.scores_RLN is None else rows.scores_RLN[:, layer].astype(np.float64),
        selection_scores_TN=None if rows.selection_RLN is None else rows.selection_RLN[:, layer].astype(np.float64),
        token_mask_T=np.ones(len(rows), np.bool_),
    )


def _machine_of_layer(plan: PassSpec, layer: int) -> Machine:
    placement_NR = plan.placement.devices_LNR[layer].astype(np.int64)
    costs = plan.machine.costs
    return Machine(
        placement_NR=placement_NR,
        cost_NR=np.where(placement_NR >= 0, costs.picoseconds[placement_NR], 0),
        resident_NR=None,
        devices=plan.machine.devices,
        groups=costs.groups,
    )
