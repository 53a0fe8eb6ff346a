"""Running a model's MoE layers from slots: decide, fetch, compute, exchange, reduce.

Every rank holds the dense model, decides the same (the caches' books are mirrored, so no rank asks another what it
holds), fetches and computes its own experts, and adds the experts' outputs up with the others'. It sees all tokens, or
those of its own sequences (``runtime.dispatch``).

Outputs are kept apart per (token, slot) until the end and then reduced in the stock kernel's own order. So the result
does not depend on how many ranks or waves took part: with nothing pruned it is bit-equal to the stock model.

Shape legend: T tokens (rows of the step, padding included), K slots per token, N experts, R = T·K rows, H hidden size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from probes.errors import CheckpointError, RunError
from runtime.cache import CacheBook, CacheSnapshot
from runtime.clock import PhaseClock
from runtime.dispatch import Dispatched, Replicated, TokenDispatch
from runtime.experts.pool import SlotPool
from runtime.experts.rows import (
    all_finite,
    changed_tokens,
    count_by_device,
    count_layer,
    experts_by_device,
    gates_of,
    of_real_tokens,
)
from runtime.experts.stock import StockKernel
from runtime.experts.transfer import Request, TransferEngine
from runtime.layout import Layout
from runtime.models.load import LoadedModel
from runtime.models.router import RouterView, WeightRule, as_float64
from runtime.parallel import Ranks
from runtime.policy.guard import Brake
from runtime.policy.make import make_policy
from runtime.policy.spec import parse_policy
from runtime.policy.types import (
    SHARE_UNIT,
    Bools,
    Decision,
    Ints,
    Machine,
    Policy,
    Routed,
    Summary,
    Tokens,
)
from runtime.prefetch import prefetch_idle
from runtime.recording import BrakeStep, LayerStep, StepRecord, Timers
from runtime.shadow import relative_error
from runtime.trace.live import NoObserver, RoutingObserver


class StepContext:
    """What the next forward pass is: which rows are real, which policy applies, whether the caches learn from it.

    ``real_G``: the same of all ranks' rows, where this rank has a share of the batch; None: it has all.
    """

    def __init__(
        self,
        real_T: Bools,
        policy: Policy,
        *,
        prefill: bool,
        bypass_cache: bool = False,
        real_G: Bools | None = None,
    ) -> None:
        self.real_T = real_T
        self.real_G = real_T if real_G is None else real_G
        self.all_real = bool(real_T.all())
        self.policy = policy
        self.bypass_cache = bypass_cache
        self.record = StepRecord(tokens=int(self.real_G.sum()), prefill=prefill)


class ExpertExecution:
    """The MoE layers of one rank. Attaching replaces the ``forward`` of every expert module of ``loaded``."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: SlotPool,
        transfers: TransferEngine,
        books: Sequence[CacheBook],
        layout: Layout,
        ranks: Ranks,
    ) -> None:
        self.layout = layout
        self.books = tuple(books)
        self.num_experts = loaded.num_experts
        self.num_layers = len(loaded.experts)
        # Known after the first forward pass.
        self.top_k = 0
        self.hidden_size = 0
        self.check_ranks = False
        self.observer: RoutingObserver = NoObserver()
        self.brake: Brake | None = None
        self.dispatch: TokenDispatch = Replicated()
        self.context: StepContext | None = None
        self._ranks = ranks
        self._transfers = transfers
        self.clock = PhaseClock(transfers.backend)
        self._staging = range(layout.cache_slots, layout.cache_slots + layout.staging_slots)
        # What each cache slot really holds, as layer · N + expert; the book says what it should hold.
        self._held = np.full(layout.cache_slots, -1, np.int64)
        # On the device: whether every expert is in its slot, where it then stays.
        self._all_in_place = False
        self._on_device = Machine(
            placement_NR=layout.placement_N[:, None],
            cost_NR=layout.cost_N[:, None],
            resident_NR=None,
            devices=layout.devices,
            groups=layout.groups,
        )
        self._none_N = np.zeros(self.num_experts, np.bool_)
        self._router_policy = make_policy(parse_policy("router"), offloading=layout.offloading)
        self.kernels: list[StockKernel] = []
        self._routers: list[RouterView] = []
        self._attach(loaded, pool)

    def _attach(self, loaded: LoadedModel, pool: SlotPool) -> None:
        """Follow every layer's router, and take over its experts."""
        parents = {
            id(child): (name, parent) for name, parent in loaded.model.named_modules() for child in parent.children()
        }
        for layer, module in enumerate(loaded.experts):
            name, parent = parents[id(module)]
            self._routers.append(RouterView(module, parent, f"{name} ({loaded.family})"))
            self.kernels.append(StockKernel(module, pool))
            module.forward = partial(self._forward, layer, self.kernels[-1])

    def weight_rule(self) -> WeightRule:
        """How the model makes weights of scores, known after the first forward pass; the same in every layer."""
        first = self._routers[0].rule
        for router in self._routers:
            if not router.rule.agrees(first):
                raise CheckpointError(
                    f"the routers of this model weigh in different ways: {first} and {router.rule}",
                    hint="this family cannot be run with a policy; please report its name",
                )
        return first

    def fill_caches(self) -> None:
        """Bring every expert of every device into its cache, for inference with all experts on the devices."""
        for layer in range(self.num_layers):
            for device, book in enumerate(self.books):
                book.dispatch(layer, np.flatnonzero(self.layout.placement_N == device))
        self.restore(self.snapshot())

    def snapshot(self) -> tuple[CacheSnapshot, ...]:
        """The state of every device's cache."""
        return tuple(book.snapshot() for book in self.books)

    def restore(self, snapshots: Sequence[CacheSnapshot]) -> None:
        """Bring books and slots back to ``snapshots``; what is missing in this device's slots is fetched."""
        for book, snapshot in zip(self.books, snapshots, strict=True):
            book.restore(snapshot)
        wanted = snapshots[self._ranks.rank].key
        stale = np.flatnonzero((wanted >= 0) & (wanted != self._held))
        requests = [Request(*divmod(int(wanted[slot]), self.num_experts), int(slot)) for slot in stale]
        self._transfers.fetch(requests).wait()
        self._held[stale] = wanted[stale]
        self._all_in_place = not self.layout.offloading and all(
            book.resident(layer)[self.layout.placement_N == device].all()
            for device, book in enumerate(self.books)
            for layer in range(self.num_layers)
        )

    def start_step(self, context: StepContext) -> None:
        """Every forward pass of the model begins with this."""
        self.clock.settle()
        self.context = context
        self.observer.start_step(context.real_T, prefill=context.record.prefill)
        if not context.bypass_cache:
            for book in self.books:
                book.start_step()

    def _forward(
        self,
        layer: int,
        kernel: StockKernel,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        context = self.context
        assert context is not None, "start_step comes first"
        self.top_k, self.hidden_size = top_k_index.shape[1], hidden_states.shape[-1]
        timers = context.record.timers
        # Waits for the device, whose work until here is not part of the decision.
        chosen_TK = top_k_index.detach().cpu().numpy()
        start, exchanged = time.perf_counter(), self.dispatch.seconds
        if context.all_real:
            own_TK = np.array(chosen_TK, np.int64, order="C")
        else:
            own_TK = of_real_tokens(chosen_TK, context.real_T)
        ids_TK, weights_TK, everywhere = self._route(layer, context, hidden_states, own_TK, top_k_index, top_k_weights)
        plan = self._plan(layer, context, everywhere.ids_GK, everywhere.own_GK)
        exchanged = self.dispatch.seconds - exchanged
        timers.decide += time.perf_counter() - start - exchanged
        timers.exchange += exchanged
        rows_RH = self._compute(plan, kernel, everywhere.hidden_GH, everywhere.ids_GK, timers)
        if self._ranks.world > 1:
            computed = self.clock.mark()
            self._ranks.sum_(rows_RH)
            self.clock.add(timers, "exchange", computed)
        output_TH = kernel.reduce(self._own_rows(rows_RH, context), weights_TK, ids_TK)
        if self._sample_is_due(context):
            self._sample(layer, kernel, context, everywhere, (own_TK, top_k_weights), output_TH)
        return output_TH

    def _own_rows(self, rows_RH: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The outputs for this rank's tokens."""
        return self.dispatch.output_rows(rows_RH, len(context.real_G), len(context.real_T))

    # decide -----------------------------------------------------------------------------------------------------------

    def _route(
        self,
        layer: int,
        context: StepContext,
        hidden_TH: torch.Tensor,
        own_TK: Ints,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> tuple[Ints, torch.Tensor, Dispatched]:
        """Ids [T, K] after the decision, −1 for nothing, and their weights; tokens left alone keep the router's own.
        And what all ranks dispatch."""
        # Bad scores never stop a live run: the layer falls back to the router's own choice, and is counted.
        tokens, sound = self._tokens(layer, context, own_TK, top_k_index, top_k_weights)
        self.observer.see(layer, tokens)
        resident_N = self._resident(layer)
        machine = self._machine(layer, context.policy, resident_N)
        # The brake watches a policy, not the router itself, and no pass beside the caches.
        is_watched = not context.bypass_cache and context.policy.spec.name != "router"
        brake = self.brake if is_watched else None
        braked = brake is not None and not brake.advance()
        policy = self._router_policy if braked else context.policy
        summary, sound = self._summarise(policy, tokens, machine, sound)
        if not sound:
            policy = self._router_policy
            tokens = dataclasses.replace(tokens, gates_TK=np.ones_like(tokens.gates_TK))
            summary, _ = self.dispatch.combine(policy.summarise(tokens, machine), True)
        decision = policy.decide(summary, machine)
        routed = policy.reroute(tokens, decision, machine)
        everywhere = self.dispatch.exchange(own_TK, routed, hidden_TH, len(context.real_G))
        weights_TK = _merge_weights(own_TK, routed, top_k_weights)
        if self.check_ranks:
            self._compare_decisions(layer, decision, everywhere, weights_TK)
        layout = self.layout
        counts = count_layer(
            everywhere.own_GK,
            everywhere.ids_GK,
            layout.placement_N,
            resident_N,
            layout.devices,
            summary.importance_N,
            summary.active_N,
        )
        scale = 1.0 / SHARE_UNIT / max(1, summary.tokens)
        context.record.layers.append(
            LayerStep(
                layer=layer,
                misses_before_D=counts.misses_before_D,
                misses_after_D=counts.misses_after_D,
                dispatched_D=counts.dispatched_D,
                removed=everywhere.removed,
                rerouted_slots=everywhere.rerouted_slots,
                importance_highest=counts.highest * scale,
                importance_lowest=counts.lowest * scale,
                fell_back=not sound,
                brake=None if brake is None else BrakeStep(braked),
            )
        )
        return routed.topk_ids_TK, weights_TK, everywhere

    def _summarise(self, policy: Policy, tokens: Tokens, machine: Machine, sound: bool) -> tuple[Summary, bool]:
        """What all ranks' tokens say of the experts, and whether all scores are numbers."""
        if sound:
            return self.dispatch.combine(policy.summarise(tokens, machine), True)
        # Nobody will use it, but a rank whose scores are sound sends one of the same size.
        scores_TN, selection_TN = (
            None if scores is None else np.nan_to_num(scores, posinf=0.0, neginf=0.0)
            for scores in (tokens.scores_TN, tokens.selection_scores_TN)
        )
        stand_in = dataclasses.replace(
            tokens, gates_TK=np.ones_like(tokens.gates_TK), scores_TN=scores_TN, selection_scores_TN=selection_TN
        )
        return self.dispatch.combine(policy.summarise(stand_in, machine), False)

    def _compare_decisions(
        self, layer: int, decision: Decision, everywhere: Dispatched, weights_TK: torch.Tensor
    ) -> None:
        """Every rank must have taken the same decision, to the last bit. Raises ``RunError`` where one has not."""
        compared = decision.kept_N.tobytes() + everywhere.ids_GK.tobytes()
        if self.dispatch.replicated:
            compared += weights_TK.detach().cpu().float().numpy().tobytes()
        digests = self._ranks.gather(hashlib.sha256(compared).hexdigest())
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise RunError(
                f"rank {odd[0]} decided differently from rank 0 at MoE layer {layer}",
                hint="all ranks must use the same kind of device, the same torch and the same checkpoint",
            )

    def _tokens(
        self,
        layer: int,
        context: StepContext,
        own_TK: Ints,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> tuple[Tokens, bool]:
        """What the router decided, and whether it gave numbers for every real token."""
        found = self._routers[layer].scores(top_k_index, top_k_weights)
        if found is None:
            scores_TN = selection_TN = None
            gates_TK = np.where(own_TK >= 0, as_float64(top_k_weights), 0.0)
            sound = all_finite(gates_TK, context.real_T)
        else:
            scores, selection = found
            scores_TN = as_float64(scores)
            selection_TN = scores_TN if selection is scores else as_float64(selection)
            gates_TK = np.empty(own_TK.shape)
            sound = gates_of(scores_TN, own_TK, context.real_T, gates_TK)
        tokens = Tokens(
            topk_ids_TK=own_TK,
            gates_TK=gates_TK,
            scores_TN=scores_TN,
            selection_scores_TN=selection_TN,
            token_mask_T=context.real_T,
        )
        return tokens, sound

    def _machine(self, layer: int, policy: Policy, resident_N: Bools) -> Machine:
        if not self.layout.offloading:
            return self._on_device
        rate_N = None
        if policy.spec.parameters.get("reuse"):
            rate_N = sum((book.rate(layer) for book in self.books), np.zeros(self.num_experts))
        return dataclasses.replace(self._on_device, resident_NR=resident_N[:, None], rate_N=rate_N)

    def _resident(self, layer: int) -> Bools:
        """[N] whether each expert is in its own device's cache; on-device none is, since each is read."""
        if not self.layout.offloading:
            return self._none_N
        resident = self.books[0].resident(layer)
        for book in self.books[1:]:
            resident |= book.resident(layer)
        return resident

    # fetch and compute ------------------------------------------------------------------------------------------------

    def _plan(self, layer: int, context: StepContext, ids_TK: Ints, own_TK: Ints) -> _Plan:
        """Advance every device's book; for this device, which expert comes into which slot, in waves."""
        placement_N = self.layout.placement_N
        used_E, used_D1 = experts_by_device(ids_TK, placement_N, self.layout.devices)
        plan = _Plan()
        if self._all_in_place:
            rank = self._ranks.rank
            plan.use_resident(layer, self.books[rank], used_E[used_D1[rank] : used_D1[rank + 1]])
            return plan
        counts_demand = self.books[0].spec.counts_demand
        if counts_demand:
            wanted_E, wanted_D1 = experts_by_device(own_TK, placement_N, self.layout.devices)
        for device, book in enumerate(self.books):
            here = used_E[used_D1[device] : used_D1[device + 1]]
            mine = device == self._ranks.rank
            if context.bypass_cache:
                if mine:
                    plan.bypass(layer, book, here, self._staging)
                continue
            if mine:
                plan.use_resident(layer, book, here)
            demanded = wanted_E[wanted_D1[device] : wanted_D1[device + 1]] if counts_demand else None
            fetches = book.dispatch(layer, here, demanded)
            if mine:
                cached = [Request(layer, f.expert, f.slot) for f in fetches if f.slot is not None]
                self._hold(cached)
                plan.stage(cached, layer, [f.expert for f in fetches if f.slot is None], self._staging)
        if not context.bypass_cache:
            self._plan_ahead(context, plan)
        return plan

    def _plan_ahead(self, context: StepContext, plan: _Plan) -> None:
        """What the links that are not the slowest one move for later layers, if the cache does that."""
        if not self.books[0].spec.prefetch:
            return
        record = context.record.layers[-1]
        layout = self.layout
        # A device's experts cost the same to move.
        cost_D = np.zeros(layout.devices, np.int64)
        np.maximum.at(cost_D, layout.placement_N, layout.cost_N)
        ahead = prefetch_idle(self.books, record.misses_after_D.astype(np.int64), cost_D, layout.groups)
        record.misses_after_D = record.misses_after_D + np.array([len(each) for each in ahead], np.int32)
        plan.ahead = [Request(p.layer, p.expert, p.slot) for p in ahead[self._ranks.rank]]
        self._hold(plan.ahead)

    def _hold(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._held[request.slot] = request.layer * self.num_experts + request.expert

    def _compute(
        self, plan: _Plan, kernel: StockKernel, hidden_TH: torch.Tensor, ids_TK: Ints, timers: Timers
    ) -> torch.Tensor:
        """Rows [R, H] of this device's experts, zero elsewhere; fetches run beside the experts already there."""
        rows_RH = hidden_TH.new_zeros((ids_TK.size, hidden_TH.shape[-1]))
        groups = [plan.ready, *({r.expert: r.slot for r in wave} for wave in plan.waves)]
        order_R = kernel.row_order(ids_TK)
        first = [*(plan.waves[0] if plan.waves else []), *plan.ahead]
        ticket = self._transfers.fetch(first) if first else None
        for number, group in enumerate(groups):
            if number > 0 and ticket is not None:
                waits = self.clock.mark()
                ticket.wait()
                self.clock.add(timers, "fetch_wait", waits)
            start = self.clock.mark()
            kernel.rows(hidden_TH, ids_TK, order_R, group, rows_RH)
            self.clock.add(timers, "experts", start)
            if 0 < number < len(plan.waves):
                ticket = self._transfers.fetch(plan.waves[number])
        if ticket is not None and not plan.waves:
            waits = self.clock.mark()
            ticket.wait()
            self.clock.add(timers, "fetch_wait", waits)
        return rows_RH

    # the brake's shadow samples ---------------------------------------------------------------------------------------

    def _sample_is_due(self, context: StepContext) -> bool:
        """Whether this layer-step is computed both ways: while decoding, where the policy acted on sound scores."""
        step = context.record.layers[-1]
        if self.brake is None or step.brake is None or context.record.prefill or not context.record.tokens:
            return False
        return self.brake.sample_due and not step.fell_back

    def _sample(
        self,
        layer: int,
        kernel: StockKernel,
        context: StepContext,
        everywhere: Dispatched,
        own: tuple[Ints, torch.Tensor],
        policy_TH: torch.Tensor,
    ) -> None:
        """Compute the layer as the router itself would (``own``: its ids and weights for this rank's tokens), beside
        the caches, and tell the brake how far ``policy_TH`` is from that. The time it takes is counted apart."""
        assert self.brake is not None
        self._transfers.synchronize()  # what was queued before is not the sample's
        start = time.perf_counter()
        error, fetches = 0.0, 0
        own_GK = everywhere.own_GK
        if not np.array_equal(everywhere.ids_GK, own_GK):
            own_TK, weights_TK = own
            misses_D, _ = count_by_device(own_GK, self.layout.placement_N, self._resident(layer), self.layout.devices)
            fetches = int(misses_D.sum())
            experts = np.unique(own_GK[own_GK >= 0])
            here = experts[self.layout.placement_N[experts] == self._ranks.rank]
            plan = _Plan()
            plan.bypass(layer, self.books[self._ranks.rank], here, self._staging)
            rows_RH = self._compute(plan, kernel, everywhere.hidden_GH, own_GK, Timers())
            self._ranks.sum_(rows_RH)
            router_TH = kernel.reduce(self._own_rows(rows_RH, context), weights_TK, own_TK)
            policy_GH, router_GH = (self.dispatch.whole(each, len(context.real_G)) for each in (policy_TH, router_TH))
            error = relative_error(policy_GH, router_GH, context.real_G)
            error = float(self._ranks.from_first(error))  # ranks on unlike hosts may round a norm otherwise
        trips = self.brake.trips
        self.brake.observe(error)
        step = context.record.layers[-1]
        step.brake = BrakeStep(braked=False, error=error, fetches=fetches, tripped=self.brake.trips > trips)
        context.record.timers.shadow += time.perf_counter() - start


class _Plan:
    """What this device does in one layer-step: experts ready in slots, then waves of fetches; ``ahead``: for later."""

    def __init__(self) -> None:
        self.ready: dict[int, int] = {}
        self.waves: list[list[Request]] = []
        self.ahead: list[Request] = []

    def stage(self, cached: list[Request], layer: int, uncached: Sequence[int], staging: range) -> None:
        """The first wave fills cache slots and as many staging slots as there are; the rest follows in waves."""
        size = len(staging)
        chunks = [
            [Request(layer, e, s) for e, s in zip(uncached[at : at + size], staging, strict=False)]
            for at in range(0, len(uncached), size)
        ]
        first = cached + (chunks[0] if chunks else [])
        self.waves = [wave for wave in [first, *chunks[1:]] if wave]

    def bypass(self, layer: int, book: CacheBook, experts: Ints, staging: range) -> None:
        """Use what the cache holds, bring the rest through staging, and leave the cache as it is."""
        self.use_resident(layer, book, experts)
        self.stage([], layer, [expert for expert in experts.tolist() if expert not in self.ready], staging)

    def use_resident(self, layer: int, book: CacheBook, experts: Ints) -> None:
        """What is in its slot already."""
        slots = zip(experts.tolist(), book.slots_of(layer, experts), strict=True)
        self.ready = {expert: slot for expert, slot in slots if slot >= 0}


def _merge_weights(own_TK: Ints, routed: Routed, top_k_weights: torch.Tensor) -> torch.Tensor:
    """The router's own weights, bit for bit, for tokens whose ids are unchanged; the policy's for the others."""
    changed_T, any_changed = changed_tokens(own_TK, routed.topk_ids_TK)
    if not any_changed:
        return top_k_weights
    device = top_k_weights.device
    ours_TK = torch.from_numpy(routed.topk_weights_TK).to(device=device, dtype=top_k_weights.dtype)
    return torch.where(torch.from_numpy(changed_T).to(device)[:, None], ours_TK, top_k_weights)
