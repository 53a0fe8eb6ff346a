"""Bytes that stand for experts: cheap to make, unlike each other, and known at any time without being kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

WORD_BYTES = 8
_STRIDE_WORDS = 100_003
"""How far one unit is rotated against the one before: a prime, so that no two pages of two units are alike."""
_WEIGHT_SCALE = 0.02


class ExpertContent:
    """Unit u is one block of random numbers, rotated by its number.

    ``dtype``: weights of that kind, small and ordinary ones, since arithmetic on infinities or subnormal numbers may
    take longer; None: any bytes. ``size_bytes`` is a multiple of 8.
    """

    def __init__(self, size_bytes: int, *, dtype: torch.dtype | None, seed: int) -> None:
        assert size_bytes % WORD_BYTES == 0, f"{size_bytes} bytes are no whole number of words"
        self.size_bytes = size_bytes
        generator = np.random.default_rng(seed)
        if dtype is None:
            self._base: Words = generator.integers(0, 1 << 64, size_bytes // WORD_BYTES, dtype=np.uint64)
        else:
            values = generator.standard_normal(size_bytes // dtype.itemsize, dtype=np.float32) * np.float32(
                _WEIGHT_SCALE
            )
            self._base = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy().view(np.uint64)

    def unit(self, number: int) -> Words:
        """The bytes of unit ``number``."""
        return np.roll(self._base, number * _STRIDE_WORDS)

    def matches(self, number: int, data: npt.NDArray[np.uint8]) -> bool:
        """Whether ``data`` is unit ``number``."""
        words = data.view(np.uint64)
        at = number * _STRIDE_WORDS % len(self._base)
        return bool(
            len(words) == len(self._base)
            and np.array_equal(words[at:], self._base[: len(words) - at])
            and np.array_equal(words[:at], self._base[len(words) - at :])
        )
