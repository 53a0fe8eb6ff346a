"""Measured MoE kernels: Parquet tables of layer times by shape and load (github.com/ai-dynamo/aiconfigurator).

Times are in milliseconds. Only the ``balanced`` rows of whole experts can be used: there it is known which experts are
activated. From the count on at which all of a device's experts are, more tokens add arithmetic, not weights to read.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from probes.errors import ImportFormatError
from probes.imports.figures import Figures, model_of_rate
from probes.imports.routing import activated_experts
from probes.layer_model import MIN_COUNTS, fit_layer, holdout_errors
from probes.records import Concurrency, Device, LayerModel, LayerShape, LinkKind, LinkModel

MAGIC = b"PAR1"
BALANCED = "balanced"
# A layer model that misses more than this, in the median of the rows left out, is not to be trusted without a look.
GOOD_ERROR = 0.05
_MILLISECOND = 1e-3
_MATRICES = 3
_BYTES_PER_WEIGHT = {"bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int4_wo": 0.5, "w4a16_mxfp4": 0.5}
_COLUMNS = (
    "device",
    "kernel_source",
    "moe_dtype",
    "hidden_size",
    "inter_size",
    "topk",
    "num_experts",
    "moe_ep_size",
    "moe_tp_size",
    "num_tokens",
    "distribution",
    "latency",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Rows of one shape by rising load, up to the first at which every expert of the device is activated."""

    shape: LayerShape
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """The usable curves of one table. ``device``: the GPU's name."""

    device: str
    curves: tuple[Curve, ...]


def read_kernel_table(path: Path) -> KernelTable:
    """The ``balanced`` curves with at least ``MIN_COUNTS`` different numbers of activated experts.

    Raises ``ImportFormatError`` where the file is no such table or holds no such rows.
    """
    columns = _columns(path)
    rows = list(zip(*columns.values(), strict=True))
    if not rows:
        raise ImportFormatError(f"{path} holds no rows", hint="download the table again")
    curves: dict[LayerShape, list[tuple[int, float]]] = defaultdict(list)
    devices = {str(device) for device in columns["device"]}
    if len(devices) > 1:
        raise ImportFormatError(f"{path} mixes {', '.join(sorted(devices))}", hint="import one device at a time")
    for _, kernel, dtype, hidden, intermediate, top_k, experts, parallel, tensor, tokens, distribution, latency in rows:
        if distribution != BALANCED or tensor != 1 or parallel > experts:
            continue
        if not (latency > 0 and tokens > 0 and top_k > 0 and parallel > 0):
            raise ImportFormatError(f"{path}: {tokens} tokens in {latency} ms is no measurement", hint="check the file")
        shape = LayerShape(
            kernel=kernel,
            dtype=dtype,
            hidden_size=hidden,
            intermediate_size=intermediate,
            top_k=top_k,
            num_experts=experts,
            expert_parallel_size=parallel,
        )
        curves[shape].append((tokens, latency * _MILLISECOND))
    if not curves:
        found = ", ".join(sorted({str(value) for value in columns["distribution"]}))
        raise ImportFormatError(
            f"{path} has no balanced rows (only {found}): how many experts a row activated is not known",
            hint="import a table that was measured with the distribution `balanced`",
        )
    ordered = sorted(curves.items(), key=lambda item: astuple(item[0]))
    usable = [curve for curve in (_curve(shape, points) for shape, points in ordered) if _bends(curve)]
    return KernelTable(device=devices.pop(), curves=tuple(usable))


def layer_models(table: KernelTable) -> tuple[LayerModel, ...]:
    """A model of each curve, fitted to all its rows; its error is that of every second row, predicted from the rest."""
    models = []
    for curve in table.curves:
        errors = holdout_errors(curve.experts, curve.seconds)
        error = statistics.median(errors) if errors else None
        good = error is not None and error <= GOOD_ERROR
        fit = fit_layer(curve.experts, curve.seconds)
        models.append(LayerModel(shape=curve.shape, fit=fit, holdout_error=error, status="ok" if good else "poor"))
    return tuple(models)


def figures_of(path: Path) -> Figures:
    """A device, a model of each layer shape, and how fast experts are read from the device's memory."""
    table = read_kernel_table(path)
    layers = layer_models(table)
    if not layers:
        raise ImportFormatError(
            f"{path}: no shape was measured with {MIN_COUNTS} different numbers of activated experts",
            hint="import a table with more rows",
        )
    device = Device(index=0, kind="cuda", name=table.device, uuid=None, memory_bytes=None)
    memory, note = _memory(layers, device.name_on_link)
    return Figures(devices=(device,), models=memory, link_groups=(), warnings=note, layers=layers)


def _columns(path: Path) -> Mapping[str, Sequence[object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=list(_COLUMNS), partitioning=None)
        missing = [name for name in _COLUMNS if name not in table.column_names]
        if missing:
            raise ImportFormatError(
                f"{path} is a Parquet file without the columns {', '.join(missing)}",
                hint="only tables of measured MoE kernels (moe_perf.parquet) can be imported",
            )
        numbers = [name for name in _COLUMNS if name not in ("device", "kernel_source", "moe_dtype", "distribution")]
        for name in numbers:
            kind = pa.float64() if name == "latency" else pa.int64()
            table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        if any(table[name].null_count for name in _COLUMNS):
            raise ImportFormatError(f"{path} has empty cells", hint="download the table again")
        return {name: table[name].to_pylist() for name in _COLUMNS}
    except (pa.ArrowException, OSError) as error:
        raise ImportFormatError(f"{path} cannot be read as Parquet: {error}", hint="download it again") from error


def _curve(shape: LayerShape, points: Sequence[tuple[int, float]]) -> Curve:
    local = shape.num_experts // shape.expert_parallel_size
    tokens, experts, seconds = [], [], []
    for load, time in sorted(points):
        tokens.append(load)
        seconds.append(time)
        experts.append(activated_experts(load, shape.top_k, shape.num_experts, shape.expert_parallel_size))
        if experts[-1] >= local:
            break
    return Curve(shape=shape, tokens=tuple(tokens), experts=tuple(experts), seconds=tuple(seconds))


def _bends(curve: Curve) -> bool:
    return len(set(curve.experts)) >= MIN_COUNTS


def _memory(layers: Sequence[LayerModel], device: str) -> tuple[tuple[LinkModel, ...], tuple[str, ...]]:
    """Bytes of one more expert ÷ its seconds, in the median over the shapes of the widest type measured."""
    for dtype, width in _BYTES_PER_WEIGHT.items():
        rates = [
            _MATRICES * layer.shape.hidden_size * layer.shape.intermediate_size * width / layer.fit.seconds_per_expert
            for layer in layers
            if layer.shape.dtype == dtype and layer.fit.seconds_per_expert > 0
        ]
        if rates:
            rate = statistics.median(rates)
            model = model_of_rate(
                LinkKind.DEVICE_MEMORY, device, device, mode=None, concurrency=Concurrency.SOLO, bytes_per_s=rate
            )
            note = f"device memory: the median over {len(rates)} shapes in {dtype} of an expert's bytes ÷ its time"
            return (model,), (note, "a layer's own β is paid once and stands with its layer model")
    return (), ("no weight type is known: only the layers' own times were imported",)
