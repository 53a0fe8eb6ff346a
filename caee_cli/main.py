"""The ``caee`` command: wires the commands together and turns errors into exit codes.

Nothing heavy is imported here: every command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

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


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed_version

        sys.stdout.write(f"caee {installed_version('caee')}\n")
        raise typer.Exit


def main() -> None:
    """Run the command line; the only place that exits the process."""
    sys.exit(run_app(sys.argv[1:]))


def run_app(arguments: list[str]) -> int:
    """Exit code of the command line with ``arguments``; errors are printed to standard error, never as a traceback."""
    import click

    from caee_cli.output import complain
    from probes.errors import CaeeError

    try:
        result = app(args=arguments, prog_name="caee", standalone_mode=False)
    except CaeeError as error:
        if os.environ.get("CAEE_DEBUG") == "1":
            raise
        complain(error.message, error.hint)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stdout.write(error.format_message() + "\n")
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        complain("interrupted; nothing was kept")
        return 130
    except BrokenPipeError:
        # The reader (head, a pager) has gone: not an error of ours. Point stdout away so that the exit flush is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("CAEE_DEBUG") == "1":
            raise
        complain(f"unexpected {type(error).__name__}: {error}", "set CAEE_DEBUG=1 for the traceback, and report it")
        return 1
    return result if isinstance(result, int) else 0
