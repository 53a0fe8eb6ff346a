"""The numbers that quantised bytes stand for, to the last bit those that transformers makes of them.

Arithmetic is in float32 and rounded once, to the type of the output. It runs in pieces, so that what it needs in
between stays small. A CPU has compiled loops of its own; torch's operations serve every other device.

Shape legend: E matrices of R rows and C columns; r × c blocks; G = C/32 groups of B = 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

from runtime.experts.formats import MXFP4_GROUP

PIECE_WEIGHTS = 1 << 24
"""Weights that are converted together by torch: 64 MB in float32."""
PIECE_WEIGHTS_CPU = 1 << 17
"""Those that a CPU makes in float32 before they are rounded: they stay in a core's cache."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By the four bits: a sign, two of exponent, one of mantissa."""


def dequantise_fp8(
    values_ERC: torch.Tensor, scales_Erc: torch.Tensor, block: tuple[int, int], out_ERC: torch.Tensor
) -> None:
    """``out`` = value × scale of its block of ``block`` rows × columns.

    ``values``: float8_e4m3fn. ``scales``: floats, or exponents (float8_e8m0fnu, or the same as uint8).
    """
    if values_ERC.device.type != "cpu":
        fp8_by_torch(values_ERC, scales_Erc, block, out_ERC)
        return
    from runtime.experts.dequantise_kernels import fp8_rows

    numbers = _fp8_numbers().numpy()
    for values_RC, scales_rc, out_RC in zip(values_ERC, _as_float32(scales_Erc), out_ERC, strict=True):
        values, scales = values_RC.view(torch.uint8).contiguous().numpy(), scales_rc.contiguous().numpy()

        def fill(start: int, out: torch.Tensor, values: Any = values, scales: Any = scales) -> None:
            fp8_rows(values, scales, *block, numbers, start, out.numpy())

        _in_pieces(fill, out_RC.detach(), 1)


def dequantise_mxfp4(values_ERGB: torch.Tensor, scales_ERG: torch.Tensor, out_ECR: torch.Tensor) -> None:
    """``out``, transposed, = value × 2^(scale − 127); of a byte the lower half comes first. All stored as uint8."""
    if values_ERGB.device.type != "cpu":
        mxfp4_by_torch(values_ERGB, scales_ERG, out_ECR)
        return
    from runtime.experts.dequantise_kernels import mxfp4_columns

    cpu = torch.device("cpu")
    pairs = _fp4_pairs(cpu).view(torch.float32).view(256, 2).t().contiguous().numpy()
    powers = _powers_of_two(128, cpu).numpy()
    for values_RGB, scales_RG, out_CR in zip(values_ERGB, scales_ERG, out_ECR, strict=True):
        values, scales = values_RGB.contiguous().numpy(), scales_RG.contiguous().numpy()

        def fill(start: int, out: torch.Tensor, values: Any = values, scales: Any = scales) -> None:
            mxfp4_columns(values, scales, pairs, powers, start // MXFP4_GROUP, out.numpy())

        _in_pieces(fill, out_CR.detach(), MXFP4_GROUP)


def _in_pieces(fill: Callable[[int, torch.Tensor], None], out: torch.Tensor, unit: int) -> None:
    """Let ``fill(start, part)`` make all of ``out`` [lines, …], some multiple of ``unit`` lines at a time, by as many
    threads as torch uses."""

    @torch.inference_mode()  # a caller's own does not hold in other threads
    def one(start: int) -> None:
        part = out[start : start + step]
        if part.dtype == torch.float32 and part.is_contiguous():
            fill(start, part)
        else:
            numbers = torch.empty(part.shape, dtype=torch.float32)
            fill(start, numbers)
            part.copy_(numbers)

    step = max(1, PIECE_WEIGHTS_CPU // (out.shape[1] * unit)) * unit
    starts = range(0, len(out), step)
    threads = torch.get_num_threads()
    if threads == 1 or len(starts) == 1:
        for start in starts:
            one(start)
    else:
        list(_threads(threads).map(one, starts))


def fp8_by_torch(
    values_ERC: torch.Tensor, scales_Erc: torch.Tensor, block: tuple[int, int], out_ERC: torch.Tensor
) -> None:
    """``dequantise_fp8`` on any device."""
    matrices, rows, columns = values_ERC.shape
    scales_ERc = _as_float32(scales_Erc).repeat_interleave(block[0], 1)[:, :rows]
    across = block[1]
    whole = columns // across * across
    step = max(1, PIECE_WEIGHTS // (matrices * columns))
    for at in range(0, rows, step):
        piece = values_ERC[:, at : at + step].to(torch.float32)
        scales = scales_ERc[:, at : at + step]
        if whole:
            blocks = piece[..., :whole].view(*piece.shape[:2], whole // across, across)
            blocks.mul_(scales[..., : whole // across, None])
        if whole < columns:
            piece[..., whole:].mul_(scales[..., whole // across :])
        out_ERC[:, at : at + step].copy_(piece)


def mxfp4_by_torch(values_ERGB: torch.Tensor, scales_ERG: torch.Tensor, out_ECR: torch.Tensor) -> None:
    """``dequantise_mxfp4`` on any device."""
    matrices, rows, groups, _ = values_ERGB.shape
    numbers, powers = _fp4_pairs(values_ERGB.device), _powers_of_two(128, values_ERGB.device)
    step = max(1, PIECE_WEIGHTS // (matrices * groups * MXFP4_GROUP))
    for at in range(0, rows, step):
        pairs = numbers.index_select(0, values_ERGB[:, at : at + step].reshape(-1).int())
        piece = pairs.view(torch.float32).view(matrices, -1, groups, MXFP4_GROUP)
        piece.mul_(powers[scales_ERG[:, at : at + step].int()][..., None])
        out_ECR[..., at : at + step].copy_(piece.flatten(2).transpose(1, 2))


def _as_float32(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.uint8:
        return _powers_of_two(127, scales.device)[scales.int()]
    return scales.to(torch.float32)


@lru_cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix="dequantise")


@lru_cache
def _fp8_numbers() -> torch.Tensor:
    """[256] what each byte stands for."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


@lru_cache
def _fp4_pairs(device: torch.device) -> torch.Tensor:
    """[256] the two float32 of each byte, doubled, as one int64 that holds the bits of both."""
    # Doubled so that half of the largest power of two, which is beyond float32, comes out right.
    numbers = 2 * torch.tensor(_FP4, dtype=torch.float32)
    return torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], 1).view(torch.int64).view(-1).to(device)


@lru_cache
def _powers_of_two(bias: int, device: torch.device) -> torch.Tensor:
    """[256] 2^(byte − bias), infinite beyond float32."""
    exact = torch.tensor([2.0 ** (byte - bias) for byte in range(256)], dtype=torch.float64)
    return exact.to(torch.float32).to(device)
