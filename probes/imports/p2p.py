"""The CUDA samples' p2pBandwidthLatencyTest (github.com/NVIDIA/cuda-samples): every pair of GPUs, with latencies.

A cell's row is the GPU that writes, its column the one written to. Diagonals are copies within one memory, counted
twice by the tool (read and written). Bidirectional figures are the sum of both ways.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from probes.errors import ImportFormatError
from probes.imports.figures import Figures, model_of_rate, named_gpus
from probes.records import Concurrency, LinkKind, LinkMode, LinkModel

_GB = 1e9
_MICROSECOND = 1e-6
_DEVICE = re.compile(r"^Device: (\d+), (.+?), pciBusID", re.MULTILINE)
_ROW = re.compile(r"^\s*(\d+)((?:\s+-?\d+(?:\.\d+)?)+)\s*$")
_AGAIN = "the output is damaged: run p2pBandwidthLatencyTest again"
_ALONE_OFF = "Unidirectional P2P=Disabled Bandwidth"
_ALONE_ON = "Unidirectional P2P=Enabled Bandwidth"
_BOTH_OFF = "Bidirectional P2P=Disabled Bandwidth"
_BOTH_ON = "Bidirectional P2P=Enabled Bandwidth"
_LATENCY_OFF = "P2P=Disabled Latency Matrix"
_LATENCY_ON = "P2P=Enabled Latency"
# Table, mode, together with what, table of latencies, ways that the figures add up.
_TABLES = (
    (_ALONE_ON, None, Concurrency.SOLO, _LATENCY_ON, 1),
    (_ALONE_OFF, LinkMode.STAGED, Concurrency.SOLO, _LATENCY_OFF, 1),
    (_BOTH_ON, None, Concurrency.BOTH_WAYS, _LATENCY_ON, 2),
    (_BOTH_OFF, LinkMode.STAGED, Concurrency.BOTH_WAYS, _LATENCY_OFF, 2),
)
Matrix = tuple[tuple[float, ...], ...]


def looks_like(text: str) -> bool:
    return "P2P (Peer-to-Peer) GPU Bandwidth Latency Test" in text or _ALONE_OFF in text or _BOTH_OFF in text


def read(text: str) -> Figures:
    """Models of every ordered pair and of each memory. Raises ``ImportFormatError`` for tables that do not fit."""
    names = {int(index): name for index, name in _DEVICE.findall(text)}
    tables = {title: found for title in _titles() if (found := _matrix(text, title))}
    count = len(names) or max((len(table) for table in tables.values()), default=0)
    for title, table in tables.items():
        if len(table) != count or any(len(row) != count for row in table):
            shape = f"{len(table)} × {len(table[0])}"
            raise ImportFormatError(f"{title}: a matrix of {shape} for {count} devices", hint=_AGAIN)
    models = [*_pairs(tables, count), *_memories(tables, count)]
    if not models:
        raise ImportFormatError("this output holds no bandwidth matrix", hint=_AGAIN)
    devices = named_gpus([names.get(index, "NVIDIA GPU") for index in range(count)])
    warnings = () if _LATENCY_ON in tables or _LATENCY_OFF in tables else ("no latencies were measured: β is 0",)
    return Figures(devices=devices, models=tuple(models), link_groups=(), warnings=warnings)


def _titles() -> tuple[str, ...]:
    return (_ALONE_OFF, _ALONE_ON, _BOTH_OFF, _BOTH_ON, _LATENCY_OFF, _LATENCY_ON)


def _matrix(text: str, title: str) -> Matrix | None:
    start = re.search(rf"^{re.escape(title)}", text, re.MULTILINE)
    if start is None:
        return None
    rows: list[tuple[float, ...]] = []
    # The title, then the columns' numbers.
    for line in text[start.start() :].splitlines()[2:]:
        row = _ROW.match(line)
        if row is None:
            break
        if int(row[1]) != len(rows):
            raise ImportFormatError(f"{title}: row {row[1]} stands where {len(rows)} is due", hint=_AGAIN)
        rows.append(tuple(float(cell) for cell in row[2].split()))
    if any(not math.isfinite(cell) or cell < 0 for row in rows for cell in row):
        raise ImportFormatError(f"{title}: a negative figure", hint=_AGAIN)
    return tuple(rows) or None


def _pairs(tables: Mapping[str, Matrix], count: int) -> Iterator[LinkModel]:
    for title, mode, concurrency, latencies, ways in _TABLES:
        table = tables.get(title)
        for source in range(count if table else 0):
            for destination in range(count):
                rate = table[source][destination] if table else 0.0
                # 0.00 stands for a pair that was not measured.
                if source == destination or rate == 0.0:
                    continue
                times = tables.get(latencies)
                yield model_of_rate(
                    LinkKind.DEVICE_TO_DEVICE,
                    f"cuda:{source}",
                    f"cuda:{destination}",
                    mode=mode,
                    concurrency=concurrency,
                    bytes_per_s=rate * _GB / ways,
                    beta_seconds=times[source][destination] * _MICROSECOND if times else 0.0,
                )


def _memories(tables: Mapping[str, Matrix], count: int) -> Iterator[LinkModel]:
    table = tables.get(_ALONE_ON) or tables.get(_ALONE_OFF)
    times = tables.get(_LATENCY_ON) or tables.get(_LATENCY_OFF)
    for index in range(count if table else 0):
        if table and table[index][index] > 0:
            yield model_of_rate(
                LinkKind.DEVICE_MEMORY,
                f"cuda:{index}",
                f"cuda:{index}",
                mode=None,
                concurrency=Concurrency.SOLO,
                bytes_per_s=table[index][index] * _GB,
                beta_seconds=times[index][index] * _MICROSECOND if times else 0.0,
            )
