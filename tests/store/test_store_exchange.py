"""Records move between stores as one JSON file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.errors import InputError, StoreError, UsageError
from store.codec import encode
from store.exchange import read_export, write_export
from store.session import Store, open_store


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "other.db")) as opened:
        yield opened


def test_a_run_brings_what_it_was_made_from(full_store: Store, other: Store, tmp_path: Path, records: Any) -> None:
    document = full_store.export("run-1")
    assert [record["record_id"] for record in document["records"]] == ["probe-1", "calibration-1", "run-1"]
    write_export(tmp_path / "export.json", document)
    imported = other.import_document(read_export(tmp_path / "export.json"))
    assert imported.added == ("probe-1", "calibration-1", "run-1")
    assert other.probe() == records.probe()
    assert other.calibration() == records.calibration()
    assert other.run() == records.run()
    assert other.check() == ()


def test_everything_arrives_the_same_and_is_exported_the_same(full_store: Store, other: Store) -> None:
    document = full_store.export(*(entry.record_id for entry in full_store.entries()))
    other.import_document(document)
    assert sorted(map(str, other.entries())) == sorted(map(str, full_store.entries()))
    assert other.export(*(entry.record_id for entry in other.entries())) == document


def test_importing_twice_changes_nothing(full_store: Store, other: Store) -> None:
    document = full_store.export("calibration-1")
    other.import_document(document)
    before = other.entries()
    imported = other.import_document(document)
    assert (imported.added, imported.present) == ((), ("probe-1", "calibration-1"))
    assert other.entries() == before
    assert full_store.import_document(document).added == ()


def test_a_number_written_without_its_point_is_the_same_number(full_store: Store, other: Store) -> None:
    document = full_store.export("calibration-1")
    text = json.dumps(document).replace('"factor": 1.0', '"factor": 1')
    assert text != json.dumps(document)
    assert full_store.import_document(json.loads(text)).present == ("probe-1", "calibration-1")
    other.import_document(json.loads(text))
    assert other.check() == ()


def test_another_content_under_the_same_id_is_refused_and_nothing_is_added(full_store: Store, other: Store) -> None:
    document = full_store.export("run-1")
    other.import_document(full_store.export("probe-1"))
    document["records"][0]["document"]["warnings"] = ["another machine"]
    with pytest.raises(StoreError, match="another probe is kept under the id probe-1"):
        other.import_document(document)
    assert [entry.record_id for entry in other.entries()] == ["probe-1"]


def test_what_was_deleted_since_is_left_out(full_store: Store, other: Store) -> None:
    full_store.delete("probe-1", force=True)
    document = full_store.export("run-1")
    assert [record["record_id"] for record in document["records"]] == ["calibration-1", "run-1"]
    other.import_document(document)
    assert [problem.damage for problem in other.check()] == [False]


def _set(path: tuple[Any, ...], value: Any) -> Callable[[Any], Any]:
    def change(document: Any) -> Any:
        at = document
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        return document

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda document: [document], "its schema is None"),
        (lambda document: None, "its schema is None"),
        (_set(("schema",), "caee.export/2"), "its schema is 'caee.export/2'"),
        (_set(("records",), {}), r"damaged: Export\.records: expected a list"),
        (_set(("records", 0), "probe"), r"Export\.records\[0\]: expected an object"),
        (_set(("records", 0, "kind"), "song"), r"Export\.records\[0\]\.kind: 'song' is not a valid RecordKind"),
        (_set(("records", 0, "more"), 1), r"Export\.records\[0\]: unknown field more"),
        (_set(("records", 0, "record_id"), "probe-2"), "at probe probe-2: the document says probe-1"),
        (_set(("records", 0, "created_at"), "2026-03-01T12:00:01Z"), "at probe probe-1: the document says probe-1 of"),
        (_set(("records", 2, "document", "gain_tpot", "ratio"), None), r"at run run-1: RunRecord\.gain_tpot\.ratio"),
        (_set(("records", 1, "kind"), "run"), r"at run calibration-1: RunRecord"),
    ],
)
def test_a_wrong_export_is_refused_and_nothing_is_added(
    full_store: Store, other: Store, change: Callable[[Any], Any], expected: str
) -> None:
    document = change(copy.deepcopy(full_store.export("run-1")))
    with pytest.raises(InputError, match=expected):
        other.import_document(document)
    assert other.entries() == ()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"schema": NaN}', b"[" * 200_000])
def test_a_file_that_is_no_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "export.json").write_bytes(content)
    with pytest.raises(InputError, match=r"export\.json is not JSON"):
        read_export(tmp_path / "export.json")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.json: No such file"):
        read_export(tmp_path / "none.json")


def test_a_written_export_does_not_replace_a_file_by_mistake(full_store: Store, tmp_path: Path) -> None:
    target = tmp_path / "export.json"
    target.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_export(target, full_store.export("probe-1"))
    assert target.read_text() == "mine"
    write_export(target, full_store.export("probe-1"), force=True)
    assert read_export(target) == full_store.export("probe-1")


def test_an_exported_document_is_the_record(full_store: Store, records: Any) -> None:
    (record,) = full_store.export("probe-1")["records"]
    assert record["document"] == encode(records.probe())
