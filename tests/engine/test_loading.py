"""What is loaded is what the checkpoint holds, and what is inferred of a router is so whatever the first tokens are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from runtime.worker import RankSession

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]
PROMPTS = [list(b"Hello there, my"), list(b"And he said, go"), list(b"Now is the time")]


# A module of gemma4_text owns a parameter of the file and a buffer that is computed, as no other family's does.
@pytest.mark.parametrize("family", ["gemma4_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_dense_tensors_are_those_of_transformers(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, family: str
) -> None:
    folder = checkpoint(family)
    model, theirs = open_session(folder).loaded.model, stock.load(folder, torch.float32)
    found: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    dense = {name for name in expected if ".experts." not in name}
    assert dense <= found.keys()
    for name in dense:
        assert torch.equal(found[name], expected[name]), name


def test_gemma4(checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType) -> None:
    folder = checkpoint("gemma4_text")
    session = open_session(folder, dtype="float32")
    theirs = stock.stock_logits(stock.load(folder, torch.float32), PROMPTS, 3)
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, 3)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["Hello there, my", "And he said, go", "Call me", "Sing, O"])
@pytest.mark.parametrize(("family", "of_scores"), [("deepseek_v3", True), ("axk1", True), ("kolibri1", False)])
def test_what_ranks_the_experts_does_not_depend_on_the_first_tokens(
    checkpoint: Checkpoint, open_session: OpenSession, family: str, text: str, of_scores: bool
) -> None:
    session = open_session(checkpoint(family, top_k=4), cache_experts=8)
    session.run_pass([list(text.encode())], session.router, new_tokens=2)
    for router in session.execution._routers:
        router._logits = logits = torch.randn(5, 8)
        found = router.scores(torch.zeros(5, 4, dtype=torch.int64), torch.ones(5, 4))
        assert found is not None
        ranked = logits.sigmoid() if of_scores else logits
        torch.testing.assert_close(found[1], ranked + router._bias)
