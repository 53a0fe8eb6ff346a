"""The ``caee`` command: wires the commands together and turns errors into exit codes.

Nothing heavy is imported here: every command imports what it needs when it runs.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from caee_cli.commands import calibrate, doctor, explain, probe, report, run, simulate, store, trace

app = typer.Typer(
    name="caee",
    help="Cost-Aware Expert Execution for Mixture-of-Experts inference: what routing costs on this machine, what "
    "pruning would buy, at what loss of quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("probe")(probe.command)
app.command("calibrate")(calibrate.command)
app.add_typer(trace.app, name="trace")
app.command("simulate")(simulate.command)
app.command("run")(run.command)
app.command("report")(report.command)
app.command("explain")(explain.command)
app.add_typer(store.app, name="store")
app.command("doctor")(doctor.command)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        sys.stdout.write(f"caee {version('caee')}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before the command."""


# What the command-line parser raises for wrong usage. typer brings its own copy of click, or in older versions needs
# click, and exports only this class's child.
_ParserError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the command line; the only place that exits the process."""
    if os.environ.get("CAEE_DEBUG") != "1":
        # What torch's libraries log about ranks that are gone, stack traces and all, we say in one message.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 is no reason to fail
    sys.exit(run_app(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Standard streams that were closed lead nowhere: else the next file to be opened would take their place, and what
    is printed would go into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))


def run_app(arguments: list[str]) -> int:
    """Exit code of the command line with ``arguments``; errors go to standard error, as a traceback only for debugging.

    Not through ``typer.Typer.__call__``, which has exit codes and messages of its own for interrupts and closed pipes.
    """
    try:
        _invoke(arguments)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except (BrokenPipeError, SystemExit) as stop:
        # The reader (head, a pager) has gone: not an error of ours. rich makes an exit of it.
        if not isinstance(stop, BrokenPipeError) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        _silence_stdout()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return _failed(error)
    return 0


def command_line() -> Any:
    """The parser's command; in its help flags show no type, and paragraphs fit the terminal's width."""
    command = typer.main.get_command(app)
    _tidy(command)
    return command


def _tidy(command: Any) -> None:
    if command.help:
        command.help = "\n\n".join(
            part if "\b" in part else " ".join(part.split()) for part in command.help.split("\n\n")
        )
    for parameter in command.params:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _tidy(inner)


def _invoke(arguments: list[str]) -> None:
    command = command_line()
    with command.make_context("caee", arguments) as context:
        command.invoke(context)


def _failed(error: BaseException) -> int:
    """Say what went wrong, and return the exit code for it."""
    from caee_cli.output import complain
    from probes.errors import CaeeError

    if os.environ.get("CAEE_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, CaeeError):
        complain(error.message, error.hint)
        return error.exit_code
    if isinstance(error, _ParserError):
        return _usage_failed(error)
    if _is_interrupt(error):
        complain("interrupted")
        return 130
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _silence_stdout()
        complain("no space left where the output goes", "free some space, and try again")
        return 1
    complain(f"unexpected {type(error).__name__}: {error}", "set CAEE_DEBUG=1 for the traceback, and report it")
    return 1


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind ``error``: Python and libraries wrap it where it falls into an import."""
    while error is not None:
        if isinstance(error, (KeyboardInterrupt, typer.Abort)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _usage_failed(error: Any) -> int:
    """``error`` is a parser's error of whichever click typer uses; ``caee`` alone is one whose message is the help."""
    from caee_cli.output import complain

    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "caee"
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(error.format_message())
    else:
        complain(error.format_message(), f"{path} --help shows how it is called")
    return int(error.exit_code)


def _silence_stdout() -> None:
    """Point standard output away, so that Python's flush at exit does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
