"""The engine on whatever device there is: the same checks on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from probes.devices import find_devices
from probes.errors import DeviceError
from runtime.experts import dequantise, memory, pool, transfer
from runtime.experts import quantised as quantised_pool
from runtime.experts.transfer import Request
from runtime.options import TIERS, RunOptions
from runtime.parallel import Ranks
from runtime.policy.spec import parse_policy
from runtime.roofline import measure_roofline
from runtime.worker import RankSession, run_rank

PROMPTS = [list(b"Hello there, my"), list(b"And he said, go")]
Open = Callable[..., RankSession]


@pytest.fixture(params=["cpu:1", pytest.param("cuda:1", marks=pytest.mark.gpu)])
def open_on_device(request: pytest.FixtureRequest) -> Iterator[Open]:
    """An engine of one rank on the first device of a kind."""
    if request.param.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    sessions = []

    def open_one(folder: Path, *, policy: str = "router", **options: Any) -> RankSession:
        given: dict[str, Any] = {
            "tier": "disk",
            "cache": "lfu",
            "prompts": ("Hello there",),
            "held_out": None,
            "calibration": None,
            **options,
        }
        devices = find_devices(request.param)
        session = RankSession(
            RunOptions(model=folder, devices=devices, policy=parse_policy(policy), **given), Ranks(rank=0, world=1)
        )
        sessions.append(session)
        return session

    yield open_one
    for session in sessions:
        session.close()


def stock_on(stock: ModuleType, folder: Path, session: RankSession, steps: int) -> list[torch.Tensor]:
    model = stock.load(folder, session.dtype).to(session.device)
    found: list[torch.Tensor] = stock.stock_logits(model, PROMPTS, steps)
    return found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", "float32"), ("gpt_oss", "bfloat16")])
def test_logits_as_the_stock_model_on_that_device(
    checkpoint: Callable[..., Path],
    open_on_device: Open,
    stock: ModuleType,
    family: str,
    dtype: str,
    tier: str,
) -> None:
    folder = checkpoint(family)
    session = open_on_device(folder, tier=tier, dtype=dtype, cache_experts=5 if tier != "device" else None)
    if tier == "device":
        session.execution.fill_caches()
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, 4)
    theirs = stock_on(stock, folder, session, 4)
    tolerance = 1e-4 if dtype == "float32" else 6e-2
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.float(), their.float(), rtol=tolerance, atol=tolerance)


def test_slots_hold_what_was_fetched_while_others_are_computed(
    checkpoint: Callable[..., Path], open_on_device: Open
) -> None:
    """Slots are written over and over while the device reads others; at last each must hold its expert, to the bit."""
    session = open_on_device(checkpoint("qwen3_moe", experts=32, top_k=4), cache_experts=6, dtype="float32")
    kernel, slots = session.execution.kernels[0], session.pool
    where: dict[str, Any] = {"device": session.device}
    hidden_TH, rows_RH = torch.randn((64, 32), **where), torch.zeros((64, 32), **where)
    random = np.random.default_rng(0)
    with torch.inference_mode():
        for _ in range(20):
            wanted = [Request(int(random.integers(2)), int(random.integers(32)), slot) for slot in range(6)]
            ticket = session.transfers.fetch(wanted)
            kernel.rows(hidden_TH, np.zeros((64, 1), np.int64), np.arange(64), {0: 7}, rows_RH)
            ticket.wait()
            kernel.rows(hidden_TH, np.zeros((64, 1), np.int64), np.arange(64), {0: 3}, rows_RH)
    held = {name: parameter.cpu().clone() for name, parameter in slots.parameters.items()}
    for request in wanted:
        session.transfers.fetch([Request(request.layer, request.expert, 7)]).wait()
        session.transfers.synchronize()
        for name, parameter in slots.parameters.items():
            assert torch.equal(parameter[7].cpu(), held[name][request.slot])


@pytest.mark.parametrize("policy", ["caee:theta=0.5", "budget:epsilon=0.05", "max-rank:j=1,m=2"])
def test_a_policy_prunes_and_leaves_a_record(
    checkpoint: Callable[..., Path], open_on_device: Open, policy: str
) -> None:
    session = open_on_device(checkpoint("qwen3_moe", experts=16, top_k=4), policy=policy, cache_experts=8)
    session.run_pass(PROMPTS, session.router, new_tokens=2)
    done = session.run_pass(PROMPTS, session.asked_policy(), new_tokens=6)
    assert [len(ids) for ids in done.token_ids] == [6, 6]
    for step in done.steps:
        timers = step.timers
        assert step.seconds > 0.0
        assert timers.experts > 0.0
        assert 0.0 <= timers.fetch_wait <= step.seconds
        assert len(step.layers) == 2


def test_windows_of_slots(
    checkpoint: Callable[..., Path], open_on_device: Open, stock: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("gpt_oss")
    monkeypatch.setattr("runtime.experts.stock.MOST_GROUPS", 3)
    session = open_on_device(folder, dtype="bfloat16", cache_experts=12)
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, 3)
    for our, their in zip(ours, stock_on(stock, folder, session, 3), strict=True):
        torch.testing.assert_close(our.float(), their.float(), rtol=6e-2, atol=6e-2)


@pytest.fixture
def as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Lets a CPU take the ways that fetches take to any other device: copies of torch's, whole spans, several places
    that torch's own operations dequantise into. Returns the types of the targets that were copied to."""
    copied_to: list[type] = []

    def copy(target: Any, data: Any) -> None:
        copied_to.extend((type(target), type(data)))
        target.copy_(data, non_blocking=True)

    for module in (memory, pool, quantised_pool, transfer):
        monkeypatch.setattr(module, "bytes_for", lambda device, data: data)
    monkeypatch.setattr(memory, "copy_bytes", copy)
    monkeypatch.setattr(pool.SlotPool, "takes_parts", lambda self, index: False)
    monkeypatch.setattr(quantised_pool.QuantisedPool, "takes_parts", lambda self, index: False)
    monkeypatch.setattr(quantised_pool, "PLACES", {})
    monkeypatch.setattr(quantised_pool, "dequantise_fp8", dequantise.fp8_by_torch)
    monkeypatch.setattr(quantised_pool, "dequantise_mxfp4", dequantise.mxfp4_by_torch)
    return copied_to


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("form", ["qwen3_moe", "gpt_oss", "qwen3_moe-fp8", "gpt_oss-mxfp4"])
def test_fetches_of_other_devices_bring_the_same_bytes(
    checkpoint: Callable[..., Path],
    quantised: Callable[..., Path],
    open_session: Open,
    as_elsewhere: list[type],
    stock: ModuleType,
    quantising: ModuleType,
    form: str,
    tier: str,
) -> None:
    folder = quantised(form) if "-" in form else checkpoint(form)
    load = quantising.load_stock if "-" in form else stock.load
    # As stored, so that nothing is converted on the way.
    dtype = torch.bfloat16 if "-" in form else torch.float32
    theirs = stock.stock_logits(load(folder, dtype), PROMPTS, 4)
    session = open_session(
        folder, tier=tier, dtype=str(dtype).removeprefix("torch."), cache_experts=5 if tier != "device" else None
    )
    if tier == "device":
        session.execution.fill_caches()
    ours, _ = stock.engine_logits(session.model, session.router, PROMPTS, 4)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=6e-2, atol=6e-2)
    assert set(as_elsewhere) == {torch.Tensor}
    for layer, expert in ((0, 0), (1, 3)):
        session.transfers.fetch([Request(layer, expert, 0)]).wait()
        fetched = fetched_bytes(session, 0)
        reference = stored_bytes(session, layer, expert)
        assert fetched == reference


