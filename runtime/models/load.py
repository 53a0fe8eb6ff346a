"""Loading what is not experts: the dense tensors of a checkpoint, computed buffers, and the tokenizer.

The experts are never materialised together; the caller gives every expert module its slots afterwards. Only safetensors
files are read.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probes.errors import CheckpointError
from probes.text import first_line, plural
from runtime.experts.formats import Fp8Blocks, StoredFormat
from runtime.experts.headers import TensorEntry
from runtime.experts.index import ExpertIndex
from runtime.models.dense import DenseFile
from runtime.models.names import SAVE_AS_RUN
from runtime.models.skeleton import Skeleton


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A model whose expert parameters are still empty. ``experts``: the expert modules, in layer order."""

    model: Any
    tokenizer: Any
    family: str
    experts: tuple[torch.nn.Module, ...]
    num_experts: int


def load_without_experts(folder: Path, skeleton: Skeleton, index: ExpertIndex, *, device: torch.device) -> LoadedModel:
    """``skeleton`` on ``device`` with everything but the experts' weights. Raises ``CheckpointError``."""
    if skeleton.num_experts != index.num_experts:
        raise CheckpointError(
            f"{folder}: the config describes {skeleton.num_experts} experts per layer, the checkpoint holds "
            f"{index.num_experts}",
            hint="config.json and the safetensors files are of different models, or shards are missing",
        )
    _load_dense(folder, skeleton, index.dense, device)
    _fill_buffers(skeleton.model, device)
    return LoadedModel(
        model=skeleton.model,
        tokenizer=_load_tokenizer(folder),
        family=skeleton.family,
        experts=skeleton.experts,
        num_experts=skeleton.num_experts,
    )


def _load_dense(folder: Path, skeleton: Skeleton, dense: dict[str, TensorEntry], device: torch.device) -> None:
    model = skeleton.model
    slots = {id(module.get_parameter(name)) for module in skeleton.experts for name in skeleton.expert_shapes}
    wanted = {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in slots}
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    wanted |= {name: b for name, b in model.named_buffers() if name not in computed}
    by_file: dict[Path, list[str]] = {}
    for name in sorted(dense.keys() & wanted.keys(), key=lambda name: dense[name].offset):
        by_file.setdefault(dense[name].path, []).append(name)
    for path, names in sorted(by_file.items()):
        with DenseFile(path) as file:
            for name in names:
                _check_shape(name, dense[name], wanted[name])
                tensor = _read(file, name, dense, skeleton.stored_as, wanted[name].dtype, device)
                _refuse_nan(dense[name], tensor)
                _assign(model, name, tensor)
    model.tie_weights()
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta and id(tensor) not in slots]
    missing += [name for name, tensor in model.named_buffers() if tensor.is_meta and name not in computed]
    optional = model._keys_to_ignore_on_load_missing or ()
    missing = [name for name in missing if not any(re.search(pattern, name) for pattern in optional)]
    if missing:
        strange = [entry.name for name, entry in dense.items() if name not in wanted]
        raise _lacking(folder, skeleton.family, missing, strange)


def _lacking(folder: Path, family: str, missing: list[str], strange: list[str]) -> CheckpointError:
    """``strange``: the checkpoint's tensors that the model has no place for."""
    lacks = f"{folder} lacks {plural(len(missing), 'dense tensor')} of the {family} model, the first is {missing[0]}"
    block = ".".join(missing[0].split(".")[:-2])
    instead = [name for name in strange if block and name.startswith(f"{block}.")]
    if not instead:
        return CheckpointError(lacks, hint="shards are missing, or config.json is of another model; download it again")
    return CheckpointError(
        f"{lacks}; {instead[0]} is there in its place, another arrangement than the model runs it in",
        hint=SAVE_AS_RUN,
    )


def _read(
    file: DenseFile,
    name: str,
    dense: dict[str, TensorEntry],
    stored_as: StoredFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A dense tensor in the type that computes, whatever it is stored as. Raises ``CheckpointError``."""
    entry = dense[name]
    scales = dense.get(f"{name}_scale_inv") if isinstance(stored_as, Fp8Blocks) else None
    if dtype.is_floating_point:
        stored_as.check(entry, scales)
    if isinstance(stored_as, Fp8Blocks) and scales is not None:
        return file.read_fp8(entry, scales, stored_as, dtype=dtype, device=device)
    return file.read(entry, dtype=dtype, device=device)


def _check_shape(name: str, entry: TensorEntry, current: torch.Tensor) -> None:
    if entry.shape != tuple(current.shape):
        raise CheckpointError(
            f"{entry.path}: {entry.name} is stored as {list(entry.shape)} where the config makes it "
            f"{list(current.shape)}",
            hint="config.json and the safetensors files are of different models",
        )


def _refuse_nan(entry: TensorEntry, tensor: torch.Tensor) -> None:
    """Where the last layers give NaN, no router sees it, and greedy decoding would go on with any token."""
    if tensor.is_floating_point() and tensor.numel() and tensor.aminmax().min.isnan():  # which takes no memory
        raise CheckpointError(
            f"{entry.path}: {entry.name} holds numbers that are NaN",
            hint="the checkpoint is damaged; download the file again",
        )


def _assign(model: Any, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        # requires_grad as when transformers loads: torch folds a batched matmul otherwise, which changes the last bit.
        tensor = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        setattr(module, leaf, tensor)
    else:
        module._buffers[leaf] = tensor
    # transformers' mark against initialising it again; a parameter does not take over that of its tensor.
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Rotary tables and the like are not in a checkpoint: the model computes them, as it does when it loads itself."""
    owners = {name.rpartition(".")[0] for name, buffer in model.named_buffers() if buffer.is_meta}
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        model._init_weights(module)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizer.json is from outside, and its parser raises the bare class
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be used: {first_line(error)}",
            hint="is tokenizer.json there, and whole? copy it again",
        ) from error
    if not tokenizer.encode("a", add_special_tokens=False):
        # Without its files, transformers makes an empty tokenizer of some families rather than fail.
        raise CheckpointError(
            f"the tokenizer of {folder} knows no tokens", hint="is tokenizer.json there? copy the whole model folder"
        )
    # Held-out text is encoded as one piece and cut afterwards; a warning about its length would mislead.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """``auto``: float32 on a CPU, whose matmuls are fastest and exact there; elsewhere what the config says."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        stored = getattr(config, "dtype", None)
        return stored if isinstance(stored, torch.dtype) else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
