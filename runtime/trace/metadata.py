"""A trace's metadata as the JSON that its Parquet file carries, and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from probes.errors import TraceError
from runtime.trace.check import check_meta
from runtime.trace.records import FORMAT_VERSION, IdSpace, ScoreFunction, TraceMeta

# The key of the Parquet file's schema metadata; its value is the JSON.
METADATA_KEY = b"caee.trace"
ROUTING = "routing"
LOAD_PROFILE = "load_profile"


def meta_to_json(meta: TraceMeta, kind: str, extra: dict[str, Any] | None = None) -> bytes:
    """``kind``: ``routing`` or ``load_profile``; ``extra``: further top-level keys."""
    document = {"kind": kind, **dataclasses.asdict(meta), **(extra or {})}
    return json.dumps(document, allow_nan=False, ensure_ascii=False).encode()


def meta_from_json(text: bytes, where: str) -> tuple[str, TraceMeta, dict[str, Any]]:
    """Kind, metadata, and the further keys. Raises ``TraceError`` naming ``where`` it was read."""
    try:
        document = json.loads(text)
        version = document.pop("format_version")
        kind = document.pop("kind")
    except (ValueError, KeyError, AttributeError) as error:
        raise TraceError(
            f"{where}: the trace metadata is damaged ({error})", hint="record or import it again"
        ) from error
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{where}: trace format version {version!r}, this caee reads version {FORMAT_VERSION}",
            hint="update caee, or import the original again",
        )
    try:
        meta, extra = _meta(document)
    except (TypeError, ValueError, KeyError) as error:
        raise TraceError(
            f"{where}: the trace metadata is damaged ({error})", hint="record or import it again"
        ) from error
    if kind not in (ROUTING, LOAD_PROFILE):
        raise TraceError(f"{where}: unknown kind of trace {kind!r}", hint="update caee, or import the original again")
    check_meta(meta)
    return kind, meta, extra


def _meta(document: dict[str, Any]) -> tuple[TraceMeta, dict[str, Any]]:
    known = {field.name for field in dataclasses.fields(TraceMeta)}
    values = {key: value for key, value in document.items() if key in known}
    extra = {key: value for key, value in document.items() if key not in known}
    values["num_experts"] = int(values["num_experts"])
    values["top_k"] = int(values["top_k"])
    values["layer_numbers"] = tuple(int(number) for number in values["layer_numbers"])
    values["draft_layers"] = tuple(int(number) for number in values["draft_layers"])
    values["score_function"] = ScoreFunction(values["score_function"])
    values["id_space"] = IdSpace(values["id_space"])
    values["parameters"] = dict(values["parameters"])
    return TraceMeta(**values), extra
