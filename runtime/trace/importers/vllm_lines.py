"""The lines of ``vllm-jsonl`` logs: each a token's choice at one layer, put together into whole tokens.

Shape legend: L layers, K slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.errors import TraceError
from runtime.trace.importers.streams import SourceFile
from runtime.trace.records import MAX_EXPERTS, TraceMeta

# A token whose layers are not all there after so many later tokens will not be completed.
_MAX_PENDING = 1 << 20

# Request, token_idx, layer, expert ids, gate weights.
Route = tuple[str, int, int, list[int], list[float]]


def routes(source: SourceFile, stated: dict[str, Any]) -> Iterator[tuple[int, Route]]:
    """Line number and content of every route line; what meta lines say is added to ``stated``.

    Raises ``TraceError`` with the number of a line that is neither, or that belongs to another model.
    """
    for number, line in source.lines():
        try:
            row = json.loads(line)
            if row["type"] == "meta":
                _merge_meta(stated, row, source.path, number)
                continue
            route = _route(row)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TraceError(
                f"{source.path}, line {number}: not a route line ({type(error).__name__}: {error})",
                hint="the file is cut off or damaged there",
            ) from error
        yield number, route


def _route(row: dict[str, Any]) -> Route:
    ids, weights = row["topk_ids"], row["topk_weights"]
    token, layer = row["token_idx"], row["layer"]
    if not ids or len(ids) != len(weights):
        raise ValueError(f"{len(ids)} ids and {len(weights)} weights")
    if not all(type(expert) is int and -1 <= expert <= MAX_EXPERTS for expert in ids):
        raise ValueError(f"expert ids {ids}")
    if not (type(token) is int and 0 <= token < 1 << 31 and type(layer) is int and 0 <= layer < 1 << 15):
        raise ValueError(f"token_idx {token!r}, layer {layer!r}")
    return str(row["req_id"]), token, layer, ids, [float(weight) for weight in weights]


def _merge_meta(stated: dict[str, Any], row: dict[str, Any], path: Path, number: int) -> None:
    for key in ("model_id", "num_experts", "top_k"):
        if key in stated and row.get(key) != stated[key]:
            raise TraceError(
                f"{path}, line {number}: {key} {row.get(key)!r} after {stated[key]!r}: two models in one file",
                hint="import each model's lines alone",
            )
        if key != "model_id" and type(row.get(key, 1)) is not int:
            raise TypeError(f"{key} {row[key]!r}")
    stated.update(row)


@dataclass(slots=True)
class LoggedToken:
    """One token as far as its layers have been seen. ``run``: how often its request's token_idx has restarted."""

    request: str
    run: int
    index: int
    missing: int
    ids_LK: list[list[int]]
    gates_LK: list[list[float]]


def tokens_of(source: SourceFile, meta: TraceMeta) -> Iterator[LoggedToken]:
    """Complete tokens in the order in which they first appear, whether the log goes by token or by layer."""
    place = {number: index for index, number in enumerate(meta.layer_numbers)}
    last: dict[tuple[str, int], tuple[int, int]] = {}
    pending: dict[tuple[str, int, int], LoggedToken] = {}
    layers = meta.moe_layers
    for _, (request, index, layer, ids, weights) in routes(source, {}):
        run, before = last.get((request, layer), (0, -1))
        run += index <= before
        last[request, layer] = (run, index)
        key = (request, run, index)
        token = pending.get(key)
        if token is None:
            token = pending[key] = LoggedToken(request, run, index, layers, [[]] * layers, [[]] * layers)
        token.ids_LK[place[layer]], token.gates_LK[place[layer]] = ids, weights
        token.missing -= 1
        while pending and (head := next(iter(pending.values()))).missing == 0:
            del pending[head.request, head.run, head.index]
            yield head
        if len(pending) > _MAX_PENDING:
            break
    if pending:
        head = next(iter(pending.values()))
        raise TraceError(
            f"{source.path}: token {head.index} of request {head.request!r} lacks {head.missing} of {layers} layers",
            hint="the log is cut off, or some layers were not logged for every token",
        )
