"""The numbers that quantised bytes stand for, to the last bit those that transformers makes of them.

Arithmetic is in float32 and rounded once, to the type of the output. It runs in pieces of rows, so that what it needs
in between stays small, and on a CPU within a core's cache.

Shape legend: E matrices of R rows and C columns; r × c blocks; G = C/32 groups.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from runtime.experts.formats import MXFP4_GROUP

PIECE_WEIGHTS = {"cpu": 1 << 17}
PIECE_WEIGHTS_ELSEWHERE = 1 << 24

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By the four bits: a sign, two of exponent, one of mantissa."""


def dequantise_fp8(
    values_ERC: torch.Tensor, scales_Erc: torch.Tensor, block: tuple[int, int], out_ERC: torch.Tensor
) -> None:
    """``out`` = value × scale of its block of ``block`` rows × columns.

    ``values``: float8_e4m3fn. ``scales``: floats, or exponents (float8_e8m0fnu, or the same as uint8).
    """
    matrices, rows, columns = values_ERC.shape
    scales_ERc = _as_float32(scales_Erc).repeat_interleave(block[0], 1)[:, :rows]
    across = block[1]
    whole = columns // across * across
    step = _rows_at_once(matrices * columns, values_ERC.device)
    for at in range(0, rows, step):
        piece = _fp8_as_float32(values_ERC[:, at : at + step])
        scales = scales_ERc[:, at : at + step]
        if whole:
            blocks = piece[..., :whole].view(*piece.shape[:2], whole // across, across)
            blocks.mul_(scales[..., : whole // across, None])
        if whole < columns:
            piece[..., whole:].mul_(scales[..., whole // across :])
        out_ERC[:, at : at + step].copy_(piece)


def dequantise_mxfp4(values_ERGB: torch.Tensor, scales_ERG: torch.Tensor, out_ECR: torch.Tensor) -> None:
    """``out``, transposed, = value × 2^(scale − 127); of a byte the lower half comes first. All stored as uint8."""
    matrices, rows, groups, _ = values_ERGB.shape
    numbers, powers = _fp4_pairs(values_ERGB.device), _powers_of_two(128, values_ERGB.device)
    step = _rows_at_once(matrices * groups * MXFP4_GROUP, values_ERGB.device)
    for at in range(0, rows, step):
        pairs = numbers.index_select(0, values_ERGB[:, at : at + step].reshape(-1).int())
        piece = pairs.view(torch.float32).view(matrices, -1, groups, MXFP4_GROUP)
        piece.mul_(powers[scales_ERG[:, at : at + step].int()][..., None])
        out_ECR[..., at : at + step].copy_(piece.flatten(2).transpose(1, 2))


def _rows_at_once(row_weights: int, device: torch.device) -> int:
    return max(1, PIECE_WEIGHTS.get(device.type, PIECE_WEIGHTS_ELSEWHERE) // max(1, row_weights))


def _as_float32(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.uint8:
        return _powers_of_two(127, scales.device)[scales.int()]
    return scales.to(torch.float32)


def _fp8_as_float32(values: torch.Tensor) -> torch.Tensor:
    if values.device.type != "cpu":
        return values.to(torch.float32)
    # torch's own conversion takes three times as long on a CPU.
    found = _fp8_numbers().index_select(0, values.view(torch.uint8).reshape(-1).int())
    return found.view(values.shape)


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
