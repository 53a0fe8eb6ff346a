"""``caee store list | show | export | import | delete | check``: what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.options import ForceOption, JsonOption, OutputOption, StoreOption

app = typer.Typer(no_args_is_help=True, help="What is kept: probes, calibrations, policies, runs and simulations.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id, or enough of its beginning.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID", help="Ids, or enough of their beginnings.")]


@app.command("list")
def list_records(
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only one kind: probe, calibration, policy, run or simulation.")
    ] = None,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """List what is kept, newest first."""
    from caee_cli.output import emit_json, show
    from reports.stored import entries_table
    from store.codec import encode
    from store.entries import record_kind
    from store.session import open_store

    with open_store(store, create=False) as kept:
        entries = kept.entries(None if kind is None else record_kind(kind))
    if json:
        records = [encode(entry) for entry in entries]
        emit_json({"schema": "caee.store.list/1", "location": kept.location, "records": records})
    else:
        show(entries_table(entries, kept.location))


@app.command("show")
def show_record(record_id: IdArgument, json: JsonOption = False, store: StoreOption = None) -> None:
    """Show one record; with --json, its whole document."""
    from caee_cli.output import emit_json, show
    from reports.stored import record_view
    from store.codec import encode
    from store.session import open_store

    with open_store(store, create=False) as kept:
        entry, document = kept.document(record_id)
    if json:
        emit_json({"schema": "caee.store.show/1", **encode(entry), "document": document})
    else:
        show(*record_view(entry, document))


@app.command("export")
def export_records(
    record_ids: IdsArgument,
    output: OutputOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Write records, and what they were made from, as one JSON document that `caee store import` reads.

    Without -o the document itself is printed.
    """
    from caee_cli.output import emit_json, note
    from caee_cli.outputs import check_output
    from store.exchange import write_export
    from store.session import open_store

    check_output(output, force=force, store=store)
    with open_store(store, create=False) as kept:
        document = kept.export(*record_ids)
    if output is None:
        emit_json(document)
    else:
        write_export(output, document, force=force)
        written = [record["record_id"] for record in document["records"]]
        note(f"Wrote {output}: {', '.join(written)}")
        if json:
            emit_json({"schema": "caee.store.export/1", "output": str(output), "records": written})


@app.command("import")
def import_records(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `caee store export` wrote.")],
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Add the records of an export; those that are kept already are left alone."""
    from caee_cli.output import emit_json, note
    from caee_cli.outputs import refuse_overwriting
    from store.codec import encode
    from store.exchange import read_export
    from store.session import open_store

    refuse_overwriting(file, store=store)  # which would be both read and written
    document = read_export(file)
    with open_store(store) as kept:
        imported = kept.import_document(document)
    if json:
        emit_json({"schema": "caee.store.import/1", "location": kept.location, **encode(imported)})
    else:
        note(f"Added {', '.join(imported.added) or 'nothing'}; {len(imported.present)} were kept already")


@app.command("delete")
def delete_records(
    record_ids: IdsArgument,
    force: Annotated[bool, typer.Option("--force", help="Even where other records were made from these.")] = False,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Delete records: all that are named, or none."""
    from caee_cli.output import emit_json, note
    from store.session import open_store

    with open_store(store, create=False) as kept:
        deleted = [entry.record_id for entry in kept.delete(*record_ids, force=force)]
    if json:
        emit_json({"schema": "caee.store.delete/1", "location": kept.location, "deleted": deleted})
    else:
        note(f"Deleted {', '.join(deleted)}")


@app.command("check")
def check_store(json: JsonOption = False, store: StoreOption = None) -> None:
    """Check that the database is sound and every record in it whole; exit code 3 if not."""
    from caee_cli.output import emit_json, show
    from probes.errors import CheckFailed
    from reports.stored import problems_view
    from store.codec import encode
    from store.session import check_store as check

    checked = check(store)
    if json:
        emit_json({"schema": "caee.store.check/1", "ok": not checked.damage, **encode(checked)})
    else:
        show(problems_view(checked.problems, checked.location))
    if checked.damage:
        raise CheckFailed(
            f"{checked.location} is damaged: {checked.damage[0].message}",
            hint="restore it from a copy, or export what is whole and import that into a new store",
        )
