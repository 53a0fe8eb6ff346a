"""Checkpoints whose config, dense tensors, weights or tokenizer are wrong: what is said, and of which file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from caee_cli.running import checked_model
from probes.errors import CheckpointError
from runtime.worker import RankSession

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]
Tensor = torch.Tensor

ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")


def state(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def damage(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path, open_session: OpenSession, why: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=why) as caught:
        open_session(folder)
    assert str(folder) in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("top_k", [-1, 0, 9, 99])
def test_more_experts_per_token_than_there_are_or_none(folder: Path, open_session: OpenSession, top_k: int) -> None:
    state(folder, {"num_experts_per_tok": top_k})
    refusal(folder, open_session, f"config.json contradicts itself: {top_k} experts per token of 8")


@pytest.mark.parametrize("stated", ["fp8", ["fp8"], 8])
def test_a_quantisation_that_is_no_object(folder: Path, stated: object) -> None:
    state(folder, {"quantization_config": stated})
    with pytest.raises(CheckpointError, match=r"quantization_config is .* no JSON object") as caught:
        checked_model(str(folder), input_len=None, max_new_tokens=1)
    assert str(folder) in caught.value.message


def test_a_dense_tensor_is_missing(folder: Path, open_session: OpenSession) -> None:
    damage(folder, lambda tensors: tensors.pop(ROUTER))
    error = refusal(folder, open_session, f"lacks 1 dense tensor of the qwen3_moe model, the first is {ROUTER}$")
    assert "download" in str(error.hint)


def test_dense_tensors_in_another_arrangement_are_not_called_absent(
    checkpoint: Checkpoint, open_session: OpenSession
) -> None:
    error = refusal(
        checkpoint("lara_mini"),
        open_session,
        r"4 dense tensors of the lara_mini model, .*in_proj_qkv\.weight; .*linear_attn\.in_proj\.weight is there",
    )
    assert "save_original_format=False" in str(error.hint)


def test_as_the_model_runs_them_they_are_read(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    open_session(checkpoint("lara_mini", saving={"save_original_format": False}))


def test_a_dense_tensor_of_another_shape_is_named_with_its_file(folder: Path, open_session: OpenSession) -> None:
    damage(folder, lambda tensors: tensors.update({ROUTER: tensors[ROUTER].t().contiguous()}))
    error = refusal(folder, open_session, rf"{ROUTER} is stored as \[32, 8\] where the config makes it \[8, 32\]")
    assert "model.safetensors" in error.message


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("name", [ROUTER, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_dense_weights_that_are_nan_are_refused(folder: Path, open_session: OpenSession, name: str, at: int) -> None:
    damage(folder, lambda tensors: tensors[name].view(-1)[at].fill_(float("nan")))
    error = refusal(folder, open_session, f"{name} holds numbers that are NaN")
    assert "model.safetensors" in error.message


@pytest.mark.parametrize("name", [ROUTER, "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_damage_and_not_the_family(
    folder: Path, open_session: OpenSession, name: str
) -> None:
    damage(folder, lambda tensors: tensors[name].fill_(float("inf")))
    session = open_session(folder)
    with pytest.raises(
        CheckpointError, match=r"the router of model\.layers\.[01].* gives scores that are no numbers"
    ) as caught:
        session.run_pass([[1, 2, 3]], session.router, new_tokens=2)
    assert "damaged" in str(caught.value.hint)


def test_a_tokenizer_that_is_there_but_no_tokenizer(folder: Path, open_session: OpenSession) -> None:
    (folder / "tokenizer.json").write_text("{}")
    error = refusal(folder, open_session, "tokenizer of .* cannot be used")
    assert "whole" in str(error.hint)
