"""A model's experts as tables of measured kernels name them."""

from __future__ import annotations

from runtime.cost import ExpertShape
from runtime.models.config import MoeShape
from runtime.models.quantisation import Storage

# By how a config names its storage; two bytes are two bytes.
_DTYPES: dict[str, tuple[str, ...]] = {
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "mxfp4": ("w4a16_mxfp4",),
    "nvfp4": ("nvfp4",),
    "int4": ("int4_wo",),
    "gptq": ("int4_wo",),
    "awq": ("int4_wo",),
    "float8": ("fp8",),
}


def expert_shape(model: MoeShape) -> ExpertShape:
    """The shape to look measured layers up by; without weight types where no table has such weights."""
    return ExpertShape(
        hidden_size=model.hidden,
        intermediate_size=model.expert_intermediate,
        top_k=model.top_k,
        num_experts=model.num_experts,
        dtypes=_dtypes(model.storage),
    )


def _dtypes(storage: Storage) -> tuple[str, ...]:
    if storage.name == "fp8":
        return ("fp8_block",) if storage.block not in (None, (0, 0)) else ("fp8",)
    if storage.name in ("gptq", "awq") and storage.bits != 4:
        return ()
    return _DTYPES.get(storage.name, ())
