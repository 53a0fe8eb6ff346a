"""Stored policies: kept, listed, moved and checked like every record, with a row of their own."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from probes.errors import StoreError
from store.documents import policy_document
from store.entries import RecordKind
from store.session import Store, open_store


@pytest.fixture
def with_policy(full_store: Store, records: Any) -> Store:
    """The full store, a policy found there, and a run that used it."""
    full_store.save_policy(records.policy())
    full_store.save_run(dataclasses.replace(records.run("run-2"), policy_origin=records.origin()))
    return full_store


def test_a_policy_comes_back_as_it_was_saved(with_policy: Store, records: Any) -> None:
    assert with_policy.policy() == with_policy.policy("policy-1") == records.policy()
    assert with_policy.policies() == (records.policy(),)
    assert with_policy.run("run-2").policy_origin == records.origin()
    assert with_policy.check() == ()


def test_without_one_the_error_names_the_command(full_store: Store) -> None:
    assert full_store.policies() == ()
    with pytest.raises(StoreError, match="no policy is kept yet") as caught:
        full_store.policy()
    assert "--max-quality-drop" in str(caught.value.hint)


def test_the_newest_comes_first(full_store: Store, records: Any) -> None:
    for number, day in ((1, "05"), (2, "07"), (3, "06")):
        full_store.save_policy(records.policy(f"policy-{number}", created_at=f"2026-03-{day}T12:00:00+00:00"))
    assert [record.policy_id for record in full_store.policies()] == ["policy-2", "policy-3", "policy-1"]


def test_what_a_search_that_found_nothing_says_in_a_list(full_store: Store, records: Any) -> None:
    search = dataclasses.replace(records.policy().search, chosen=None)
    full_store.save_policy(
        dataclasses.replace(records.policy(), policy=None, search=search, run_id=None, measured=None, gain_tpot=None)
    )
    (entry,) = full_store.entries(RecordKind.POLICY)
    assert entry.summary == "demo on 2 devices, tier disk: no setting of theta within a loss of 1 %"
    assert full_store.policy().policy is None
    assert full_store.check() == ()


def test_a_run_takes_its_policy_along(with_policy: Store, tmp_path: Path, records: Any) -> None:
    exported = with_policy.export("run-2")
    assert [record["record_id"] for record in exported["records"]] == ["probe-1", "calibration-1", "policy-1", "run-2"]
    with open_store(str(tmp_path / "other.db")) as other:
        other.import_document(exported)
        assert other.policy() == records.policy()
        assert other.check() == ()


def test_a_policy_that_a_run_used_is_not_deleted_alone(with_policy: Store) -> None:
    with pytest.raises(StoreError, match="run-2 was made from policy-1"):
        with_policy.delete("policy-1")
    with_policy.delete("policy-1", "run-2")
    assert with_policy.policies() == ()


def test_its_row_holds_what_people_ask_for(with_policy: Store, store_file: Path) -> None:
    connection = sqlite3.connect(store_file)
    row = connection.execute(
        "SELECT model, tier, devices, cache_experts, knob, chosen, policy FROM policies"
    ).fetchone()
    assert row == ("demo", "disk", 2, 32, "theta", 0.6, "caee")
    connection.execute("UPDATE policies SET chosen = 0.5")
    connection.commit()
    (problem,) = with_policy.check()
    assert (problem.record_id, problem.damage) == ("policy-1", True)
    assert "policies" in problem.message


def test_the_row_goes_with_the_record(with_policy: Store, store_file: Path) -> None:
    with_policy.delete("policy-1", "run-2")
    assert sqlite3.connect(store_file).execute("SELECT COUNT(*) FROM policies").fetchone() == (0,)


def test_the_document_is_plain(records: Any) -> None:
    document = policy_document(records.policy())
    assert document["schema"] == "caee.policy/1"
    assert document["policy"]["name"] == "caee"
    assert document["policy"]["theta"] == records.policy().policy.parameters["theta"]
    assert document["search"]["points"][0]["loss_rise_ci95"] == (0.002, 0.006)
