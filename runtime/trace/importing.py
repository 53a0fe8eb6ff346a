"""``caee trace import``: any file that holds routing becomes one of the project's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.trace.importers.detect import detect_and_open
from runtime.trace.importers.formats import ImportOptions, check_asked
from runtime.trace.profile import write_profile
from runtime.trace.records import LoadProfile, TraceMeta
from runtime.trace.writer import write_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What was written. ``tokens`` None: a load profile that does not say; ``bytes_per_choice``: None in profiles."""

    kind: str
    meta: TraceMeta
    tokens: int | None
    size_bytes: int
    bytes_per_choice: float | None
    notes: tuple[str, ...]


def import_trace(
    path: Path,
    output: Path,
    options: ImportOptions,
    *,
    format_name: str | None = None,
    force: bool = False,
    on_progress: Callable[[float], None] | None = None,
) -> Imported:
    """Write ``path`` as a trace or load profile at ``output``, whole or not at all.

    ``on_progress`` is told the fraction of the file that was read. Raises ``TraceError``, ``UsageError``.
    """
    source = detect_and_open(path, options, format_name=format_name)
    check_asked(path, source.meta, options)
    if isinstance(source, LoadProfile):
        write_profile(output, source, force=force)
        return Imported(
            kind="load_profile",
            meta=source.meta,
            tokens=source.tokens,
            size_bytes=output.stat().st_size,
            bytes_per_choice=None,
            notes=("counts without tokens: a load profile, for show, placements and synth",),
        )
    tokens = write_trace(output, source, force=force, on_progress=on_progress)
    size = output.stat().st_size
    choices = tokens * source.meta.moe_layers * source.meta.top_k
    return Imported(
        kind="routing",
        meta=source.meta,
        tokens=tokens,
        size_bytes=size,
        bytes_per_choice=size / choices if choices else None,
        notes=source.notes,
    )


def imported_info(path: Path, output: Path, imported: Imported) -> dict[str, Any]:
    """The document of ``caee trace import --json``."""
    return {
        "schema": "caee.trace.import/1",
        "input": str(path),
        "output": str(output),
        **dataclasses.asdict(imported),
        "notes": list(imported.notes),
    }
