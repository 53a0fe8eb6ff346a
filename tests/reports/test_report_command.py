"""``caee report`` on a store: what is written where, and what is refused."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from caee_cli import output
from caee_cli.main import run_app
from reports.info.run import run_info
from reports.pages.run import run_page
from reports.report import Format, Report, make_report, write_report
from store.session import open_store


@pytest.fixture
def kept(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a store of two runs and their calibration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAEE_STORE", str(tmp_path / "caee.db"))
    with open_store(str(tmp_path / "caee.db")) as store:
        store.save_probe(build.make_probe())
        store.save_calibration(build.make_calibration())
        store.save_run(build.make_run())
        later = build.make_run(run_id="run-0002", theta=0.6, ratio=0.75)
        store.save_run(replace(later, created_at="2026-03-15T00:00:00Z"))
    return tmp_path


def test_the_newest_run_is_reported_and_a_second_time_is_up_to_date(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["report"]) == 0
    output = capsys.readouterr()
    assert output.err.endswith("Wrote caee-report-run-0002.html\n")
    assert "25.0 % less time per output token." in output.out
    first = (kept / "caee-report-run-0002.html").read_bytes()
    assert b"Fitted cost models" in first
    assert run_app(["report"]) == 0
    assert "caee-report-run-0002.html is up to date" in capsys.readouterr().err
    assert (kept / "caee-report-run-0002.html").read_bytes() == first


def test_a_file_that_is_another_is_never_replaced_unasked(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = kept / "caee-report-run-0002.html"
    target.write_text("mine")
    assert run_app(["report"]) == 2
    assert "--force" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert run_app(["report", "--force"]) == 0
    assert target.read_text() != "mine"


def test_a_named_output_that_exists_is_refused_even_with_the_same_content(kept: Path) -> None:
    assert run_app(["report", "-o", "page.html"]) == 0
    assert run_app(["report", "-o", "page.html"]) == 2
    assert run_app(["report", "-o", "page.html", "--force"]) == 0


def test_a_run_is_named_by_its_id(kept: Path) -> None:
    assert run_app(["report", "run-0001"]) == 0
    assert (kept / "caee-report-run-0001.html").is_file()


def test_json_has_every_number_and_says_where_the_page_is(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["report", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "caee.report/1"
    assert document["written"] == "caee-report-run-0002.html"
    (run,) = document["runs"]
    assert run["verdict"]["outcome"] == "faster"
    assert len(run["phases"][0]["baseline"]["samples"]) == 12
    assert document["comparison"] is None


def test_format_json_is_the_same_document(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["report", "--format", "json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    written = json.loads((kept / "caee-report-run-0002.json").read_text())
    del document["written"]
    assert written == document


def test_format_md(kept: Path) -> None:
    assert run_app(["report", "--format", "md"]) == 0
    assert (kept / "caee-report-run-0002.md").read_text().startswith("# What cost-aware expert execution did")


def test_format_csv_dir_has_a_file_for_each_card(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["report", "--format", "csv-dir", "-o", "tables"]) == 0
    names = {file.name for file in (kept / "tables").iterdir()}
    assert {"layer-devices.csv", "phases.csv", "quality.csv", "cost-models.csv", "identity.csv"} <= names
    rows = list(csv.DictReader((kept / "tables" / "layer-devices.csv").open(newline="")))
    assert len(rows) == 8 * 4
    assert run_app(["report", "--format", "csv-dir", "-o", "tables"]) == 0
    assert "up to date" in capsys.readouterr().err
    (kept / "tables" / "quality.csv").write_text("mine")
    assert run_app(["report", "--format", "csv-dir", "-o", "tables"]) == 2
    assert (kept / "tables" / "quality.csv").read_text() == "mine"
    assert run_app(["report", "--format", "csv-dir", "-o", "tables", "--force"]) == 0


def test_several_runs_side_by_side(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["report", "--last", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [run["run_id"] for run in document["comparison"]["runs"]] == ["run-0001", "run-0002"]
    assert document["comparison"]["runs"][1]["tpot_against_first"]["ratio"] < 1
    page = (kept / "caee-report-run-0001-run-0002.html").read_text()
    assert "2 runs side by side" in page
    assert "Sweep of θ" in page
    assert run_app(["report", "run-0002", "run-0001"]) == 0
    assert (kept / "caee-report-run-0002-run-0001.html").is_file()


@pytest.mark.parametrize("last", [1, 2, 3, 9])
def test_fewer_runs_than_were_asked_for_are_said(kept: Path, last: int, capsys: pytest.CaptureFixture[str]) -> None:
    """To who asks, not on the page; with one run in the store, too."""
    for there in (2, 1):
        assert run_app(["report", "--last", str(last), "-o", "page.html", "--force"]) == 0
        said = f"--last {last} asks for {last} runs, and the store has {there}"
        assert (said in capsys.readouterr().err) == (last > there)
        assert "--last" not in (kept / "page.html").read_text().partition('id="data"')[0]
        with open_store(str(kept / "caee.db")) as store:
            if there == 2:
                store.delete("run-0002", force=True)


def test_a_stored_simulation_is_reported_by_its_id(
    build: ModuleType, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulation = build.make_simulation()
    with open_store(str(kept / "caee.db")) as store:
        store.save_simulation(simulation["simulation_id"], simulation["created_at"], simulation)
    assert run_app(["report", "simulation-0001", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["written"] == "caee-report-simulation-0001.html"
    assert document["runs"] == []
    assert [each["cut"] for each in document["simulation"]["passes"]] == [
        each["cut_against_router"] for each in simulation["policies"]
    ]
    assert "Predicted, not measured" in (kept / document["written"]).read_text()
    assert run_app(["report", "run-0001", "simulation-0001"]) == 1
    assert "simulation-0001" in capsys.readouterr().err


@pytest.mark.parametrize("output_format", list(Format))
def test_five_runs_in_every_format(build: ModuleType, kept: Path, output_format: Format) -> None:
    with open_store(str(kept / "caee.db")) as store:
        for at in range(3, 7):
            made = build.make_run(run_id=f"run-000{at}", theta=at / 10)
            store.save_run(replace(made, created_at=f"2026-03-2{at}T00:00:00Z"))
    assert run_app(["report", "--last", "5", "--format", output_format, "-o", "out"]) == 0
    written = kept / "out"
    names = [f"run-000{at}" for at in range(2, 7)]
    if output_format is Format.CSV_DIR:
        rows = list(csv.DictReader((written / "frontier.csv").open(newline="")))
        assert [row["run"] for row in rows] == names
    elif output_format is Format.JSON:
        assert [run["run_id"] for run in json.loads(written.read_text())["runs"]] == names
    else:
        text = written.read_text()
        assert "5 runs side by side" in text
        assert all(name in text for name in names)


def test_progress_is_told_for_each_run(build: ModuleType, kept: Path) -> None:
    told: list[float] = []
    with open_store(str(kept / "caee.db")) as store:
        make_report(store, [], last=2, progress=told.append)
    assert told == pytest.approx([1 / 3, 2 / 3])


def test_a_bar_appears_only_once_the_work_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[MagicMock] = []

    @contextlib.contextmanager
    def counted() -> Iterator[MagicMock]:
        bars.append(MagicMock())
        yield bars[-1]

    monkeypatch.setattr(output, "progress", counted)
    with output.late_progress("work", after_seconds=1e9) as tell:
        tell(0.5)
    assert bars == []
    with output.late_progress("work", after_seconds=0.0) as tell:
        tell(0.25)
        tell(0.75)
    (bar,) = bars
    assert [call.kwargs["completed"] for call in bar.update.call_args_list] == [0.25, 0.75]


def test_unlike_hosts_are_compared_only_if_asked(
    build: ModuleType, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(str(kept / "caee.db")) as store:
        other = replace(build.make_run(run_id="run-0003"), fingerprint=build.make_fingerprint(cpu="EPYC 9654"))
        store.save_run(replace(other, created_at="2026-03-16T00:00:00Z"))
    assert run_app(["report", "run-0001", "run-0003"]) == 1
    error = capsys.readouterr().err
    assert "cpu (Intel Xeon Platinum 8481C against EPYC 9654)" in error
    assert "--allow-unlike-hosts" in error
    assert not list(kept.glob("*.html"))
    assert run_app(["report", "run-0001", "run-0003", "--allow-unlike-hosts"]) == 0
    assert "unlike hosts: cpu differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run-9"], 1, "run-9"),
        (["--format", "pdf"], 2, "html, md, json, csv-dir"),
        (["--last", "0"], 2, "--last"),
        (["run-0001", "--last", "2"], 2, "--last"),
        (["run-0001", "run-0001"], 2, "twice"),
        (["-o", "no/such/folder/page.html"], 1, "no/such/folder"),
        (["--format", "csv-dir", "-o", "no/such/folder"], 1, "cannot make the folder no/such/folder"),
        (["--format", "csv-dir", "-o", "caee.db"], 2, "caee.db exists already"),
        (["--format", "csv-dir", "-o", "caee.db", "--force"], 1, "cannot make the folder caee.db"),
    ],
)
def test_what_cannot_be_done_is_said(
    kept: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    before = sorted(kept.iterdir())
    assert run_app(["report", *arguments]) == code
    assert says in capsys.readouterr().err
    assert sorted(kept.iterdir()) == before


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "mistyped.db"
    assert run_app(["report", "--store", str(missing)]) == 1
    assert "there is no store at" in capsys.readouterr().err
    assert not missing.exists()


def test_an_empty_store_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_store(str(tmp_path / "empty.db")).close()
    assert run_app(["report", "--store", str(tmp_path / "empty.db")]) == 1
    assert "caee run" in capsys.readouterr().err


def test_a_deleted_calibration_leaves_a_report(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(str(kept / "caee.db")) as store:
        store.delete("calibration-0001", "probe-0001", force=True)
    assert run_app(["report"]) == 0
    assert "no longer in the store" in capsys.readouterr().err


def test_an_id_cannot_lead_out_of_the_folder(build: ModuleType, kept: Path) -> None:
    with open_store(str(kept / "caee.db")) as store:
        store.save_run(replace(build.make_run(run_id="../x\\y"), created_at="2026-03-17T00:00:00Z"))
    assert run_app(["report"]) == 0
    assert (kept / "caee-report-.._x_y.html").is_file()


@pytest.mark.parametrize("output_format", list(Format))
def test_a_path_that_is_no_utf8_is_written_as_escapes(build: ModuleType, tmp_path: Path, output_format: Format) -> None:
    info = run_info(build.make_run(model="models/caf\udce9"))
    report = Report(runs=(info,), page=run_page(info))
    written = write_report(report, output_format, tmp_path / "out").path
    text = (written / "workload.csv" if written.is_dir() else written).read_text(encoding="utf-8")
    assert "models/caf\\udce9" in text


@pytest.mark.parametrize("called", ["its name", "a symbolic link", "a hard link"])
@pytest.mark.parametrize("chosen", [*Format, "export"])
def test_no_output_is_written_over_the_store(
    kept: Path, chosen: str, called: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every format; of a folder of tables, one of them is the store."""
    command = ["store", "export", "run-0001"] if chosen == "export" else ["report", "--format", chosen]
    (kept / "tables").mkdir()
    output = kept / "tables" / "phases.csv"
    store = kept / "caee.db"
    if called == "its name":
        store.rename(output)
        store = output
    elif called == "a symbolic link":
        output.symlink_to(store)
    else:
        output.hardlink_to(store)
    before = store.read_bytes()
    target = output.parent if chosen == Format.CSV_DIR else output
    assert run_app([*command, "-o", str(target), "--force", "--store", str(store)]) == 2
    assert "is the store's own file" in capsys.readouterr().err
    assert store.read_bytes() == before
    assert list(output.parent.iterdir()) == [output]


