"""Workloads as people benchmark: prompts of a given length, files of prompts, and the model's context."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import InputError, UsageError
from runtime.models.config import context_limit
from runtime.options import CUT_BATCHES, read_prompts
from runtime.worker import RankSession
from runtime.workload import check_context, cut_prompts

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]


@given(text=st.integers(1, 60), length=st.integers(1, 60), count=st.integers(1, 12), seed=st.integers(0, 9))
def test_prompts_are_pieces_of_the_text_of_exactly_that_length(text: int, length: int, count: int, seed: int) -> None:
    ids = list(range(100, 100 + text))
    if length > text:
        with pytest.raises(InputError, match=f"has {text} tokens, --input-len asks for {length}"):
            cut_prompts(ids, length=length, count=count, seed=seed)
        return
    prompts = cut_prompts(ids, length=length, count=count, seed=seed)
    assert prompts == cut_prompts(ids, length=length, count=count, seed=seed)
    assert len(prompts) == count
    for prompt in prompts:
        assert prompt == list(range(prompt[0], prompt[0] + length))
        assert 100 <= prompt[0] <= 100 + text - length
    places = text - length + 1
    assert len({prompt[0] for prompt in prompts}) == count or places < count


def test_another_seed_cuts_elsewhere() -> None:
    cut = [cut_prompts(range(10_000), length=8, count=4, seed=seed) for seed in (0, 1)]
    assert cut[0] != cut[1]


def test_a_session_cuts_its_prompts(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    text = "It was the best of times, it was the worst of times."
    session = open_session(checkpoint("qwen3_moe"), prompts=(text,), input_len=7, batch_size=3, max_new_tokens=4)
    ids = session.loaded.tokenizer.encode(text, add_special_tokens=False)
    prompts = session.encoded_prompts()
    assert len(prompts) == session.options.prompt_count == CUT_BATCHES * 3
    assert {len(prompt) for prompt in prompts} == {7}
    assert all(any(ids[at : at + 7] == prompt for at in range(len(ids))) for prompt in prompts)
    assert len(session.run_pass(prompts[:3], session.router).token_ids) == 3


def test_a_prompt_beyond_the_context_is_refused(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    session = open_session(checkpoint("qwen3_moe"), prompts=("a", "b" * 5000), max_new_tokens=4)
    with pytest.raises(UsageError, match="5,000 prompt tokens and 4 new ones are more than the"):
        session.encoded_prompts()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 1}, 64),
        ({"n_positions": 77}, 77),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
    ],
)
def test_the_context_of_a_config(config: dict[str, object], expected: int | None) -> None:
    assert context_limit(config) == expected


def test_a_context_is_full_at_its_last_position() -> None:
    check_context(64, 60, 4)
    check_context(None, 10**9, 10**9)
    with pytest.raises(UsageError, match="more than the 64 positions"):
        check_context(64, 61, 4)


def test_prompts_are_lines_or_json_lines(tmp_path: Path) -> None:
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.json"
    plain.write_text('Hello\n\n{"not": "a prompt"}\n  {braces\n', encoding="utf-8")
    assert read_prompts(plain) == ("Hello", '{"not": "a prompt"}', "  {braces")
    texts = ("two\nlines", "é “quoted”", "x")
    lines.write_text("\n".join(json.dumps({"prompt": text, "id": 3}) for text in texts) + "\n\n", encoding="utf-8")
    assert read_prompts(lines) == texts


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", '{"prompt": "x"}\nplain\n', "a.txt, line 2: this is no JSON object with a text"),
        ("a.jsonl", '\n{"text": "x"}\n', "a.jsonl, line 2: this is no JSON object with a text"),
        ("a.jsonl", '{"prompt": " "}\n', "line 1"),
        ("a.jsonl", '{"prompt": 3}\n', "line 1"),
        ("a.jsonl", "[" * 100_000, "line 1"),
        ("a.jsonl", "", "holds no prompt"),
    ],
)
def test_json_lines_that_hold_no_prompt_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_prompts(tmp_path / name)
