"""``caee report``: from the store's runs, or a simulation, to a file in one of four formats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from probes.errors import InputError, StoreError, UsageError
from probes.files import written_whole
from probes.text import plural
from reports.info.comparison import ComparisonInfo, comparison_info
from reports.info.earlier import without_rough_intervals
from reports.info.run import RunInfo, run_info
from reports.info.simulation import SimulationInfo, simulation_info
from reports.pages.comparison import comparison_page
from reports.pages.page import Page
from reports.pages.run import run_page
from reports.pages.simulation import simulation_content
from store.entries import RecordKind
from store.records import RunRecord
from store.session import Store

SCHEMA = "caee.report/1"

# Newest calibrations that the drift is drawn from.
MOST_CALIBRATIONS = 50

# A file name that is no UTF-8 reaches us as lone surrogates, which no file can hold: their escapes are written.
_LONE_SURROGATES = "backslashreplace"

Progress = Callable[[float], None]


class Format(StrEnum):
    """``csv-dir`` is a folder with one CSV file per card; the others are one file."""

    HTML = "html"
    MD = "md"
    JSON = "json"
    CSV_DIR = "csv-dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What will be written: the numbers of runs or of a simulation, and the page made of them. ``notes``: what whoever
    asked for it should know, and its reader need not."""

    page: Page
    runs: tuple[RunInfo, ...] = ()
    comparison: ComparisonInfo | None = None
    simulation: SimulationInfo | None = None
    notes: tuple[str, ...] = ()

    @property
    def record_ids(self) -> tuple[str, ...]:
        return (self.simulation.simulation_id,) if self.simulation else tuple(run.run_id for run in self.runs)

    def document(self) -> dict[str, Any]:
        """Every number of the page, as the JSON document ``caee.report/1``."""
        return {
            "schema": SCHEMA,
            "runs": [dataclasses.asdict(run) for run in self.runs],
            "comparison": dataclasses.asdict(self.comparison) if self.comparison else None,
            "simulation": dataclasses.asdict(self.simulation) if self.simulation else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Where the report is; ``up_to_date``: it was there already, with the very same content."""

    path: Path
    up_to_date: bool


def parse_format(text: str) -> Format:
    """A format by its name. Raises ``UsageError``."""
    try:
        return Format(text)
    except ValueError as error:
        raise UsageError(f"--format {text!r} is unknown", hint=f"choose one of {', '.join(Format)}") from error


def make_report(
    store: Store,
    record_ids: Sequence[str],
    *,
    last: int | None = None,
    allow_unlike_hosts: bool = False,
    progress: Progress = lambda _: None,
) -> Report:
    """The report of the named runs or simulation, of the ``last`` newest runs, or of the newest run.

    Raises ``StoreError`` where a record cannot be had, ``UsageError`` for a wrong choice and ``InputError`` for runs
    of unlike hosts. ``progress`` is told the share that is done.
    """
    if len(record_ids) == 1 and last is None and (document := _simulation(store, record_ids[0])):
        simulation = simulation_info(document)
        return Report(page=simulation_content(simulation), simulation=simulation)
    records = _runs(store, record_ids, last)
    infos = _infos(store, records, progress)
    notes = _fewer(len(records), last)
    if len(records) == 1:
        return Report(page=run_page(infos[0]), runs=infos, notes=notes)
    comparison = comparison_info(records, allow_unlike_hosts=allow_unlike_hosts)
    return Report(page=comparison_page(comparison, infos), runs=infos, comparison=comparison, notes=notes)


def files_of(report: Report, output_format: Format, output: Path | None) -> tuple[Path, ...]:
    """The files that ``write_report`` writes."""
    path = output if output is not None else Path(_default_name(report, output_format))
    if output_format is not Format.CSV_DIR:
        return (path,)
    return tuple(path / f"{card.key}.csv" for card in report.page.cards)


def write_report(report: Report, output_format: Format, output: Path | None, *, force: bool = False) -> Written:
    """Write whole or not at all.

    Without ``output`` the file is named after its runs, and one with the same content is left as it is. Any other
    existing file is a ``UsageError`` unless ``force``.
    """
    path = output if output is not None else Path(_default_name(report, output_format))
    if output_format is Format.CSV_DIR:
        return _write_folder(report, path, force=force)
    content = _content(report, output_format).encode("utf-8", _LONE_SURROGATES)
    if output is None and path.is_file() and path.read_bytes() == content:
        return Written(path=path, up_to_date=True)
    with written_whole(path, force=force) as stream:
        stream.write(content)
    return Written(path=path, up_to_date=False)


def _simulation(store: Store, record_id: str) -> dict[str, Any] | None:
    """None where there is no such record, or it is no simulation: the search for a run says what is wrong."""
    try:
        entry, document = store.document(record_id)
    except StoreError:
        return None
    return document if entry.kind is RecordKind.SIMULATION else None


def _runs(store: Store, run_ids: Sequence[str], last: int | None) -> tuple[RunRecord, ...]:
    if run_ids and last is not None:
        raise UsageError("runs are named and --last is given", hint="name the runs, or ask for the last ones")
    if last is not None and last < 1:
        raise UsageError(f"--last {last} asks for no run", hint="--last takes 1 or more")
    if run_ids:
        found = tuple(without_rough_intervals(store.run(run_id)) for run_id in run_ids)
        if len({run.run_id for run in found}) < len(found):
            raise UsageError("a run is named twice", hint="name each run once")
        return found
    if last is None or last == 1:
        return (without_rough_intervals(store.run()),)
    # The oldest first: later runs are read against earlier ones.
    return tuple(map(without_rough_intervals, reversed(store.runs(last)))) or (store.run(),)


def _fewer(found: int, last: int | None) -> tuple[str, ...]:
    if last is None or found >= last:
        return ()
    return (f"--last {last} asks for {plural(last, 'run')}, and the store has {found}: the page shows {found}",)


def _infos(store: Store, runs: Sequence[RunRecord], progress: Progress) -> tuple[RunInfo, ...]:
    """A calibration or probe that has been deleted since is left out."""
    kept = [entry.record_id for entry in store.entries(RecordKind.CALIBRATION)]
    used = {run.calibration_id for run in runs}
    calibrations = {
        each: store.calibration(each) for at, each in enumerate(kept) if at < MOST_CALIBRATIONS or each in used
    }
    history = [calibrations[each] for each in kept[:MOST_CALIBRATIONS]]
    probes = {entry.record_id for entry in store.entries(RecordKind.PROBE)}
    found = []
    for run in runs:
        calibration = calibrations.get(run.calibration_id or "")
        probe = store.probe(calibration.probe_id) if calibration and calibration.probe_id in probes else None
        found.append(run_info(run, calibration, probe, history))
        progress(len(found) / (len(runs) + 1))
    return tuple(found)


def _default_name(report: Report, output_format: Format) -> str:
    name = "-".join(["caee-report", *map(_safe, report.record_ids)])
    return name if output_format is Format.CSV_DIR else f"{name}.{output_format}"


def _safe(record_id: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in record_id)


def _content(report: Report, output_format: Format) -> str:
    if output_format is Format.HTML:
        from reports.html.render import render_page

        return render_page(report.page)
    if output_format is Format.MD:
        from reports.markdown import markdown_page

        return markdown_page(report.page)
    return json.dumps(report.document(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _write_folder(report: Report, folder: Path, *, force: bool) -> Written:
    tables = {f"{card.key}.csv": card.table.csv().encode("utf-8", _LONE_SURROGATES) for card in report.page.cards}
    if folder.exists() and not force:
        if all((folder / name).is_file() and (folder / name).read_bytes() == text for name, text in tables.items()):
            return Written(path=folder, up_to_date=True)
        raise UsageError(f"{folder} exists already", hint="choose another name, or add --force to replace its tables")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {folder}: {error.strerror}", hint="choose a folder in one that exists"
        ) from error
    for name, text in tables.items():
        with written_whole(folder / name, force=True) as stream:
            stream.write(text)
    return Written(path=folder, up_to_date=False)
