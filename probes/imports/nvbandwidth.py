"""NVIDIA's nvbandwidth, its text and its JSON (github.com/NVIDIA/nvbandwidth).

A test case is a matrix of GB/s; the arrow of its title says which way the bytes go. Text around the JSON, cells that
are strings, and N/A or 0.00 on the diagonal are all seen in the wild.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from probes.errors import ImportFormatError
from probes.groups import group_of
from probes.imports.figures import Figures, model_of_rate
from probes.records import Concurrency, Device, LinkGroup, LinkKind, LinkMode, LinkModel

_GB = 1e9
_RUNNING = re.compile(r"^Running (\w+)\.?\s*$")
_SUM = re.compile(r"^SUM (\w+)\s+(\S+)\s*$")
_DEVICE = re.compile(r"^Device (\d+): (.+?)\s*(?:\([0-9A-Fa-f:.]+\))?\s*$")
_ROW = re.compile(r"^\s*\d+((?:\s+(?:N/A|\d+\.\d+))+)\s*$")
# Printed cells are rounded to 0.005 each.
_ROUNDING = 0.0051
_AGAIN = "the output is damaged: run nvbandwidth again"
_LATENCY_NOTE = "nvbandwidth times one large transfer: latency is unknown, β is taken as 0"
_HOST_CASES = {
    "host_to_device_memcpy_ce": (LinkKind.HOST_TO_DEVICE, Concurrency.SOLO),
    "host_to_all_memcpy_ce": (LinkKind.HOST_TO_DEVICE, Concurrency.ALL),
    "device_to_host_memcpy_ce": (LinkKind.DEVICE_TO_HOST, Concurrency.SOLO),
    "all_to_host_memcpy_ce": (LinkKind.DEVICE_TO_HOST, Concurrency.ALL),
}
# The first of these that is there tells what a copy from one GPU to another takes.
_PAIR_CASES = ("device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce")
_LOCAL_CASE = "device_local_copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCase:
    """One matrix, None where there is no link. ``total``: the tool's own sum over the cells, None where not given."""

    name: str
    title: str
    rows: tuple[tuple[float | None, ...], ...]
    total: float | None


def looks_like(text: str) -> bool:
    return '"nvbandwidth"' in text or "nvbandwidth Version" in text or _RUNNING.search(_first_running(text)) is not None


def read(text: str) -> Figures:
    """Cost models of the copy-engine test cases. Raises ``ImportFormatError`` where the output contradicts itself."""
    names, cases = _parse(text)
    by_name = {case.name: case for case in cases if case.rows}
    devices = _devices(names, by_name)
    models = [*_host_models(by_name), *_pair_models(by_name), *_local_models(by_name)]
    if not models:
        raise ImportFormatError(
            "this nvbandwidth output holds no copy test that a cost model needs",
            hint="run nvbandwidth with at least -t host_to_device_memcpy_ce device_to_host_memcpy_ce",
        )
    return Figures(devices=devices, models=tuple(models), link_groups=tuple(_groups(models)), warnings=(_LATENCY_NOTE,))


def _parse(text: str) -> tuple[dict[int, str], list[TestCase]]:
    start = text.find('"nvbandwidth"')
    names, cases = ({}, _json_cases(text, start)) if start >= 0 else (_device_names(text), list(_text_cases(text)))
    for case in cases:
        _check(case, len(names))
    return names, cases


