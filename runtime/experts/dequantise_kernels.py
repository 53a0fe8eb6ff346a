"""Dequantising on a CPU in compiled loops, one pass over the bytes: torch takes one for every step, ten times as long.

Importing this module imports numba. The loops hold no lock, so that reads go on beside them, and take a part of a
matrix each, so that several threads can share one. Shape legend as in ``runtime.experts.dequantise``; numbers are
float32, bytes uint8, arrays C-contiguous. What is written to comes last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.compile import compiled_without_lock

Bytes = npt.NDArray[np.uint8]
Floats32 = npt.NDArray[np.float32]

ROWS_AT_ONCE = 256
"""Of a transposed matrix: their bytes stay in the first-level cache while column after column is written."""


@compiled_without_lock
def fp8_rows(
    values_RC: Bytes, scales_rc: Floats32, down: int, across: int, numbers: Floats32, start: int, out_RC: Floats32
) -> None:
    """Fill ``out``, which are the rows from ``start`` on; ``numbers`` [256]: what each byte stands for."""
    rows, columns = out_RC.shape
    for row in range(rows):
        for block in range(scales_rc.shape[1]):
            scale = scales_rc[(start + row) // down, block]
            for column in range(block * across, min(columns, (block + 1) * across)):
                out_RC[row, column] = numbers[values_RC[start + row, column]] * scale


@compiled_without_lock
def mxfp4_columns(
    values_RGB: Bytes, scales_RG: Bytes, pairs: Floats32, powers: Floats32, start: int, out_CR: Floats32
) -> None:
    """Fill ``out``, which are the columns of the groups from ``start`` on; ``pairs`` [2, 256]: what each byte's halves
    stand for, ``powers`` [256]: what each scale does."""
    columns, rows = out_CR.shape
    for first in range(0, rows, ROWS_AT_ONCE):
        last = min(rows, first + ROWS_AT_ONCE)
        for column in range(0, columns, 2):
            group, at = start + column // 32, column % 32 // 2
            for row in range(first, last):
                byte = values_RGB[row, group, at]
                scale = powers[scales_RG[row, group]]
                out_CR[column, row] = pairs[0, byte] * scale
                out_CR[column + 1, row] = pairs[1, byte] * scale
