"""``caee report``: one page about a run or several, to read and to pass on."""

from __future__ import annotations

from typing import Annotated

import typer

from caee_cli.interrupts import ended_by_interrupts
from caee_cli.options import ForceOption, JsonOption, OutputOption, StoreOption


def command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs, or one simulation, by id. Default: the newest run.", metavar="[RUN]..."),
    ] = None,
    last: Annotated[int | None, typer.Option("--last", metavar="N", help="The N newest runs, side by side.")] = None,
    output: OutputOption = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="html|md|json|csv-dir", help="What to write.")
    ] = "html",
    allow_unlike_hosts: Annotated[
        bool, typer.Option("--allow-unlike-hosts", help="Compare runs even if their machines differ.")
    ] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Write one self-contained page: what the policy changed, at what cost, and how sure that is.

    Without -o the file is named after its runs. Nothing is overwritten without --force.
    """
    with ended_by_interrupts():
        from caee_cli.output import emit_json, late_progress, note, show, warn
        from caee_cli.outputs import refuse_overwriting
        from reports.report import files_of, make_report, parse_format, write_report
        from reports.terminal import page_summary
        from store.session import open_store

    chosen = parse_format(output_format)
    with late_progress("reporting") as progress, open_store(store, create=False) as kept:
        report = make_report(kept, runs or [], last=last, allow_unlike_hosts=allow_unlike_hosts, progress=progress)
        for file in files_of(report, chosen, output):
            refuse_overwriting(file, store=store)
        written = write_report(report, chosen, output, force=force)
    for warning in (*report.notes, *report.page.warnings):
        warn(warning)
    if as_json:
        emit_json(report.document() | {"written": str(written.path)})
    else:
        show(*page_summary(report.page))
    note(f"{written.path} is up to date" if written.up_to_date else f"Wrote {written.path}")
