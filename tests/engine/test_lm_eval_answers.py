"""Answers to the harness's requests: in lockstep as one by one, and texts as tokens. The package is not needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import InputError
from runtime.engine import Phases, generate
from runtime.parallel import Ranks
from runtime.policy.types import Policy
from runtime.quality import measure_losses
from runtime.tasks.compare import compare
from runtime.tasks.harness import Scores
from runtime.tasks.lockstep import Answer, Answerer, Asked, Order
from runtime.tasks.model import LockstepLM
from runtime.worker import RankSession

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom."


def scored(start: int, context: int, forced: int) -> Asked:
    ids = tuple(TEXT[start : start + context + forced])
    return Asked(context=ids[:context], forced=ids[context:])


RAGGED = (scored(0, 9, 3), scored(5, 1, 1), scored(20, 14, 6), scored(31, 2, 8), scored(3, 20, 2), scored(40, 7, 1))


def answerer_of(session: RankSession, policy: Policy | None = None, **changes: Any) -> Answerer:
    chosen = policy or session.router
    start = session.execution.snapshot()
    settings: dict[str, Any] = {
        "model": session.model,
        "tokenizer": session.loaded.tokenizer,
        "baseline": Phases(prefill=session.router, decode=session.router),
        "treated": Phases(prefill=chosen, decode=chosen),
        "restart": lambda: session.execution.restore(start),
        "prefill": False,
        "batch_size": 4,
        "expect": lambda batches: None,
        "advance": lambda: None,
    }
    return Answerer(**{**settings, **changes})


def order(asked: Sequence[Asked], *, treated: bool = False, restart: bool = True) -> Order:
    return Order(asked=tuple(asked), treated=treated, restart=restart)


@pytest.fixture
def session(checkpoint: Checkpoint, open_session: OpenSession) -> RankSession:
    opened = open_session(checkpoint("qwen3_moe", top_k=4), policy="caee:theta=0.5", cache_experts=6)
    opened.run_pass([[1, 2, 3]], opened.router)
    return opened


# In lockstep as one by one ------------------------------------------------------------------------------------------


@torch.inference_mode()
def one_by_one(model: Any, asked: Asked) -> tuple[float, bool]:
    """What transformers itself makes of one sequence in a forward pass over all of it."""
    ids = torch.tensor([[*asked.context, *asked.forced]])
    shares = model(input_ids=ids).logits[0].float().log_softmax(-1)[len(asked.context) - 1 : -1]
    forced = torch.tensor(asked.forced)
    return float(shares.gather(1, forced[:, None]).double().sum()), bool((shares.argmax(-1) == forced).all())


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_sequences_of_any_lengths_are_scored_as_each_by_itself(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, family: str, prefill: bool
) -> None:
    folder = checkpoint(family)
    opened = open_session(folder)
    answers = answerer_of(opened, prefill=prefill).answer(order(RAGGED))
    model = stock.load(folder, torch.float32)
    for asked, answer in zip(RAGGED, answers, strict=True):
        share, greedy = one_by_one(model, asked)
        assert answer.log_share == pytest.approx(share, abs=1e-3)
        assert answer.greedy == greedy
        assert answer.token_ids == asked.forced


@pytest.mark.parametrize("prefill", [False, True])
def test_a_text_is_written_as_a_run_writes_it(session: RankSession, prefill: bool) -> None:
    prompts = [list(TEXT[at : at + 8]) for at in (0, 11, 22)]
    phases = Phases(prefill=session.router, decode=session.router)
    record = generate(session.model, prompts, phases, max_new_tokens=6, pad_id=256, ranks=Ranks(rank=0, world=1))
    asked = [Asked(context=tuple(prompt), new_tokens=6) for prompt in prompts]
    answers = answerer_of(session, prefill=prefill).answer(order(asked))
    assert [list(answer.token_ids) for answer in answers] == record.token_ids
    # A greedy text is what is scored as greedy.
    again = [Asked(context=each.context, forced=answer.token_ids) for each, answer in zip(asked, answers, strict=True)]
    assert all(answer.greedy for answer in answerer_of(session, prefill=prefill).answer(order(again)))


def test_a_text_ends_where_it_should_and_the_others_go_on(session: RankSession) -> None:
    free = answerer_of(session).answer(order([Asked(context=tuple(TEXT[:8]), new_tokens=8)]))[0].token_ids
    stop = session.loaded.tokenizer.decode(list(free[2:4]))
    asked = [
        Asked(context=tuple(TEXT[:8]), new_tokens=8),
        Asked(context=tuple(TEXT[:8]), new_tokens=8, until=(stop,)),
        Asked(context=tuple(TEXT[:8]), new_tokens=5),
    ]
    answers = answerer_of(session).answer(order(asked))
    ended = next(n for n in range(1, 9) if stop in session.loaded.tokenizer.decode(list(free[:n])))
    assert [answer.token_ids for answer in answers] == [free, free[:ended], free[:5]]


def test_the_model_s_own_end_of_text_ends_a_text(session: RankSession) -> None:
    asked = [Asked(context=tuple(TEXT[:8]), new_tokens=8)]
    free = answerer_of(session).answer(order(asked))[0].token_ids
    tokenizer = SimpleNamespace(eos_token_id=free[2], pad_token_id=None, decode=session.loaded.tokenizer.decode)
    ended = answerer_of(session, tokenizer=tokenizer).answer(order(asked))[0].token_ids
    assert ended == free[: free.index(free[2]) + 1]


def test_the_policy_sees_decoding_as_quality_does(session: RankSession) -> None:
    policy, passages = session.asked_policy(), [list(TEXT[at : at + 9]) for at in (0, 10, 20, 30)]
    start = session.execution.snapshot()
    losses = measure_losses(session.model, passages, policy, batch_size=4)
    session.execution.restore(start)
    asked = [Asked(context=tuple(passage[:1]), forced=tuple(passage[1:])) for passage in passages]
    answerer = answerer_of(session, policy)
    answers = answerer.answer(order(asked, treated=True))
    assert [-answer.log_share / 8 for answer in answers] == pytest.approx(losses.nll_B.tolist(), rel=1e-6)
    assert answerer.pruned.removed == sum(layer.removed for step in losses.steps for layer in step.layers) > 0
    assert answerer.pruned.shares == 2 * 8 * 4


def test_a_pass_is_the_same_whatever_came_before(session: RankSession) -> None:
    policy = session.asked_policy()
    answerer = answerer_of(session, policy)
    first = answerer.answer(order(RAGGED, treated=True))
    answerer.answer(order(RAGGED))
    assert answerer.pruned.removed == 0
    assert answerer.answer(order(RAGGED, treated=True)) == first


@pytest.mark.parametrize("prefill", [False, True])
def test_a_sequence_that_has_ended_is_no_token(session: RankSession, prefill: bool) -> None:
    told: list[int] = []
    answerer = answerer_of(session, prefill=prefill, expect=told.append, advance=lambda: told.append(-1))
    answerer.answer(order(RAGGED))
    fed = sum(len(asked) - 1 for asked in RAGGED)
    assert answerer.pruned.shares == 2 * fed
    assert told == [2, -1, -1]


# Texts as tokens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    args: tuple[Any, ...]


class Bytes:
    """A tokenizer of bytes that puts a token of its own in front."""

    bos_token, bos_token_id, eos_token_id, pad_token_id = "<s>", 256, 257, None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        begun = text.startswith(self.bos_token)
        front = [256] if begun or add_special_tokens else []
        return front + list(text.removeprefix(self.bos_token).encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode()


def asked_by(ask: Callable[[LockstepLM], Any], limit: int | None = None) -> tuple[list[Asked], LockstepLM]:
    seen: list[Asked] = []

    def answer(asked: Sequence[Asked]) -> list[Answer]:
        seen.extend(asked)
        return [Answer(log_share=-float(len(each.forced)), greedy=True, token_ids=(97, 46, 98, 257)) for each in asked]

    model = LockstepLM(Bytes(), answer, limit)
    ask(model)
    return seen, model


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("ab", " c", ([256, 97, 98], [32, 99])),
        ("ab ", "c", ([256, 97, 98], [32, 99])),
        ("<s>ab", "c", ([256, 97, 98], [99])),
        ("", "c", ([256], [99])),
        ("", "<s>c", ([256], [99])),
        (" ", "c", ([256], [32, 99])),
    ],
)
def test_a_pair_is_divided_between_its_texts(context: str, continuation: str, expected: Any) -> None:
    (asked,), _ = asked_by(lambda model: model.loglikelihood([Ask((context, continuation))]))
    assert (list(asked.context), list(asked.forced)) == expected


def test_what_is_too_long_loses_its_beginning() -> None:
    (asked,), model = asked_by(lambda model: model.loglikelihood([Ask(("abcdef", "gh"))]), 5)
    assert (bytes(asked.context), bytes(asked.forced), model.cut) == (b"cdef", b"gh", 1)
    (asked,), model = asked_by(lambda model: model.generate_until([Ask(("abcdef", {"max_gen_toks": 3}))]), 5)
    assert (bytes(asked.context), asked.new_tokens, model.cut) == (b"ef", 3, 1)
    for ask in (("a", "bcdefg"), ("a", {"max_gen_toks": 5})):
        with pytest.raises(InputError, match="no room for its context"):
            asked_by(
                lambda model, ask=ask: (  # type: ignore[misc]  # its value is not used
                    model.generate_until([Ask(ask)]) if isinstance(ask[1], dict) else model.loglikelihood([Ask(ask)])
                ),
                5,
            )
    with pytest.raises(InputError, match="has no token"):
        asked_by(lambda model: model.loglikelihood([Ask(("a", ""))]))


def test_a_text_is_given_up_to_where_it_stops() -> None:
    found: list[str] = []
    settings = [{"until": "b"}, {"until": [".", "b"]}, {"until": []}, {}]
    seen, _ = asked_by(lambda model: found.extend(model.generate_until([Ask(("x", each)) for each in settings])))
    assert found == ["a.", "a", "a.b", "a.b"]
    assert [asked.until for asked in seen] == [("b",), (".", "b"), (), ()]


@given(length=st.integers(0, 40), limit=st.none() | st.integers(1, 12))
def test_a_long_text_is_scored_token_by_token_once_with_all_that_fits_before_it(length: int, limit: int | None) -> None:
    text = "".join(chr(97 + at % 26) for at in range(length))
    found: list[float] = []
    seen, _ = asked_by(lambda model: found.extend(model.loglikelihood_rolling([Ask((text,)), Ask(("xy",))])), limit)
    ids = [256, *text.encode()]
    windows = seen[: len(seen) - (1 if limit is None or limit > 2 else math.ceil(3 / limit))]
    assert [token for window in windows for token in window.forced] == ids
    assert found == [-len(ids), -3.0]
    at = 0
    for window in windows:
        whole = [*window.context, *window.forced]
        end = at + len(window.forced)
        assert whole == [256, *ids][end + 1 - len(whole) : end + 1]
        assert limit is None or len(whole) - 1 == min(limit, end)
        at = end


# Before and after ---------------------------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def scores(values: list[Any], aggregate: Callable[[list[Any]], Any] = mean, **changes: Any) -> Scores:
    settings = {"metric": "acc", "filter": "none", "higher_is_better": True, "chance": 0.5, **changes}
    return Scores(values=values, aggregate=aggregate, **settings)


def test_documents_that_a_policy_changes_are_counted() -> None:
    found = compare(scores([1, 1, 0, 0, 1.0, True]), scores([1, 0, 0, 1, 0.0, False]), seed=0)
    assert (found.baseline, found.with_policy, found.documents, found.chance) == (4 / 6, 2 / 6, 6, 0.5)
    assert found.difference == pytest.approx(-2 / 6)
    assert (found.documents_better, found.documents_worse) == (1, 3)
    assert found.difference_ci95 is not None
    low, high = found.difference_ci95
    assert -1 <= low < found.difference < high <= 1
    lower_is_better = compare(
        scores([1.0, 2.0], higher_is_better=False), scores([3.0, 1.0], higher_is_better=False), seed=0
    )
    assert (lower_is_better.documents_better, lower_is_better.documents_worse) == (1, 1)


def test_a_metric_that_is_no_mean_is_resampled_as_the_harness_makes_it() -> None:
    def perplexity(values: list[float]) -> float:
        return math.exp(-mean(values))

    before, after = [-1.0, -2.0, -3.0, -1.5] * 5, [-1.1, -2.0, -3.2, -1.4] * 5
    found = compare(scores(before, perplexity), scores(after, perplexity), seed=0)
    assert found.difference == pytest.approx(perplexity(after) - perplexity(before))
    assert found.documents_better is found.documents_worse is None
    assert found.difference_ci95 is not None
    assert found.difference_ci95[0] < found.difference < found.difference_ci95[1]
    assert compare(scores(before, perplexity), scores(after, perplexity), seed=0) == found

    def of_pairs(values: list[tuple[float, int]]) -> float:
        return sum(a for a, _ in values) / sum(n for _, n in values)

    pairs = compare(scores([(1.0, 2), (2.0, 3)], of_pairs), scores([(1.5, 2), (2.0, 3)], of_pairs), seed=0)
    assert pairs.difference == pytest.approx(0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e999])
def test_what_is_no_number_is_unknown(value: float) -> None:
    found = compare(scores([1.0, 1.0]), scores([1.0, value]), seed=0)
    assert (found.with_policy, found.difference, found.difference_ci95) == (None, None, None)
    huge = compare(scores([1.0, 1.0]), scores([1.0, 1.0], lambda values: math.exp(1e4)), seed=0)
    assert (huge.baseline, huge.with_policy, huge.difference_ci95) == (1.0, None, None)


def test_one_document_and_metrics_of_all_at_once_have_no_interval() -> None:
    assert compare(scores([1.0]), scores([0.0]), seed=0).difference_ci95 is None
    bleu = [scores([("a", "b")] * 3, lambda values: 12.0, metric="bleu") for _ in range(2)]
    assert compare(*bleu, seed=0).difference_ci95 is None
