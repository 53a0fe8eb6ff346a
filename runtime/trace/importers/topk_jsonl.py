"""``topk-jsonl``: a line per token, ``{"seq", "pos", "ids": [L][K], "p": [L][K]}``, decode tokens with gate weights.

The form in which token-level decode traces of gpt-oss-20b were published
(github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.errors import TraceError
from runtime.trace.chunking import SequenceTable, equal_shares, new_chunk
from runtime.trace.importers.formats import (
    Format,
    Head,
    ImportedTrace,
    ImportOptions,
    Reading,
    inferred_experts,
    weights_sum_to_one,
)
from runtime.trace.importers.streams import SourceFile
from runtime.trace.records import MAX_EXPERTS, Phase, RoutingTrace, TraceMeta

# Lines that are parsed before they become arrays; more would only hold more Python objects.
_BATCH = 512


def _recognises(head: Head) -> bool:
    return isinstance(head.value, dict) and {"seq", "pos", "ids"} <= head.value.keys()


def _open(head: Head, options: ImportOptions) -> ImportedTrace:
    with SourceFile(head.path) as source:
        rows = list(itertools.islice(_rows(source), _BATCH))
    with_gates = "p" in rows[0][1]
    shape = _shape(rows[0], head.path)
    _, gates = _arrays(rows, shape, with_gates, head.path)
    if options.top_k not in (None, shape[1]):
        raise TraceError(f"{head.path} has {shape[1]} experts per token, not --top-k {options.top_k}")
    highest = 0 if options.num_experts else _highest_id(head.path)
    experts, notes = inferred_experts(options, None, highest)
    meta = TraceMeta(
        model=options.model,
        num_experts=experts,
        top_k=shape[1],
        layer_numbers=tuple(range(shape[0])),
        normalised=weights_sum_to_one(gates) if with_gates else None,
        gates_recorded=with_gates,
    )
    # The published files hold decode tokens and do not say so; a user knows better of other files.
    phase = Phase.DECODE if options.phase is Phase.UNKNOWN else options.phase
    return ImportedTrace(meta, lambda reading: _chunks(head.path, meta, phase, reading), notes=notes)


def _chunks(path: Path, meta: TraceMeta, phase: Phase, reading: Reading) -> Iterator[RoutingTrace]:
    sequences = SequenceTable()
    last_position: dict[str, int] = {}
    shape = (meta.moe_layers, meta.top_k)
    with SourceFile(path) as source:
        rows = _rows(source)
        while batch := list(itertools.islice(rows, _BATCH)):
            ids, gates = _arrays(batch, shape, meta.gates_recorded, path)
            _check_positions(batch, last_position, path)
            number = np.array([sequences.number(str(row["seq"])) for _, row in batch], dtype=np.int32)
            position = [row["pos"] for _, row in batch]
            reading.fraction = source.fraction_read
            yield new_chunk(meta, sequences.names, number, ids, gates, position=position, phase=phase)


def _rows(source: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in source.lines():
        try:
            row = json.loads(line)
            seq, pos, _ = row["seq"], row["pos"], row["ids"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TraceError(
                f"{source.path}, line {number}: not an object with seq, pos and ids ({type(error).__name__}: {error})",
                hint="the file is cut off or damaged there",
            ) from error
        if not isinstance(seq, str | int) or type(pos) is not int or not 0 <= pos < 1 << 31:
            raise TraceError(f"{source.path}, line {number}: seq {seq!r} or pos {pos!r} is not a name and a position")
        yield number, row


def _arrays(
    rows: list[tuple[int, dict[str, Any]]], shape: tuple[int, int], with_gates: bool, path: Path
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
    """ids [T, L, K] and gate weights [T, L, K] of the rows."""
    ids = _array(rows, "ids", "iu", shape, path)
    if ids.min() < -1 or ids.max() > MAX_EXPERTS:
        row = int(np.argmax(((ids < -1) | (ids > MAX_EXPERTS)).any(axis=(1, 2))))
        raise TraceError(f"{path}, line {rows[row][0]}: an expert id is not in -1..{MAX_EXPERTS}")
    ids = ids.astype(np.int16)
    if not with_gates:
        return ids, equal_shares(ids)
    return ids, _array(rows, "p", "iuf", shape, path).astype(np.float32)


def _array(
    rows: list[tuple[int, dict[str, Any]]], key: str, kinds: str, shape: tuple[int, int], path: Path
) -> npt.NDArray[Any]:
    try:
        array = np.array([row[key] for _, row in rows])
    except (KeyError, ValueError, OverflowError):
        array = np.zeros(0)
    if array.shape == (len(rows), *shape) and array.dtype.kind in kinds:
        return array
    raise TraceError(
        f"{path}, line {_first_odd_line(rows, key, kinds, shape)}: {key!r} is not {shape[0]} layers of {shape[1]} "
        f"{'numbers' if 'f' in kinds else 'expert ids'}, as in the first line",
        hint="a line is damaged, or lines of two models are in one file: import each model's lines alone",
    )


def _first_odd_line(rows: list[tuple[int, dict[str, Any]]], key: str, kinds: str, shape: tuple[int, int]) -> int:
    for number, row in rows:
        try:
            array = np.array(row[key])
        except (KeyError, ValueError, OverflowError):
            return number
        if array.shape != shape or array.dtype.kind not in kinds:
            return number
    return rows[0][0]


def _shape(first: tuple[int, dict[str, Any]], path: Path) -> tuple[int, int]:
    try:
        layers, slots = np.shape(first[1]["ids"])
    except ValueError as error:
        raise TraceError(f"{path}, line {first[0]}: ids are not a list of layers of expert ids") from error
    return layers, slots


def _check_positions(rows: list[tuple[int, dict[str, Any]]], last: dict[str, int], path: Path) -> None:
    for number, row in rows:
        sequence, position = str(row["seq"]), row["pos"]
        if position <= last.get(sequence, -1):
            raise TraceError(
                f"{path}, line {number}: position {position} of sequence {sequence!r} comes after position "
                f"{last[sequence]}: a token twice, or lines out of order",
                hint="remove the repeated lines, or sort each sequence's lines by pos",
            )
        last[sequence] = position


def _highest_id(path: Path) -> int:
    highest = 0
    with SourceFile(path) as source:
        for number, row in _rows(source):
            try:
                highest = max(highest, max(max(ids) for ids in row["ids"]))
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: ids are not a list of layers of expert ids") from error
    return highest


FORMAT = Format(
    name="topk-jsonl",
    looks_for='a JSON object a line with "seq", "pos", "ids" [layers][top-k] and "p" (gate weights)',
    recognises=_recognises,
    open=_open,
)
