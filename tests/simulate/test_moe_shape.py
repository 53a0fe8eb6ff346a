"""The MoE shape of real models' configs, against what their makers publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probes.errors import CheckpointError
from runtime.models.config import MoeShape, moe_shape, read_moe_shape

# By file: MoE layers, experts, top-k, hidden, expert intermediate, shared intermediate, storage.
SHAPES: dict[str, tuple[int, int, int, int, int, int, str]] = {
    "aic__MiniMaxAI--MiniMax-M2.5": (62, 256, 8, 3072, 1536, 0, "fp8"),
    "aic__Qwen--Qwen3-235B-A22B-FP8": (94, 128, 8, 4096, 1536, 0, "fp8"),
    "aic__Qwen--Qwen3-235B-A22B": (94, 128, 8, 4096, 1536, 0, "bfloat16"),
    "aic__Qwen--Qwen3-30B-A3B-FP8": (48, 128, 8, 2048, 768, 0, "fp8"),
    "aic__Qwen--Qwen3-30B-A3B": (48, 128, 8, 2048, 768, 0, "bfloat16"),
    "aic__Qwen--Qwen3-Coder-480B-A35B-Instruct": (62, 160, 8, 6144, 2560, 0, "bfloat16"),
    "aic__Qwen--Qwen3.5-397B-A17B": (60, 512, 10, 4096, 1024, 1024, "bfloat16"),
    "aic__deepseek-ai--DeepSeek-R1": (58, 256, 8, 7168, 2048, 2048, "fp8"),
    "aic__deepseek-ai--DeepSeek-V3.2": (58, 256, 8, 7168, 2048, 2048, "fp8"),
    "aic__deepseek-ai--DeepSeek-V3": (58, 256, 8, 7168, 2048, 2048, "fp8"),
    "aic__deepseek-ai--DeepSeek-V4-Pro": (61, 384, 6, 7168, 3072, 3072, "mxfp4"),
    "aic__google--gemma-4-26B-A4B": (30, 128, 8, 2816, 704, 2112, "bfloat16"),
    "aic__meta-llama--Llama-4-Maverick-17B-128E-Instruct": (24, 128, 1, 5120, 8192, 8192, "bfloat16"),
    "aic__meta-llama--Llama-4-Scout-17B-16E-Instruct": (48, 16, 1, 5120, 8192, 8192, "bfloat16"),
    "aic__mistralai--Mixtral-8x22B-v0.1": (56, 8, 2, 6144, 16384, 0, "bfloat16"),
    "aic__mistralai--Mixtral-8x7B-v0.1": (32, 8, 2, 4096, 14336, 0, "bfloat16"),
    "aic__moonshotai--Kimi-K2.5": (60, 384, 8, 7168, 2048, 2048, "int4"),
    "aic__nvidia--DeepSeek-V3.1-NVFP4": (58, 256, 8, 7168, 2048, 2048, "bfloat16"),
    "aic__nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (23, 128, 6, 2688, 1856, 3712, "bfloat16"),
    "aic__openai--gpt-oss-120b": (36, 128, 4, 2880, 2880, 0, "mxfp4"),
    "aic__openai--gpt-oss-20b": (24, 32, 4, 2880, 2880, 0, "mxfp4"),
    "aic__zai-org--GLM-5.2": (75, 256, 8, 6144, 2048, 2048, "bfloat16"),
    "aic__zai-org--GLM-5": (75, 256, 8, 6144, 2048, 2048, "bfloat16"),
    "fragment__granite-3.1-1b-a400m": (24, 32, 8, 1024, 512, 0, "bfloat16"),
    "llmservingsim__Phi-mini-MoE-instruct": (32, 16, 2, 4096, 960, 0, "bfloat16"),
    "lrc__DeepSeek-V2-Lite": (26, 64, 6, 2048, 1408, 2816, "bfloat16"),
    "lrc__GRIN-MoE": (32, 16, 2, 4096, 6400, 0, "bfloat16"),
    "lrc__Jamba-Mini-1.6": (16, 16, 2, 4096, 14336, 0, "bfloat16"),
    "lrc__LLaMA-MoE-v2": (32, 8, 2, 4096, 1792, 0, "bfloat16"),
    "lrc__MiniCPM-MoE-8x2B": (40, 8, 2, 2304, 5760, 0, "bfloat16"),
    "lrc__Mixtral-8x7B-v0.1": (32, 8, 2, 4096, 14336, 0, "bfloat16"),
    "lrc__OLMoE-1B-7B-0125": (16, 64, 8, 2048, 1024, 0, "float32"),
    "lrc__Phi-3.5-MoE": (32, 16, 2, 4096, 6400, 0, "bfloat16"),
    "lrc__PowerMoE-3B": (32, 40, 8, 1536, 512, 0, "float32"),
    "lrc__Qwen1.5-MoE-A2.7B": (24, 60, 4, 2048, 1408, 5632, "bfloat16"),
    "lrc__Qwen3-30B-A3B": (48, 128, 8, 2048, 768, 0, "bfloat16"),
    "lrc__XVERSE-MoE-A4.2B": (28, 64, 6, 2560, 1728, 3456, "bfloat16"),
    "lrc__Yuan2.0-M32": (24, 32, 2, 2048, 8192, 0, "bfloat16"),
    "lrc__deepseek-moe-16b": (27, 64, 6, 2048, 1408, 2816, "bfloat16"),
    "reap__GLM-4.5-Air": (45, 128, 8, 4096, 1408, 1408, "bfloat16"),
}
# Total parameters as published, in billions; the routed experts are most of them.
PUBLISHED = {
    "aic__deepseek-ai--DeepSeek-R1": 671,
    "aic__meta-llama--Llama-4-Maverick-17B-128E-Instruct": 400,
    "aic__meta-llama--Llama-4-Scout-17B-16E-Instruct": 109,
    "aic__moonshotai--Kimi-K2.5": 1030,
    "aic__nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "aic__openai--gpt-oss-120b": 117,
    "aic__openai--gpt-oss-20b": 21,
    "aic__Qwen--Qwen3-235B-A22B": 235,
    "lrc__Jamba-Mini-1.6": 52,
    "lrc__Mixtral-8x7B-v0.1": 46.7,
    "lrc__Yuan2.0-M32": 40,
    "reap__GLM-4.5-Air": 106,
}


def test_every_config_at_hand_is_in_the_table(shared_data: Path) -> None:
    assert {path.stem for path in (shared_data / "configs").glob("*.json")} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_shape_of_a_real_config(name: str, shared_data: Path) -> None:
    shape = read_moe_shape(shared_data / f"configs/{name}.json")
    assert _about(shape) == SHAPES[name]
    if name in PUBLISHED:
        routed = shape.moe_layers * shape.num_experts * shape.expert_parameters / 1e9
        assert 0.85 * PUBLISHED[name] < routed < PUBLISHED[name]


def _about(shape: MoeShape) -> tuple[int, int, int, int, int, int, str]:
    return (
        shape.moe_layers,
        shape.num_experts,
        shape.top_k,
        shape.hidden,
        shape.expert_intermediate,
        shape.shared_intermediate,
        shape.storage.name,
    )


BASE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
WEIGHTS = 3 * 256 * 128


@pytest.mark.parametrize(
    ("extra", "expert_bytes"),
    [
        ({}, WEIGHTS * 2),
        ({"dtype": "float32"}, WEIGHTS * 4),
        ({"torch_dtype": "torch.float16"}, WEIGHTS * 2),
        # One float32 scale for each 128 × 128 block: one row of blocks, two across.
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, WEIGHTS + 3 * 2 * 4),
        ({"quantization_config": {"quant_method": "fp8"}}, WEIGHTS + 3 * 4),
        ({"quantization_config": {"quant_method": "mxfp4"}}, WEIGHTS // 2 + WEIGHTS // 32),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}},
            WEIGHTS // 2 + WEIGHTS // 64 * 3,
        ),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, WEIGHTS // 2 + WEIGHTS // 16),
        ({"quantization_config": {"quant_method": "modelopt_fp4"}}, WEIGHTS // 2 + WEIGHTS // 16),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, WEIGHTS + 3 * 4),
        ({"mlp_hidden_act": "relu2"}, WEIGHTS // 3 * 2 * 2),
    ],
)
def test_bytes_of_an_expert(extra: dict[str, Any], expert_bytes: int) -> None:
    shape = moe_shape(BASE | extra)
    assert shape.expert_bytes == expert_bytes
    assert shape.expert_bytes_in(2) == shape.expert_parameters * 2


@pytest.mark.parametrize(
    ("extra", "layers"),
    [
        ({"first_k_dense_replace": 1}, 3),
        ({"moe_layer_freq": 2}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 3),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, 1),
        ({"interleave_moe_layer_step": 2}, 2),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 2),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, 3),
        ({"hybrid_override_pattern": "ME*E"}, 2),
    ],
)
def test_which_layers_have_experts(extra: dict[str, Any], layers: int) -> None:
    assert moe_shape(BASE | extra).moe_layers == layers


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512},
        BASE | {"num_experts": 0},
        BASE | {"num_experts": True},
        BASE | {"num_experts_per_tok": 9},
        BASE | {"first_k_dense_replace": 4},
        BASE | {"moe_layer_freq": "x"},
        BASE | {"decoder_sparse_step": {"a": 1}},
        BASE | {"dtype": "int3"},
        BASE | {"quantization_config": {"quant_method": "unheard-of"}},
        BASE | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 2, 3]}},
        BASE | {"quantization_config": {"quant_method": "gptq"}},
        BASE | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
    ],
)
def test_a_config_without_a_shape_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        moe_shape(config)


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read"), ("{", "not JSON"), ("[]", "no JSON object")])
def test_a_file_that_is_no_config(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_moe_shape(path)


def test_a_model_folder_is_as_good_as_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert read_moe_shape(tmp_path) == moe_shape(BASE)


def test_a_quantisation_stated_beside_the_config_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert read_moe_shape(tmp_path).expert_bytes == WEIGHTS // 2 + WEIGHTS // 16
    assert read_moe_shape(tmp_path / "config.json") == read_moe_shape(tmp_path)
