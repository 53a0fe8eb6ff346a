"""Where every expert's bytes lie in a checkpoint: from safetensors headers alone, no tensor is loaded.

Two layouts are read: one set of tensors per expert (``….experts.7.gate_proj.weight``, or ``w1``/``w3``/``w2``), and
fused ones (``….experts.gate_up_proj`` of shape [N, …]), of which each expert is a slice. A checkpoint is untrusted:
every offset is checked against the file before it is used.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from probes.errors import CheckpointError

HEADER_LIMIT_BYTES = 100 << 20
"""The format's own limit; a larger header is an attack or damage."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
FLOATS = {"F16", "BF16", "F32", "F64"}

_PER_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.(?P<leaf>weight|bias)")
_FUSED = re.compile(r"(?P<prefix>.*\.experts)\.(?P<name>(?:gate_up|gate|up|down)_proj(?:_bias)?)")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")

# Which rows of which fused parameter a per-expert tensor fills: (parameter, part, parts).
_PARTS = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "w1": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "w3": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
    "w2": ("down_proj", 0, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a safetensors file: absolute offset and size in bytes."""

    name: str
    path: Path
    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor within a read: ``start`` bytes into it; fills part ``part`` of ``parts`` of a slot's ``parameter``."""

    start: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    parameter: str
    part: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One contiguous span of a file that holds ``pieces``, in file order."""

    path: Path
    offset: int
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertIndex:
    """``reads[layer][expert]``: what to read for it.

    Layers are the MoE layers in order; ``layer_numbers`` are the model's own. ``expert_bytes``: as stored.
    ``dense``: every other tensor.
    """

    layer_numbers: tuple[int, ...]
    num_experts: int
    expert_bytes: int
    reads: tuple[tuple[tuple[Read, ...], ...], ...]
    dense: dict[str, TensorEntry]


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the ``*.safetensors`` files in ``folder``, by name. Raises ``CheckpointError``."""
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no model folder {folder}",
            hint="give a local folder with config.json and *.safetensors, or download the model first",
        )
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} holds no *.safetensors file", hint="only safetensors checkpoints are read")
    _check_shards_complete(folder, {path.name for path in paths})
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        for entry in _read_header(path):
            if entry.name in entries:
                raise CheckpointError(f"tensor {entry.name} is in {entries[entry.name].path.name} and in {path.name}")
            entries[entry.name] = entry
    return entries


def index_experts(folder: Path) -> ExpertIndex:
    """Index the experts of the checkpoint in ``folder``. Raises ``CheckpointError`` where they are not all there."""
    dense: dict[str, TensorEntry] = {}
    found: dict[int, dict[int, list[tuple[TensorEntry, Piece]]]] = {}
    for entry in read_headers(folder).values():
        pieces = _expert_pieces(entry)
        if pieces is None:
            dense[entry.name] = entry
            continue
        layer, by_expert = pieces
        for expert, (slice_entry, piece) in by_expert.items():
            found.setdefault(layer, {}).setdefault(expert, []).append((slice_entry, piece))
    if not found:
        raise CheckpointError(f"{folder} holds no experts", hint="is this a Mixture-of-Experts model?")
    layer_numbers = tuple(sorted(found))
    num_experts = max(max(experts) for experts in found.values()) + 1
    reads = tuple(tuple(_reads_of(found[layer], layer, e) for e in range(num_experts)) for layer in layer_numbers)
    sizes = {sum(piece.size_bytes for read in expert for piece in read.pieces) for layer in reads for expert in layer}
    if len(sizes) != 1:
        raise CheckpointError(f"experts of {folder} differ in size ({', '.join(map(str, sorted(sizes)))} bytes)")
    return ExpertIndex(
        layer_numbers=layer_numbers, num_experts=num_experts, expert_bytes=sizes.pop(), reads=reads, dense=dense
    )


def expert_bytes(folder: Path) -> int:
    """Bytes of one expert as stored in the checkpoint in ``folder``."""
    return index_experts(folder).expert_bytes


def _check_shards_complete(folder: Path, present: set[str]) -> None:
    listing = folder / "model.safetensors.index.json"
    if not listing.is_file():
        return
    try:
        wanted = set(json.loads(listing.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{listing} is not a valid shard index: {error!r}") from error
    missing = sorted(str(name) for name in wanted - present)
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {len(wanted)} shards, the first is {missing[0]}",
            hint="download the model again: every shard that model.safetensors.index.json names is needed",
        )


def _read_header(path: Path) -> list[TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise _damaged(path, f"its header claims {length} bytes of a file of {size}")
        try:
            header = json.loads(stream.read(length))
            items = [(name, facts) for name, facts in header.items() if name != "__metadata__"]
            return [_entry(path, name, facts, 8 + length, size) for name, facts in items]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, f"its header does not decode ({error!r})") from error


def _entry(path: Path, name: str, facts: dict[str, object], data_start: int, file_size: int) -> TensorEntry:
    dtype = str(facts["dtype"])
    shape = tuple(int(n) for n in facts["shape"])  # type: ignore[attr-defined]  # a TypeError is caught by the caller
    start, stop = (int(n) for n in facts["data_offsets"])  # type: ignore[attr-defined]  # likewise
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name} has the unknown data type {dtype}")
    if not 0 <= start <= stop or stop - start != math.prod(shape) * ITEM_BYTES[dtype] or min(shape, default=1) < 0:
        raise _damaged(path, f"the offsets of {name} contradict its shape")
    if data_start + stop > file_size:
        raise _damaged(path, f"{name} ends at byte {data_start + stop} of a file of {file_size}")
    return TensorEntry(
        name=name, path=path, offset=data_start + start, size_bytes=stop - start, dtype=dtype, shape=shape
    )


