"""A Hugging Face MoE model without weights: built on the meta device, to know its experts before a byte is read.

No code from a checkpoint is run (``trust_remote_code`` stays off).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probes.errors import CheckpointError
from probes.text import first_line
from runtime.experts.formats import StoredFormat
from runtime.experts.index import layer_of
from runtime.models.config import stated_top_k
from runtime.models.names import CheckpointNames
from runtime.models.quantisation import stored_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """``experts``: the expert modules in layer order; ``expert_shapes``: of one expert, by parameter name.

    ``names``: parameter names of a checkpoint's keys. ``layer_numbers``: of the MoE layers, the model's own.
    ``stored_as``: the checkpoint's matrices.
    """

    model: Any
    family: str
    experts: tuple[torch.nn.Module, ...]
    expert_shapes: dict[str, tuple[int, ...]]
    num_experts: int
    layer_numbers: tuple[int, ...]
    names: CheckpointNames
    stored_as: StoredFormat


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
    except Exception as error:  # a config from outside can make its family's code fail in any way
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be used: {first_line(error)}",
            hint="the model's type may be too new for the installed transformers, or need code from the checkpoint",
        ) from error


def build_skeleton(folder: Path, *, dtype: torch.dtype) -> Skeleton:
    """The model of ``folder``'s config. Raises ``CheckpointError`` naming a family whose experts cannot be run."""
    from transformers import AutoModelForCausalLM

    config = read_config(folder)
    family = str(config.model_type)
    stored_as = stored_format(config, folder)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # likewise
        if "Unrecognized configuration class" in str(error):
            raise CheckpointError(
                f"the model family {family} is not supported: transformers builds no causal language model of it",
                hint="models of images or speech and encoder-decoder models are not; use a text-only checkpoint of the "
                "family where there is one",
            ) from error
        raise CheckpointError(
            f"cannot build the {family} model of {folder}: {first_line(error)}",
            hint="is config.json complete, and is this a model that generates text?",
        ) from error
    model.eval()
    found = {name: module for name, module in model.named_modules() if speaks_experts_protocol(module)}
    if not found:
        raise CheckpointError(
            f"the model family {family} is not supported: it has no experts that take (hidden_states, top_k_index, "
            "top_k_weights) over fused parameters",
            hint="supported are Mixture-of-Experts families whose experts transformers keeps in fused parameters",
        )
    experts = tuple(found.values())
    shapes = [_stacked_shapes(module) for module in experts]
    counts = {expert_count(module) for module in experts}
    if len(counts) > 1 or any(other != shapes[0] for other in shapes):
        raise CheckpointError(f"the model family {family} is not supported: its MoE layers differ in their experts")
    num_experts, top_k = counts.pop(), stated_top_k(config.to_dict())
    if top_k is not None and not 1 <= top_k <= num_experts:
        raise CheckpointError(
            f"{folder / 'config.json'} contradicts itself: {top_k} experts per token of {num_experts}",
            hint="download config.json again",
        )
    return Skeleton(
        model=model,
        family=family,
        experts=experts,
        expert_shapes=shapes[0],
        num_experts=num_experts,
        layer_numbers=tuple(layer_of(f"{name}.") for name in found),
        names=CheckpointNames(model, family, stored_as.kinds),
        stored_as=stored_as,
    )


def expert_count(module: torch.nn.Module) -> int:
    """How many experts an expert module holds."""
    count = module.num_experts
    assert isinstance(count, int)
    return count


def speaks_experts_protocol(module: torch.nn.Module) -> bool:
    stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    count = getattr(module, "num_experts", None)
    return (
        len(stacked) >= 2
        and isinstance(count, int)
        and all(p.shape[0] == count for p in stacked)
        and len(inspect.signature(module.forward).parameters) >= 3
    )


def _stacked_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    count = expert_count(module)
    return {
        name: tuple(parameter.shape[1:])
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.shape[0] == count
    }
