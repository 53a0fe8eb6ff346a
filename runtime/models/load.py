"""Loading a Hugging Face MoE model without its experts: a skeleton on the meta device, then the dense tensors alone.

The experts are never materialised together; the caller gives every expert module its slots afterwards. No code from a
checkpoint is run (``trust_remote_code`` stays off), and only safetensors files are read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probes.errors import CheckpointError
from runtime.experts.index import ExpertIndex, TensorEntry

CACHE_LINE_BYTES = 64


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A model whose expert parameters are still empty. ``experts``: the expert modules, in layer order."""

    model: Any
    tokenizer: Any
    family: str
    experts: tuple[torch.nn.Module, ...]
    expert_shapes: dict[str, tuple[int, ...]]
    num_experts: int


def read_config(folder: Path) -> Any:
    """The checkpoint's config. Raises ``CheckpointError``."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        missing = "no config.json in" if folder.is_dir() else "there is no model folder"
        raise CheckpointError(
            f"{missing} {folder}", hint="give a local Hugging Face model folder, or download the model first"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be used: {_first_line(error)}",
            hint="the model's type may be too new for the installed transformers, or need code from the checkpoint",
        ) from error


def load_without_experts(folder: Path, index: ExpertIndex, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Build the model of ``folder`` in ``dtype`` on ``device`` with everything but the experts' weights."""
    from transformers import AutoModelForCausalLM

    config = read_config(folder)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise CheckpointError(f"cannot build the model of {folder}: {_first_line(error)}") from error
    model.eval()
    family = str(config.model_type)
    experts = find_expert_modules(model, family)
    _check_layers(model, experts, index, folder)
    shapes = _stacked_shapes(experts[0])
    _load_dense(model, index.dense, experts, device)
    _fill_buffers(model, device)
    return LoadedModel(
        model=model,
        tokenizer=_load_tokenizer(folder),
        family=family,
        experts=experts,
        expert_shapes=shapes,
        num_experts=expert_count(experts[0]),
    )


def find_expert_modules(model: torch.nn.Module, family: str) -> tuple[torch.nn.Module, ...]:
    """Modules that speak ``forward(hidden_states, top_k_index, top_k_weights)`` over fused [N, …] parameters."""
    found = [module for _, module in model.named_modules() if _speaks_experts_protocol(module)]
    if not found:
        raise CheckpointError(
            f"the model family {family} is not supported: its experts do not take (hidden_states, top_k_index, "
            "top_k_weights)",
            hint="supported are the families whose experts transformers keeps as fused 3-D parameters",
        )
    return tuple(found)


def expert_count(module: torch.nn.Module) -> int:
    """How many experts an expert module holds."""
    count = module.num_experts
    assert isinstance(count, int)
    return count


def _speaks_experts_protocol(module: torch.nn.Module) -> bool:
    stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    count = getattr(module, "num_experts", None)
    return len(stacked) >= 2 and isinstance(count, int) and all(p.shape[0] == count for p in stacked)


def _check_layers(model: Any, experts: tuple[torch.nn.Module, ...], index: ExpertIndex, folder: Path) -> None:
    count = expert_count(experts[0])
    if len(experts) != len(index.layer_numbers) or count != index.num_experts:
        raise CheckpointError(
            f"{folder}: the config describes {len(experts)} MoE layers of {count} experts, the checkpoint holds "
            f"{len(index.layer_numbers)} of {index.num_experts}",
            hint="config.json and the safetensors files are of different models, or shards are missing",
        )


def _stacked_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    count = expert_count(module)
    return {
        name: tuple(parameter.shape[1:])
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.shape[0] == count
    }


def _load_dense(
    model: Any, dense: dict[str, TensorEntry], experts: tuple[torch.nn.Module, ...], device: torch.device
) -> None:
    from safetensors import safe_open

    skipped = {id(p) for module in experts for p in module.parameters(recurse=False)}
    wanted = {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in skipped}
    wanted |= {name: b for name, b in model.named_buffers() if name in _persistent_buffers(model)}
    renamed = _renamed_keys(model, dense)
    loaded: set[str] = set()
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for source, target in renamed.items():
        if target in wanted:
            by_file.setdefault(dense[source].path, []).append((source, target))
    for path, names in by_file.items():
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for source, target in names:
                _assign(model, target, file.get_tensor(source), wanted[target], device)
                loaded.add(target)
    model.tie_weights()
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta and id(tensor) not in skipped]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} dense tensors, the first is {missing[0]}",
            hint="shards are missing, or the layout of this family is not known to the installed transformers",
        )


def _renamed_keys(model: Any, dense: dict[str, TensorEntry]) -> dict[str, str]:
    """Checkpoint key → parameter name, by the renamings that transformers itself applies when it loads."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {key: rename_source_key(key, renamings, [], model.base_model_prefix, names)[0] for key in dense}


def _assign(model: Any, name: str, value: torch.Tensor, current: torch.Tensor, device: torch.device) -> None:
    if value.shape != current.shape:
        raise CheckpointError(
            f"{name} is stored as {list(value.shape)} where the config makes it {list(current.shape)}",
            hint="config.json and the safetensors files are of different models",
        )
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    tensor = _copied(value, current.dtype, device)
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark against initialising it again
    if leaf in module._parameters:
        # requires_grad as when transformers loads: torch folds a batched matmul otherwise, which changes the last bit.
        setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    else:
        module._buffers[leaf] = tensor


def _copied(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy outside the file's memory map, whose pages would be counted, and evicted, as page cache.

    On a CPU it lies in its cache lines as the mapped tensor does: transformers computes on that one, and how operands
    lie shows in the last bit of a small matmul.
    """
    if device.type != "cpu" or value.dtype != dtype:
        return value.to(device=device, dtype=dtype, copy=True)
    size = value.numel() * value.element_size()
    memory = torch.empty(size + 2 * CACHE_LINE_BYTES, dtype=torch.uint8)
    start = (value.data_ptr() - memory.data_ptr()) % CACHE_LINE_BYTES
    return memory[start : start + size].view(dtype).view(value.shape).copy_(value)


def _persistent_buffers(model: Any) -> set[str]:
    return {name for name, _ in model.named_buffers()} - {name for name, _ in model.named_non_persistent_buffers()}


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Rotary tables and the like are not in a checkpoint: the model computes them, as it does when it loads itself."""
    owners = {name.rpartition(".")[0] for name, buffer in model.named_buffers() if buffer.is_meta}
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
        model._init_weights(module)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be used: {_first_line(error)}", hint="is tokenizer.json there?"
        ) from error
    # Held-out text is encoded as one piece and cut afterwards; a warning about its length would mislead.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """``auto``: float32 on a CPU, whose matmuls are fastest and exact there; elsewhere what the config says."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        stored = getattr(config, "dtype", None)
        return stored if isinstance(stored, torch.dtype) else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