def fetched_bytes(session: RankSession, slot: int) -> dict[Any, bytes]:
    """What a slot holds, by the piece or the parameter that it is of."""
    slots = session.pool
    held = slots._stored if isinstance(slots, quantised_pool.QuantisedPool) else slots.parameters
    return {key: tensor[slot].reshape(-1).view(torch.uint8).numpy().tobytes() for key, tensor in held.items()}


def stored_bytes(session: RankSession, layer: int, expert: int) -> dict[Any, bytes]:
    """The same of the checkpoint's files, read plainly."""
    slots, found = session.pool, {}
    for read in session.index.reads[layer][expert]:
        data = read.path.read_bytes()[read.offset : read.offset + read.size_bytes]
        for piece in read.pieces:
            part = data[piece.start : piece.start + piece.size_bytes]
            if isinstance(slots, quantised_pool.QuantisedPool):
                found[piece.parameter, piece.part, piece.scales] = part
            else:
                found.setdefault(piece.parameter, {})[piece.part] = part
    return {
        key: part if isinstance(part, bytes) else b"".join(part[at] for at in sorted(part))
        for key, part in found.items()
    }


def test_roofline(checkpoint: Callable[..., Path], open_on_device: Open) -> None:
    session = open_on_device(checkpoint("qwen3_moe"))
    roofline = measure_roofline(
        session.backend,
        session.execution.kernels[0],
        session.pool,
        hidden_size=32,
        fetch_seconds=1e-3,
        memory_bytes_per_s=None,
    )
    assert all(0.0 < point.flops / point.seconds <= roofline.peak_flops_per_s for point in roofline.points)


def test_a_device_without_room_is_named(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines")

    monkeypatch.setattr(RankSession, "run", allocate)
    options = RunOptions(
        model=checkpoint("qwen3_moe"),
        devices=find_devices("cpu:1"),
        tier="disk",
        policy=parse_policy("router"),
        cache="lfu",
        prompts=("Hello there",),
        held_out=None,
        calibration=None,
    )
    with pytest.raises(DeviceError, match=r"rank 0: its device has no room: CUDA .* 20.00 GiB\.$") as caught:
        run_rank(options)
    assert "--cache-experts" in str(caught.value.hint)
