"""``routed-experts``: vLLM's ``CompletionOutput.routed_experts`` arrays, saved with ``numpy.save`` or ``savez``.

Each array is [tokens, layers, top-k] of one sequence, prompt and answer; ids only, no weights. In an ``.npz`` every
array of that shape is a sequence, named by its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.errors import TraceError
from probes.text import plural, verb
from runtime.trace.chunking import equal_shares, new_chunk
from runtime.trace.importers.formats import Format, Head, ImportedTrace, ImportOptions, Reading, inferred_experts
from runtime.trace.importers.streams import plain_file
from runtime.trace.records import MAX_EXPERTS, Bools, RoutingTrace, TraceMeta

_NO_WEIGHTS = "vLLM's routed_experts hold ids, but no weights: each of a token's experts gets an equal share"
_NO_PHASES = "the arrays do not say where a prompt ends: phases are unknown (give --phase to set one)"
_NPY_MAGIC = b"\x93NUMPY"
_BATCH = 4096


def _recognises(head: Head) -> bool:
    if head.start.startswith(_NPY_MAGIC):
        return True
    return head.start.startswith(b"PK\x03\x04") and b".npy" in head.start[:512]


@dataclass(slots=True)
class _Survey:
    """What a first pass over the arrays finds: layers that route, slots, the highest id, and what is no routing."""

    used_L: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    slots: int = 0
    highest_id: int = 0
    tokens: int = 0
    ignored: list[str] = field(default_factory=list)


def _open(head: Head, options: ImportOptions) -> ImportedTrace:
    survey = _survey(head.path)
    if not survey.used_L.any():
        raise TraceError(
            f"{head.path} holds no integer array [tokens, layers, top-k] of expert ids; it holds {survey.ignored}",
            hint="save CompletionOutput.routed_experts with numpy.save, or several with numpy.savez",
        )
    experts, notes = inferred_experts(options, None, survey.highest_id)
    meta = TraceMeta(
        model=options.model,
        num_experts=experts,
        top_k=survey.slots,
        layer_numbers=tuple(int(layer) for layer in np.flatnonzero(survey.used_L)),
        engine="vllm",
        gates_recorded=False,
    )
    notes += (_NO_WEIGHTS,) if options.phase >= 0 else (_NO_WEIGHTS, _NO_PHASES)
    if dense := len(survey.used_L) - meta.moe_layers:
        notes += (f"{plural(dense, 'layer')} without any expert {verb(dense, 'is', 'are')} dense and left out",)
    if survey.ignored:
        notes += (f"not routing, left out: {', '.join(survey.ignored)}",)
    return ImportedTrace(meta, lambda reading: _decode(head.path, meta, survey.tokens, options, reading), notes=notes)


def _survey(path: Path) -> _Survey:
    survey = _Survey()
    for name, array in _arrays(path):
        if not _is_routing(array):
            survey.ignored.append(f"{name} {array.dtype}{list(array.shape)}")
            continue
        if survey.slots and (len(survey.used_L), survey.slots) != array.shape[1:]:
            raise TraceError(
                f"{path}, array {name!r}: {array.shape[1]} layers of {array.shape[2]} experts, "
                f"{len(survey.used_L)} of {survey.slots} in the arrays before",
                hint="arrays of two models are in one file: import each model's alone",
            )
        survey.slots = array.shape[2]
        # An engine leaves a dense layer at −1, or all at zero, which is no choice where there are several slots.
        lowest_chosen = 1 if survey.slots > 1 else 0
        used = np.zeros(array.shape[1], dtype=np.bool_)
        for start in range(0, len(array), _BATCH):
            used |= (array[start : start + _BATCH] >= lowest_chosen).any(axis=(0, 2))
        survey.used_L = np.logical_or(survey.used_L, used) if len(survey.used_L) else used
        survey.highest_id = max(survey.highest_id, int(array.max(initial=0)))
        survey.tokens += len(array)
    return survey


def _decode(
    path: Path, meta: TraceMeta, tokens: int, options: ImportOptions, reading: Reading
) -> Iterator[RoutingTrace]:
    names: tuple[str, ...] = ()
    done = 0
    for name, array in _arrays(path):
        if not _is_routing(array):
            continue
        names = (*names, name)
        for start in range(0, len(array), _BATCH):
            raw = array[start : start + _BATCH, list(meta.layer_numbers)]
            if raw.max(initial=0) > MAX_EXPERTS or raw.min(initial=0) < -1:
                raise TraceError(f"{path}, array {name!r}: an expert id is not in -1..{MAX_EXPERTS}")
            ids = raw.astype(np.int16)
            yield new_chunk(
                meta,
                names,
                np.full(len(ids), len(names) - 1, dtype=np.int32),
                ids,
                equal_shares(ids),
                position=np.arange(start, start + len(ids)),
                phase=options.phase,
            )
            done += len(ids)
            reading.fraction = done / tokens


def _is_routing(array: npt.NDArray[Any]) -> bool:
    return array.ndim == 3 and array.dtype.kind in "iu" and 0 not in array.shape[1:]


def _arrays(path: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Name and array of every array in the file, one in memory at a time; pickled objects are refused."""
    with plain_file(path) as plain, plain.open("rb") as stream:
        try:
            if stream.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
                # A single array is mapped, so that its size does not matter.
                yield path.name.split(".", 1)[0], np.load(plain, mmap_mode="r", allow_pickle=False)
                return
            stream.seek(0)
            loaded = np.load(stream, allow_pickle=False)
            for name in loaded.files:
                yield name, loaded[name]
        except Exception as error:  # NumPy raises whatever its parsers meet: TokenError, NotImplementedError, …
            raise TraceError(
                f"{path}: cut off, damaged, or with pickled objects, which are refused ({error})",
                hint="save plain integer arrays with numpy.save or numpy.savez",
            ) from error


FORMAT = Format(
    name="routed-experts",
    looks_for="a NumPy .npy or .npz file of integer arrays [tokens, layers, top-k]",
    recognises=_recognises,
    open=_open,
)
