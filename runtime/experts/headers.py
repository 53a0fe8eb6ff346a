"""What a checkpoint's safetensors files hold, from their headers alone: no tensor is loaded.

A checkpoint is untrusted: every offset is checked against the file before it is used. The format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"
HEADER_LIMIT_BYTES = 100 << 20
"""The format's own limit; a larger header is an attack or damage."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a safetensors file: absolute offset and size in bytes."""

    name: str
    path: Path
    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in ``folder``, by name. Raises ``CheckpointError``."""
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no model folder {folder}",
            hint="give a local folder with config.json and *.safetensors, or download the model first",
        )
    entries: dict[str, TensorEntry] = {}
    for path in _shards(folder):
        for entry in _read_header(path):
            if entry.name in entries:
                raise CheckpointError(
                    f"{folder}: tensor {entry.name} is in {entries[entry.name].path.name} and in {path.name}",
                    hint="remove the files that are not part of the model",
                )
            entries[entry.name] = entry
    return entries


def _shards(folder: Path) -> list[Path]:
    """The files that transformers would read: model.safetensors, else the shards of the index, else all there are."""
    single, listing = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    present = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    if not listing.is_file():
        if not present:
            raise CheckpointError(
                f"{folder} holds no *.safetensors file",
                hint="only safetensors checkpoints are read, never pickles; transformers can convert one",
            )
        return list(present.values())
    try:
        wanted = set(json.loads(listing.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(wanted - present.keys())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{listing} is not a valid list of shards: {error!r}", hint="download the file again"
        ) from error
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {len(wanted)} shards, the first is {missing[0]}",
            hint="download the model again: every shard that model.safetensors.index.json names is needed",
        )
    return [present[name] for name in sorted(wanted)]


def _read_header(path: Path) -> list[TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            if prefix + stream.read(len(LFS_POINTER) - 8) == LFS_POINTER:
                raise CheckpointError(
                    f"{path} is a pointer of Git LFS, which stands for the file",
                    hint="run git lfs pull in the model's folder, or download the model again",
                )
            stream.seek(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
                raise _damaged(path, f"its header claims {length} bytes of a file of {size}")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}", hint="check the file, its permissions and where it links to"
        ) from error
    try:
        header = json.loads(text)
        entries = [_entry(path, name, header[name], 8 + length) for name in header if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, f"its header does not decode ({error!r:.200})") from error
    _check_packed(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, facts: dict[str, Any], data_start: int) -> TensorEntry:
    dtype, (start, stop) = str(facts["dtype"]), facts["data_offsets"]
    shape = tuple(facts["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (start, stop, *shape)):
        raise TypeError(f"{name} has a shape or offsets that are not whole numbers")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: tensor {name} has the unknown data type {dtype:.40}",
            hint="use a 16- or 32-bit checkpoint of this model",
        )
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise _damaged(path, f"the offsets of {name} contradict its shape")
    return TensorEntry(
        name=name, path=path, offset=data_start + start, size_bytes=stop - start, dtype=dtype, shape=shape
    )


def _check_packed(path: Path, entries: list[TensorEntry], data_start: int, file_size: int) -> None:
    """The format leaves no gap, lets no two tensors overlap, and ends with the last one."""
    end = data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.size_bytes)):
        if entry.offset != end:
            raise _damaged(path, f"{entry.name} begins at byte {entry.offset} where the tensor before ends at {end}")
        end += entry.size_bytes
    if end != file_size:
        raise _damaged(path, f"its tensors end at byte {end} of a file of {file_size}")


def _damaged(path: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{path} is cut off or damaged: {detail}", hint="download or copy the file again")