def _damaged(path: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{path} is cut off or damaged: {detail}", hint="download or copy the file again")


def _expert_pieces(entry: TensorEntry) -> tuple[int, dict[int, tuple[TensorEntry, Piece]]] | None:
    """(layer, {expert: slice and piece}) of an expert tensor; None for a dense one."""
    if match := _PER_EXPERT.fullmatch(entry.name):
        if match["name"] not in _PARTS:
            raise CheckpointError(
                f"{entry.path.name}: {entry.name} is an expert tensor of an unsupported kind",
                hint="supported are gate_proj/up_proj/down_proj and w1/w3/w2 in 16- or 32-bit floats",
            )
        parameter, part, parts = _PARTS[match["name"]]
        if match["leaf"] == "bias":
            parameter += "_bias"
        _require_float(entry)
        return _layer_of(entry), {int(match["expert"]): (entry, _piece(entry, parameter, part, parts))}
    if match := _FUSED.fullmatch(entry.name):
        _require_float(entry)
        experts = entry.shape[0]
        size = entry.size_bytes // experts
        slices = [
            TensorEntry(
                name=entry.name,
                path=entry.path,
                offset=entry.offset + expert * size,
                size_bytes=size,
                dtype=entry.dtype,
                shape=entry.shape[1:],
            )
            for expert in range(experts)
        ]
        return _layer_of(entry), {e: (part, _piece(part, match["name"], 0, 1)) for e, part in enumerate(slices)}
    if ".experts." in entry.name and ".shared_experts." not in entry.name:
        raise CheckpointError(
            f"{entry.path.name}: {entry.name} is an expert tensor of an unsupported kind",
            hint="quantised experts are not supported yet; use a 16- or 32-bit checkpoint",
        )
    return None


def _require_float(entry: TensorEntry) -> None:
    if entry.dtype not in FLOATS:
        raise CheckpointError(
            f"{entry.path.name}: experts are stored as {entry.dtype}",
            hint="quantised experts are not supported yet; use a 16- or 32-bit checkpoint",
        )


def _layer_of(entry: TensorEntry) -> int:
    match = _LAYER.search(entry.name)
    if match is None:
        raise CheckpointError(f"{entry.path.name}: cannot tell the layer of {entry.name}")
    return int(match[1])


def _piece(entry: TensorEntry, parameter: str, part: int, parts: int) -> Piece:
    return Piece(
        start=0,
        size_bytes=entry.size_bytes,
        dtype=entry.dtype,
        shape=entry.shape,
        parameter=parameter,
        part=part,
        parts=parts,
    )


def _reads_of(experts: dict[int, list[tuple[TensorEntry, Piece]]], layer: int, expert: int) -> tuple[Read, ...]:
    """Neighbouring tensors become one read: an expert's three tensors usually lie side by side."""
    if expert not in experts:
        raise CheckpointError(f"expert {expert} of layer {layer} is missing", hint="download the missing shards")
    parts = sorted(experts[expert], key=lambda item: (str(item[0].path), item[0].offset))
    names = sorted((piece.parameter, piece.part) for _, piece in parts)
    if names != sorted({(p, i) for _, piece in parts for p, i in [(piece.parameter, n) for n in range(piece.parts)]}):
        raise CheckpointError(f"expert {expert} of layer {layer} lacks tensors", hint="download the missing shards")
    reads: list[list[tuple[TensorEntry, Piece]]] = []
    for entry, piece in parts:
        last = reads[-1][-1][0] if reads else None
        if last is not None and last.path == entry.path and last.offset + last.size_bytes == entry.offset:
            reads[-1].append((entry, piece))
        else:
            reads.append([(entry, piece)])
    return tuple(_merged(read) for read in reads)


def _merged(read: list[tuple[TensorEntry, Piece]]) -> Read:
    origin = read[0][0].offset
    pieces = tuple(
        Piece(
            start=entry.offset - origin,
            size_bytes=piece.size_bytes,
            dtype=piece.dtype,
            shape=piece.shape,
            parameter=piece.parameter,
            part=piece.part,
            parts=piece.parts,
        )
        for entry, piece in read
    )
    return Read(
        path=read[0][0].path, offset=origin, size_bytes=sum(piece.size_bytes for piece in pieces), pieces=pieces
    )
