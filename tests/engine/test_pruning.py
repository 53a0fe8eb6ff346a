"""With experts pruned: what is kept is all that runs and moves, and the result is that of a plain masked forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from probes.errors import UsageError
from runtime.experts.transfer import Request, Ticket
from runtime.worker import RankSession

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]

STEPS = 6
PROMPTS = [list(b"Hello there, my"), list(b"And he said"), list(b"Now is"), list(b"the time for")]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3", "phimoe"])
@pytest.mark.parametrize("policy", ["caee:theta=0.5", "importance:theta=0.4,compensation=none", "budget:price=0.01"])
def test_the_result_is_that_of_a_masked_forward(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, family: str, policy: str
) -> None:
    folder = checkpoint(family, top_k=2 if family == "phimoe" else 4)  # sparsemixer chooses two
    session = open_session(folder, policy=policy, cache_experts=5)
    spy = stock.warmed_up(session, PROMPTS)
    ours, records = stock.engine_logits(session.model, spy, PROMPTS, STEPS)
    assert sum(layer.removed for record in records for layer in record.layers) > 0, "nothing was pruned"
    dispatched = spy.dispatched(session.execution.num_layers)
    theirs = stock.masked_logits(stock.load(folder, torch.float32), PROMPTS, dispatched, stock.RULES[family])
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5, msg=lambda text, n=number: f"step {n}: {text}")


@pytest.mark.parametrize("cache_experts", [1, 6, 12])
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_what_is_pruned_neither_runs_nor_moves(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, tier: str, cache_experts: int
) -> None:
    session = open_session(
        checkpoint("qwen3_moe", top_k=4), policy="caee:theta=0.5", tier=tier, cache_experts=cache_experts
    )
    spy = stock.warmed_up(session, PROMPTS)
    moved: list[list[Request]] = []
    fetch = session.transfers.fetch

    def watched(requests: list[Request]) -> Ticket:
        moved.append(list(requests))
        return fetch(requests)

    session.transfers.fetch = watched  # type: ignore[method-assign]
    _, records = stock.engine_logits(session.model, spy, PROMPTS, STEPS)
    layers = [layer for record in records for layer in record.layers]
    assert sum(int((d.active_N & ~d.kept_N).sum()) for d in spy.decisions) > 0, "nothing was pruned"
    for decision, routed, layer in zip(spy.decisions, spy.routed, layers, strict=True):
        sent = np.unique(routed.topk_ids_TK[routed.topk_ids_TK >= 0])
        assert decision.kept_N[sent].all()
        assert layer.dispatched_D.sum() == len(sent)
    requests = [request for batch in moved for request in batch]
    assert len(requests) == sum(int(layer.misses_after_D.sum()) for layer in layers)
    kept = {(number % session.execution.num_layers, int(e)) for number, decision in enumerate(spy.decisions)
            for e in np.flatnonzero(decision.kept_N)}  # fmt: skip
    assert {(request.layer, request.expert) for request in requests} <= kept


@pytest.mark.parametrize("cache", ["lfu", "lru", "lfu:decay=0.9,admit=1", "forecast:decay=0.9,prefetch=1"])
@pytest.mark.parametrize("cache_experts", [1, 7, 16])
def test_the_books_say_what_the_slots_hold(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, cache: str, cache_experts: int
) -> None:
    folder = checkpoint("qwen3_moe", top_k=4)
    session = open_session(folder, policy="caee:theta=0.6", cache=cache, cache_experts=cache_experts)
    spy = stock.warmed_up(session, PROMPTS)
    stock.engine_logits(session.model, spy, PROMPTS, STEPS)
    assert_slots_match_the_book(session, stock.load(folder, torch.float32))


def assert_slots_match_the_book(session: RankSession, model: torch.nn.Module) -> None:
    (book,) = session.execution.books
    experts = [layer.mlp.experts for layer in model.model.layers]
    found = 0
    for layer, module in enumerate(experts):
        for expert in range(session.execution.num_experts):
            slot = book.slot_of(layer, expert)
            if slot is not None:
                found += 1
                for name, parameter in session.pool.parameters.items():
                    assert torch.equal(parameter[slot], getattr(module, name)[expert])
    assert 0 < found <= book.slots


def test_a_pass_can_be_repeated_from_a_snapshot(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType
) -> None:
    folder = checkpoint("qwen3_moe", top_k=4)
    session = open_session(folder, policy="caee:theta=0.6", cache_experts=6)
    spy = stock.warmed_up(session, PROMPTS)
    snapshot = session.execution.snapshot()
    runs = []
    for _ in range(2):
        session.execution.restore(snapshot)
        assert_slots_match_the_book(session, stock.load(folder, torch.float32))
        logits, records = stock.engine_logits(session.model, spy, PROMPTS, STEPS)
        misses = [layer.misses_after_D.tolist() for record in records for layer in record.layers]
        runs.append((torch.stack(logits), misses))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_padding_counts_for_nothing(checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType) -> None:
    session = open_session(checkpoint("qwen3_moe", top_k=4), policy="caee:theta=0.6", cache_experts=6)
    spy = stock.warmed_up(session, PROMPTS)
    stock.engine_logits(session.model, spy, PROMPTS, 1)
    width = max(map(len, PROMPTS))
    real = [column >= width - len(prompt) for prompt in PROMPTS for column in range(width)]
    for tokens, routed in zip(spy.tokens, spy.routed, strict=True):
        assert tokens.token_mask_T.tolist() == real
        assert (routed.topk_ids_TK[~tokens.token_mask_T] == -1).all()


def test_the_decisions_inputs_are_the_routers_own_scores(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType
) -> None:
    """The best scores of what the policy sees are what the router chose, where no group limits its choice."""
    for family in ("qwen3_moe", "gpt_oss", "ernie4_5_moe", "glm4_moe", "minimax_m2", "kolibri1", "afmoe", "lfm2_moe"):
        session = open_session(checkpoint(family, top_k=3), policy="caee:theta=0.6")
        spy = stock.warmed_up(session, PROMPTS)
        stock.engine_logits(session.model, spy, PROMPTS, 2)
        for tokens in spy.tokens:
            real = tokens.token_mask_T
            ranks = tokens.selection_scores_TN
            assert ranks is not None
            best = np.argsort(-ranks[real], axis=1, kind="stable")[:, :3]
            assert (np.sort(best, 1) == np.sort(tokens.topk_ids_TK[real], 1)).all(), family


def test_scores_that_are_no_numbers_fall_back_to_the_router(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType
) -> None:
    session = open_session(checkpoint("qwen3_moe", top_k=4), policy="caee:theta=0.5", cache_experts=6)
    spy = stock.warmed_up(session, PROMPTS)
    router = session.loaded.model.model.layers[1].mlp.gate
    with torch.no_grad():
        router.weight[3] = float("nan")
    _, records = stock.engine_logits(session.model, spy, PROMPTS, 3)
    assert all([layer.fell_back for layer in record.layers] == [False, True] for record in records)
    assert all(record.layers[1].removed == 0 for record in records)


@pytest.mark.parametrize(("phases", "pruned"), [("all", "pd"), ("decode", "d"), ("prefill", "p")])
def test_the_policy_applies_in_its_phases_only(
    checkpoint: Checkpoint, open_session: OpenSession, phases: str, pruned: str
) -> None:
    session = open_session(
        checkpoint("qwen3_moe", top_k=4), policy="caee:theta=0.3", cache_experts=3, phases=phases, max_new_tokens=6
    )
    session.run_pass(PROMPTS, session.router)
    record = session.run_pass(PROMPTS, session.asked_policy())
    removed = {True: 0, False: 0}
    for step in record.steps:
        removed[step.prefill] += sum(layer.removed for layer in step.layers)
    assert (removed[True] > 0, removed[False] > 0) == ("p" in pruned, "d" in pruned)


def test_on_device_every_dispatched_expert_is_paid_and_none_is_fetched(
    checkpoint: Checkpoint, open_session: OpenSession
) -> None:
    session = open_session(checkpoint("qwen3_moe", top_k=4), tier="device", policy="caee:theta=0.6", max_new_tokens=4)
    session.execution.fill_caches()
    moved: list[int] = []
    fetch = session.transfers.fetch
    session.transfers.fetch = lambda requests: (moved.append(len(requests)), fetch(requests))[1]  # type: ignore[method-assign]
    session.run_pass(PROMPTS, session.router)
    record = session.run_pass(PROMPTS, session.asked_policy())
    assert sum(moved) == 0
    for step in record.steps:
        for layer in step.layers:
            assert layer.misses_after_D.tolist() == layer.dispatched_D.tolist()


def test_on_device_the_way_there_does_not_show(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    """Brought when first used, or all at once, after which nothing is looked up any more: the same is computed."""
    found = []
    for filled in (False, True):
        session = open_session(
            checkpoint("qwen3_moe", top_k=4), tier="device", policy="caee:theta=0.6", max_new_tokens=4
        )
        if filled:
            session.execution.fill_caches()
        assert session.execution._all_in_place == filled
        session.run_pass(PROMPTS, session.router)
        record = session.run_pass(PROMPTS, session.asked_policy())
        assert session.execution._all_in_place == filled
        counts = [[layer.dispatched_D.tolist() for layer in step.layers] for step in record.steps]
        found.append((record.token_ids, counts))
    assert found[0] == found[1]


def test_a_bypassed_cache_stays_as_it_is(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    session = open_session(checkpoint("qwen3_moe", top_k=4), cache_experts=5)
    session.run_pass(PROMPTS, session.router)
    before = session.execution.snapshot()
    ids = torch.tensor([[5], [77]])
    with torch.inference_mode():
        session.model.step(
            ids, torch.ones_like(ids), session.model.begin(), session.router, prefill=False, bypass_cache=True
        )
    after = session.execution.snapshot()
    assert before[0].key.tolist() == after[0].key.tolist()
    assert before[0].count.tolist() == after[0].count.tolist()


def test_policies_that_need_scores_are_refused_where_only_weights_are_known(
    checkpoint: Checkpoint, open_session: OpenSession
) -> None:
    session = open_session(checkpoint("phimoe"), policy="xshare:budget=3", cache_experts=5)
    session.run_pass(PROMPTS, session.router, new_tokens=2)
    with pytest.raises(UsageError, match="needs full scores, and the router of phimoe has only") as caught:
        session.asked_policy()
    assert "caee" in str(caught.value.hint)
