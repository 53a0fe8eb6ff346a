"""A file of incompressible bytes that can be checked at any place without being kept in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_BLOCK_BYTES = 1 << 20
_WORDS = _BLOCK_BYTES // 8


class FileContent:
    """Block i is one random megabyte, xor a random word of its own: cheap to make, and no two pages are alike."""

    def __init__(self, size_bytes: int, *, seed: int) -> None:
        self.size_bytes = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        generator = np.random.default_rng(seed)
        self._base = generator.integers(0, 1 << 63, _WORDS, dtype=np.uint64)
        self._keys = generator.integers(0, 1 << 63, self.size_bytes // _BLOCK_BYTES, dtype=np.uint64)

    def blocks(self) -> Iterator[npt.NDArray[np.uint64]]:
        """The file's blocks in order."""
        for key in self._keys:
            yield self._base ^ key

    def matches(self, offset: int, part: npt.NDArray[np.uint8]) -> bool:
        """Whether ``part`` holds the file's bytes from ``offset`` on; both in whole 8-byte words."""
        words = part.view(np.uint64)
        at = offset // 8
        done = 0
        while done < len(words):
            block, inside = divmod(at + done, _WORDS)
            count = min(_WORDS - inside, len(words) - done)
            expected = self._base[inside : inside + count] ^ self._keys[block]
            if not np.array_equal(words[done : done + count], expected):
                return False
            done += count
        return True
