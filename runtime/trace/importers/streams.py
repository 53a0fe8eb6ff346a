"""Files from outside as streams of bytes or lines: plain, gzip or Zstandard, told from their first bytes."""

from __future__ import annotations

import contextlib
import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from probes.errors import TraceError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 18
# A line longer than this is no line of a log; without the limit a file without newlines would fill the memory.
MAX_LINE_BYTES = 1 << 26


class SourceFile:
    """One file, decompressed as it is read. Use as a context manager; reading errors are ``TraceError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._raw = path.open("rb")
            self._size = path.stat().st_size
            magic = self._raw.read(4)
            self._raw.seek(0)
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}", hint="check the path") from error
        self._stream = _decompressed(self._raw, magic)
        self.compressed = self._stream is not self._raw

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    @property
    def fraction_read(self) -> float:
        """Share of the file's bytes that were read, 0 to 1."""
        return 1.0 if self._raw.closed or not self._size else self._raw.tell() / self._size

    def read(self, limit: int) -> bytes:
        """Up to ``limit`` bytes from here."""
        with _cut_off_is_a_trace_error(self.path):
            return self._stream.read(limit)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Line number (from 1) and content of every line that is not blank."""
        number = 0
        while True:
            with _cut_off_is_a_trace_error(self.path):
                line = self._stream.readline(MAX_LINE_BYTES)
            if not line:
                return
            number += 1
            if len(line) >= MAX_LINE_BYTES:
                raise TraceError(f"{self.path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                yield number, line


@contextlib.contextmanager
def plain_file(path: Path) -> Iterator[Path]:
    """The path itself, or a temporary decompressed copy of it, for readers that need a real file."""
    with SourceFile(path) as source:
        if not source.compressed:
            yield path
            return
        with tempfile.NamedTemporaryFile(prefix="caee-") as copy:
            while block := source.read(_BLOCK):
                copy.write(block)
            copy.flush()
            yield Path(copy.name)


def _decompressed(raw: IO[bytes], magic: bytes) -> IO[bytes]:
    if magic.startswith(GZIP_MAGIC):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if magic == ZSTD_MAGIC:
        return io.BufferedReader(_ZstdReader(raw), _BLOCK)
    return raw


class _ZstdReader(io.RawIOBase):
    """Zstandard frames one after the other; unlike the library's own reader it complains where a frame is cut off."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._raw.read(_BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError("the last frame is incomplete")
                return 0
            self._ready = b"".join(self._decompress(block))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> Iterator[bytes]:
        import zstandard

        while block:
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                yield self._frame.decompress(block)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            if not self._frame.eof:
                return
            block, self._frame = self._frame.unused_data, None


@contextlib.contextmanager
def _cut_off_is_a_trace_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: the compressed data is cut off or damaged ({error})", hint="copy or download the file again"
        ) from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}", hint="check the path and the disk") from error
