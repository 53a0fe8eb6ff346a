"""Quantised checkpoints that do not hold what they should, and quantisations that cannot be run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from probes.errors import CheckpointError
from runtime.worker import RankSession

OpenSession = Callable[..., RankSession]
Quantised = Callable[..., Path]
Tensor = torch.Tensor

FP8, MXFP4 = "qwen3_moe-fp8", "gpt_oss-mxfp4"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
DENSE = "model.layers.1.self_attn.o_proj.weight"
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.gate_up_proj_{kind}" for kind in ("blocks", "scales"))
EXPERT_SCALES, DENSE_SCALES = f"{EXPERT}_scale_inv", f"{DENSE}_scale_inv"


def gone(_: Tensor) -> None:
    """In place of a tensor: it is missing."""


Damage = tuple[str, str, Callable[[Tensor], Tensor | None], str, str]
"""The model, a tensor of it, what becomes of that, which tensor the error names, and what it says."""

DAMAGES: dict[str, Damage] = {
    "expert scales missing": (FP8, EXPERT_SCALES, gone, EXPERT, r"its scales .*up_proj\.weight_scale_inv are missing"),
    "expert missing": (FP8, EXPERT, gone, EXPERT_SCALES, "holds the scales of weights that are missing"),
    "dense scales missing": (FP8, DENSE_SCALES, gone, DENSE, r"scales .*o_proj\.weight_scale_inv are missing"),
    "expert's grid": (FP8, EXPERT_SCALES, lambda t: t.t().contiguous(), EXPERT_SCALES, r"blocks of 8 × 16 .*\[4, 2\]"),
    "dense grid": (FP8, DENSE_SCALES, lambda t: t[:1], DENSE_SCALES, r"has the shape \[1, 2\] where blocks of 8 × 16"),
    "expert not quantised": (FP8, EXPERT, lambda t: t.float(), EXPERT, "F32 where config.json says F8_E4M3"),
    "other fp8": (FP8, EXPERT, lambda t: t.float().to(torch.float8_e5m2), EXPERT, "stored as F8_E5M2"),
    "dense whole numbers": (FP8, DENSE, lambda t: t.view(torch.int8), DENSE, "stored as I8"),
    "scales whole numbers": (FP8, EXPERT_SCALES, lambda t: t.int(), EXPERT_SCALES, "stores scales as I32"),
    "wider scales": (FP8, EXPERT_SCALES, lambda t: t.float(), "experts of", "differ in size"),
    "other scales": (FP8, EXPERT_SCALES, lambda t: t.half(), "expert 2 of layer 1", r"F16 \[4, 2\], which the first"),
    "packed scales missing": (MXFP4, SCALES, gone, BLOCKS, "its scales .*gate_up_proj_scales are missing"),
    "packed missing": (MXFP4, BLOCKS, gone, SCALES, "holds the scales of weights that are missing"),
    "packed scales' shape": (MXFP4, SCALES, lambda t: t[:, :, :1], SCALES, r"\[64, 1\] where .* U8 of shape \[64, 2\]"),
    "packed scales' type": (MXFP4, SCALES, lambda t: t.float(), SCALES, "holds F32 of shape"),
    "packed type": (MXFP4, BLOCKS, lambda t: t.view(torch.int8), BLOCKS, "I8 where config.json says U8"),
    "packed groups": (MXFP4, BLOCKS, lambda t: t.view(16, 64, 4, 8), BLOCKS, r"has the shape \[64, 4, 8\], not"),
    "other model": (MXFP4, BLOCKS, lambda t: t[:, :32], "gate_up_proj_scales", r"\[64, 2\] where .* \[32, 2\]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_named(
    quantised: Quantised, open_session: OpenSession, tmp_path: Path, damage: str
) -> None:
    form, name, change, named, why = DAMAGES[damage]
    folder = shutil.copytree(quantised(form), tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    damaged = change(tensors.pop(name))
    if damaged is not None:
        tensors[name] = damaged.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=why) as caught:
        open_session(folder)
    assert named in caught.value.message
    assert str(folder) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
            r"_scale_inv has the shape \[4, 2\] where blocks of 16 × 16",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": [0, 16]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": "all"}, "weight_block_size is"),
        ({"quant_method": "fp8"}, "quantised as fp8 without weight_block_size, which cannot be run"),
        ({"quant_method": "fp8", "weight_block_size": [8, 16], "expert_dtype": "fp4"}, "fp8 with experts in fp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quantised as gptq, which cannot be run"),
        ({"quant_method": "awq"}, "quantised as awq"),
        ({"quant_method": "compressed-tensors"}, "quantised as compressed-tensors"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "as nvfp4-pack-quantized \\(comp"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantised as NVFP4 \\(modelopt\\)"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantised as FP8 \\(modelopt\\)"),
        ({"bits": 4}, "quant_method in config.json does not name"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised as bitsandbytes"),
        (None, "is of a quantisation that config.json does not state"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    quantised: Quantised,
    quantising: ModuleType,
    open_session: OpenSession,
    tmp_path: Path,
    stated: dict[str, Any] | None,
    why: str,
) -> None:
    folder = shutil.copytree(quantised("qwen3_moe-fp8"), tmp_path / "stated")
    with pytest.raises(CheckpointError, match=why) as caught:
        open_session(quantising.state(folder, quantization_config=stated))
    assert str(folder) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}', r"quantised as NVFP4 \(modelopt\)"),
        ("{}", "hf_quant_config.json does not say"),
        ("[", "hf_quant_config.json does not say"),
    ],
)
def test_a_quantisation_that_is_stated_beside_the_config_is_refused_by_name(
    checkpoint: Quantised, open_session: OpenSession, tmp_path: Path, beside: str, why: str
) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "beside")
    (folder / "hf_quant_config.json").write_text(beside)
    with pytest.raises(CheckpointError, match=why) as caught:
        open_session(folder)
    assert str(folder) in caught.value.message
    assert caught.value.hint


def test_a_file_beside_the_config_that_states_no_quantisation_changes_nothing(
    checkpoint: Quantised, open_session: OpenSession, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "beside")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    open_session(folder)
