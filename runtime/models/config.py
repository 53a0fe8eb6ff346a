"""The Mixture-of-Experts shape of a model from its ``config.json``: how many experts, and how many bytes each.

Families name the same thing differently; every name that is looked for stands in a table here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.errors import CheckpointError
from runtime.models.quantisation import Storage, stated_beside, storage_of

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "num_experts_per_token", "experts_per_token", "moe_k")
_EXPERT_SIZE = ("moe_intermediate_size", "ffn_hidden_size", "intermediate_size")
# Shared experts as a size, and as a number of experts of the routed ones' size.
_SHARED_SIZE = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts")
# Where a model of several parts keeps its language model, and where some families keep what concerns experts.
_PARTS = ("thinker_config", "text_config", "language_config", "llm_config")
_MOE_PARTS = ("moe_config", "ffn_config")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """``shared_intermediate``: width of what runs for every token beside the routed experts, 0 for none.

    ``matrices``: 3 with a gated activation (gate, up, down), else 2. ``biases``: whether they have biases.
    """

    model_type: str | None
    moe_layers: int
    num_experts: int
    top_k: int
    hidden: int
    expert_intermediate: int
    shared_intermediate: int
    matrices: int
    biases: bool
    storage: Storage

    @property
    def expert_parameters(self) -> int:
        """Weights of one routed expert, biases included."""
        return self._weights + self._biases

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as the checkpoint stores it, scales of a quantisation included."""
        rows, columns = self.expert_intermediate, self.hidden
        matrix = self.storage.matrix_bytes(rows, columns)
        return self.matrices * matrix + self._biases * 2

    def expert_bytes_in(self, bytes_per_weight: float) -> int:
        """Bytes of one routed expert with its weights in another format, such as 2 in bfloat16."""
        return round(self.expert_parameters * bytes_per_weight)

    @property
    def _weights(self) -> int:
        return self.matrices * self.hidden * self.expert_intermediate

    @property
    def _biases(self) -> int:
        return (self.matrices - 1) * self.expert_intermediate + self.hidden if self.biases else 0


def read_moe_shape(path: Path) -> MoeShape:
    """``path``: a config.json, or a model folder that holds one. Raises ``CheckpointError``."""
    return moe_shape(read_config_file(path))