def _json_cases(text: str, start: int) -> list[TestCase]:
    # Log lines may stand before and after the document, braces among them.
    opening = text.rfind("{", 0, start)
    try:
        document, _ = json.JSONDecoder().raw_decode(text, max(opening, 0))
        found = [_json_case(case) for case in document["nvbandwidth"]["testcases"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImportFormatError(
            f"the nvbandwidth JSON cannot be read: {error}", hint="write it again with nvbandwidth -j"
        ) from error
    return [case for case in found if case is not None]


def _json_case(case: dict[str, Any]) -> TestCase | None:
    if "bandwidth_matrix" not in case:
        return None
    rows = tuple(tuple(_cell(str(cell)) for cell in row) for row in case["bandwidth_matrix"])
    total = case.get("sum")
    title = str(case.get("bandwidth_description", ""))
    return TestCase(name=str(case["name"]), title=title, rows=rows, total=None if total is None else float(total))


def _text_cases(text: str) -> Iterator[TestCase]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        running = _RUNNING.match(line)
        if running is None:
            continue
        title = lines[number + 1] if number + 1 < len(lines) else ""
        rows: list[tuple[float | None, ...]] = []
        total = None
        for following in lines[number + 2 :]:
            if _RUNNING.match(following):
                break
            row, summed = _ROW.match(following), _SUM.match(following)
            if row is not None:
                rows.append(tuple(_cell(cell) for cell in row[1].split()))
            elif summed is not None and summed[1] == running[1]:
                total = _cell(summed[2])
                break
        yield TestCase(name=running[1], title=title, rows=tuple(rows), total=total)


def _device_names(text: str) -> dict[int, str]:
    matches = (_DEVICE.match(line) for line in text.splitlines())
    return {int(match[1]): match[2] for match in matches if match is not None}


def _cell(text: str) -> float | None:
    if text == "N/A":
        return None
    try:
        value = float(text)
    except ValueError:
        raise ImportFormatError(f"{text!r} is no bandwidth", hint=_AGAIN) from None
    if not math.isfinite(value) or value < 0:
        raise ImportFormatError(f"{text!r} is no bandwidth", hint=_AGAIN)
    # A copy that takes no time does not exist: older versions print 0.00 where newer ones print N/A.
    return value or None


def _check(case: TestCase, devices: int) -> None:
    cells = [cell for row in case.rows for cell in row if cell is not None]
    widths = {len(row) for row in case.rows}
    if len(widths) > 1:
        raise ImportFormatError(f"{case.name}: the rows of the matrix differ in length", hint=_AGAIN)
    per_device = case.name in _HOST_CASES or case.name in _PAIR_CASES
    if per_device and devices and widths and widths != {devices}:
        shape = f"{len(case.rows)} × {widths.pop()}"
        raise ImportFormatError(
            f"{case.name}: a matrix of {shape} contradicts the {devices} devices that are listed",
            hint="the output was edited or two outputs were mixed: run nvbandwidth again",
        )
    if case.name in _HOST_CASES and len(case.rows) > 1:
        raise ImportFormatError(f"{case.name}: {len(case.rows)} hosts in one output", hint="import one host at a time")
    if case.total is not None and abs(sum(cells) - case.total) > _ROUNDING * (len(cells) + 1):
        raise ImportFormatError(
            f"{case.name}: the cells add up to {sum(cells):.2f}, the output says {case.total:.2f}",
            hint="a row is missing or was changed: run nvbandwidth again",
        )


def _devices(names: dict[int, str], cases: dict[str, TestCase]) -> tuple[Device, ...]:
    wide = max((len(case.rows[0]) for name, case in cases.items() if name in (*_HOST_CASES, *_PAIR_CASES)), default=0)
    count = max(wide, len(names), 1)
    return tuple(
        Device(index=index, kind="cuda", name=names.get(index, "NVIDIA GPU"), uuid=None, memory_bytes=None)
        for index in range(count)
    )


def _host_models(cases: dict[str, TestCase]) -> Iterator[LinkModel]:
    for name, (kind, concurrency) in _HOST_CASES.items():
        for index, rate in enumerate(cases[name].rows[0] if name in cases else ()):
            if rate is None:
                continue
            ends = ("host", f"cuda:{index}") if kind is LinkKind.HOST_TO_DEVICE else (f"cuda:{index}", "host")
            yield model_of_rate(kind, *ends, mode=LinkMode.PINNED, concurrency=concurrency, bytes_per_s=rate * _GB)


def _pair_models(cases: dict[str, TestCase]) -> Iterator[LinkModel]:
    case = next((cases[name] for name in _PAIR_CASES if name in cases), None)
    for row, rates in enumerate(case.rows if case is not None else ()):
        for column, rate in enumerate(rates):
            if rate is None or case is None:
                continue
            source, destination = (column, row) if "<-" in case.title else (row, column)
            yield model_of_rate(
                LinkKind.DEVICE_TO_DEVICE,
                f"cuda:{source}",
                f"cuda:{destination}",
                mode=None,
                concurrency=Concurrency.SOLO,
                bytes_per_s=rate * _GB,
            )


def _local_models(cases: dict[str, TestCase]) -> Iterator[LinkModel]:
    for index, rate in enumerate(cases[_LOCAL_CASE].rows[0] if _LOCAL_CASE in cases else ()):
        if rate is not None:
            # nvbandwidth counts a copied byte once; inside one memory it was read and written.
            yield model_of_rate(
                LinkKind.DEVICE_MEMORY,
                f"cuda:{index}",
                f"cuda:{index}",
                mode=None,
                concurrency=Concurrency.SOLO,
                bytes_per_s=2 * rate * _GB,
            )


def _groups(models: Sequence[LinkModel]) -> Iterator[LinkGroup]:
    for kind in (LinkKind.HOST_TO_DEVICE, LinkKind.DEVICE_TO_HOST):
        rates = {
            concurrency: {
                _index(model): model.bandwidth_bytes_per_s
                for model in models
                if model.kind is kind and model.concurrency is concurrency
            }
            for concurrency in (Concurrency.SOLO, Concurrency.ALL)
        }
        together = rates[Concurrency.ALL]
        slowdown = {at: alone / together[at] for at, alone in rates[Concurrency.SOLO].items() if at in together}
        group = group_of(kind, slowdown)
        if group is not None:
            yield group


def _index(model: LinkModel) -> int:
    name = model.destination if model.source == "host" else model.source
    return int(name.partition(":")[2])


def _first_running(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("Running ")), "")
