"""Dequantised numbers are exactly those of a plain loop, and of transformers' own functions."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.experts import dequantise
from runtime.experts.dequantise import dequantise_fp8, dequantise_mxfp4, fp8_by_torch, mxfp4_by_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# From one row to all at once, so that a piece ends in the middle of a block, too.
PIECES = [1, 100, 1 << 17]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """To the bit, signs of zeros included; NaN is NaN."""
    assert ours.dtype == theirs.dtype
    nan = ours.isnan()
    kind = {4: torch.int32, 2: torch.int16}[ours.itemsize]
    bits = [tensor.masked_fill(nan, 0).contiguous().view(kind) for tensor in (ours, theirs)]
    return bool(torch.equal(nan, theirs.isnan()) and torch.equal(*bits))


@pytest.fixture(params=PIECES)
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantise, "PIECE_WEIGHTS", request.param)
    monkeypatch.setattr(dequantise, "PIECE_WEIGHTS_CPU", request.param)


def all_bytes(rows: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def fp8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """By the CPU's own loops, after checking that torch's operations, as on any other device, make the same."""
    out, other = torch.empty(values.shape, dtype=dtype), torch.empty(values.shape, dtype=dtype)
    dequantise_fp8(values, scales, block, out)
    fp8_by_torch(values, scales, block, other)
    assert same(other, out)
    return out


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Likewise."""
    shape = (len(blocks), blocks.shape[2] * 32, blocks.shape[1])
    out, other = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    dequantise_mxfp4(blocks, scales, out)
    mxfp4_by_torch(blocks, scales, other)
    assert same(other, out)
    return out


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fp8_is_value_times_scale_of_its_block(quantising: ModuleType, pieces: None, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    block = (data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24)))
    dtype, seed = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 10_000))
    values = all_bytes(rows, columns, seed=seed).view(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    width = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scales = torch.rand(grid, generator=torch.Generator().manual_seed(seed)).mul(0.01).to(width)
    expected = quantising.plain_fp8(values, scales, block, dtype)
    assert same(fp8(values[None], scales[None], block, dtype)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_what_transformers_makes_of_it(pieces: None, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = all_bytes(3 * 48, 96).view(torch.float8_e4m3fn).view(3, 48, 96)
    exponents = torch.arange(3 * 6 * 3, dtype=torch.uint8).view(3, 6, 3) + 100
    floats = torch.rand(3, 6, 3) * 1e-3
    theirs = Fp8Dequantize(None)
    for scales in (floats, floats.bfloat16(), exponents, exponents.view(torch.float8_e8m0fnu)):
        assert same(fp8(values, scales, (8, 32), dtype), theirs._dequantize_one(values, scales, dtype))


def test_every_fp8_byte_and_exponent(quantising: ModuleType) -> None:
    values = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    expected = torch.tensor([[quantising.fp8_number(byte)] for byte in range(256)])
    assert same(fp8(values[None], torch.ones(1, 1, 1), (256, 1), torch.float32)[0], expected)
    ones = torch.ones(256, 1).to(torch.float8_e4m3fn)
    exponents = torch.arange(256, dtype=torch.uint8)[:, None]
    powers = torch.tensor([[2.0 ** (byte - 127)] for byte in range(256)], dtype=torch.float64).to(torch.float32)
    assert same(fp8(ones[None], exponents[None], (1, 1), torch.float32)[0], powers)


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mxfp4_is_two_numbers_a_byte_times_a_power_of_two(
    quantising: ModuleType, pieces: None, data: st.DataObject
) -> None:
    rows, groups = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    dtype, seed = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 10_000))
    blocks = all_bytes(rows * groups, 16, seed=seed).view(rows, groups, 16)
    scales = all_bytes(rows, groups, seed=seed + 1)
    assert same(mxfp4(blocks[None], scales[None], dtype)[0], quantising.plain_mxfp4(blocks, scales, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_what_transformers_makes_of_it(pieces: None, dtype: torch.dtype) -> None:
    """Every byte with every scale."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 128, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(2, 128, 1).expand(2, 128, 16).contiguous()
    assert same(mxfp4(blocks, scales, dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype))


def test_a_part_of_a_larger_tensor_can_be_filled() -> None:
    """As up_proj does, which is the lower half of gate_up_proj; the rest stays as it was."""
    values = all_bytes(2 * 8, 8).view(torch.float8_e4m3fn).view(2, 8, 8)
    out = torch.full((2, 16, 8), 7.0)
    dequantise_fp8(values, torch.full((2, 1, 1), 0.5), (8, 8), out[:, 8:])
    assert (out[:, :8] == 7).all()
    assert same(out[:, 8:], values.float() * 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_a_matrix(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """As in a live run: while no gradients are kept, into a model's parameter."""
    values = all_bytes(96, 64).view(torch.float8_e4m3fn)[None]
    scales = torch.rand(1, 12, 4)
    alone = fp8(values, scales, (8, 16), dtype)
    blocks, exponents = all_bytes(96 * 3, 16).view(1, 96, 3, 16), all_bytes(96, 3)[None]
    packed_alone = mxfp4(blocks, exponents, dtype)
    monkeypatch.setattr(dequantise, "PIECE_WEIGHTS_CPU", 64)
    torch.set_num_threads(3)
    try:
        with torch.inference_mode():
            whole = torch.nn.Parameter(torch.zeros(2, *alone.shape[1:], dtype=dtype), requires_grad=False)
            packed = torch.nn.Parameter(torch.zeros(packed_alone.shape, dtype=dtype), requires_grad=False)
        for out, packed_out in ((whole, packed), (whole.clone(), packed.clone())):
            with torch.inference_mode():
                dequantise_fp8(values, scales, (8, 16), out[:1])
                dequantise_mxfp4(blocks, exponents, packed_out)
            assert same(out[:1], alone)
            assert same(packed_out, packed_alone)
    finally:
        torch.set_num_threads(1)
