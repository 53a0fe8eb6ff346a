"""Checkpoints with experts in FP8 with block scales and in MXFP4: what is computed, what moves, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from caee_cli.main import app
from probes.disk import ALIGNMENT
from runtime.experts.transfer import Request, Ticket
from runtime.trace.reader import read_trace
from runtime.worker import RankSession
from store.session import open_store

OpenSession = Callable[..., RankSession]
Quantised = Callable[..., Path]

STEPS = 5
PROMPTS = [list(b"Hello there, my"), list(b"And he said, go"), list(b"Now is the time")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMS = ["qwen3_moe-fp8", "deepseek_v3-fp8", "gpt_oss-mxfp4"]
EXPERT_BYTES = {
    # Three matrices of 32 × 32 bytes, each with 4 × 2 scales: in bfloat16, and in float32.
    "qwen3_moe-fp8": 3 * (32 * 32 + 4 * 2 * 2),
    "deepseek_v3-fp8": 3 * (32 * 32 + 4 * 2 * 4),
    # 64 × 64 and 32 × 64 weights in half a byte each, a scale for every 32, and biases in bfloat16.
    "gpt_oss-mxfp4": (64 * 64 + 32 * 64) // 2 + (64 * 64 + 32 * 64) // 32 + 2 * (64 + 64),
}


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(our, their), f"step {number} differs by {(our - their).abs().max():.2e}"


# What is computed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_transformers_on_the_dequantised_weights(
    quantised: Quantised, quantising: ModuleType, open_session: OpenSession, stock: ModuleType, form: str, dtype: str
) -> None:
    folder = quantised(form)
    theirs = stock.stock_logits(quantising.load_stock(folder, DTYPES[dtype]), PROMPTS, STEPS)
    session = open_session(folder, dtype=dtype)
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, STEPS)
    assert_equal(ours, theirs)
    assert session.index.expert_bytes == EXPERT_BYTES[form]


@pytest.mark.parametrize("form", FORMS)
def test_those_weights_are_what_the_bytes_mean(quantised: Quantised, quantising: ModuleType, form: str) -> None:
    """transformers, which the engine is held against, against a plain loop."""
    folder = quantised(form)
    tensors = load_file(folder / "model.safetensors")
    found = dict(quantising.load_stock(folder, torch.bfloat16).named_parameters())
    checked = 0
    for name, value in tensors.items():
        if value.dtype == torch.float8_e4m3fn and ".experts." not in name:
            plain = quantising.plain_fp8(value, tensors[f"{name}_scale_inv"], quantising.FP8_BLOCK, torch.bfloat16)
            assert torch.equal(found[name], plain), name
        elif match := re.fullmatch(r"(.*\.experts)\.3\.(gate|up|down)_proj\.weight", name):
            plain = quantising.plain_fp8(value, tensors[f"{name}_scale_inv"], quantising.FP8_BLOCK, torch.bfloat16)
            whole = found[f"{match[1]}.{'down_proj' if match[2] == 'down' else 'gate_up_proj'}"][3]
            assert torch.equal({"gate": whole[:32], "up": whole[-32:], "down": whole}[match[2]], plain), name
        elif name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            plain = quantising.plain_mxfp4(value[3], tensors[f"{base}_scales"][3], torch.bfloat16)
            assert torch.equal(found[base][3], plain), name
        else:
            continue
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(
    ("form", "tier", "cache_experts"),
    [
        ("qwen3_moe-fp8", "disk", 1),
        ("qwen3_moe-fp8", "disk", 24),
        ("qwen3_moe-fp8", "host", 5),
        ("qwen3_moe-fp8", "device", None),
        ("gpt_oss-mxfp4", "disk", 5),
        ("gpt_oss-mxfp4", "host", 1),
        ("gpt_oss-mxfp4", "device", None),
    ],
)
def test_caches_and_tiers_change_nothing(
    quantised: Quantised,
    quantising: ModuleType,
    open_session: OpenSession,
    stock: ModuleType,
    form: str,
    tier: str,
    cache_experts: int | None,
) -> None:
    """From one slot to all; on the device tier everything is in its slot from the start."""
    folder = quantised(form, top_k=4, **({"num_local_experts": 12} if "gpt" in form else {"experts": 12}))
    theirs = stock.stock_logits(quantising.load_stock(folder, torch.float32), PROMPTS, STEPS)
    session = open_session(folder, tier=tier, cache_experts=cache_experts)
    if tier == "device":
        session.execution.fill_caches()
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, STEPS)
    if session.pool.slots >= 12:
        assert_equal(ours, theirs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5)


@pytest.mark.parametrize("places", [1, 2, 3, 8])
@pytest.mark.parametrize("form", ["deepseek_v3-fp8", "gpt_oss-mxfp4"])
def test_any_number_of_experts_may_be_dequantised_together(
    quantised: Quantised,
    quantising: ModuleType,
    open_session: OpenSession,
    stock: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    places: int,
) -> None:
    """As on a GPU, where they share launches."""
    from runtime.experts import quantised as module

    folder = quantised(form)
    theirs = stock.stock_logits(quantising.load_stock(folder, torch.float32), PROMPTS, STEPS)
    monkeypatch.setitem(module.PLACES, "cpu", places)
    session = open_session(folder, cache_experts=5)
    assert session.pool.places == places
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, STEPS)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_read_in_parts_is_the_same(
    quantised: Quantised,
    quantising: ModuleType,
    open_session: OpenSession,
    stock: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """As large ones are on a CPU, by several threads."""
    folder = quantised(form)
    theirs = stock.stock_logits(quantising.load_stock(folder, torch.float32), PROMPTS, STEPS)
    monkeypatch.setattr("runtime.worker.PART_BYTES", ALIGNMENT)
    monkeypatch.setattr("runtime.experts.transfer.WORTH_A_THREAD", 0)
    session = open_session(folder, cache_experts=5)
    starts, write = [], session.pool.write

    def written(slot: int, pieces: Any, data: Any, start: int) -> None:
        starts.append(start)
        write(slot, pieces, data, start)

    monkeypatch.setattr(session.pool, "write", written)
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, STEPS)
    assert_equal(ours, theirs)
    assert max(starts) > 0


@pytest.mark.parametrize("block", [(12, 20), (32, 7), (128, 128)])
def test_blocks_may_be_cut_off_at_the_edges(
    quantised: Quantised,
    quantising: ModuleType,
    open_session: OpenSession,
    stock: ModuleType,
    tmp_path: Path,
    block: Any,
) -> None:
    """As DeepSeek's are; transformers cannot read those, so its model gets the numbers from a plain loop."""
    folder = quantised("deepseek_v3-fp8", block=block)
    plain = shutil.copytree(folder, tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    numbers = {
        name: quantising.plain_fp8(value, tensors[f"{name}_scale_inv"], block, torch.float32)
        if value.dtype == torch.float8_e4m3fn
        else value
        for name, value in tensors.items()
        if not name.endswith("_scale_inv")
    }
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    quantising.state(plain, quantization_config=None)
    theirs = stock.stock_logits(stock.load(plain, torch.float32), PROMPTS, STEPS)
    session = open_session(folder)
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, STEPS)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5)


