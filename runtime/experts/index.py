"""Where every expert's bytes lie in a checkpoint.

Two layouts are read: one set of tensors per expert (``….experts.7.gate_proj.weight``, or ``w1``/``w3``/``w2``), and
fused ones (``….experts.gate_up_proj`` of shape [N, …]), of which each expert is a slice. Quantised ones have scales
beside them: ``….weight_scale_inv`` and ``….gate_up_proj_scale_inv`` (FP8), ``…_blocks`` and ``…_scales`` (MXFP4).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from probes.errors import CheckpointError
from runtime.experts.formats import PLAIN, StoredFormat
from runtime.experts.headers import TensorEntry, read_headers

_PER_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<expert>[0-9]{1,9})\.(?P<name>\w+)\.(?P<leaf>weight|bias|weight_scale_inv)"
)
_FUSED = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<name>(?:gate_up|gate|up|down)_proj(?:_bias)?)(?P<kind>_blocks|_scales|_scale_inv)?"
)
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.([0-9]{1,9})\.")

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
class Piece:
    """A tensor within a read: ``start`` bytes into it; fills part ``part`` of ``parts`` of a slot's ``parameter``.

    ``scales``: whether it holds that part's scales instead of its values.
    """

    start: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    parameter: str
    part: int
    parts: int
    scales: bool = False


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
    ``dense``: every other tensor, by the parameter or buffer that it fills. ``fused``: of the first layer, the tensors
    that hold all experts, by parameter; empty where every expert has its own. ``stored_as``: of every matrix in it.
    """

    layer_numbers: tuple[int, ...]
    num_experts: int
    expert_bytes: int
    reads: tuple[tuple[tuple[Read, ...], ...], ...]
    dense: dict[str, TensorEntry]
    fused: dict[str, TensorEntry]
    stored_as: StoredFormat = PLAIN


_Parts = list[tuple[TensorEntry, Piece]]
_Experts = dict[int, _Parts]


def index_experts(
    folder: Path,
    *,
    rename: Callable[[str], str] = lambda key: key,
    layers: Collection[int] | None = None,
    stored_as: StoredFormat = PLAIN,
) -> ExpertIndex:
    """Index the experts of the checkpoint in ``folder``. Raises ``CheckpointError`` where they are not all there.

    ``rename``: what a checkpoint's key is called in the model. ``layers``: the model's own MoE layers, others are left
    out (checkpoints hold layers that predict further tokens); None: all that are there. ``stored_as``: by its config.
    """
    dense: dict[str, TensorEntry] = {}
    fused: dict[int, dict[str, TensorEntry]] = {}
    found: dict[int, _Experts] = {}
    for entry in read_headers(folder).values():
        name = rename(entry.name)
        for layer, expert, part, piece in _expert_pieces(entry, name, stored_as):
            found.setdefault(layer, {}).setdefault(expert, []).append((part, piece))
        if ".experts." not in name:
            dense[name] = entry
        elif (match := _FUSED.fullmatch(name)) and not match["kind"]:
            fused.setdefault(layer_of(name), {})[match["name"]] = entry
    if not found:
        raise CheckpointError(f"{folder} holds no experts", hint="is this a Mixture-of-Experts model?")
    layer_numbers = tuple(sorted(found if layers is None else layers))
    absent = [layer for layer in layer_numbers if layer not in found]
    if absent:
        raise CheckpointError(
            f"{folder} lacks the experts of layer {absent[0]}",
            hint="config.json and the safetensors files are of different models, or shards are missing",
        )
    num_experts = max(max(found[layer]) for layer in layer_numbers) + 1
    reads = tuple(
        tuple(_reads_of(folder, found[layer], layer, expert, stored_as) for expert in range(num_experts))
        for layer in layer_numbers
    )
    sizes = {sum(read.size_bytes for read in expert) for layer in reads for expert in layer}
    if len(sizes) != 1:
        raise CheckpointError(
            f"experts of {folder} differ in size ({', '.join(map(str, sorted(sizes)))} bytes)",
            hint="mixed precisions and shapes are not supported; use a checkpoint with one data type",
        )
    return ExpertIndex(
        layer_numbers=layer_numbers,
        num_experts=num_experts,
        expert_bytes=sizes.pop(),
        reads=reads,
        dense=dense,
        fused=fused.get(layer_numbers[0], {}),
        stored_as=stored_as,
    )


def by_target(pieces: tuple[Piece, ...]) -> Iterator[tuple[int, int, tuple[Piece, ...]]]:
    """Neighbours of a read that fill the same thing: first byte, the one after the last, and they, told from there."""
    for _, group in groupby(pieces, key=lambda piece: (piece.parameter, piece.scales)):
        together = tuple(group)
        first = together[0].start
        moved = tuple(replace(piece, start=piece.start - first) for piece in together)
        yield first, together[-1].start + together[-1].size_bytes, moved


def expert_bytes(folder: Path) -> int:
    """Bytes of one expert as stored in the checkpoint in ``folder``."""
    return index_experts(folder).expert_bytes


