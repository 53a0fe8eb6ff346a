"""``caee probe``: measure this machine's links."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.interrupts import ended_by_interrupts
from caee_cli.options import JsonOption, SeedOption, StoreOption


def command(
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="KIND[:COUNT]",
            help="cpu:4, cuda, cuda:2 (the first two) or cuda:0,3 (these). Default: every GPU, else ranks on the CPU.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and samples, under 15 s.")] = False,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes", metavar="SIZE,…", help="Further sizes to measure, such as a model's experts: 43MB,88MB."
        ),
    ] = None,
    disk_path: Annotated[
        Path | None,
        typer.Option(
            "--disk-path", metavar="FOLDER", help="Folder on the disk to measure. Default: the store's folder."
        ),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="Also time all-to-all (dispatch, combine) and all-reduce over all devices, on each: 10 s more.",
        ),
    ] = False,
    json: JsonOption = False,
    store: StoreOption = None,
    seed: SeedOption = 0,
) -> None:
    """Measure device memory, host memory, the links between them and the disk: alone, and all devices at once.

    Every transfer is verified. Raw samples and the machine's fingerprint are stored; `caee calibrate` fits them. Takes
    at most 30 seconds without --collectives.
    """
    with ended_by_interrupts():
        from caee_cli.measuring import disk_folder, measure_and_store
        from caee_cli.output import emit_json, note, show
        from probes.documents import probe_document
        from reports.measured import probe_tables
        from store.session import open_store

    with open_store(store) as kept:
        folder = disk_folder(kept, disk_path)
        measured = measure_and_store(
            kept,
            devices=devices,
            quick=quick,
            sizes=sizes,
            collectives=collectives,
            folder=folder,
            seed=seed,
        )
    if json:
        emit_json(probe_document(measured))
    else:
        show(*probe_tables(measured))
    note(f"Stored probe {measured.probe_id} in {kept.location}; next: caee calibrate")
