"""The way in for any file that may hold routing: told from its content, opened by the importer that knows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from probes.errors import TraceError, UsageError
from runtime.trace.importers import counts, routed_experts, sglang_dump, topk_jsonl, vllm_jsonl
from runtime.trace.importers.formats import Format, Head, ImportOptions
from runtime.trace.importers.streams import MAX_LINE_BYTES, SourceFile
from runtime.trace.metadata import LOAD_PROFILE
from runtime.trace.profile import read_profile
from runtime.trace.reader import TraceReader, holds_pieces, metadata_of, open_parquet, partial_folder
from runtime.trace.records import LoadProfile, TraceSource

FORMATS: tuple[Format, ...] = (
    topk_jsonl.FORMAT,
    vllm_jsonl.FORMAT,
    sglang_dump.FORMAT,
    routed_experts.FORMAT,
    *counts.FORMATS,
)
_HEAD_BYTES = 1 << 16
_PARQUET_MAGIC = b"PAR1"


def detect_and_open(
    path: Path, options: ImportOptions | None = None, *, format_name: str | None = None
) -> TraceSource | LoadProfile:
    """Open a trace, a load profile, an interrupted recording or another tool's dump, whichever ``path`` is.

    ``format_name`` says which importer to use instead of asking each. Raises ``TraceError`` that lists what was looked
    for where no importer knows the file, and ``UsageError`` for an unknown format name.
    """
    options = options or ImportOptions()
    if path.is_dir() or (not path.exists() and holds_pieces(partial_folder(path))):
        return TraceReader(path)
    head = _head(path)
    if head.start.startswith(_PARQUET_MAGIC):
        return _open_parquet(path)
    return _choose(head, format_name).open(head, options)


def _choose(head: Head, format_name: str | None) -> Format:
    by_name = {known.name: known for known in FORMATS}
    if format_name is not None and format_name not in by_name:
        raise UsageError(f"unknown format {format_name!r}", hint=f"known formats: {', '.join(by_name)}")
    candidates = FORMATS if format_name is None else (by_name[format_name],)
    for candidate in candidates:
        if candidate.recognises(head):
            return candidate
    if head.value is None and head.start.lstrip()[:1] in (b"{", b"["):
        head = Head(path=head.path, start=head.start, value=counts.load_json(head.path))
        for candidate in candidates:
            if candidate.recognises(head):
                return candidate
    if format_name is not None:
        raise TraceError(
            f"{head.path} is {_seen(head)}; looked for {candidates[0].looks_for} ({format_name})",
            hint="leave --format out to try every format; pickles are never opened",
        )
    raise TraceError(
        f"{head.path} is {_seen(head)}; looked for a caee trace (Parquet), {', '.join(by_name)}",
        hint="--format NAME says what a file of one of these has to hold; pickles are never opened",
    )


def _head(path: Path) -> Head:
    with SourceFile(path) as source:
        start = source.read(_HEAD_BYTES)
    if not start:
        raise TraceError(f"{path} is empty", hint="check that the recording or the download ended well")
    value: Any = None
    if start.lstrip()[:1] in (b"{", b"["):
        with SourceFile(path) as source:
            value = _first_value(next(source.lines(), (0, b""))[1])
    return Head(path=path, start=start, value=value)


def _first_value(line: bytes) -> Any:
    """The JSON value that the first line holds, None where the line alone is not one."""
    assert len(line) <= MAX_LINE_BYTES
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _open_parquet(path: Path) -> TraceSource | LoadProfile:
    with open_parquet(path) as parquet:
        kind, _, _ = metadata_of(parquet, path)
    return read_profile(path) if kind == LOAD_PROFILE else TraceReader(path)


def _seen(head: Head) -> str:
    if isinstance(head.value, dict):
        return f"JSON with the keys {sorted(head.value)[:8]}"
    if head.value is not None:
        return f"JSON, a {type(head.value).__name__}"
    return f"a file that begins with {head.start[:8]!r}"
