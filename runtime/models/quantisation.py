"""What a config states about its checkpoint's quantisation: how many bytes a matrix takes, and how to read one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.errors import CheckpointError
from runtime.experts.formats import PLAIN, Fp8Blocks, Mxfp4, StoredFormat

_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """``bits`` a weight. A scale of ``scale_bytes`` stands for each block of ``block`` rows × columns, None: no scales;
    a block of 0 rows or columns spans all of them."""

    name: str
    bits: int
    block: tuple[int, int] | None = None
    scale_bytes: int = 0

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix, its scales included."""
        weights = -(-rows * columns * self.bits // 8)
        if self.block is None:
            return weights
        down, across = (side or span for side, span in zip(self.block, (rows, columns), strict=True))
        return weights + -(-rows // down) * -(-columns // across) * self.scale_bytes


def storage_of(config: Mapping[str, Any], text: Mapping[str, Any]) -> Storage:
    """How ``config``, whose language model is ``text``, stores the routed experts. Raises ``CheckpointError``."""
    if text.get("expert_dtype") == "fp4":
        return Storage(name="mxfp4", bits=4, block=(1, 32), scale_bytes=1)
    quantisation = text.get("quantization_config") or config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return _plain(text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or config.get("dtype"))
    method = str(quantisation.get("quant_method"))
    if method == "mxfp4":
        return Storage(name=method, bits=4, block=(1, 32), scale_bytes=1)
    if method == "fp8":
        rows, columns = quantisation.get("weight_block_size") or (0, 0)
        return Storage(name=method, bits=8, block=(int(rows), int(columns)), scale_bytes=4)
    if method in ("gptq", "awq"):
        # A scale in float16 and a zero point of the weights' own width for each group.
        bits, group = int(quantisation["bits"]), int(quantisation["group_size"])
        return Storage(name=method, bits=bits, block=(1, max(group, 0)), scale_bytes=2 + -(-bits // 8))
    if method == "compressed-tensors":
        return _compressed_tensors(quantisation)
    algorithm = str(quantisation.get("quant_algo")).upper()
    if method == "modelopt_fp4" or (method == "modelopt" and "NVFP4" in algorithm):
        return Storage(name="nvfp4", bits=4, block=(1, 16), scale_bytes=1)
    if method == "modelopt" and algorithm == "FP8":
        return Storage(name="fp8", bits=8, block=(0, 0), scale_bytes=4)
    raise CheckpointError(
        f"the config's quantisation, {_called(quantisation)}, is not known",
        hint="give the experts' size with --expert-bytes",
    )


def stated_beside(folder: Path) -> dict[str, Any]:
    """The ``quantization_config`` that ModelOpt leaves out of config.json and states in a file of its own beside it, as
    a config would; nothing where there is none."""
    file = folder / "hf_quant_config.json"
    try:
        stated = json.loads(file.read_bytes())["quantization"]
        algorithm = stated["quant_algo"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} does not say how the weights are quantised: {error!r:.80}", hint="download the file again"
        ) from error
    return {"quantization_config": {"quant_method": "modelopt", **stated}} if algorithm else {}


def _called(stated: Mapping[str, Any]) -> str:
    """What users know a quantisation by: a toolkit has several."""
    method, kind = stated.get("quant_method"), stated.get("quant_algo")
    if method == "compressed-tensors":
        kind = stated.get("format")
    if method is None:
        return "something that quant_method in config.json does not name"
    return f"{kind!s:.60} ({method!s:.60})" if kind else f"{method!s:.60}"


def stored_format(config: Any, folder: Path) -> StoredFormat:
    """The form in which the checkpoint in ``folder`` stores its weights, by its transformers config.

    Raises ``CheckpointError`` naming a quantisation that cannot be run.
    """
    text = config.get_text_config()
    stated = next((q for c in (text, config) if (q := getattr(c, "quantization_config", None))), None)
    stated = stated or stated_beside(folder).get("quantization_config")
    if stated is None:
        return PLAIN
    stated = stated if isinstance(stated, dict) else stated.to_dict()
    method, called = str(stated.get("quant_method")), _called(stated)
    if "fp4" in (stated.get("expert_dtype"), getattr(text, "expert_dtype", None)):
        called = f"{method} with experts in fp4"
    elif method == "mxfp4":
        return Mxfp4()
    elif method == "fp8":
        block = stated.get("weight_block_size")
        if block is None:
            called = "fp8 without weight_block_size"
        elif isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return Fp8Blocks(*block)
        else:
            raise CheckpointError(
                f"{folder / 'config.json'}: weight_block_size is {block!r:.60}, which is no number of rows and of "
                "columns",
                hint="download config.json again; such models have [128, 128]",
            )
    raise CheckpointError(
        f"{folder} is quantised as {called}, which cannot be run",
        hint="use a checkpoint of this model in 16 or 32 bits, in FP8 with block scales or in MXFP4; caee simulate "
        "needs only its config.json",
    )


def _plain(dtype: object) -> Storage:
    # A config without a dtype is of a model that is published in bfloat16.
    name = str(dtype or "bfloat16").removeprefix("torch.")
    if name not in _DTYPE_BITS:
        raise CheckpointError(f"the config's dtype {name!r} is not known", hint="give --expert-bytes")
    return Storage(name=name, bits=_DTYPE_BITS[name])


def _compressed_tensors(quantisation: Mapping[str, Any]) -> Storage:
    try:
        (weights, *_) = [group["weights"] for group in quantisation["config_groups"].values()]
        group = weights.get("group_size") if weights.get("strategy") == "group" else 0
        return Storage(
            name=f"{weights['type']}{weights['num_bits']}",
            bits=int(weights["num_bits"]),
            block=(1, int(group or 0)),
            scale_bytes=2,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the config's compressed-tensors groups cannot be read: {error}", hint="give --expert-bytes"
        ) from error
