"""Following a file of steps while another process writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.signals.step import StepsHeader, StepSignal, parse_line

POLL_SECONDS = 0.1


class StepFollower:
    """Tells ``on_line`` of each line of ``path``, on a thread, and at the end of the block of all that is left.

    The file may not exist yet. The last line may be incomplete: it is read when its end has come. ``on_line`` must not
    raise.
    """

    def __init__(self, path: Path, on_line: Callable[[StepsHeader | StepSignal], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._at = 0
        self._rest = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="steps")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._read()
        self._read()

    def _read(self) -> None:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._at)
                more = stream.read()
        except FileNotFoundError:
            return
        self._at += len(more)
        *lines, self._rest = (self._rest + more).split(b"\n")
        for line in lines:
            self._on_line(parse_line(line))
