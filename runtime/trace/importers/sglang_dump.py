"""``sglang-recorder``: dumps of SGLang's expert distribution recorder (``torch.save`` files), all three modes.

``stat``: summed logical counts. ``per_pass``: counts per forward pass, of physical experts. ``per_token``: every
token's physical expert ids, no weights. Layout: sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py.
Tensors and plain containers are loaded, nothing in the file is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.errors import TraceError
from runtime.trace.chunking import SequenceTable, equal_shares, new_chunk
from runtime.trace.importers.counts import profile_from_counts
from runtime.trace.importers.dummies import DummyMarker
from runtime.trace.importers.formats import Format, Head, ImportedTrace, ImportOptions, Reading
from runtime.trace.importers.streams import plain_file
from runtime.trace.records import Bools, Int16s, Int64s, LoadProfile, Phase, RoutingTrace, TraceMeta, TraceSource

# sglang.srt.model_executor.forward_batch_info.ForwardMode; the others (verify, draft) are left unknown.
_EXTEND, _DECODE, _MIXED = 1, 2, 3
_NO_REQUESTS = (
    "SGLang records no request ids: a decode token's sequence is its row in the batch, a prompt's is its forward pass"
)
_LAST_MAP = (
    "physical ids were mapped to logical ones by the dump's last placement; if experts moved while it was recorded, "
    "earlier passes are mapped wrongly"
)


def _recognises(head: Head) -> bool:
    return head.start.startswith(b"PK\x03\x04") and b"/data.pkl" in head.start[:4096]


def _open(head: Head, options: ImportOptions) -> TraceSource | LoadProfile:
    dump = _load(head.path)
    if "logical_count" in dump:
        return _stat(dump, options, head.path)
    if not {"records", "last_physical_to_logical_map"} <= dump.keys():
        raise TraceError(
            f"{head.path}: a torch file, but not an SGLang recorder dump: it has {sorted(map(str, dump))[:8]}",
            hint="expected logical_count, or records and last_physical_to_logical_map",
        )
    to_logical_LP = _integers(dump["last_physical_to_logical_map"], 2, f"{head.path}: last_physical_to_logical_map")
    records = dump["records"]
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        raise TraceError(f"{head.path} holds no record", hint="record some traffic before dumping")
    if all("topk_ids_of_layer" in record for record in records):
        return _per_token(records, to_logical_LP, options, head.path)
    return _per_pass(records, to_logical_LP, options, head.path)


def _load(path: Path) -> dict[str, Any]:
    import pickle

    import torch

    with plain_file(path) as plain:
        try:
            dump = torch.load(plain, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise TraceError(
                f"{path}: holds objects that only executing code could load; refused",
                hint="only dumps of tensors, numbers, lists and dictionaries are read",
            ) from error
        except Exception as error:  # whatever its unpickler meets in damaged bytes
            raise TraceError(f"{path}: cut off or damaged ({error})", hint="copy or dump the file again") from error
    if not isinstance(dump, dict):
        raise TraceError(f"{path}: a torch file, but not an SGLang recorder dump: it holds a {type(dump).__name__}")
    return dump


def _stat(dump: dict[str, Any], options: ImportOptions, path: Path) -> LoadProfile:
    counts_SLN = _integers(dump["logical_count"], 3, f"{path}: logical_count")
    return profile_from_counts(
        counts_SLN.sum(axis=0).astype(np.float64), options, engine="sglang", parameters={"steps": len(counts_SLN)}
    )


def _per_pass(records: list[dict[str, Any]], to_logical_LP: Int64s, options: ImportOptions, path: Path) -> LoadProfile:
    layers = np.arange(len(to_logical_LP))[:, None]
    experts = _logical_experts(to_logical_LP)
    counts_LN = np.zeros((len(to_logical_LP), experts))
    for number, record in enumerate(records):
        where = f"{path}, record {number}: global_physical_count"
        counts_LP = _integers(record.get("global_physical_count"), 2, where)
        if counts_LP.shape != to_logical_LP.shape:
            raise TraceError(f"{where} has shape {counts_LP.shape}, the placement {to_logical_LP.shape}")
        np.add.at(counts_LN, (layers, to_logical_LP), counts_LP)
    passes = len({record.get("forward_pass_id") for record in records})
    return profile_from_counts(counts_LN, options, engine="sglang", parameters={"forward_passes": passes})


def _per_token(
    records: list[dict[str, Any]], to_logical_LP: Int64s, options: ImportOptions, path: Path
) -> ImportedTrace:
    used_LK: Bools = np.zeros((len(to_logical_LP), 0), dtype=np.bool_)
    for number, record in enumerate(records):
        used = np.any(_topk_ids(record, len(to_logical_LP), f"{path}, record {number}") >= 0, axis=1)
        if used_LK.shape[1] not in (0, used.shape[1]):
            raise TraceError(f"{path}, record {number}: {used.shape[1]} slots a token, {used_LK.shape[1]} before")
        used_LK = np.logical_or(used_LK, used) if used_LK.shape[1] else used
    moe_layers = np.flatnonzero(used_LK.any(axis=1))
    top_k = int(np.flatnonzero(used_LK.any(axis=0)).max(initial=-1)) + 1
    if not top_k:
        raise TraceError(f"{path}: no token chose any expert", hint="record some traffic before dumping")
    meta = TraceMeta(
        model=options.model,
        num_experts=_logical_experts(to_logical_LP),
        top_k=top_k,
        layer_numbers=tuple(int(layer) for layer in moe_layers),
        engine="sglang",
        gates_recorded=False,
        parameters={"sequences": "batch rows"},
    )
    to_logical = to_logical_LP[moe_layers]

    def decode(reading: Reading) -> Iterator[RoutingTrace]:
        marker = DummyMarker()
        yield from marker.mark(_chunks(records, meta, to_logical, path, reading))
        if marker.marked:
            reading.notes.append(f"{marker.marked} identical rows are marked as warm-up dummies")

    notes = ("SGLang records ids, but no weights: each of a token's experts gets an equal share", _NO_REQUESTS)
    redundant = to_logical_LP.shape[1] > meta.num_experts
    moved = not np.array_equal(to_logical_LP, np.broadcast_to(np.arange(to_logical_LP.shape[1]), to_logical_LP.shape))
    return ImportedTrace(meta, decode, notes=(*notes, _LAST_MAP) if redundant or moved else notes)


def _chunks(
    records: list[dict[str, Any]], meta: TraceMeta, to_logical_LP: Int64s, path: Path, reading: Reading
) -> Iterator[RoutingTrace]:
    sequences = SequenceTable()
    for number, record in enumerate(records):
        try:
            chunk = _chunk(record, meta, to_logical_LP, sequences, f"{path}, record {number}")
        except (TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{path}, record {number}: damaged ({error})", hint="dump the recording again") from error
        reading.fraction = (number + 1) / len(records)
        yield chunk


def _chunk(
    record: dict[str, Any], meta: TraceMeta, to_logical_LP: Int64s, sequences: SequenceTable, where: str
) -> RoutingTrace:
    raw_LTK = _topk_ids(record, None, where)[list(meta.layer_numbers), :, : meta.top_k]
    ids_TLK = _to_logical(raw_LTK, to_logical_LP, where).transpose(1, 0, 2)
    tokens = len(ids_TLK)
    position = record.get("positions", [-1] * tokens)
    if len(position) != tokens:
        raise TraceError(f"{where}: {len(position)} positions for {tokens} tokens")
    names, phase = _rows(record, tokens, where)
    return new_chunk(
        meta,
        sequence_T=np.array([sequences.number(name) for name in names], dtype=np.int32),
        names=sequences.names,
        ids_TLK=ids_TLK,
        gates_TLK=equal_shares(ids_TLK),
        position=position,
        step=int(record.get("forward_pass_id", -1)),
        phase=phase,
        rank=int(record.get("rank", 0)),
    )


def _rows(record: dict[str, Any], tokens: int, where: str) -> tuple[list[str], list[Phase]]:
    """Sequence name and phase of every token of one forward pass."""
    rank, mode = record.get("rank", 0), record.get("forward_mode")
    lengths = record.get("extend_seq_lens")
    if mode not in (_EXTEND, _MIXED) or not lengths:
        phase = Phase.DECODE if mode == _DECODE else Phase.UNKNOWN
        return [f"rank{rank}/row{row}" for row in range(tokens)], [phase] * tokens
    if sum(lengths) != tokens:
        raise TraceError(f"{where}: extend_seq_lens sum to {sum(lengths)}, not to {tokens} tokens")
    names: list[str] = []
    phases: list[Phase] = []
    for request, length in enumerate(lengths):
        # A mixed batch holds running requests too, which look like prompts of one token.
        phase = Phase.UNKNOWN if mode == _MIXED and length == 1 else Phase.PREFILL
        names += [f"rank{rank}/pass{record.get('forward_pass_id')}/prompt{request}"] * length
        phases += [phase] * length
    return names, phases


def _logical_experts(to_logical_LP: Int64s) -> int:
    """As the placement says: it has every logical expert at least once. ``check_asked`` refuses another number."""
    return int(to_logical_LP.max()) + 1


def _to_logical(physical_LTK: Int64s, to_logical_LP: Int64s, where: str) -> Int16s:
    if physical_LTK.max(initial=-1) >= to_logical_LP.shape[1] or physical_LTK.min(initial=0) < -1:
        raise TraceError(
            f"{where}: a physical expert id is not in -1..{to_logical_LP.shape[1] - 1}",
            hint="the dump is damaged, or its placement is another model's",
        )
    layers = np.arange(len(to_logical_LP))[:, None, None]
    logical = to_logical_LP[layers, np.maximum(physical_LTK, 0)]
    return np.where(physical_LTK >= 0, logical, -1).astype(np.int16)


def _topk_ids(record: dict[str, Any], layers: int | None, where: str) -> Int64s:
    ids_LTK = _integers(record.get("topk_ids_of_layer"), 3, f"{where}: topk_ids_of_layer")
    if layers is not None and len(ids_LTK) != layers:
        raise TraceError(f"{where}: {len(ids_LTK)} layers, the placement has {layers}")
    return ids_LTK


def _integers(value: Any, dimensions: int, what: str) -> npt.NDArray[np.int64]:
    import torch

    if not isinstance(value, torch.Tensor) or value.dim() != dimensions or value.is_floating_point():
        raise TraceError(f"{what} is not a tensor of integers with {dimensions} dimensions")
    array: npt.NDArray[np.int64] = value.to(torch.int64).numpy()
    return array


FORMAT = Format(
    name="sglang-recorder",
    looks_for="a torch.save file with logical_count, or records and last_physical_to_logical_map",
    recognises=_recognises,
    open=_open,
)
