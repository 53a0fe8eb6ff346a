"""Tiny checkpoints with random weights, in the form that transformers itself saves, and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 257
"""256 bytes and a padding token."""

# Multiples of 32: what is left over of a vector of 32 numbers goes through another routine, which rounds otherwise.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}

# The number of experts and of the chosen ones has a name of its own in every family.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts")

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
_ALL_SPARSE = {"first_k_dense_replace": 0, "n_shared_experts": 1}
_MIXED_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 32, "norm_topk_prob": False, "decoder_sparse_step": 1},
    "mixtral": {"sliding_window": None},
    "olmoe": {},
    # As many heads and experts as fill whole cache lines with their biases, so that every layer's tensors lie alike.
    "gpt_oss": {
        "num_attention_heads": 16,
        "num_local_experts": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granitemoe": {},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "granitemoe_swa": {},
    "deepseek_v2": _LATENT | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": _LATENT | _GROUPS | _ALL_SPARSE,
    "glm4_moe": _ALL_SPARSE,
    "glm4_moe_lite": _LATENT | _ALL_SPARSE | {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": _ALL_SPARSE | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "hunyuan_v1_moe": {},
    "flex_olmo": {},
    "minimax_m2": {},
    "minimax": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "qwen3_next": _MIXED_ATTENTION | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3_5_moe_text": _MIXED_ATTENTION | {"shared_expert_intermediate_size": 32},
    "afmoe": {"num_dense_layers": 0},
    "cohere2_moe": {},
    "exaone_moe": {},
    "hy_v3": {},
    "laguna": {"shared_expert_intermediate_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mellum": {},
    "mimo_v2_flash": {},
    "nemotron_h": {"layer_types": ["moe", "full_attention"], "moe_shared_expert_intermediate_size": 32},
    "solar_open": {},
    "sarvam_mla": _LATENT | _ALL_SPARSE,
    "kolibri1": {},
    "flint": {"shared_expert_intermediate_size": 32},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Refused, but transformers writes its checkpoint.
    "longcat_flash": _LATENT
    | {"num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "bailing_hybrid": _LATENT | _GROUPS | _ALL_SPARSE,
    "glm_moe_dsa": _LATENT | _ALL_SPARSE | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 64},
    "deepseek_v32": _LATENT | _GROUPS | _ALL_SPARSE | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 64},
    "deepseek_v4": {},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "axk1": _LATENT | _GROUPS | _ALL_SPARSE,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 32,
    },
}


def tiny_config(family: str, *, experts: int = 8, top_k: int = 2, **changes: Any) -> Any:
    """The family's config at a size that runs in milliseconds."""
    from transformers import AutoConfig

    known = set(AutoConfig.for_model(family).to_dict())
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    sizes |= {name: experts for name in _EXPERTS if name in known}
    sizes |= {name: top_k for name in _TOP_K if name in known}
    return AutoConfig.for_model(family, **{**sizes, **FAMILIES.get(family, {}), **changes})


def save_checkpoint(
    folder: Path, config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0, **saving: Any
) -> Path:
    """A model of ``config`` with random weights, large enough that routing and text vary."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and (tensor.ndim >= 2 or name.endswith("bias")):
                spread = 0.05 if name.endswith("bias") else 0.2
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
    model.save_pretrained(folder, **saving)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
