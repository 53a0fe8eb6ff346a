"""In which forms a checkpoint may store its weights, and which tensors each takes.

A quantised matrix is two tensors, its values and their scales; what comes beside it unquantised, such as a bias, is
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from probes.errors import CheckpointError
from runtime.experts.headers import TensorEntry

FLOATS = {"F16", "BF16", "F32", "F64"}
FP8_SCALES = {"F32", "BF16", "F16", "F8_E8M0", "U8"}
"""Numbers, or exponents of two in the last two (U8 of the same meaning as F8_E8M0)."""

MXFP4_GROUP = 32
"""Weights that share a scale, two to a byte."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Every tensor in 16 to 64 bits, none with scales.

    ``kinds``: the endings of names that this form adds.
    """

    kinds: ClassVar[frozenset[str]] = frozenset()

    def check(self, values: TensorEntry, scales: TensorEntry | None) -> None:
        """``values`` and their ``scales`` are what this form takes. Raises ``CheckpointError`` naming what is not."""
        if scales is not None or values.dtype not in FLOATS:
            odd = values if values.dtype not in FLOATS else scales
            assert odd is not None
            raise _unfit(
                odd,
                f"is stored as {odd.dtype}, which is a quantisation that config.json does not state",
                "quantised weights need the quantization_config of their model; or use its 16- or 32-bit checkpoint",
            )


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Matrices [R, C] in float8_e4m3fn, with a scale for every block of ``rows`` × ``columns``, the last ones cut off
    where the matrix ends."""

    kinds: ClassVar[frozenset[str]] = frozenset({"_scale_inv"})
    rows: int
    columns: int

    def check(self, values: TensorEntry, scales: TensorEntry | None) -> None:
        """As ``Plain.check``."""
        if _is_plain(values, scales, expected="F8_E4M3", called=f"{values.name}_scale_inv"):
            return
        assert scales is not None
        if len(values.shape) != 2:
            raise _unfit(values, f"is no matrix, its shape is {list(values.shape)}", _OTHER_CHECKPOINT)
        if scales.dtype not in FP8_SCALES:
            raise _unfit(scales, f"stores scales as {scales.dtype}", _OTHER_CHECKPOINT)
        grid = (-(-values.shape[0] // self.rows), -(-values.shape[1] // self.columns))
        if scales.shape != grid:
            raise _unfit(
                scales,
                f"has the shape {list(scales.shape)} where blocks of {self.rows} × {self.columns} "
                f"(weight_block_size in config.json) make it {list(grid)}",
                "config.json and the safetensors files are of different models",
            )


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Matrices [R, C] as bytes [R, C/32, 16] of two 4-bit numbers each, with an exponent of two for every 32."""

    kinds: ClassVar[frozenset[str]] = frozenset({"_blocks", "_scales"})

    def check(self, values: TensorEntry, scales: TensorEntry | None) -> None:
        """As ``Plain.check``."""
        if _is_plain(values, scales, expected="U8", called=values.name.removesuffix("_blocks") + "_scales"):
            return
        assert scales is not None
        if len(values.shape) != 3 or values.shape[2] != MXFP4_GROUP // 2:
            raise _unfit(
                values, f"has the shape {list(values.shape)}, not [rows, groups, {MXFP4_GROUP // 2}]", _OTHER_CHECKPOINT
            )
        if scales.dtype != "U8" or scales.shape != values.shape[:2]:
            raise _unfit(
                scales,
                f"holds {scales.dtype} of shape {list(scales.shape)} where the scales of {values.name} are U8 of shape "
                f"{list(values.shape[:2])}",
                _OTHER_CHECKPOINT,
            )


StoredFormat = Plain | Fp8Blocks | Mxfp4
PLAIN = Plain()

_OTHER_CHECKPOINT = "the files are damaged, or of another quantisation than config.json says; download them again"


def _is_plain(values: TensorEntry, scales: TensorEntry | None, *, expected: str, called: str) -> bool:
    """Whether ``values`` are unquantised; if not, they are ``expected`` and have scales, or this raises."""
    if values.dtype == expected:
        if scales is None:
            raise _unfit(
                values,
                f"is quantised, and its scales {called} are missing",
                "download the missing shards, or the model again",
            )
        return False
    if values.dtype not in FLOATS or scales is not None:
        raise _unfit(values, f"is stored as {values.dtype} where config.json says {expected}", _OTHER_CHECKPOINT)
    return True


def _unfit(entry: TensorEntry, why: str, hint: str) -> CheckpointError:
    return CheckpointError(f"{entry.path}: {entry.name} {why}", hint=hint)
