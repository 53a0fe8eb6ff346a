"""Finding, listing, replacing and deleting records."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from probes.errors import StoreError, UsageError
from probes.records import Field
from store.entries import RecordKind, record_kind
from store.session import Store, default_location, open_store


def test_none_is_the_newest_whatever_the_order_of_saving(store: Store, records: Any) -> None:
    for run_id, created_at in [
        ("b", "2026-03-02T00:00:00+00:00"),
        ("c", "2026-03-01T00:00:00+00:00"),
        ("a", "2026-03-02T00:30:00+01:00"),  # half an hour before b
    ]:
        store.save_run(records.run(run_id, None, created_at))
    assert store.run().run_id == "b"
    assert [run.run_id for run in store.runs(2)] == ["b", "a"]
    assert [run.run_id for run in store.runs(10)] == ["b", "a", "c"]
    assert store.runs(0) == ()


def test_of_one_moment_the_last_saved_is_the_newest(store: Store, records: Any) -> None:
    store.save_probe(records.probe("z"))
    store.save_probe(records.probe("a"))
    assert store.probe().probe_id == "a"


def test_the_newest_calibration_of_this_machine_whatever_was_imported_since(store: Store, records: Any) -> None:
    ours = records.calibration("ours", None, "2026-03-01T00:00:00Z")
    assert ours.fingerprint is not None
    identity = ours.fingerprint.identity
    elsewhere = dataclasses.replace(ours.fingerprint, identity=identity | {"cpu": Field(value="Another")})
    later = dataclasses.replace(ours, calibration_id="theirs", created_at="2026-03-09T00:00:00Z", fingerprint=elsewhere)
    store.save_calibration(later)
    with pytest.raises(StoreError, match="no calibration of this machine is kept yet") as caught:
        store.calibration(machine=ours.fingerprint)
    assert "caee calibrate" in str(caught.value.hint)
    store.save_calibration(ours)
    assert store.calibration() == later
    assert store.calibration(machine=elsewhere) == later
    # Neither another state nor a field that has become unknown with a reason makes another machine.
    same = dataclasses.replace(
        ours.fingerprint, state={}, identity=identity | {"new": Field(value=None, reason="not readable")}
    )
    assert store.calibration(machine=same) == ours
    with pytest.raises(StoreError, match="no calibration of this machine has the id 'theirs'"):
        store.calibration("theirs", machine=same)


def test_the_beginning_of_an_id_is_enough_if_it_is_the_only_one(store: Store, records: Any) -> None:
    for probe_id in ("alpha", "alphabet", "beta_1", "beta%2"):
        store.save_probe(records.probe(probe_id))
    assert store.probe("alphab").probe_id == "alphabet"
    assert store.probe("alpha").probe_id == "alpha"  # a whole id wins over longer ones
    assert store.probe("beta_").probe_id == "beta_1"  # no wildcards
    with pytest.raises(StoreError, match="2 ids begin with 'alp': alpha, alphabet"):
        store.probe("alp")
    with pytest.raises(StoreError, match="no probe has the id 'Alpha'"):
        store.probe("Alpha")
    with pytest.raises(StoreError, match="no probe has the id ''"):
        store.probe("")


def test_a_kind_is_looked_for_among_its_own(full_store: Store) -> None:
    with pytest.raises(StoreError, match="'probe-1' is the id of a probe, and a calibration is asked for"):
        full_store.calibration("probe-1")


@pytest.mark.parametrize(
    ("kind", "command"),
    [("probe", "caee probe"), ("calibration", "caee calibrate"), ("run", "caee run"), ("simulation", "caee simulate")],
)
def test_where_there_is_none_the_next_command_is_named(store: Store, kind: str, command: str) -> None:
    with pytest.raises(StoreError, match=f"no {kind} is kept yet") as caught:
        getattr(store, kind)()
    assert command in str(caught.value.hint)


def test_entries_say_what_is_kept(full_store: Store) -> None:
    assert {(entry.kind, entry.record_id): entry.summary for entry in full_store.entries()} == {
        (RecordKind.PROBE, "probe-1"): "2 devices, 1 link measured, 1 waived",
        (RecordKind.CALIBRATION, "calibration-1"): "1 cost model from probe probe-1",
        (RecordKind.RUN, "run-1"): "demo on 2 devices, caee:rule=cir,theta=0.8,seed=0,strict=True: TPOT × 0.870",
        (RecordKind.SIMULATION, "simulation-1"): "2 results",
    }
    assert [entry.record_id for entry in full_store.entries(RecordKind.RUN)] == ["run-1"]
    assert all(entry.size_bytes > 80 for entry in full_store.entries())


def test_a_simulation_is_named_by_what_was_replayed(store: Store) -> None:
    written = ["router", "caee:theta=0.8", "router", "caee:theta=0.6", "lynx", "random"]
    document = {
        "trace": {"model": "demo", "path": "/traces/t.parquet"},
        "machine": {"devices": 4},
        "policies": [{"name": text.partition(":")[0], "written": text} for text in written],
    }
    unnamed = document | {"trace": {"model": None, "path": "/traces/\udcff.parquet"}}
    odd = {"trace": [1], "machine": {"devices": "x"}, "policies": [1, {"written": 2}]}
    summaries = []
    for number, each in enumerate((document, unnamed, odd, {"policies": 1})):
        store.save_simulation(f"s{number}", "2026-03-01T12:00:00Z", each)
        summaries.append(store.entries()[0].summary)
    assert summaries[0] == "demo on 4 devices: router, caee:theta=0.8, caee:theta=0.6, 2 more; 6 results"
    assert summaries[1] == "/traces/\\udcff.parquet on 4 devices: " + summaries[0].partition(": ")[2]
    assert summaries[2:] == ["2 results", "a simulation"]


def test_an_unknown_kind_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="'runs' is no kind"):
        record_kind("runs")


def test_saving_twice_changes_nothing(full_store: Store, records: Any) -> None:
    before = full_store.entries()
    full_store.save_probe(records.probe())
    full_store.save_calibration(records.calibration())
    full_store.save_run(records.run())
    assert full_store.entries() == before


def test_another_record_under_a_used_id_is_refused(full_store: Store, records: Any) -> None:
    with pytest.raises(StoreError, match="another run is kept under the id run-1"):
        full_store.save_run(dataclasses.replace(records.run(), tier="host"))
    with pytest.raises(StoreError, match="another probe is kept under the id probe-1"):
        full_store.save_run(records.run("probe-1"))
    assert full_store.run() == records.run()


@pytest.mark.parametrize("run_id", ["", "two words", "line\nbreak", "x" * 129])
def test_an_id_that_cannot_be_typed_is_refused(store: Store, records: Any, run_id: str) -> None:
    with pytest.raises(StoreError, match="cannot be an id"):
        store.save_run(records.run(run_id))


@pytest.mark.parametrize("created_at", ["", "yesterday", "2026-13-01"])
def test_a_date_that_does_not_sort_is_refused(store: Store, records: Any, created_at: str) -> None:
    with pytest.raises(StoreError, match="created_at is no ISO 8601 date"):
        store.save_run(records.run(created_at=created_at))


def test_what_others_were_made_from_is_not_deleted_by_mistake(full_store: Store) -> None:
    before = full_store.entries()
    with pytest.raises(StoreError, match="calibration-1 was made from probe-1") as caught:
        full_store.delete("probe-1")
    assert "--force" in str(caught.value.hint)
    with pytest.raises(StoreError, match="run-1 was made from calibration-1"):
        full_store.delete("probe-1", "calibration-1")
    assert full_store.entries() == before


def test_records_are_deleted_together_or_not_at_all(full_store: Store) -> None:
    with pytest.raises(StoreError, match="no record has the id 'nothing'"):
        full_store.delete("run-1", "nothing")
    assert len(full_store.entries()) == 4
    gone = full_store.delete("probe", "cal", "run-1")
    assert [entry.record_id for entry in gone] == ["probe-1", "calibration-1", "run-1"]
    assert [entry.record_id for entry in full_store.entries()] == ["simulation-1"]


def test_deleting_leaves_no_row_behind(full_store: Store, store_file: Path) -> None:
    full_store.delete(*(entry.record_id for entry in full_store.entries()))
    connection = sqlite3.connect(store_file)
    for table in ("records", "dependencies", "links", "samples", "models", "runs"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


def test_a_forced_deletion_is_noted_by_the_check_but_is_no_damage(full_store: Store, records: Any) -> None:
    full_store.delete("calibration-1", force=True)
    (problem,) = full_store.check()
    assert (problem.record_id, problem.damage) == ("run-1", False)
    assert "calibration-1" in problem.message
    full_store.save_calibration(records.calibration())
    assert full_store.check() == ()


def test_the_tables_answer_questions_in_sql(full_store: Store, store_file: Path) -> None:
    connection = sqlite3.connect(store_file)
    links = connection.execute("SELECT kind, status, bandwidth_median_bytes_per_s FROM links ORDER BY link").fetchall()
    assert links == [("disk_to_host", "unstable", 1.1e9), ("host_to_device", "waived", None)]
    sizes = connection.execute("SELECT size_bytes, json_array_length(seconds) FROM samples").fetchall()
    assert sizes == [(4096, 3), (1 << 30, 2)]
    models = connection.execute("SELECT source, alpha, bandwidth_bytes_per_s, beta_seconds FROM models").fetchall()
    assert models == [("disk", 1.07, 1.1e9, 9.5e-5)]
    runs = connection.execute("SELECT model, tier, policy, gain_tpot FROM runs").fetchall()
    assert runs == [("demo", "disk", "caee", 0.87)]
    machines = connection.execute("SELECT DISTINCT machine FROM records WHERE machine IS NOT NULL").fetchall()
    assert len(machines) == 1


def test_the_location_is_the_option_then_the_environment_then_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CAEE_STORE", str(tmp_path / "from-environment.db"))
    with open_store(str(tmp_path / "named" / "deep" / "a.db")) as store:
        assert store.location == str(tmp_path / "named" / "deep" / "a.db")
    with open_store(None) as store:
        assert store.location == str(tmp_path / "from-environment.db")
    monkeypatch.setenv("CAEE_STORE", "")
    with open_store(None) as store:
        assert store.location == default_location() == str(tmp_path / "data" / "caee" / "caee.db")


@pytest.mark.parametrize("name", ["a b.db", "q?x=1.db", "#1.db", "%41.db", "ünï.db"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    with open_store(str(tmp_path / name)):
        pass
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_sqlite_url_is_the_file_it_names(tmp_path: Path, records: Any) -> None:
    with open_store(f"sqlite:///{tmp_path}/new/a.db") as store:
        store.save_probe(records.probe())
    with open_store(str(tmp_path / "new" / "a.db"), create=False) as store:
        assert store.probe() == records.probe()


def test_to_ask_whether_a_store_can_be_written_changes_nothing(full_store: Store, store_file: Path) -> None:
    before = store_file.read_bytes()
    full_store.require_writable()
    assert store_file.read_bytes() == before
    assert full_store.check() == ()
