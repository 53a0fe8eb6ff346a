"""Reading dense tensors straight into the memory where they stay.

A memory map would hold a file's pages in this process beside their copies for as long as the file is open, and twice
the dense part is more than many machines have to spare. So nothing is held but the tensor itself and one chunk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import torch

from probes.errors import CheckpointError
from probes.text import first_line
from runtime.experts.dequantise import dequantise_fp8
from runtime.experts.formats import Fp8Blocks
from runtime.experts.headers import TensorEntry
from runtime.experts.lines import placed_zeros

CHUNK_BYTES = 16 << 20
"""Tensors that are converted, or go to another device, pass through host memory of this size."""

STORED_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
}  # fmt: skip


class DenseFile:
    """One safetensors file, opened to read whole tensors from it. Raises ``CheckpointError`` where it cannot be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error

    def read(self, entry: TensorEntry, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor that ``entry`` describes, converted to ``dtype``, on ``device``."""
        stored = STORED_DTYPES[entry.dtype]
        if device.type == "cpu" and stored is dtype:
            # Within its cache lines as in the file, which is how transformers computes on it.
            tensor = placed_zeros(entry.shape, dtype, entry.offset)
            self._fill(entry.offset, tensor.view(-1).view(torch.uint8))
            return tensor
        tensor = torch.empty(entry.shape, dtype=dtype, device=device)
        flat = tensor.view(-1)
        chunk = torch.empty(min(CHUNK_BYTES, entry.size_bytes), dtype=torch.uint8)
        for start in range(0, entry.size_bytes, CHUNK_BYTES):
            part = chunk[: min(CHUNK_BYTES, entry.size_bytes - start)]
            self._fill(entry.offset + start, part)
            numbers = part.view(stored)
            first = start // stored.itemsize
            flat[first : first + len(numbers)].copy_(numbers)
        return tensor

    def read_fp8(
        self, entry: TensorEntry, scales: TensorEntry, form: Fp8Blocks, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The matrix of ``entry`` and its ``scales``, which may be in another file, dequantised to ``dtype``."""
        values = self.read(entry, dtype=torch.float8_e4m3fn, device=device)
        with DenseFile(scales.path) as file:
            factors = file.read(scales, dtype=STORED_DTYPES[scales.dtype], device=device)
        tensor = torch.empty(entry.shape, dtype=dtype, device=device)
        dequantise_fp8(values[None], factors[None], (form.rows, form.columns), tensor[None])
        return tensor

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, offset: int, data: torch.Tensor) -> None:
        """Fill ``data``, uint8, with the bytes from ``offset`` on."""
        view = data.numpy().data
        got = 0
        while got < len(view):
            try:
                count = os.preadv(self._fd, [view[got : got + (1 << 30)]], offset + got)
            except OSError as error:
                raise self._unreadable(error) from error
            if count == 0:
                raise self._unreadable(f"it ends at byte {offset + got}")
            got += count

    def _unreadable(self, why: OSError | str) -> CheckpointError:
        reason = why if isinstance(why, str) else why.strerror or first_line(why)
        return CheckpointError(f"{self._path} cannot be read: {reason}", hint="copy the file again")