def test_a_store_is_not_imported_into_itself(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (kept / "caee.db").read_bytes()
    assert run_app(["store", "import", "caee.db"]) == 2
    assert "is the store's own file" in capsys.readouterr().err
    assert (kept / "caee.db").read_bytes() == before


@pytest.mark.parametrize("ending", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("there", [False, True])
def test_nor_beside_it_where_the_database_has_files_of_its_own(
    kept: Path, ending: str, there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = kept / f"caee.db{ending}"
    commands = (
        ["report", "-o", str(beside), "--force"],
        ["store", "export", "run-0001", "-o", str(beside), "--force"],
        ["run", "--steps-jsonl", str(beside)],
    )
    if there:
        beside.touch()
    for command in commands:
        assert run_app(command) == 2, command
        assert "store's own file" in capsys.readouterr().err
        assert beside.exists() == there


def test_steps_are_not_written_over_the_store(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (kept / "caee.db").read_bytes()
    assert run_app(["run", "--steps-jsonl", "caee.db"]) == 2
    assert "is the store's own file" in capsys.readouterr().err
    assert (kept / "caee.db").read_bytes() == before


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_intervals_that_earlier_versions_gave_of_too_few_pairs_are_not_shown(
    kept: Path, build: ModuleType, pairs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    old = build.make_run(run_id="old", pairs=pairs, ratio=0.8)
    with open_store(str(kept / "caee.db")) as store:
        store.save_run(old)
        assert store.run("old") == old, "what was saved stays"
    for named in (["old"], ["old", "run-0002"], ["--last", "3"]):
        assert run_app(["report", *named, "--json", "-o", "page.html", "--force"]) == 0
        (found,) = [run for run in json.loads(capsys.readouterr().out)["runs"] if run["run_id"] == "old"]
        assert found["verdict"]["outcome"] == ("faster" if pairs == 3 else "not shown")
        for phase in found["phases"]:
            for figure in (phase["baseline"], phase["with_policy"], phase["gain"]):
                assert (figure["ci95"] is None) == (pairs < 3)
