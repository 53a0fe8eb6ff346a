"""``caee doctor``: what this machine can and cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.interrupts import ended_by_interrupts
from caee_cli.options import JsonOption, StoreOption


def command(
    disk_path: Annotated[
        Path | None, typer.Option("--disk-path", metavar="FOLDER", help="As for `caee probe`: the disk to look at.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Say what this machine can and cannot do, each with the reason and the fix; exit code 3 where a check fails."""
    from dataclasses import asdict

    with ended_by_interrupts():
        from caee_cli.diagnosis import diagnose
        from caee_cli.output import emit_json, show
        from probes.documents import fingerprint_document
        from probes.errors import CheckFailed
        from probes.text import plural
        from reports.measured import findings_table

    findings, fingerprint = diagnose(store, disk_path)
    if json:
        emit_json(
            {
                "schema": "caee.doctor/1",
                "findings": [asdict(finding) for finding in findings],
                "fingerprint": fingerprint_document(fingerprint),
            }
        )
    else:
        show(findings_table(findings))
    if failed := [finding for finding in findings if finding.status == "fail"]:
        names = ", ".join(finding.what for finding in failed)
        raise CheckFailed(f"{plural(len(failed), 'check')} failed: {names}", hint=failed[0].fix)
