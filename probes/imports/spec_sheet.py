"""Spec sheets of GPU systems in YAML (github.com/ai-dynamo/aiconfigurator, systems/*.yaml): bytes/s and seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from probes.errors import ImportFormatError
from probes.imports.figures import Figures, model_of_rate
from probes.records import Concurrency, Device, LinkKind, LinkMode, LinkModel

_MOST_BYTES = 1 << 20
_MOST_GPUS = 64
_BOUND = "bandwidths are a data sheet's, not measured"
_SCALED = "device memory: α and β are the sheet's own empirical corrections"


def looks_like(text: str) -> bool:
    return "mem_bw" in text and "pcie_bw" in text


def read(text: str) -> Figures:
    """Links of one node as the sheet gives them. Raises ``ImportFormatError`` for what is no such sheet."""
    sheet = _load(text)
    gpu, node = _section(sheet, "gpu"), _section(sheet, "node")
    count = round(_positive(node, "node.num_gpus_per_node"))
    if count > _MOST_GPUS:
        raise ImportFormatError(f"node.num_gpus_per_node: {count} GPUs in one node", hint="check the file")
    memory_bytes = round(_positive(gpu, "gpu.mem_capacity")) if "mem_capacity" in gpu else None
    name = str(sheet.get("data_dir", "GPU")).rpartition("/")[2] or "GPU"
    devices = tuple(
        Device(index=index, kind="cuda", name=name, uuid=None, memory_bytes=memory_bytes) for index in range(count)
    )
    models = tuple(_models(gpu, node, count))
    return Figures(devices=devices, models=models, link_groups=(), warnings=(_BOUND, _SCALED))


def _load(text: str) -> Mapping[str, Any]:
    import yaml

    if len(text) > _MOST_BYTES:
        raise ImportFormatError(f"a spec sheet of {len(text)} characters", hint="check the file")
    try:
        sheet = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ImportFormatError(f"this YAML cannot be read: {str(error)[:200]}", hint="check the file") from error
    if not isinstance(sheet, dict):
        raise ImportFormatError("a spec sheet is a mapping with the sections gpu and node", hint="check the file")
    return sheet


def _section(sheet: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = sheet.get(name)
    if not isinstance(found, dict):
        raise ImportFormatError(f"the spec sheet has no section {name}", hint="it needs the sections gpu and node")
    return found


def _positive(section: Mapping[str, Any], path: str) -> float:
    value = section.get(path.rpartition(".")[2])
    # YAML's bool is a Python int.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ImportFormatError(f"{path} is {value!r}, not a positive number", hint="give it in bytes/s or seconds")
    return float(value)


def _models(gpu: Mapping[str, Any], node: Mapping[str, Any], count: int) -> Iterator[LinkModel]:
    memory = _positive(gpu, "gpu.mem_bw")
    scaling = _optional(gpu, "gpu.mem_bw_empirical_scaling_factor", 1.0)
    latency = _optional(gpu, "gpu.mem_empirical_constant_latency", 0.0)
    host = _positive(node, "node.pcie_bw")
    between = _optional(node, "node.intra_node_bw", 0.0)
    between_latency = _optional(node, "node.p2p_latency", 0.0)
    for index in range(count):
        name = f"cuda:{index}"
        yield model_of_rate(
            LinkKind.DEVICE_MEMORY,
            name,
            name,
            mode=None,
            concurrency=Concurrency.SOLO,
            bytes_per_s=memory,
            alpha=1.0 / scaling,
            beta_seconds=latency,
        )
        for kind, ends in ((LinkKind.HOST_TO_DEVICE, ("host", name)), (LinkKind.DEVICE_TO_HOST, (name, "host"))):
            yield model_of_rate(kind, *ends, mode=LinkMode.PINNED, concurrency=Concurrency.SOLO, bytes_per_s=host)
    for source, destination in itertools.permutations(range(count if between else 0), 2):
        yield model_of_rate(
            LinkKind.DEVICE_TO_DEVICE,
            f"cuda:{source}",
            f"cuda:{destination}",
            mode=None,
            concurrency=Concurrency.SOLO,
            bytes_per_s=between,
            beta_seconds=between_latency,
        )


def _optional(section: Mapping[str, Any], path: str, default: float) -> float:
    return _positive(section, path) if path.rpartition(".")[2] in section else default
