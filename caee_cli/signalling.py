"""What ``caee run`` shows and serves while it runs: a file of steps, a live table, a Prometheus endpoint.

Rank 0 writes a line per step. The table and the endpoint follow those lines from this process, so that a run costs the
same however many look at it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.signals.collect import SignalFiles
    from runtime.signals.totals import StepTotals

LOOPBACK = "127.0.0.1"
REFRESHES_PER_SECOND = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRequest:
    """The command's options, as given."""

    steps_jsonl: Path | None = None
    live: bool = False
    metrics_port: int | None = None
    metrics_host: str = LOOPBACK


@contextlib.contextmanager
def serving_signals(request: SignalRequest, model: str) -> Iterator[SignalFiles | None]:
    """Show and serve during the block what was asked for; yields where rank 0 is to write, None for nowhere.

    Raises ``RunError`` where the endpoint cannot listen, ``UsageError`` or ``RunError`` where the file cannot be.
    """
    from caee_cli.output import note, warn
    from runtime.signals.collect import SignalFiles
    from runtime.signals.follow import StepFollower
    from runtime.signals.prometheus import exposition
    from runtime.signals.server import MetricsServer
    from runtime.signals.totals import StepTotals

    on_terminal = request.live and sys.stderr.isatty()
    if request.live and not on_terminal:
        warn("--live shows nothing: standard error is no terminal")
    with contextlib.ExitStack() as stack:
        paths = []
        if request.metrics_port is not None or on_terminal:
            totals = StepTotals()
            lines = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "steps.jsonl"
            paths.append(lines)
            if request.metrics_port is not None:
                server = MetricsServer(
                    request.metrics_host, request.metrics_port, lambda: exposition(totals.snapshot())
                )
                note(f"Metrics at {stack.enter_context(server).url}")
            if on_terminal:
                stack.enter_context(_live_table(totals))
            stack.enter_context(StepFollower(lines, totals.add))
        if request.steps_jsonl is not None:
            paths.append(stack.enter_context(_new_file(request.steps_jsonl)))
        yield SignalFiles(paths=tuple(paths), model=model) if paths else None


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """``path``, made now so that it fails before the work; removed again if nothing was written to it."""
    from probes.errors import RunError, UsageError

    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give the name of a file with --steps-jsonl")
    if path.exists() and not path.is_file():  # a pipe or a device, which others read
        yield path.absolute()
        return
    try:
        path.open("x").close()
    except FileExistsError as error:
        raise UsageError(
            f"{path} exists already", hint="name another file with --steps-jsonl, or remove this one"
        ) from error
    except OSError as error:
        raise RunError(
            f"steps cannot be written to {path}: {error.strerror or error}",
            hint="name a file in a folder that exists and that you may write to",
        ) from error
    try:
        yield path.absolute()
    finally:
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


@contextlib.contextmanager
def _live_table(totals: StepTotals) -> Iterator[None]:
    """A table on standard error that follows ``totals``."""
    from rich.live import Live

    from caee_cli.output import error_console
    from reports.live import live_table

    with Live(
        console=error_console(),
        get_renderable=lambda: live_table(totals.snapshot()),
        refresh_per_second=REFRESHES_PER_SECOND,
        redirect_stdout=False,  # the document goes there
        transient=True,
    ):
        yield
