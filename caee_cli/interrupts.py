"""Ctrl-C while large libraries are imported."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from probes.errors import Interrupted


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C ends the process at once: large libraries swallow it while they are imported, and are
    left half-imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end(number: int, frame: object) -> None:
    from caee_cli.output import complain

    complain("interrupted")
    os._exit(Interrupted.exit_code)
