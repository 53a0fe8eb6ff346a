"""Counts-only JSON files: how often each expert was chosen, in the forms that different projects write.

- ``logical-count``: SGLang, ``{"logical_count": [layers][experts]}``.
- ``olmoe-counts``: ``{"counts": {layer: [experts]}}`` (allenai/OLMoE, routing_output).
- ``glm-counts``: ``{"layers": {layer: {"cnt", "gate", "sal"}}}`` (github.com/Dorijan10/glm-expert-pruning).
- ``eplb-weight``: ``{"weight": [layers][experts], "num_replicas"}``, the load that DeepSeek's expert-parallel load
  balancer takes (deepseek-ai/EPLB).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from probes.errors import TraceError
from runtime.trace.check import check_meta
from runtime.trace.importers.formats import Format, Head, ImportOptions
from runtime.trace.importers.streams import SourceFile
from runtime.trace.profile import check_profile
from runtime.trace.records import Float64s, LoadProfile, TraceMeta

# A file of counts is small; a larger one is something else.
MAX_JSON_BYTES = 1 << 28


def load_json(path: Path) -> Any:
    """The JSON document in a file. Raises ``TraceError``."""
    with SourceFile(path) as source:
        text = source.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise TraceError(f"{path}: more than {MAX_JSON_BYTES} bytes of JSON that are no lines of a log")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not valid JSON ({error})", hint="the file is cut off or damaged") from error


def profile_from_counts(
    counts_LN: Float64s,
    options: ImportOptions,
    *,
    layer_numbers: tuple[int, ...] | None = None,
    tokens: int | None = None,
    engine: str | None = None,
    model: str | None = None,
    parameters: dict[str, object] | None = None,
    gate_sums_LN: Float64s | None = None,
    saliency_sums_LN: Float64s | None = None,
) -> LoadProfile:
    """A load profile; layers without any count are dense ones and left out. Raises ``TraceError``.

    Where top-k is known (``--top-k``) and the source says no number of tokens, it is a layer's sum ÷ k, the largest
    where layers differ.
    """
    moe = np.flatnonzero(np.nan_to_num(counts_LN, nan=1.0).any(axis=1))
    if not len(moe):
        raise TraceError("all counts are zero", hint="record some traffic first")
    numbers = layer_numbers or tuple(range(len(counts_LN)))
    top_k = options.top_k or (round(counts_LN[moe].sum(axis=1).max() / tokens) if tokens else 0)
    meta = TraceMeta(
        model=options.model or model,
        num_experts=counts_LN.shape[1],
        top_k=top_k,
        layer_numbers=tuple(numbers[layer] for layer in moe),
        engine=engine,
        gates_recorded=False,
        parameters=parameters or {},
    )
    check_meta(meta)
    if tokens is None and top_k:
        tokens = round(float(counts_LN[moe].sum(axis=1).max()) / top_k)
    profile = LoadProfile(
        meta=meta,
        counts_LN=counts_LN[moe],
        tokens=tokens,
        gate_sums_LN=None if gate_sums_LN is None else gate_sums_LN[moe],
        saliency_sums_LN=None if saliency_sums_LN is None else saliency_sums_LN[moe],
    )
    check_profile(profile)
    return profile


def _has(*keys: str) -> Any:
    return lambda head: isinstance(head.value, dict) and set(keys) <= head.value.keys()


def _has_glm_layers(head: Head) -> bool:
    layers = head.value.get("layers") if isinstance(head.value, dict) else None
    return isinstance(layers, dict) and all(isinstance(layer, dict) and "cnt" in layer for layer in layers.values())


def _open_logical_count(head: Head, options: ImportOptions) -> LoadProfile:
    counts = _matrix(load_json(head.path)["logical_count"], "logical_count", head.path)
    if counts.ndim == 3:  # [steps][layers][experts], as the recorder keeps them
        counts = counts.sum(axis=0)
    return profile_from_counts(counts, options, engine="sglang")


def _open_olmoe(head: Head, options: ImportOptions) -> LoadProfile:
    document = load_json(head.path)
    numbers, rows = _by_layer(document["counts"], head.path)
    source = document.get("source")
    return profile_from_counts(
        _matrix(rows, "counts", head.path),
        options,
        layer_numbers=numbers,
        parameters={"source": source} if isinstance(source, str) else {},
    )


def _open_glm(head: Head, options: ImportOptions) -> LoadProfile:
    document = load_json(head.path)
    numbers, layers = _by_layer(document["layers"], head.path)
    sums = {
        key: _matrix([layer.get(key) for layer in layers], key, head.path)
        for key in ("cnt", "gate", "sal")
        if all(key in layer for layer in layers)
    }
    arch, tokens = document.get("arch"), document.get("tokens")
    return profile_from_counts(
        sums["cnt"],
        options,
        layer_numbers=numbers,
        tokens=tokens if type(tokens) is int and tokens > 0 else None,
        model=arch if isinstance(arch, str) else None,
        gate_sums_LN=sums.get("gate"),
        saliency_sums_LN=sums.get("sal"),
    )


def _open_eplb(head: Head, options: ImportOptions) -> LoadProfile:
    document = load_json(head.path)
    kept = {key: value for key, value in document.items() if key != "weight"}
    return profile_from_counts(_matrix(document["weight"], "weight", head.path), options, parameters={"eplb": kept})


def _by_layer(layers: Any, path: Path) -> tuple[tuple[int, ...], list[Any]]:
    try:
        ordered = sorted((int(number), layer) for number, layer in layers.items())
    except (AttributeError, ValueError, TypeError) as error:
        raise TraceError(f"{path}: layers are not an object of layer numbers ({error})") from error
    return tuple(number for number, _ in ordered), [layer for _, layer in ordered]


def _matrix(rows: Any, what: str, path: Path) -> Float64s:
    try:
        matrix = np.asarray(rows, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}: {what} is not a table of numbers, layers × experts ({error})") from error
    if matrix.ndim not in (2, 3) or not matrix.size:
        raise TraceError(f"{path}: {what} is not a table of numbers, layers × experts")
    return matrix


FORMATS = (
    Format(
        name="logical-count",
        looks_for='a JSON object with "logical_count" [layers][experts]',
        recognises=_has("logical_count"),
        open=_open_logical_count,
    ),
    Format(
        name="eplb-weight",
        looks_for='a JSON object with "weight" [layers][experts] and "num_replicas"',
        recognises=_has("weight", "num_replicas"),
        open=_open_eplb,
    ),
    Format(
        name="glm-counts",
        looks_for='a JSON object with "layers", each an object with "cnt" [experts]',
        recognises=_has_glm_layers,
        open=_open_glm,
    ),
    Format(
        name="olmoe-counts",
        looks_for='a JSON object with "counts", an object of lists [experts] by layer number',
        recognises=_has("counts"),
        open=_open_olmoe,
    ),
)
