"""The program of one rank of a trace-driven run: stand-ins for experts, then interleaved pairs of passes.

Every pass is what the simulator calls a pass: it begins with empty caches and a policy that has seen nothing, goes
through the warm-up steps under that policy, and counts from there on. The warm-up is on paper (books and decisions, no
bytes), then what the caches hold by then is fetched, and the clock starts.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from probes.backend import TorchBackend
from probes.errors import RunError
from probes.limits import memory_available_bytes
from probes.records import Device
from probes.units import format_size
from runtime.cache import CacheBook, parse_cache
from runtime.cost import CostTable, uniform_costs
from runtime.experts.transfer import PART_BYTES, ExpertSource, Request, TransferEngine, most_staging_bytes
from runtime.layout import UNKNOWN_SECONDS, lay_out, most_experts
from runtime.pairs import PassesOfRanks, how_many_pairs, measure_pairs
from runtime.parallel import Ranks, join, leave
from runtime.policy.spec import parse_policy, resolve
from runtime.policy.types import PolicySpec
from runtime.rank import (
    Progress,
    full_device_named,
    take_device,
    without_garbage_collection,
)
from runtime.recording import PassRecord, StepRecord
from runtime.simulate.placement import make_placement
from runtime.simulate.prepare import prepare
from runtime.simulate.records import PassSpec, SimulatedMachine
from runtime.simulate.reference import PolicyPass
from runtime.tracerun.content import ExpertContent
from runtime.tracerun.execution import ReplayExecution
from runtime.tracerun.kernel import STORED_DTYPES, BytePool, ExpertWeights, slot_bytes, stand_in_sets, stored_dtype
from runtime.tracerun.options import TraceRunOptions
from runtime.tracerun.sources import MemorySource, ScratchSource, Units, disk_room, how_many_units, memory_room

FEWEST_TIMED_PAIRS = 3
"""When the number of interleaved pairs follows from the time."""
DRAIN_SECONDS = (0.25, 2.0)
"""A disk that was at rest is read for as long as it rested, within these bounds, before a pass is timed: one that is
throttled by credit gained some meanwhile."""
CHECKED_SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRunReport:
    """What rank 0 brings home. ``baseline`` and ``treated``: by rank, then by pair.

    ``distinct_experts`` of ``experts_per_device``: stand-ins of the rank that has fewest of them. ``checked_experts``:
    whose bytes in the slots were compared with what was stored.
    """

    devices: tuple[Device, ...]
    expert_bytes: int
    cache_experts: int
    experts_per_device: int
    distinct_experts: int
    checked_experts: int
    read_mode: str | None
    read_reason: str | None
    dtype: str
    multiplies: str
    costs: CostTable | None
    baseline: PassesOfRanks
    treated: PassesOfRanks


def run_trace_rank(options: TraceRunOptions) -> TraceRunReport:
    """Join the other ranks and do the whole run. Raises a ``CaeeError``."""
    ranks = join(options.devices[0].kind)
    try:
        # Costs decide, so they must be the same on hosts whose stores differ.
        options = replace(options, calibration=ranks.from_first(options.calibration))
        with full_device_named(ranks.rank):
            session = ranks.all_or_none(lambda: TraceRunSession(options, ranks))
            try:
                return session.run()
            finally:
                session.close()
    finally:
        leave(ranks)


class TraceRunSession:
    """One rank's slots, stand-ins and books."""

    def __init__(self, options: TraceRunOptions, ranks: Ranks) -> None:
        self.options = options
        self.ranks = ranks
        shape = options.shape
        self.devices, self.device = take_device(options.devices, ranks)
        self._ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
        self.dtype = STORED_DTYPES.get(options.dtype) or stored_dtype(shape) or torch.bfloat16
        self.costs, self.layout = lay_out(
            self.devices,
            num_experts=shape.num_experts,
            layers=options.layers,
            expert_bytes=shape.expert_bytes,
            tier=options.tier,
            cache_experts=options.cache_experts,
            calibration=options.calibration,
        )
        self.mine = np.flatnonzero(self.layout.placement_N == ranks.rank)
        slots = self.layout.cache_slots + self.layout.staging_slots
        taken = self._check_memory(slots)
        self.backend = TorchBackend(self.device)
        self.pool = BytePool(slots, slot_bytes(shape), self.device)
        self.weights = ExpertWeights(shape, self.pool, self.dtype)
        self.content = ExpertContent(slot_bytes(shape), dtype=stored_dtype(shape), seed=options.seed + ranks.rank)
        self.units = self._units(taken)
        self.source = self._source()
        self.transfers = TransferEngine(self.backend, self.source, self.pool)
        self.execution = ReplayExecution(
            self.weights,
            self.pool,
            self.transfers,
            [self._new_book() for _ in range(ranks.world)],
            self.layout,
            ranks,
            layers=options.layers,
            hidden_size=shape.hidden,
            most_rows=options.traffic.most_rows,
        )
        self.execution.check_ranks = options.check_ranks
        self.router = resolve(parse_policy("router"), offloading=options.offloading)
        self.policy = resolve(options.policy, offloading=options.offloading)
        self.progress = Progress(options.progress_file, ranks)
        self._read_until = time.monotonic()

    def close(self) -> None:
        self.transfers.close()

    def run(self) -> TraceRunReport:
        if not self.options.offloading:
            self.execution.fill_caches()
        self._start = self.execution.snapshot()
        steps = self.options.traffic.steps
        # What compiles or allocates on first use must not count.
        self.run_pass(self.policy, steps=1)
        begin, few = time.perf_counter(), max(1, steps // 4)
        warm = self.run_pass(self.router, steps=few)
        seconds = time.perf_counter() - begin + warm.tpot_seconds * (steps - few)
        pairs = how_many_pairs(self, seconds, fewest=FEWEST_TIMED_PAIRS)
        self.progress.expect(2 * pairs)

        def run_pass(_: int, with_policy: bool) -> PassRecord:
            return self.run_pass(self.policy if with_policy else self.router)

        report = self._report(*measure_pairs(self, pairs, run_pass, self._report))
        return replace(report, checked_experts=min(self.ranks.gather(self.check_bytes())))

    def run_pass(self, chosen: PolicySpec, *, steps: int | None = None) -> PassRecord:
        """The warm-up on paper, then ``steps`` measured ones (default: all)."""
        traffic = self.options.traffic
        warm = self._warmed_up(chosen)
        # Nobody's caches are filled with what the books say until the clock is about to start.
        self.execution.restore([book.snapshot() for book in warm.books] or self._start)
        self._drain()
        records: list[StepRecord] = []
        with without_garbage_collection():
            # Only now: ranks take unequal times to collect, and who begins first would wait for them on the clock.
            self.ranks.barrier()
            begin = last = time.perf_counter()
            for number in range(traffic.warmup_steps, traffic.warmup_steps + (steps or traffic.steps)):
                record = self.execution.step(traffic.step(number), warm.policy)
                self.backend.synchronize()
                now = time.perf_counter()
                record.seconds, last = now - last, now
                self.execution.clock.settle()
                records.append(record)
        self._read_until = time.monotonic()
        return PassRecord(ttft_seconds=None, tpot_seconds=(last - begin) / len(records), token_ids=[], steps=records)

    def _warmed_up(self, chosen: PolicySpec) -> PolicyPass:
        """The simulator's own pass over the warm-up steps."""
        options, traffic, world = self.options, self.options.traffic, self.ranks.world
        costs = self.costs or uniform_costs(UNKNOWN_SECONDS, world)
        spec = PassSpec(
            policy=chosen,
            cache=parse_cache(options.cache) if options.offloading else None,
            cache_experts=self.layout.cache_slots if options.offloading else None,
            placement=make_placement(
                "contiguous", layers=options.layers, experts=options.shape.num_experts, devices=world, loads_LN=None
            ),
            machine=SimulatedMachine(tier=options.tier, costs=costs),
        )
        on_paper = PolicyPass(spec)
        if traffic.warmup_steps:
            block = traffic.warmup
            prepared = prepare(block.offsets_S1, block.rows.ids_RLK, block.rows.gates_RLK, options.shape.num_experts)
            on_paper.run(block, prepared, None, block.steps)
        return on_paper

    def check_bytes(self, most: int = CHECKED_SLOTS) -> int:
        """Compare the bytes in up to ``most`` cache slots with what was stored for their experts; how many there were.

        Raises ``RunError`` where other bytes have arrived.
        """
        held = self.execution.held()
        chosen = held[:: max(1, -(-len(held) // most))]
        for slot, layer, expert in chosen:
            data = self.pool.stored[slot].cpu().numpy()
            if not self.content.matches(self.units.of(layer, expert), data):
                raise RunError(
                    f"rank {self.ranks.rank}: the bytes fetched for expert {expert} of MoE layer {layer} are not those "
                    "that were stored",
                    hint="do not trust this disk or memory: check the machine's log (dmesg)",
                )
        return len(chosen)

    # what it consists of ----------------------------------------------------------------------------------------------

    def _new_book(self) -> CacheBook:
        options = self.options
        return CacheBook(parse_cache(options.cache), self.layout.cache_slots, options.layers, options.shape.num_experts)

    def _check_memory(self, slots: int) -> int:
        """Bytes of host memory that slots will take; on a CPU they are the device's too.

        Raises ``RunError`` before they would fill the memory.
        """
        shape, size = self.options.shape, slot_bytes(self.options.shape)
        sets, weights = stand_in_sets(shape, self.dtype, slots)
        needed = slots * size + sets * weights * self.dtype.itemsize
        if self.device.type == "cpu":
            free = memory_available_bytes() // self._ranks_here
            needed += most_staging_bytes(self.device, size)
        else:
            free = int(torch.get_device_module(self.device.type).mem_get_info(self.device)[0])
        if needed > free:
            raise RunError(
                f"{slots} slots of {format_size(size)} on every device need {format_size(needed)}, "
                f"{format_size(free)} are free",
                hint="replay fewer layers (--layers), or cache fewer experts (--cache-experts)",
            )
        return needed if self.device.type == "cpu" else 0

    def _units(self, taken: int) -> Units:
        """As many distinct stand-ins as the rank with least room can have, so that ranks keep in step."""
        options, size = self.options, slot_bytes(self.options.shape)
        if options.tier == "disk":
            room, where = disk_room(options.folder, self._ranks_here), f"on the disk of {options.folder}"
        else:
            room, where = memory_room(taken, self._ranks_here), "into host memory"
        room = min(self.ranks.gather(room))
        fewest = int(np.bincount(self.layout.placement_N, minlength=self.ranks.world).min()) * options.layers
        return Units(count=how_many_units(max(1, fewest), size, room, where), own=self.mine)

    def _source(self) -> ExpertSource:
        def in_step() -> None:
            self.ranks.gather(None)  # where a rank that failed tells the others why

        if self.options.tier == "disk":
            part = PART_BYTES if self.device.type == "cpu" else None
            return ScratchSource(self.options.folder, self.content, self.units, in_step=in_step, part_bytes=part)
        return MemorySource(self.content, self.units, self.backend, in_step=in_step)

    # measuring --------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read for as long as the disk was at rest, all ranks at once."""
        if self.options.tier != "disk":
            return
        low, high = DRAIN_SECONDS
        until = time.monotonic() + min(max(time.monotonic() - self._read_until, low), high)
        slot, number = self.layout.cache_slots, 0
        while time.monotonic() < until:
            layer, place = divmod(number, len(self.mine))
            self.transfers.fetch([Request(layer % self.options.layers, int(self.mine[place]), slot)]).wait()
            number += 1
        self.ranks.barrier()

    def _report(self, baseline: PassesOfRanks, treated: PassesOfRanks) -> TraceRunReport:
        """Before any bytes are checked."""
        return TraceRunReport(
            devices=self.devices,
            expert_bytes=self.options.shape.expert_bytes,
            cache_experts=self.layout.cache_slots,
            experts_per_device=most_experts(self.layout.placement_N) * self.options.layers,
            distinct_experts=self.units.count,
            checked_experts=0,
            read_mode=None if self.source.mode is None else str(self.source.mode),
            read_reason=self.source.reason,
            dtype=str(self.dtype).removeprefix("torch."),
            multiplies=self.weights.multiplies,
            costs=self.costs,
            baseline=baseline,
            treated=treated,
        )