def layer_of(name: str) -> int:
    """The number of the layer that a parameter or module belongs to."""
    match = _LAYER.search(name)
    if match is None:
        raise CheckpointError(
            f"cannot tell the layer of {name}", hint="names with .layers.N., .h.N. or .blocks.N. are understood"
        )
    return int(match[1])


def _expert_pieces(entry: TensorEntry, name: str, stored_as: StoredFormat) -> list[tuple[int, int, TensorEntry, Piece]]:
    """(layer, expert, its slice, piece) of everything in an expert tensor; nothing of a dense one."""
    if match := _PER_EXPERT.fullmatch(name):
        if match["name"] not in _PARTS:
            raise _unsupported(entry, "is an expert tensor of an unsupported kind")
        parameter, part, parts = _PARTS[match["name"]]
        if match["leaf"] == "bias":
            parameter += "_bias"
        scales = match["leaf"] == "weight_scale_inv"
        if scales:
            _require_kind(entry, "_scale_inv", stored_as)
        piece = _piece(entry, parameter, part, parts, scales=scales)
        return [(layer_of(name), int(match["expert"]), entry, piece)]
    if match := _FUSED.fullmatch(name):
        if match["kind"]:
            _require_kind(entry, match["kind"], stored_as)
        if not entry.shape or entry.shape[0] < 1:
            raise _unsupported(entry, f"holds no experts: its shape is {list(entry.shape)}")
        layer, size = layer_of(name), entry.size_bytes // entry.shape[0]
        slices = [
            replace(entry, offset=entry.offset + expert * size, size_bytes=size, shape=entry.shape[1:])
            for expert in range(entry.shape[0])
        ]
        scales = match["kind"] in ("_scales", "_scale_inv")
        return [(layer, e, part, _piece(part, match["name"], 0, 1, scales=scales)) for e, part in enumerate(slices)]
    if ".experts." in name:
        raise _unsupported(entry, "is an expert tensor of an unsupported kind")
    return []


def _require_kind(entry: TensorEntry, kind: str, stored_as: StoredFormat) -> None:
    if kind not in stored_as.kinds:
        raise _unsupported(entry, "is of a quantisation that config.json does not state")


def _unsupported(entry: TensorEntry, why: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.path}: {entry.name} {why}",
        hint="experts are read with gate_proj, up_proj and down_proj (or w1, w3 and w2) each, or fused, in 16 or 32 "
        "bits, in FP8 with block scales or in MXFP4; use such a checkpoint of this model",
    )


def _piece(entry: TensorEntry, parameter: str, part: int, parts: int, *, scales: bool) -> Piece:
    return Piece(
        start=0,
        size_bytes=entry.size_bytes,
        dtype=entry.dtype,
        shape=entry.shape,
        parameter=parameter,
        part=part,
        parts=parts,
        scales=scales,
    )


def _reads_of(folder: Path, experts: _Experts, layer: int, expert: int, stored_as: StoredFormat) -> tuple[Read, ...]:
    """Neighbouring tensors become one read: an expert's three tensors usually lie side by side."""
    parts = _ungated(experts.get(expert, []))
    _check_stored(parts, stored_as)
    names = sorted((piece.parameter, piece.part) for _, piece in parts if not piece.scales)
    if not names or names != sorted({(piece.parameter, n) for _, piece in parts for n in range(piece.parts)}):
        raise CheckpointError(
            f"{folder}: expert {expert} of layer {layer} is missing or lacks tensors",
            hint="download the missing shards, or the model again",
        )
    reads: list[_Parts] = []
    for entry, piece in sorted(parts, key=lambda part: (str(part[0].path), part[0].offset)):
        last = reads[-1][-1][0] if reads else None
        if last is not None and last.path == entry.path and last.offset + last.size_bytes == entry.offset:
            reads[-1].append((entry, piece))
        else:
            reads.append([(entry, piece)])
    return tuple(_merged(read) for read in reads)


def _check_stored(parts: _Parts, stored_as: StoredFormat) -> None:
    scales = {(piece.parameter, piece.part): entry for entry, piece in parts if piece.scales}
    for entry, piece in parts:
        if not piece.scales:
            stored_as.check(entry, scales.pop((piece.parameter, piece.part), None))
    for entry in scales.values():
        raise CheckpointError(
            f"{entry.path}: {entry.name} holds the scales of weights that are missing",
            hint="download the missing shards, or the model again",
        )


def _ungated(parts: _Parts) -> _Parts:
    """Where experts have no gate_proj, up_proj fills a parameter of its own."""
    if any(piece.parts == 2 and piece.part == 0 for _, piece in parts):
        return parts
    return [(entry, piece if piece.parts == 1 else _alone(piece)) for entry, piece in parts]


def _alone(up: Piece) -> Piece:
    return replace(up, parameter=up.parameter.replace("gate_up", "up"), part=0, parts=1)


def _merged(read: _Parts) -> Read:
    origin = read[0][0].offset
    pieces = tuple(replace(piece, start=entry.offset - origin) for entry, piece in read)
    return Read(
        path=read[0][0].path, offset=origin, size_bytes=sum(piece.size_bytes for piece in pieces), pieces=pieces
    )
