"""How commands speak: one JSON document or rich tables on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from probes.text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

PIPED_COLUMNS = 160
"""Width of what goes to a file or another program: not 80, since programs read line by line."""

FEWEST_COLUMNS = 20
"""Nothing is laid out for less."""


def emit_json(document: dict[str, Any], *, compact: bool = False) -> None:
    """Write ``document`` and a newline; a NaN or an infinity becomes null."""
    finite, indent = _finite(document), None if compact else 2
    text = json.dumps(finite, allow_nan=False, ensure_ascii=False, indent=indent)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # An ASCII terminal, or a file name that is no UTF-8: JSON has escapes for both.
        text = json.dumps(finite, allow_nan=False, ensure_ascii=True, indent=indent)
    sys.stdout.write(text + "\n")


def show(*renderables: RenderableType) -> None:
    """Print tables and text on standard output; colour only on a terminal, ``NO_COLOR`` honoured."""
    console = _console(stderr=False)
    for renderable in renderables:
        console.print(renderable)


def note(message: str) -> None:
    """A remark on standard error."""
    sys.stderr.write(f"{printable(message)}\n")


def warn(message: str) -> None:
    """A warning on standard error."""
    note(f"warning: {message}")


def complain(message: str, hint: str | None = None) -> None:
    """An error on standard error: what and why in one line, what to do next in another."""
    sys.stderr.write(f"caee: {printable(' '.join(message.split()))}\n")
    if hint:
        sys.stderr.write(f"  → {printable(' '.join(hint.split()))}\n")


@contextlib.contextmanager
def progress(*, hidden: bool = False) -> Iterator[Progress]:
    """A progress bar with time left, on standard error; silent where ``hidden`` or standard error is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        console=_console(stderr=True),
        transient=True,
        disable=hidden or not sys.stderr.isatty(),
    ) as bar:
        yield bar


@contextlib.contextmanager
def late_progress(description: str, *, after_seconds: float = 1.0) -> Iterator[Callable[[float], None]]:
    """A bar that is told fractions, and that appears once the work has taken ``after_seconds``."""
    with contextlib.ExitStack() as stack:
        start, advance = time.monotonic(), None

        def tell(fraction: float) -> None:
            nonlocal advance
            if advance is None and time.monotonic() - start >= after_seconds:
                bar = stack.enter_context(progress())
                advance = partial(bar.update, bar.add_task(description, total=1.0))
            if advance is not None:
                advance(completed=fraction)

        yield tell


def error_console() -> Console:
    """Standard error, for what comes and goes while a command works."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Names of models, files and policies may hold [brackets] and :colons:, which rich would take for its markup.
    return Console(file=stream, width=_width(stream), highlight=False, markup=False, emoji=False)


def _width(stream: IO[str]) -> int | None:
    """Characters per line: as ``COLUMNS`` says, else the terminal's own (None), else enough for programs that read."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return max(int(columns), FEWEST_COLUMNS)
    return None if stream.isatty() else PIPED_COLUMNS


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
