"""``caee calibrate``: fit cost models to a probe, or check those that are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.interrupts import ended_by_interrupts
from caee_cli.options import JsonOption, SeedOption, StoreOption


def command(
    probe: Annotated[
        str | None,
        typer.Option(
            "--probe", metavar="ID", help="Which stored probe to fit. Default: the newest that was not interrupted."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Take figures from elsewhere instead: what the file is, is told from its content (docs/probing.md).",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Measure three sizes anew: do the stored models hold? Exit code 3 if not."),
    ] = False,
    disk_path: Annotated[
        Path | None, typer.Option("--disk-path", metavar="FOLDER", help="With --check: as for `caee probe`.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = None,
    seed: SeedOption = 0,
) -> None:
    """Fit α, B and β of every link, with intervals and hold-out error, and store the cost models."""
    with ended_by_interrupts():
        from caee_cli.measuring import check_stored, fit_and_store
        from caee_cli.output import emit_json, note, show
        from probes.documents import calibration_document, drift_document
        from probes.errors import CheckFailed, UsageError
        from reports.measured import calibration_tables, drift_tables
        from store.session import open_store

    if sum((probe is not None, file is not None, check)) > 1:
        raise UsageError("--probe, --import and --check exclude each other", hint="`caee calibrate --help`")
    # Only an import starts a store: everything else works on what is kept already.
    with open_store(store, create=file is not None) as kept:
        if check:
            report = check_stored(kept, disk_path, seed)
            emit_json(drift_document(report)) if json else show(*drift_tables(report))
            if not report.holds:
                raise CheckFailed(report.summary, hint="measure anew: `caee probe`, then `caee calibrate`")
            return
        calibration = fit_and_store(kept, probe, file, seed)
    emit_json(calibration_document(calibration)) if json else show(*calibration_tables(calibration))
    use = "caee run" if file is None else f"caee simulate TRACE --machine {calibration.calibration_id}"
    note(f"Stored calibration {calibration.calibration_id} in {kept.location}; next: {use}")
