"""Shares of a batch: what data-parallel ranks exchange is what each would have, had it all tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.dispatch import DataParallel, Dispatched, Replicated
from runtime.policy.make import make_policy
from runtime.policy.spec import parse_policy
from runtime.policy.types import Machine, Routed, Summary, Tokens

EXPERTS, SLOTS, HIDDEN = 6, 3, 4
PATIENCE_SECONDS = 60


class Exchange:
    """All threads' tensors, by rank."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=PATIENCE_SECONDS)
        self.tensors: list[Any] = [None] * world


class ThreadRank:
    """One of several threads that stand for ranks."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.world = exchange.world
        self._exchange = exchange

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        self._exchange.tensors[self.rank] = tensor.clone()
        self._exchange.barrier.wait()
        assert len({(each.shape, each.dtype) for each in self._exchange.tensors}) == 1  # all that all_gather can do
        gathered = torch.cat(self._exchange.tensors)
        self._exchange.barrier.wait()
        return gathered

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.gather_rows(tensor[None]).sum(0))


def on_ranks(world: int, program: Callable[[DataParallel], Any]) -> list[Any]:
    """What ``program`` returns on every rank."""
    exchange, results = Exchange(world), [None] * world

    def run(rank: int) -> None:
        results[rank] = program(DataParallel(ThreadRank(rank, exchange)))  # type: ignore[arg-type]  # what it uses of Ranks

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results)
    return results


worlds, batch_sizes = st.integers(2, 5), st.integers(1, 9)


@settings(max_examples=30)
@given(worlds, batch_sizes)
def test_shares_are_equal_and_together_the_batch(world: int, batch_size: int) -> None:
    batch = torch.arange(batch_size * 2).view(batch_size, 2)

    def share(dispatch: DataParallel) -> Any:
        rows, real = dispatch.rows(batch), dispatch.real(batch_size)
        assert len(rows) == len(real)
        return rows, real, dispatch.gathered(rows, batch_size)

    shares = on_ranks(world, share)
    assert {len(rows) for rows, _, _ in shares} == {-(-batch_size // world)}
    assert torch.equal(torch.cat([rows[torch.from_numpy(real)] for rows, real, _ in shares]), batch)
    assert all(torch.equal(whole, batch) for _, _, whole in shares)


@settings(max_examples=30)
@given(worlds, batch_sizes, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_what_is_exchanged_is_what_one_rank_with_all_tokens_has(
    world: int, batch_size: int, positions: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    rows = batch_size * positions
    own = generator.integers(-1, EXPERTS, (batch_size, positions, SLOTS))
    routed = generator.integers(-1, EXPERTS, (batch_size, positions, SLOTS))
    hidden = torch.from_numpy(generator.normal(size=(batch_size, positions, HIDDEN))).bfloat16()
    outputs = torch.from_numpy(generator.normal(size=(rows * SLOTS, HIDDEN)))

    def exchange(dispatch: DataParallel) -> Any:
        mine = dispatch.rows(torch.arange(batch_size)).numpy()
        real = np.repeat(dispatch.real(batch_size), positions)
        own_TK, ids_TK = (each[mine].reshape(-1, SLOTS).copy() for each in (own, routed))
        own_TK[~real], ids_TK[~real] = -1, -1
        told = Routed(
            topk_ids_TK=ids_TK,
            topk_weights_TK=np.zeros(ids_TK.shape),
            removed=int(ids_TK[real].sum()) << 40,
            rerouted_slots=int(real.sum()),
        )
        result = dispatch.exchange(own_TK, told, hidden[mine].reshape(-1, HIDDEN), rows)
        kept = dispatch.output_rows(outputs, rows, len(own_TK)).view(-1, SLOTS, HIDDEN)
        assert len(kept) == len(own_TK)
        return result, kept[torch.from_numpy(real)], dispatch.seconds

    results = on_ranks(world, exchange)
    for result, _, seconds in results:
        assert isinstance(result, Dispatched)
        assert np.array_equal(result.own_GK, own.reshape(rows, SLOTS))
        assert np.array_equal(result.ids_GK, routed.reshape(rows, SLOTS))
        assert torch.equal(result.hidden_GH, hidden.view(rows, HIDDEN))
        assert (result.removed, result.rerouted_slots) == (int(routed.sum()) << 40, rows)
        assert seconds > 0
    assert torch.equal(torch.cat([kept for _, kept, _ in results]), outputs.view(rows, SLOTS, HIDDEN))


def tokens_of(scores_TN: np.ndarray[Any, np.dtype[np.float64]]) -> Tokens:
    ids_TK = np.argsort(-scores_TN, axis=1, kind="stable")[:, :SLOTS]
    return Tokens(
        topk_ids_TK=ids_TK,
        gates_TK=np.take_along_axis(scores_TN, ids_TK, 1),
        scores_TN=scores_TN,
        selection_scores_TN=scores_TN,
        token_mask_T=np.ones(len(scores_TN), np.bool_),
    )


def machine() -> Machine:
    return Machine(
        placement_NR=(np.arange(EXPERTS) % 2)[:, None],
        cost_NR=np.full((EXPERTS, 1), 10**9),
        resident_NR=np.zeros((EXPERTS, 1), np.bool_),
        devices=2,
    )


POLICIES = (
    "router",
    "caee:theta=0.6",
    "importance:theta=0.5",
    "budget:epsilon=0.02",
    "oea:k0=1",
    "top-k:k0=2",
    "skip:beta=0.4",
    "xshare:budget=4",
    "lynx:keep=4",
)


@pytest.mark.parametrize("written", POLICIES)
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_decide_as_one_with_all_tokens(written: str, world: int) -> None:
    generator = np.random.default_rng(7)
    steps = [generator.dirichlet(np.full(EXPERTS, 0.4), size=2 * world) for _ in range(6)]
    spec = parse_policy(written)

    def decide(dispatch: DataParallel | Replicated, slice_of: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
        policy, decisions = make_policy(spec, offloading=True), []
        for scores_TN in steps:
            tokens = tokens_of(slice_of(scores_TN))
            summary, sound = dispatch.combine(policy.summarise(tokens, machine()), True)
            assert sound
            assert isinstance(summary, Summary)
            decision = policy.decide(summary, machine())
            decisions.append((summary.tokens, *map(bytes, (summary.importance_N, summary.active_N, decision.kept_N))))
        return decisions

    def on_rank(dispatch: DataParallel) -> Any:
        return decide(dispatch, lambda scores_TN: dispatch.rows(torch.from_numpy(scores_TN)).numpy())

    alone = decide(Replicated(), lambda scores_TN: scores_TN)
    assert all(decisions == alone for decisions in on_ranks(world, on_rank))


@pytest.mark.parametrize("unsound", [(), (0,), (1, 2)])
def test_all_ranks_know_of_scores_that_are_no_numbers(unsound: tuple[int, ...]) -> None:
    summary = make_policy(parse_policy("router"), offloading=True).summarise(tokens_of(np.eye(EXPERTS)), machine())

    def combine(dispatch: DataParallel) -> Any:
        rank = dispatch._ranks.rank  # a test may look
        return dispatch.combine(summary, rank not in unsound)[1], ""

    assert on_ranks(3, combine) == [(not unsound, "")] * 3
