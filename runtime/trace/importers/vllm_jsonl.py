"""``vllm-jsonl``: the routing logs that patched vLLMs write, a line per token and layer after a line of metadata.

``{"type": "route", "req_id", "token_idx", "layer", "topk_ids", "topk_weights"}``. Such logs are dirty: the warm-up's
dummy tokens are in them, ``req_id`` may be the same for all requests, and ``token_idx`` starts again at every forward
pass in some (github.com/KennethWang1221/vllm-expert-profiler, github.com/KaxitPandya/cerebras-assesment2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probes.errors import TraceError
from probes.text import plural, verb
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
from runtime.trace.importers.vllm_lines import LoggedToken, routes, tokens_of
from runtime.trace.records import RoutingTrace, TraceMeta

_BATCH = 4096
_META_KEYS = ("seed", "torch_version", "device")


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
            f"token_idx starts again {plural(survey.restarts, 'time')}: each run of it is taken as one forward pass (a "
            "step) and as a sequence of its own, since the log does not say which request a row belongs to",
        )
    by_step = survey.restarts > 0 and len(survey.requests) == 1
    return ImportedTrace(meta, lambda reading: _decode(head.path, meta, options, by_step, reading), notes=notes)


def _survey(path: Path) -> _Survey:
    survey = _Survey()
    last: dict[tuple[str, int], int] = {}
    with SourceFile(path) as source:
        for number, route in routes(source, survey.stated):
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
            f"{plural(real - marker.marked, 'real token')} {verb(real - marker.marked, 'remains', 'remain')}"
        )


def _chunks(
    path: Path, meta: TraceMeta, options: ImportOptions, by_step: bool, reading: Reading
) -> Iterator[RoutingTrace]:
    sequences = SequenceTable()
    tokens: list[LoggedToken] = []
    with SourceFile(path) as source:
        for token in tokens_of(source, meta):
            tokens.append(token)
            if len(tokens) == _BATCH:
                reading.fraction = source.fraction_read
                yield _chunk(tokens, meta, options, by_step, sequences)
                tokens = []
    if tokens:
        yield _chunk(tokens, meta, options, by_step, sequences)


def _chunk(
    tokens: list[LoggedToken], meta: TraceMeta, options: ImportOptions, by_step: bool, sequences: SequenceTable
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


FORMAT = Format(
    name="vllm-jsonl",
    looks_for='a JSON object a line with "type": "meta" (layers_logged) or "route" (topk_ids, topk_weights)',
    recognises=_recognises,
    open=_open,
)