def context_limit(config: Mapping[str, Any]) -> int | None:
    """The most positions that a sequence may have, prompt and answer together; None where the config says nothing."""
    text = _language_model(config)
    found = [text.get(name) for name in _CONTEXT]
    return next((size for size in found if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)


def stated_top_k(config: Mapping[str, Any]) -> int | None:
    """Experts per token, whatever the number is; None where the config says none."""
    text = _language_model(config)
    found = [text.get(name) for name in _TOP_K]
    return next((number for number in found if isinstance(number, int) and not isinstance(number, bool)), None)


def read_config_file(path: Path) -> dict[str, Any]:
    """The object in a config.json, or in the one of a model folder. Raises ``CheckpointError``."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror}", hint="give a config.json, or a model folder that holds one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not JSON: {error}", hint="download the file again, or copy the whole model folder"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{file} is not a model's config: it holds no JSON object", hint="give a Hugging Face model's config.json"
        )
    stated = config.get("quantization_config")
    if stated is None and file.name == "config.json":
        config |= stated_beside(file.parent)
    elif not isinstance(stated, dict | None):
        raise CheckpointError(
            f"{file}: quantization_config is {stated!r:.60}, which is no JSON object", hint="download config.json again"
        )
    return config


def moe_shape(config: Mapping[str, Any]) -> MoeShape:
    """The shape that a config describes. Raises ``CheckpointError`` where it describes no Mixture of Experts."""
    try:
        return _shape(config, _language_model(config))
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise CheckpointError(
            f"the config cannot be read: {type(error).__name__} {error}",
            hint="give the experts' size by --expert-bytes",
        ) from error


def _shape(config: Mapping[str, Any], text: Mapping[str, Any]) -> MoeShape:
    hidden = _first(text, ("hidden_size", "d_model"), "the hidden size")
    size = _first(text, _EXPERT_SIZE, "the experts' intermediate size")
    shape = MoeShape(
        model_type=text.get("model_type") if isinstance(text.get("model_type"), str) else None,
        moe_layers=_moe_layers(text),
        num_experts=_first(text, _EXPERTS, "the number of experts"),
        top_k=_first(text, _TOP_K, "the experts per token"),
        hidden=hidden,
        expert_intermediate=size,
        shared_intermediate=_shared(text, size),
        matrices=2 if text.get("mlp_hidden_act") == "relu2" or text.get("gated_linear_unit") is False else 3,
        biases=text.get("model_type") == "gpt_oss",
        storage=storage_of(config, text),
    )
    if shape.top_k > shape.num_experts or not shape.moe_layers:
        raise CheckpointError(
            f"the config contradicts itself: {shape.moe_layers} MoE layers of {shape.num_experts} experts, "
            f"{shape.top_k} of them per token"
        )
    return shape


def _language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, with the parts on experts merged in."""
    text = dict(config)
    for part in _PARTS:
        if isinstance(text.get(part), dict):
            text = dict(text[part])
    for part in _MOE_PARTS:
        if isinstance(text.get(part), dict):
            text |= text[part]
    return text


def _first(text: Mapping[str, Any], names: Iterable[str], what: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise CheckpointError(
        f"the config does not say {what} (looked for {', '.join(names)})",
        hint="give a Mixture-of-Experts model's config.json, or --expert-bytes",
    )


def _shared(text: Mapping[str, Any], expert_size: int) -> int:
    size = next((text[name] for name in _SHARED_SIZE if isinstance(text.get(name), int)), None)
    if size is not None:
        return int(size)
    count = next((text[name] for name in _SHARED_COUNT if isinstance(text.get(name), int)), None)
    if count is not None:
        return int(count) * expert_size
    # Llama 4 has one shared expert of the routed ones' size; Gemma 4 runs its dense MLP beside the experts.
    model_type = str(text.get("model_type", ""))
    dense = text.get("intermediate_size")
    return int(dense) if model_type.startswith(("llama4", "gemma4")) and isinstance(dense, int) else 0


def _moe_layers(text: Mapping[str, Any]) -> int:
    """How many layers have experts, by whichever rule the family uses."""
    if isinstance(types := text.get("mlp_layer_types"), list):
        return types.count("sparse")
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        return pattern.count("E")
    layers = _first(text, ("num_hidden_layers", "n_layers", "num_layers"), "the number of layers")
    return sum(map(_layer_rule(text), range(layers)))


def _layer_rule(text: Mapping[str, Any]) -> Callable[[int], bool]:
    """Whether a layer has experts, by its number."""
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return lambda layer: layer < len(frequency) and bool(frequency[layer])
    if isinstance(listed := text.get("moe_layers"), list):
        return lambda layer: layer in listed
    if text.get("interleave_moe_layer_step"):
        return _every(int(text["interleave_moe_layer_step"]), last=True)
    if text.get("expert_layer_period"):
        return _every(int(text["expert_layer_period"]), offset=int(text.get("expert_layer_offset", 0)))
    if text.get("decoder_sparse_step"):
        dense, sparse = text.get("mlp_only_layers") or [], _every(int(text["decoder_sparse_step"]), last=True)
        return lambda layer: sparse(layer) and layer not in dense
    first, every = int(text.get("first_k_dense_replace") or 0), _every(int(frequency or 1))
    return lambda layer: layer >= first and every(layer)


def _every(step: int, *, offset: int = 0, last: bool = False) -> Callable[[int], bool]:
    """One layer of each ``step``: the one at ``offset``, or the last."""
    return lambda layer: layer % step == (step - 1 if last else offset)
