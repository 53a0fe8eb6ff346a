"""Quantised forms of the tiny checkpoints, plain references for what their bytes mean, and transformers' own reading.

Nothing here is fast, and nothing is shared with what it is compared with.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FP8_BLOCK = (8, 16)
"""Divides every matrix of the tiny models; transformers cannot read blocks that do not."""

_FP8_NAMES = re.compile(r".*\.(?:\w+_proj|kv_a_proj_with_mqa|w[123])\.weight")
_MXFP4_NAMES = re.compile(r".*\.experts\.(?:gate_up|down)_proj")


def fp8_copy(source: Path, folder: Path, *, block: tuple[int, int] = FP8_BLOCK, scales: torch.dtype, seed: int) -> Path:
    """``source`` as Qwen and DeepSeek publish: attention, dense and expert matrices in FP8 with a scale per block, the
    rest in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not _FP8_NAMES.fullmatch(name) or value.ndim != 2:
            tensors[name] = value.to(torch.bfloat16) if "correction_bias" not in name else value
            continue
        spread = value.std().item() / 100
        tensors[name] = (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        grid = (math.ceil(value.shape[0] / block[0]), math.ceil(value.shape[1] / block[1]))
        tensors[f"{name}_scale_inv"] = (spread * (0.5 + torch.rand(grid, generator=generator))).to(scales)
    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return _save(source, folder, tensors, stated)


def mxfp4_copy(source: Path, folder: Path, *, seed: int) -> Path:
    """``source`` as gpt-oss is published: the experts' matrices in MXFP4, transposed, and the rest in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not _MXFP4_NAMES.fullmatch(name):
            tensors[name] = value.to(torch.bfloat16)
            continue
        experts, columns, rows = value.shape
        shape = (experts, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(119, 124, shape[:3], dtype=torch.uint8, generator=generator)
    return _save(
        source, folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    )


def _save(source: Path, folder: Path, tensors: dict[str, torch.Tensor], stated: dict[str, Any]) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def state(folder: Path, **changes: Any) -> Path:
    """Other statements in the config; None takes one away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


def load_stock(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it when it dequantises."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
    from transformers.quantizers import quantizer_finegrained_fp8 as fp8

    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    asked = FineGrainedFP8Config(dequantize=True) if method == "fp8" else Mxfp4Config(dequantize=True)
    # transformers asks for accelerate, and does without it once it dequantises.
    with mock.patch.object(fp8, "is_accelerate_available", return_value=True):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=asked).eval()


# What the bytes mean, number by number --------------------------------------------------------------------------------


def fp8_number(byte: int) -> float:
    """A sign, four bits of exponent with bias 7, three of mantissa; no infinities, and one NaN of each sign."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if byte & 128 else magnitude


def fp4_number(bits: int) -> float:
    """A sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = bits >> 1 & 3, bits & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if bits & 8 else magnitude


def plain_fp8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """[R, C] of float8_e4m3fn times its scales, one number after the other."""
    grid, bytes_RC = scales.to(torch.float32).numpy(), values.view(torch.uint8).numpy()
    found = np.empty(bytes_RC.shape, np.float32)
    with np.errstate(over="ignore"):
        for r, c in np.ndindex(*bytes_RC.shape):
            found[r, c] = np.float32(fp8_number(int(bytes_RC[r, c]))) * grid[r // block[0], c // block[1]]
    return torch.from_numpy(found).to(dtype)


def plain_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R, G, 16] bytes and [R, G] exponents as [32·G, R], one number after the other."""
    rows, groups, _ = blocks.shape
    found = np.empty((groups * 32, rows), np.float64)
    for r, g, at in np.ndindex(*blocks.shape):
        byte, power = int(blocks[r, g, at]), 2.0 ** (int(scales[r, g]) - 127)
        found[32 * g + 2 * at, r] = fp4_number(byte & 15) * power
        found[32 * g + 2 * at + 1, r] = fp4_number(byte >> 4) * power
    return torch.from_numpy(found).to(torch.float32).to(dtype)