def test_layouts_of_the_checkpoint_change_nothing(
    quantised: Quantised, open_session: OpenSession, stock: ModuleType, tmp_path: Path
) -> None:
    """Scales in a shard of their own, and all experts in one tensor, against one tensor each in one file."""
    folder = quantised("qwen3_moe-fp8")
    tensors = load_file(folder / "model.safetensors")
    fused = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for end, ending in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
            each = [[tensors[f"{prefix}.{e}.{name}_proj{end}"] for name in ("gate", "up", "down")] for e in range(8)]
            fused[f"{prefix}.gate_up_proj{ending}"] = stacked([torch.cat([_u8(g), _u8(u)]) for g, u, _ in each], each)
            fused[f"{prefix}.down_proj{ending}"] = stacked([_u8(d) for _, _, d in each], each)
    other = shutil.copytree(folder, tmp_path / "fused")
    save_file(fused, other / "model.safetensors", metadata={"format": "pt"})
    shards = shutil.copytree(folder, tmp_path / "shards")
    split_scales(shards, tensors)
    found = []
    for each_folder in (folder, other, shards):
        session = open_session(each_folder, cache_experts=5)
        assert session.index.expert_bytes == EXPERT_BYTES["qwen3_moe-fp8"]
        found.append(stock.engine_logits(session.model, session.router, PROMPTS, STEPS)[0])
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


def _u8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # torch does not join float8 tensors


def stacked(tensors: list[torch.Tensor], each: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack(tensors).view(each[0][0].dtype)


def split_scales(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    shards = {"model-00001-of-00002.safetensors": False, "model-00002-of-00002.safetensors": True}
    listing = {}
    for file, scales in shards.items():
        part = {name: value for name, value in tensors.items() if name.endswith("_scale_inv") is scales}
        save_file(part, folder / file, metadata={"format": "pt"})
        listing |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listing}))


