"""Bringing experts into slots: bytes that lie badly, reads that fail, and files that change meanwhile."""

from __future__ import annotations

import json
import random
import shutil
import struct
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from probes.disk import ALIGNMENT
from probes.errors import CheckpointError, DeviceError, InputError, RunError
from runtime.experts import transfer
from runtime.experts.memory import copy_shared
from runtime.experts.transfer import DiskSource, Request, TransferEngine, parts_of
from runtime.worker import RankSession

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]

PROMPTS = [list(b"Hello there, my"), list(b"And he said, go")]


@pytest.fixture(params=["one thread", "several threads"])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experts are fetched by one thread, large ones by several that take turns."""
    if request.param == "several threads":
        monkeypatch.setattr(transfer, "WORTH_A_THREAD", 0)


def copy_of(folder: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    return copied


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_tensors_may_begin_at_any_byte(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, tmp_path: Path, shift: int
) -> None:
    """The format does not align them: a header may be of any length."""
    folder = checkpoint("qwen3_moe")
    theirs = stock.stock_logits(stock.load(folder, torch.float32), PROMPTS, 4)
    copied = copy_of(folder, tmp_path)
    file = copied / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    file.write_bytes(struct.pack("<Q", length + shift) + data[8 : 8 + length] + b" " * shift + data[8 + length :])
    session = open_session(copied, cache_experts=5)
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, 4)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("failure", [InputError("cut short"), DeviceError("no answer")])
def test_a_read_that_fails_once_is_repeated(
    checkpoint: Checkpoint, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    session = open_session(checkpoint("qwen3_moe"), cache_experts=5)
    deliver = session.source.deliver
    failed: list[int] = []

    def fails_first(layer: int, expert: int, *rest: object) -> None:
        if expert not in failed:
            failed.append(expert)
            raise failure
        deliver(layer, expert, *rest)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(session.source, "deliver", fails_first)
    session.run_pass(PROMPTS, session.router, new_tokens=3)
    assert failed


@pytest.mark.usefixtures("copied")
def test_a_read_that_fails_twice_ends_the_run(
    checkpoint: Checkpoint, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(checkpoint("qwen3_moe"), cache_experts=5)

    def fails(*_: object) -> None:
        raise DeviceError("no answer", hint="look at the cable")

    monkeypatch.setattr(session.source, "deliver", fails)
    with pytest.raises(RunError, match=r"fetching expert \d of MoE layer 0 failed twice: no answer") as caught:
        session.run_pass(PROMPTS, session.router, new_tokens=3)
    assert caught.value.hint == "look at the cable"


@pytest.mark.usefixtures("copied")
def test_a_file_that_is_cut_off_during_a_run(checkpoint: Checkpoint, open_session: OpenSession, tmp_path: Path) -> None:
    copied = copy_of(checkpoint("qwen3_moe"), tmp_path)
    session = open_session(copied, cache_experts=1)
    session.run_pass(PROMPTS, session.router, new_tokens=3)
    file = copied / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 3)
    with pytest.raises(RunError, match="failed twice") as caught:
        session.run_pass(PROMPTS, session.router, new_tokens=8)
    assert "truncated" in str(caught.value.hint)


@pytest.mark.usefixtures("copied")
def test_an_error_in_the_worker_reaches_the_one_who_waits(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    session = open_session(checkpoint("qwen3_moe"), cache_experts=3)
    with pytest.raises(IndexError):
        session.transfers.fetch([Request(0, 0, 10_000)]).wait()
    session.transfers.fetch([Request(0, 0, 0)]).wait()


@given(offset=st.integers(0, 20_000), size=st.integers(1, 50_000), pages=st.integers(1, 9))
def test_parts_cover_a_span_in_order_and_fit_what_they_are_read_into(offset: int, size: int, pages: int) -> None:
    most = pages * ALIGNMENT
    parts = list(parts_of(offset, size, most))
    assert [byte for start, length in parts for byte in range(start, start + length)] == list(range(size))
    for at, (start, length) in enumerate(parts):
        first, last = (offset + start) // ALIGNMENT, -(-(offset + start + length) // ALIGNMENT)
        assert (last - first) * ALIGNMENT <= most
        assert at == 0 or (offset + start) % ALIGNMENT == 0
    assert list(parts_of(offset, size, None)) == [(0, size)]


@given(
    size=st.integers(1, 60),
    at=st.integers(0, 60),
    cuts=st.lists(st.integers(1, 119), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_parts_fill_what_they_share_with_a_target(size: int, at: int, cuts: list[int], order: random.Random) -> None:
    whole = np.arange(1, 121, dtype=np.uint8)
    edges = [0, *sorted(set(cuts)), len(whole)]
    parts = list(pairwise(edges))
    order.shuffle(parts)
    target = np.zeros(size, np.uint8)
    for start, stop in parts:
        copy_shared(target, at, whole[start:stop], start)
    assert target.tolist() == whole[at : at + size].tolist()


@pytest.mark.parametrize("part_bytes", [ALIGNMENT, 3 * ALIGNMENT, None])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_expert_read_in_parts_is_the_same(
    checkpoint: Checkpoint, open_session: OpenSession, family: str, part_bytes: int | None
) -> None:
    session = open_session(checkpoint(family), cache_experts=4)
    assert session.pool.takes_parts(session.index)
    source = DiskSource(session.index, part_bytes=part_bytes)
    engine = TransferEngine(session.backend, source, session.pool, readers=2)
    wanted = [(1, 2), (0, 5), (0, 1), (1, 7)]
    found = []
    for each in (engine, TransferEngine(session.backend, DiskSource(session.index), session.pool, readers=1)):
        for parameter in session.pool.parameters.values():
            parameter.zero_()
        each.fetch([Request(layer, expert, slot) for slot, (layer, expert) in enumerate(wanted)]).wait()
        found.append({name: values.clone() for name, values in session.pool.parameters.items()})
    for name, values in found[0].items():
        assert values[:4].any()
        assert torch.equal(values, found[1][name]), name


def test_numbers_that_are_converted_are_read_whole(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    session = open_session(checkpoint("qwen3_moe"), dtype="bfloat16", cache_experts=4)
    assert not session.pool.takes_parts(session.index)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_every_request_is_served_once_and_in_the_order_asked(
    checkpoint: Checkpoint, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    session = open_session(checkpoint("qwen3_moe"), cache_experts=5)
    asked = [(layer, expert) for layer in (1, 0) for expert in (3, 0, 5, 2, 1)]
    begun: list[tuple[int, int]] = []
    deliver = session.source.deliver

    def noted(layer: int, expert: int, *rest: object) -> None:
        begun.append((layer, expert))
        deliver(layer, expert, *rest)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(session.source, "deliver", noted)
    engine = TransferEngine(session.backend, session.source, session.pool, readers=readers)
    engine.fetch([Request(layer, expert, slot) for slot, (layer, expert) in enumerate(asked)]).wait()
    assert sorted(begun) == sorted(asked)
    # Threads that took a request each may begin in either order.
    assert all(abs(begun.index(each) - at) < readers for at, each in enumerate(asked))


def test_after_a_failure_nothing_more_is_fetched_and_no_thread_is_at_work(
    checkpoint: Checkpoint, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(checkpoint("qwen3_moe"), cache_experts=5)
    busy, ended = threading.Event(), threading.Event()
    begun: list[int] = []

    def fails_while_the_other_reads(layer: int, expert: int, *_: object) -> None:
        begun.append(expert)
        if expert == 0:
            busy.wait(10)
            raise DeviceError("no answer")
        busy.set()
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(session.source, "deliver", fails_while_the_other_reads)
    engine = TransferEngine(session.backend, session.source, session.pool, readers=2)
    ticket = engine.fetch([Request(0, expert, expert) for expert in range(6)])
    with pytest.raises(RunError, match="no answer"):
        ticket.wait()
    assert ended.is_set()
    assert set(begun) == {0, 1}


def test_nothing_to_fetch_is_done_at_once(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    open_session(checkpoint("qwen3_moe")).transfers.fetch([]).wait()


# What does not fit the model ------------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_one_expert_of_another_shape_is_refused(
    checkpoint: Checkpoint, open_session: OpenSession, tmp_path: Path
) -> None:
    """Of the same size, so that only its shape tells."""

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.experts.6.down_proj.weight"
        tensors[name] = tensors[name].reshape(16, 64)

    folder = changed(copy_of(checkpoint("qwen3_moe"), tmp_path), reshape)
    with pytest.raises(CheckpointError, match=r"expert 6 of layer 1: down_proj is stored as \[16, 64\]"):
        open_session(folder)


def test_experts_without_a_parameter_of_the_model_are_refused(
    checkpoint: Checkpoint, open_session: OpenSession, tmp_path: Path
) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "experts" in name and "down_proj" in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match="expert 0 of layer 0 lacks down_proj"):
        open_session(changed(copy_of(checkpoint("qwen3_moe"), tmp_path), drop))


def test_a_missing_dense_tensor_is_named(checkpoint: Checkpoint, open_session: OpenSession, tmp_path: Path) -> None:
    folder = changed(copy_of(checkpoint("qwen3_moe"), tmp_path), lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 dense tensor of the qwen3_moe model.* model\.norm\.weight"):
        open_session(folder)


def test_a_missing_selection_bias_is_not_taken_for_zero(
    checkpoint: Checkpoint, open_session: OpenSession, tmp_path: Path
) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]

    with pytest.raises(CheckpointError, match="e_score_correction_bias"):
        open_session(changed(copy_of(checkpoint("deepseek_v3"), tmp_path), drop))


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"moe_intermediate_size": 64}, {"num_hidden_layers": 3}])
def test_a_config_of_another_model_is_refused(
    checkpoint: Checkpoint, open_session: OpenSession, tmp_path: Path, change: dict[str, int]
) -> None:
    folder = copy_of(checkpoint("qwen3_moe"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError) as caught:
        open_session(folder)
    assert caught.value.hint


def test_layers_that_predict_further_tokens_are_ignored(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, tmp_path: Path
) -> None:
    """Checkpoints of DeepSeek hold one more layer of experts than the model."""
    folder = checkpoint("deepseek_v3")
    theirs = stock.stock_logits(stock.load(folder, torch.float32), PROMPTS, 3)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            tensors[name.replace("layers.1.", "layers.2.")] = torch.full_like(tensors[name], 7.0)

    session = open_session(changed(copy_of(folder, tmp_path), add))
    assert session.index.layer_numbers == (0, 1)
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, 3)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5)


def test_experts_are_never_in_memory_together(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    session = open_session(checkpoint("qwen3_moe", experts=64, top_k=2), cache_experts=3)
    slots = 3 + session.layout.staging_slots
    for module in session.loaded.experts:
        for name, parameter in module.named_parameters(recurse=False):
            assert parameter is session.pool.parameters[name]
            assert parameter.shape[0] == slots
