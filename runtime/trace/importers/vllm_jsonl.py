"""``vllm-jsonl``: the routing logs that patched vLLMs write, a line per token and layer after a line of metadata.

``{"type": "route", "req_id", "token_idx", "layer", "topk_ids", "topk_weights"}``. Such logs are dirty: the warm-up's
dummy tokens are in them, ``req_id`` may be the same for all requests, and ``token_idx`` starts again at every forward
pass in some (github.com/KennethWang1221/vllm-expert-profiler, github.com/KaxitPandya/cerebras-assesment2).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probes.errors import TraceError
from runtime.trace.chunking import SequenceTable, new_chunk
from runtime.trace.importers.dummies import DummyMarker
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
from runtime.trace.records import MAX_EXPERTS, RoutingTrace, TraceMeta

_BATCH = 4096
# A token whose layers are not all there after so many later tokens will not be completed.
_MAX_PENDING = 1 << 20
_META_KEYS = ("seed", "torch_version", "device")

Route = tuple[str, int, int, list[int], list[float]]


@dataclass(slots=True)
class _Survey:
    """What a first pass over the log finds. ``top_k``, ``layers`` and ``num_experts`` as stated, else as seen."""

    stated: dict[str, Any] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)
    top_k: int = 0
    highest_id: int = 0
    restarts: int = 0
    sample: list[list[float]] = field(default_factory=list)


def _recognises(head: Head) -> bool:
    value = head.value
    if not isinstance(value, dict):
        return False
    return value.get("type") == "route" or (value.get("type") == "meta" and "layers_logged" in value)


def _open(head: Head, options: ImportOptions) -> ImportedTrace:
    survey = _survey(head.path)
    stated = survey.stated
    if not survey.layers:
        raise TraceError(f"{head.path} holds no route line", hint="record some traffic first")
    experts, notes = inferred_experts(options, stated.get("num_experts"), survey.highest_id)
    meta = TraceMeta(
        model=options.model or stated.get("model_id"),
        num_experts=experts,
        top_k=survey.top_k,
        layer_numbers=tuple(sorted(survey.layers)),
        normalised=weights_sum_to_one(np.array(survey.sample, dtype=np.float32)),
        engine="vllm",
        engine_version=stated.get("vllm_version"),
        parameters={key: stated[key] for key in _META_KEYS if key in stated},
    )
    if survey.restarts:
        notes += (
            f"token_idx starts again {survey.restarts} times: each run of it is taken as one forward pass (a step) and "
            "as a sequence of its own, since the log does not say which request a row belongs to",
        )
    by_step = survey.restarts > 0 and len(survey.requests) == 1
    return ImportedTrace(meta, lambda reading: _decode(head.path, meta, options, by_step, reading), notes=notes)


def _survey(path: Path) -> _Survey:
    survey = _Survey()
    last: dict[tuple[str, int], int] = {}
    with SourceFile(path) as source:
        for number, route in _routes(source, survey):
            request, token, layer, ids, weights = route
            survey.layers.add(layer)
            survey.requests.add(request)
            survey.top_k = survey.top_k or survey.stated.get("top_k") or len(ids)
            if len(ids) != survey.top_k:
                raise TraceError(
                    f"{path}, line {number}: {len(ids)} experts, not {survey.top_k} as said or seen before",
                    hint="lines of two models are in one file: import each model's lines alone",
                )
            survey.highest_id = max(survey.highest_id, *ids)
            if len(survey.sample) < _BATCH:
                survey.sample.append(weights)
            if token <= last.get((request, layer), -1) and layer == min(survey.layers):
                survey.restarts += 1
            last[request, layer] = token
    return survey


def _decode(
    path: Path, meta: TraceMeta, options: ImportOptions, by_step: bool, reading: Reading
) -> Iterator[RoutingTrace]:
    marker = DummyMarker()
    real = 0
    for chunk in marker.mark(_chunks(path, meta, options, by_step, reading)):
        real += chunk.tokens
        yield chunk
    if marker.marked:
        reading.notes.append(
            f"{marker.marked} identical rows are marked as warm-up dummies, which count for nothing; "
            f"{real - marker.marked} real tokens remain"
        )


def _chunks(
    path: Path, meta: TraceMeta, options: ImportOptions, by_step: bool, reading: Reading
) -> Iterator[RoutingTrace]:
    sequences = SequenceTable()
    tokens: list[_Token] = []
    with SourceFile(path) as source:
        for token in _tokens(source, meta):
            tokens.append(token)
            if len(tokens) == _BATCH:
                reading.fraction = source.fraction_read
                yield _chunk(tokens, meta, options, by_step, sequences)
                tokens = []
    if tokens:
        yield _chunk(tokens, meta, options, by_step, sequences)


@dataclass(slots=True)
class _Token:
    """One token as far as its layers have been seen. ``run``: how often its request's token_idx has restarted."""

    request: str
    run: int
    index: int
    missing: int
    ids_LK: list[list[int]]
    gates_LK: list[list[float]]


def _tokens(source: SourceFile, meta: TraceMeta) -> Iterator[_Token]:
    """Complete tokens in the order in which they first appear, whether the log goes by token or by layer."""
    place = {number: index for index, number in enumerate(meta.layer_numbers)}
    last: dict[tuple[str, int], tuple[int, int]] = {}
    pending: dict[tuple[str, int, int], _Token] = {}
    layers = meta.moe_layers
    for _, (request, index, layer, ids, weights) in _routes(source, _Survey()):
        run, before = last.get((request, layer), (0, -1))
        run += index <= before
        last[request, layer] = (run, index)
        key = (request, run, index)
        token = pending.get(key)
        if token is None:
            token = pending[key] = _Token(request, run, index, layers, [[]] * layers, [[]] * layers)
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


def _chunk(
    tokens: list[_Token], meta: TraceMeta, options: ImportOptions, by_step: bool, sequences: SequenceTable
) -> RoutingTrace:
    number = [sequences.number(f"{token.request}#{token.run}") for token in tokens]
    return new_chunk(
        meta,
        sequences.names,
        np.array(number, dtype=np.int32),
        np.array([token.ids_LK for token in tokens], dtype=np.int16),
        np.array([token.gates_LK for token in tokens], dtype=np.float32),
        position=[token.index for token in tokens],
        step=[token.run for token in tokens] if by_step else -1,
        phase=options.phase,
    )


def _routes(source: SourceFile, survey: _Survey) -> Iterator[tuple[int, Route]]:
    for number, line in source.lines():
        try:
            row = json.loads(line)
            if row["type"] == "meta":
                _merge_meta(survey, row, source.path, number)
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


def _merge_meta(survey: _Survey, row: dict[str, Any], path: Path, number: int) -> None:
    for key in ("model_id", "num_experts", "top_k"):
        if key in survey.stated and row.get(key) != survey.stated[key]:
            raise TraceError(
                f"{path}, line {number}: {key} {row.get(key)!r} after {survey.stated[key]!r}: two models in one file",
                hint="import each model's lines alone",
            )
        if key != "model_id" and type(row.get(key, 1)) is not int:
            raise TypeError(f"{key} {row[key]!r}")
    survey.stated.update(row)


FORMAT = Format(
    name="vllm-jsonl",
    looks_for='a JSON object a line with "type": "meta" (layers_logged) or "route" (topk_ids, topk_weights)',
    recognises=_recognises,
    open=_open,
)
