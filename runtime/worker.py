"""The program of one rank: load, warm up, run interleaved pairs, measure quality.

All ranks run it in step. What they return is the same everywhere except for the clocks; rank 0's is kept.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from probes.backend import TorchBackend
from probes.errors import InputError
from probes.records import Device
from runtime.cache import CacheBook, CacheSnapshot, parse_cache
from runtime.cost import CostTable, cost_table
from runtime.dispatch import DataParallel
from runtime.engine import LockstepModel, Phases, generate
from runtime.execution import ExpertExecution
from runtime.experts.index import ExpertIndex, index_experts
from runtime.experts.pool import SlotPool
from runtime.experts.quantised import make_pool
from runtime.experts.transfer import PART_BYTES, DiskSource, ExpertSource, HostSource, TransferEngine
from runtime.layout import lay_out, most_experts
from runtime.models.config import context_limit, read_config_file
from runtime.models.load import LoadedModel, load_without_experts, resolve_dtype
from runtime.models.skeleton import build_skeleton, read_config
from runtime.options import RunOptions
from runtime.pairs import PassesOfRanks, how_many_pairs, measure_pairs
from runtime.parallel import Ranks, join, leave
from runtime.policy.guard import Brake
from runtime.policy.knob import knob_of, turned
from runtime.policy.make import make_policy
from runtime.policy.spec import format_policy, parse_policy, refuse_without_scores
from runtime.policy.types import Policy, PolicySpec
from runtime.quality import measure_quality
from runtime.rank import (
    Progress,
    full_device_named,
    take_device,
    without_garbage_collection,
)
from runtime.recording import PassRecord
from runtime.roofline import measure_roofline
from runtime.signals.collect import open_signals
from runtime.signals.step import StepsHeader
from runtime.tasks.lockstep import Answerer
from runtime.tasks.session import TaskSession
from runtime.tuning import search_knob
from runtime.workload import check_context, cut_prompts, held_out_passages
from store.records import PolicySearch, Quality, Roofline, TaskResult

Batches = list[list[list[int]]]

FEWEST_TIMED_PAIRS = 5
"""When the number of interleaved pairs follows from the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What rank 0 brings home. ``baseline`` and ``treated``: by rank, then by pair; empty where ``search`` found no
    policy to run.

    ``quality_brake``: the brake after quality was measured, None where there was none.
    """

    devices: tuple[Device, ...]
    family: str
    dtype: str
    top_k: int
    num_experts: int
    moe_layers: int
    layer_numbers: tuple[int, ...]
    expert_bytes: int
    cache_experts: int
    experts_per_device: int
    read_mode: str | None
    read_reason: str | None
    scores_known: bool
    batch_size: int
    policy: PolicySpec
    costs: CostTable | None
    baseline: PassesOfRanks
    treated: PassesOfRanks
    quality: Quality | None
    roofline: Roofline | None
    quality_brake: Brake | None
    prompt_texts: tuple[str, ...]
    baseline_texts: tuple[str, ...]
    treated_texts: tuple[str, ...]
    search: PolicySearch | None = None
    tasks: tuple[TaskResult, ...] = ()


def run_rank(options: RunOptions) -> RankReport:
    """Join the other ranks and do the whole run. Raises a ``CaeeError``."""
    ranks = join(options.device_kind)
    # Costs and the policy decide, so they must be the same on hosts whose stores differ.
    try:
        calibration, policy = ranks.from_first((options.calibration, options.policy))
        options = replace(options, calibration=calibration, policy=policy)
        with full_device_named(ranks.rank):
            session = ranks.all_or_none(lambda: RankSession(options, ranks))
            try:
                return session.run()
            finally:
                session.close()
    finally:
        leave(ranks)


class RankSession:
    """One rank's loaded model and everything around it."""

    def __init__(self, options: RunOptions, ranks: Ranks) -> None:
        self.options = options
        self.ranks = ranks
        self.tasks = None if options.tasks is None else TaskSession(options.tasks, ranks)
        self.devices, self.device = take_device(options.devices, ranks)
        self.context_limit = context_limit(read_config_file(options.model))
        self.dtype = resolve_dtype(options.dtype, read_config(options.model), self.device)
        skeleton = build_skeleton(options.model, dtype=self.dtype)
        self.index: ExpertIndex = index_experts(
            options.model, rename=skeleton.names, layers=skeleton.layer_numbers, stored_as=skeleton.stored_as
        )
        self.loaded: LoadedModel = load_without_experts(options.model, skeleton, self.index, device=self.device)
        self.costs, self.layout = lay_out(
            self.devices,
            num_experts=self.index.num_experts,
            layers=len(self.index.reads),
            expert_bytes=self.index.expert_bytes,
            tier=options.tier,
            cache_experts=options.cache_experts,
            calibration=options.calibration,
        )
        self.mine = np.flatnonzero(self.layout.placement_N == ranks.rank)
        self.backend = TorchBackend(self.device)
        slots = self.layout.cache_slots + self.layout.staging_slots
        shapes = skeleton.expert_shapes
        self.pool: SlotPool = make_pool(self.index, shapes, slots=slots, dtype=self.dtype, device=self.device)
        self.source: ExpertSource = self._source()
        self.transfers = TransferEngine(self.backend, self.source, self.pool)
        books = [
            CacheBook(
                parse_cache(options.cache), self.layout.cache_slots, len(self.index.reads), self.index.num_experts
            )
            for _ in range(ranks.world)
        ]
        self.execution = ExpertExecution(self.loaded, self.pool, self.transfers, books, self.layout, ranks)
        self.execution.check_ranks = options.check_ranks
        if options.data_parallel and ranks.world > 1:
            self.execution.dispatch = DataParallel(ranks)
        self.release_brake()
        self.model = LockstepModel(self.loaded, self.execution, self.device)
        self.router = make_policy(parse_policy("router"), offloading=options.offloading)
        self.progress = Progress(options.progress_file, ranks)
        self.search: PolicySearch | None = None
        self.model.signals = open_signals(
            options.signals if ranks.rank == 0 else None, self._steps_header, lambda: self.execution.brake
        )

    def release_brake(self) -> None:
        """A brake that has seen nothing yet, if one was asked for."""
        settings = self.options.brake
        self.execution.brake = None if settings is None else Brake(settings, layers=self.execution.num_layers)

    def close(self) -> None:
        self.transfers.close()
        self.model.signals.close()
        gc.unfreeze()

    def run(self) -> RankReport:
        batches = self._batches()
        held_out, searched = self._held_out()
        gc.freeze()  # a collection before each pass need not go through all that was loaded and imported
        if not self.options.offloading:
            self.execution.fill_caches()
        warm = self.run_pass(batches[0], self.router)
        policy = self.asked_policy()
        snapshot = self.execution.snapshot()
        if searched:
            chosen = self._searched_policy(searched, policy)
            if chosen is None:
                return self._report(batches, policy, [], [])
            policy = chosen
            self.execution.restore(snapshot)
        # What compiles or allocates on first use must not count: a short pass each.
        self.run_pass(batches[0], policy, new_tokens=4)
        self.execution.restore(snapshot)
        self.release_brake()
        pairs = self._pairs(warm)
        self.progress.expect(2 * pairs + -(-len(held_out) // self.options.batch_size))

        def run_pass(pair: int, with_policy: bool) -> PassRecord:
            self.execution.restore(snapshot)
            self.model.signals.begin_pass("policy" if with_policy else "baseline")
            return self.run_pass(batches[pair % len(batches)], policy if with_policy else self.router)

        reported = partial(self._report, batches, policy)
        passes = measure_pairs(self, pairs, run_pass, reported)
        self.execution.restore(snapshot)
        report = reported(*passes)
        self.release_brake()  # what quality is does not depend on how many passes there were
        quality = self._quality(held_out, policy)
        report = replace(report, quality=quality, quality_brake=self.execution.brake)
        return replace(report, tasks=self._evaluate(policy, snapshot), roofline=self._roofline())

    def _searched_policy(self, passages: list[list[int]], policy: Policy) -> Policy | None:
        """``policy`` with its knob turned as far as is allowed; None where it may not be turned at all."""
        assert self.options.max_quality_drop is not None
        self.search = search_knob(self, passages, policy.spec, self.options.max_quality_drop)
        if self.search.chosen is None:
            return None
        knob = knob_of(policy.spec, offloading=self.options.offloading)
        return make_policy(turned(policy.spec, knob, self.search.chosen), offloading=self.options.offloading)

    def _roofline(self) -> Roofline:
        """Measured last: it computes with whatever slot 0 holds, and rows of no meaning."""
        memory = None
        if self.options.calibration is not None:
            names = [self.devices[self.ranks.rank].name_on_link]
            size = self.index.expert_bytes
            with contextlib.suppress(InputError):  # that link may have been waived
                memory = size / cost_table(self.options.calibration, "device", names, size).seconds_per_expert[0]
        return measure_roofline(
            self.backend,
            self.execution.kernels[0],
            self.pool,
            hidden_size=self.execution.hidden_size,
            fetch_seconds=None if self.costs is None else self.costs.seconds_per_expert[self.ranks.rank],
            memory_bytes_per_s=memory,
        )

    def _report(self, batches: Batches, policy: Policy, baseline: PassesOfRanks, treated: PassesOfRanks) -> RankReport:
        decode = self.loaded.tokenizer.decode
        return RankReport(
            devices=self.devices,
            family=self.loaded.family,
            dtype=str(self.dtype).removeprefix("torch."),
            top_k=self.execution.top_k,
            num_experts=self.index.num_experts,
            moe_layers=len(self.index.reads),
            layer_numbers=self.index.layer_numbers,
            expert_bytes=self.index.expert_bytes,
            cache_experts=self.layout.cache_slots,
            experts_per_device=most_experts(self.layout.placement_N) * len(self.index.reads),
            read_mode=None if self.source.mode is None else str(self.source.mode),
            read_reason=self.source.reason,
            scores_known=self.execution.weight_rule().is_known,
            batch_size=len(batches[0]),
            policy=policy.spec,
            costs=self.costs,
            baseline=baseline,
            treated=treated,
            quality=None,
            roofline=None,
            quality_brake=None,
            prompt_texts=tuple(decode(ids) for ids in batches[0]),
            baseline_texts=tuple(decode(ids) for ids in baseline[0][0].token_ids) if baseline else (),
            treated_texts=tuple(decode(ids) for ids in treated[0][0].token_ids) if treated else (),
            search=self.search,
        )

    def _steps_header(self, model: str) -> StepsHeader:
        return StepsHeader(
            model=model,
            devices=tuple(device.name for device in self.devices),
            tier=self.options.tier,
            policy=format_policy(self.options.policy),
            moe_layers=len(self.index.reads),
            num_experts=self.index.num_experts,
        )

    def _source(self) -> ExpertSource:
        if self.options.tier == "host":
            mine = [(layer, int(e)) for layer in range(len(self.index.reads)) for e in self.mine]
            return HostSource(self.index, self.backend, mine)
        in_parts = self.device.type == "cpu" and self.pool.takes_parts(self.index)
        return DiskSource(self.index, part_bytes=PART_BYTES if in_parts else None)

    def asked_policy(self) -> Policy:
        """The policy of the options, after a first pass."""
        return self.policy_of(self.options.policy)

    def policy_of(self, spec: PolicySpec) -> Policy:
        """A new policy, with the model's own way of weighing where ``spec`` names none; known after a first pass."""
        rule = self.execution.weight_rule()
        if not rule.is_known:
            hint = "choose another policy; caee, importance and budget work with these weights"
            refuse_without_scores(spec, self.execution.top_k, f"the router of {self.loaded.family}", hint)
        return make_policy(
            replace(
                spec,
                renormalize=spec.renormalize or rule.renormalize,
                routed_scaling_factor=spec.routed_scaling_factor or rule.scaling,
            ),
            offloading=self.options.offloading,
        )

    def encoded_prompts(self) -> list[list[int]]:
        """Token ids of every prompt, at least one each. Raises ``UsageError`` where one passes the model's context."""
        options, encode = self.options, self.loaded.tokenizer.encode
        found = [encode(prompt, add_special_tokens=False) or [0] for prompt in options.prompts]
        if options.input_len is not None:
            text = list(itertools.chain.from_iterable(found))
            found = cut_prompts(text, length=options.input_len, count=options.prompt_count, seed=options.seed)
        check_context(self.context_limit, max(map(len, found)), options.max_new_tokens)
        return found

    def _batches(self) -> Batches:
        ids = self.encoded_prompts()
        size = min(self.options.batch_size, len(ids))
        return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]

    def run_pass(self, batch: Sequence[Sequence[int]], policy: Policy, *, new_tokens: int | None = None) -> PassRecord:
        """Prefill and decode one batch, from the caches as they are, with ``policy`` in the phases where it applies."""
        phases = self._phases(policy)
        with without_garbage_collection():
            return generate(
                self.model,
                batch,
                phases,
                max_new_tokens=new_tokens or self.options.max_new_tokens,
                pad_id=self.loaded.tokenizer.pad_token_id or 0,
                ranks=self.ranks,
            )

    def _phases(self, policy: Policy) -> Phases:
        return Phases(
            prefill=policy if self.options.applies("prefill") else self.router,
            decode=policy if self.options.applies("decode") else self.router,
        )

    def _pairs(self, warm: PassRecord) -> int:
        # The first steps of all are slower than any other.
        step = float(np.median([step.seconds for step in warm.decode_steps()]))
        seconds = (warm.ttft_seconds or 0.0) + step * (self.options.max_new_tokens - 1)
        return how_many_pairs(self, seconds, fewest=FEWEST_TIMED_PAIRS)

    def _held_out(self) -> tuple[list[list[int]], list[list[int]]]:
        """Passages to measure quality on, and others to search on; none without a text or without a search."""
        options = self.options
        if options.held_out is None:
            return [], []
        return held_out_passages(
            self.loaded.tokenizer.encode(options.held_out, add_special_tokens=False),
            length=options.quality_tokens,
            count=options.quality_sequences,
            search=options.search,
        )

    def _quality(self, held_out: list[list[int]], policy: Policy) -> Quality | None:
        if not held_out:
            return None
        self.model.signals.begin_pass("quality")
        return measure_quality(
            self.model,
            held_out,
            self.router,
            policy,
            batch_size=self.options.batch_size,
            seed=self.options.seed,
            on_batch=self.progress.advance,
        )

    def _evaluate(self, policy: Policy, snapshot: tuple[CacheSnapshot, ...]) -> tuple[TaskResult, ...]:
        """Tasks with the router's own choice and with the policy, each from ``snapshot``; none where none is asked."""
        if self.tasks is None or self.options.tasks is None:
            return ()

        def restart() -> None:
            self.execution.restore(snapshot)
            self.release_brake()

        answerer = Answerer(
            model=self.model,
            tokenizer=self.loaded.tokenizer,
            baseline=self._phases(self.router),
            treated=self._phases(policy),
            restart=restart,
            prefill=self.options.tasks.shape == "prefill",
            batch_size=self.options.batch_size,
            expect=self.progress.expect,
            advance=self.progress.advance,
        )
        return self.tasks.measure(answerer, context_limit=self.context_limit, seed=self.options.seed)
