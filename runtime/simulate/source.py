"""The trace to replay, from any file that holds routing."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from probes.errors import TraceError
from runtime.models.config import MoeShape
from runtime.simulate.batches import main_layers
from runtime.trace.importers.detect import detect_and_open
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.reader import TraceReader
from runtime.trace.records import LoadProfile, TraceMeta, TraceSource
from runtime.trace.writer import write_trace


@contextlib.contextmanager
def open_for_replay(
    path: Path, options: ImportOptions | None = None, *, on_progress: Callable[[float], None] | None = None
) -> Iterator[TraceSource]:
    """The trace in ``path``. Another tool's dump is first turned into a temporary trace: replaying looks twice.

    ``on_progress`` is told the fraction of a dump that was read. Raises ``TraceError``, also for counts without tokens.
    """
    source = detect_and_open(path, options)
    if isinstance(source, LoadProfile):
        raise TraceError(
            f"{path} holds counts, not tokens: which experts a token chose together, and in which order tokens came, "
            "is not in it, so that there is nothing to replay",
            hint="caee trace show FILE gives its load balance; caee trace synth --profile FILE makes a trace of it",
        )
    if isinstance(source, TraceReader):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="caee-") as folder:
        copy = Path(folder) / "trace.parquet"
        write_trace(copy, source, on_progress=on_progress)
        yield _Imported(copy, source.notes)


class _Imported(TraceReader):
    """A temporary trace with the notes of the import that made it."""

    def __init__(self, path: Path, notes: tuple[str, ...]) -> None:
        super().__init__(path)
        self._notes = notes


def model_notes(shape: MoeShape, meta: TraceMeta) -> tuple[str, ...]:
    """A note where a trace of ``meta`` does not fit the model of ``shape``, whose experts give the times."""
    unlike = [
        f"{given} {what} (the model {wanted})"
        for what, given, wanted in (
            ("experts per layer", meta.num_experts, shape.num_experts),
            ("experts per token", meta.top_k, shape.top_k),
            ("MoE layers", len(main_layers(meta)), shape.moe_layers),
        )
        if given != wanted
    ]
    if not unlike:
        return ()
    return (
        f"the trace does not fit --model, whose experts give the times: it has {', '.join(unlike)}; it is of another "
        "model, or of a part of this one",
    )


def read_loads(path: Path) -> LoadProfile:
    """A load profile for a balanced placement. Raises ``TraceError`` where the file holds none."""
    profile = detect_and_open(path)
    if not isinstance(profile, LoadProfile):
        raise TraceError(
            f"{path} is a trace, not a load profile", hint="its warm-up steps are used without --load-profile"
        )
    return profile