# What moves, and what runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_slots_hold_the_stored_bytes_and_no_more(
    quantised: Quantised, open_session: OpenSession, stock: ModuleType, form: str
) -> None:
    folder = quantised(form)
    session = open_session(folder, cache_experts=6)
    stock.engine_logits(session.model, session.router, PROMPTS, STEPS)
    slots = 6 + session.layout.staging_slots
    pool: Any = session.pool
    assert pool.slots == slots
    assert sum(tensor.numel() for tensor in pool._stored.values()) == slots * EXPERT_BYTES[form]
    assert all(len(parameter) == pool.places == 1 for parameter in pool.parameters.values())
    (book,) = session.execution.books
    data, found = (folder / "model.safetensors").read_bytes(), 0
    for layer, expert in np.ndindex(2, session.index.num_experts):
        slot = book.slot_of(layer, expert)
        if slot is None:
            continue
        found += 1
        stored = b"".join(
            data[read.offset : read.offset + read.size_bytes] for read in session.index.reads[layer][expert]
        )
        assert len(stored) == EXPERT_BYTES[form]
        for read in session.index.reads[layer][expert]:
            for piece in read.pieces:
                at = read.offset + piece.start
                held = pool._stored[piece.parameter, piece.part, piece.scales][slot]
                assert bytes(held.numpy()) == data[at : at + piece.size_bytes]
    assert found == 6


@pytest.mark.parametrize("form", ["qwen3_moe-fp8", "gpt_oss-mxfp4"])
def test_the_commands_take_them(quantised: Quantised, tmp_path: Path, form: str) -> None:
    folder, store = quantised(form), str(tmp_path / "store.db")
    prompts, trace = tmp_path / "prompts.txt", tmp_path / "t.parquet"
    prompts.write_text("\n".join(["Hello there", "And he said"]))
    common = ["--prompts", str(prompts), "--devices", "cpu:1", "--tier", "disk", "--max-new-tokens", "4"]
    run = ["run", str(folder), *common, "--pairs", "1", "--no-quality", "--theta", "0.5", "--store", store, "--json"]
    document = json.loads(CliRunner().invoke(app, run, catch_exceptions=False).stdout)
    with open_store(store) as kept:
        assert kept.run(document["run_id"]).workload.expert_bytes == EXPERT_BYTES[form]
    record = ["trace", "record", str(folder), *common, "-o", str(trace), "--json"]
    document = json.loads(CliRunner().invoke(app, record, catch_exceptions=False).stdout)
    found = read_trace(trace)
    assert document["tokens"] == len(found.token_step_T) == 28
    assert found.meta.num_experts == (16 if "gpt" in form else 8)


@pytest.mark.parametrize(("form", "cache_experts"), [("qwen3_moe-fp8", 1), ("gpt_oss-mxfp4", 6)])
def test_what_is_pruned_neither_runs_nor_moves(
    quantised: Quantised,
    quantising: ModuleType,
    open_session: OpenSession,
    stock: ModuleType,
    form: str,
    cache_experts: int,
) -> None:
    folder = quantised(form, top_k=4)
    session = open_session(folder, policy="caee:theta=0.5", cache_experts=cache_experts)
    spy = stock.warmed_up(session, PROMPTS)
    moved: list[Request] = []
    ran: list[list[int]] = []
    fetch, placed = session.transfers.fetch, session.pool.placed

    def watched_fetch(requests: list[Request]) -> Ticket:
        moved.extend(requests)
        return fetch(requests)

    def watched_placed(slot_of: dict[int, int]) -> Any:
        ran.append(list(slot_of))
        return placed(slot_of)

    session.transfers.fetch = watched_fetch  # type: ignore[method-assign,assignment]
    session.pool.placed = watched_placed  # type: ignore[method-assign]
    ours, records = stock.engine_logits(session.model, spy, PROMPTS, 3)
    layers = [layer for record in records for layer in record.layers]
    kept = [np.flatnonzero(decision.kept_N) for decision in spy.decisions]
    assert sum(int((d.active_N & ~d.kept_N).sum()) for d in spy.decisions) > 0, "nothing was pruned"
    assert len(moved) == sum(int(layer.misses_after_D.sum()) for layer in layers)
    assert {(r.layer, r.expert) for r in moved} <= {(n % 2, int(e)) for n, each in enumerate(kept) for e in each}
    sent = [np.unique(routed.topk_ids_TK[routed.topk_ids_TK >= 0]).tolist() for routed in spy.routed]
    assert sorted(e for group in ran for e in group) == sorted(e for each in sent for e in each)
    assert all(set(each) <= set(allowed.tolist()) for each, allowed in zip(sent, kept, strict=True))
    rule = stock.RULES[form.split("-")[0]]
    theirs = stock.masked_logits(quantising.load_stock(folder, torch.float32), PROMPTS, spy.dispatched(2), rule)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5)
