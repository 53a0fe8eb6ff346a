"""How commands speak: one JSON document or rich tables on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress


def emit_json(document: dict[str, Any], *, compact: bool = False) -> None:
    """Write ``document`` and a newline; a NaN or an infinity becomes null."""
    text = json.dumps(_finite(document), allow_nan=False, ensure_ascii=False, indent=None if compact else 2)
    sys.stdout.write(text + "\n")


def show(*renderables: RenderableType) -> None:
    """Print tables and text on standard output; colour only on a terminal, ``NO_COLOR`` honoured."""
    console = _console(stderr=False)
    for renderable in renderables:
        console.print(renderable)


def note(message: str) -> None:
    """A remark on standard error."""
    _console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """A warning on standard error."""
    note(f"warning: {message}")


def complain(message: str, hint: str | None = None) -> None:
    """An error on standard error: what and why in one line, what to do next in another."""
    sys.stderr.write(f"caee: {' '.join(message.split())}\n")
    if hint:
        sys.stderr.write(f"  → {' '.join(hint.split())}\n")


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar with time left, on standard error; silent where standard error is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        console=_console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Piped output is not wrapped at 80 columns: other programs read it line by line.
    return Console(file=stream, width=None if stream.isatty() else 160, highlight=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
