"""``caee probe``, ``calibrate`` and ``doctor`` as a user meets them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from caee_cli.main import run_app
from probes.drift import DriftReport
from probes.records import INTERRUPTED, Field, LinkKind, Probe
from store.session import open_store


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The builders of made-up records that the report's tests have."""
    spec = importlib.util.spec_from_file_location(
        "report_records", Path(__file__).parents[1] / "reports" / "records.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "kept" / "caee.db")


@pytest.fixture
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools and a short measurement: what is under test here is what happens around it."""
    monkeypatch.setattr("probes.plan.last_level_cache_bytes", lambda: 4 << 20)
    monkeypatch.setattr("caee_cli.measuring._seconds_left", lambda quick: 3.0)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_app([*arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.usefixtures("quick_machine")
def test_probe_calibrate_doctor_in_a_row(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = run_json(capsys, "probe", "--quick", "--devices", "cpu:2", "--sizes", "80kB,1MiB", "--store", store)
    assert probed["schema"] == "caee.probe/1"
    assert [device["kind"] for device in probed["devices"]] == ["cpu", "cpu"]
    memory = next(link for link in probed["links"] if link["kind"] == "host_memory" and link["concurrency"] == "solo")
    assert 81_920 in [sample["size_bytes"] for sample in memory["samples"]]

    fitted = run_json(capsys, "calibrate", "--store", store)
    assert fitted["probe_id"] == probed["probe_id"]
    for model in fitted["models"]:
        assert model["form"] in ("affine", "piecewise", "table")
        assert model["alpha"] > 0
        assert model["beta_seconds"] >= 0
        assert model["status"] in ("ok", "poor")
        assert (model["segments"] is None) == (model["form"] == "affine")

    examined = run_json(capsys, "doctor", "--store", store)
    findings = {finding["what"]: finding for finding in examined["findings"]}
    assert findings["installation"]["status"] == "ok"
    assert findings["store"]["status"] == "ok"
    assert findings["cost models"]["status"] == "ok"
    assert all(finding["detail"] for finding in examined["findings"])

    assert run_app(["calibrate", "--store", store, "--probe", probed["probe_id"]]) == 0
    tables = capsys.readouterr()
    assert "host memory" in tables.out
    assert store in tables.err


@pytest.mark.usefixtures("quick_machine")
def test_a_changed_machine_fails_the_check_with_code_3(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "probe", "--quick", "--devices", "cpu:2", "--store", store)
    with open_store(store) as kept:
        measured: Probe = kept.probe()
        identity = {**measured.fingerprint.identity, "torch": Field(value="0.1")}
        other = replace(measured.fingerprint, identity=identity)
        kept.save_probe(replace(measured, probe_id="0ther", fingerprint=other))
    assert run_app(["calibrate", "--probe", "0ther", "--store", store]) == 0
    assert run_app(["calibrate", "--check", "--store", store]) == 3
    assert "torch" in capsys.readouterr().err
    capsys.readouterr()
    assert run_app(["doctor", "--store", store, "--json"]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    models = next(finding for finding in findings if finding["what"] == "cost models")
    assert models["status"] == "fail"
    assert "torch" in models["detail"]


@pytest.mark.usefixtures("quick_machine")
def test_a_drifted_link_is_named_with_code_3(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored probe was ten times as slow as this machine is now."""
    monkeypatch.setattr("probes.drift._SECONDS_PER_LINK", 0.5)
    run_json(capsys, "probe", "--quick", "--devices", "cpu:1", "--store", store)
    with open_store(store) as kept:
        measured: Probe = kept.probe()
        memory = next(link for link in measured.links if link.kind is LinkKind.HOST_MEMORY)
        slow = tuple(
            replace(sample, seconds=tuple(10 * seconds for seconds in sample.seconds)) for sample in memory.samples
        )
        kept.save_probe(replace(measured, probe_id="s1ow", links=(replace(memory, samples=slow),)))
    assert run_app(["calibrate", "--probe", "s1ow", "--store", store]) == 0
    capsys.readouterr()
    assert run_app(["calibrate", "--check", "--store", store, "--json"]) == 3
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["holds"] is False
    assert "1 of 1 link has drifted: host memory host → host" in printed.err


@pytest.mark.usefixtures("quick_machine")
def test_little_lockable_memory_and_little_memory_are_no_obstacle(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    monkeypatch.setattr("probes.plan.memory_available_bytes", lambda: 16 << 20)
    resource.setrlimit(
        resource.RLIMIT_MEMLOCK, (min(1 << 20, hard) if hard != resource.RLIM_INFINITY else 1 << 20, hard)
    )
    try:
        probed = run_json(capsys, "probe", "--quick", "--devices", "cpu:1", "--store", store)
        findings = {each["what"]: each for each in run_json(capsys, "doctor", "--store", store)["findings"]}
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    memory = next(link for link in probed["links"] if link["kind"] == "host_memory" and link["concurrency"] == "solo")
    assert memory["status"] in ("ok", "unstable")
    # A quarter of what is free, in two pools; a copy counts what it reads and what it writes.
    assert max(sample["size_bytes"] for sample in memory["samples"]) <= 4 << 20
    assert findings["lockable memory"]["status"] == "note"
    assert "ulimit -l" in findings["lockable memory"]["detail"]
    assert findings["lockable memory"]["fix"]
    facts = {**probed["fingerprint"]["identity"], **probed["fingerprint"]["state"]}
    assert facts["lockable_memory_bytes"]["value"] <= 1 << 20
    assert findings["cost models"]["status"] == "note"
    assert "caee calibrate" in findings["cost models"]["fix"]


@pytest.mark.usefixtures("quick_machine")
def test_a_disk_that_cannot_be_written_or_is_memory_is_waived_with_the_reason(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> tuple[int, str]:
        raise OSError(30, "Read-only file system")

    memory_disk = Path("/dev/shm")
    if memory_disk.is_dir() and os.access(memory_disk, os.W_OK):
        findings = run_json(capsys, "doctor", "--disk-path", str(memory_disk), "--store", store)["findings"]
        (disk,) = [finding for finding in findings if finding["what"] == "disk"]
        assert (disk["status"], "tmpfs" in disk["detail"], bool(disk["fix"])) == ("note", True, True)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    probed = run_json(capsys, "probe", "--quick", "--devices", "cpu:1", "--store", store)
    disks = [link for link in probed["links"] if link["kind"] == "disk_to_host"]
    assert disks
    assert all(link["status"] == "waived" and "Read-only file system" in link["reason"] for link in disks)
    assert any(link["status"] in ("ok", "unstable") for link in probed["links"]), "memory is measured all the same"


def test_without_a_probe_calibrate_says_what_to_do(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["calibrate", "--store", store]) == 1
    assert "caee probe" in capsys.readouterr().err


def test_options_that_exclude_each_other(store: str) -> None:
    assert run_app(["calibrate", "--check", "--probe", "x", "--store", store]) == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--devices", "tpu"], 2),
        (["--sizes", "many"], 2),
        (["--sizes", "0"], 2),
        (["--disk-path", "/nowhere/at/all"], 1),
    ],
)
def test_wrong_probe_options(store: str, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["probe", "--store", store, *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("caee: ")


@pytest.mark.usefixtures("quick_machine")
def test_an_interrupted_probe_says_what_is_kept(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from probes import probe as module

    genuine, calls = module.measure_link, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return genuine(*arguments, **options)

    monkeypatch.setattr(module, "measure_link", interrupted)
    assert run_app(["probe", "--quick", "--devices", "cpu:2", "--store", store]) == 130
    message = capsys.readouterr().err
    with open_store(store) as kept:
        assert f"1 complete link kept as probe {kept.probe().probe_id}" in message
        assert len(kept.probe().links) == 1
        assert kept.probe().interrupted


@pytest.fixture
def probes_kept(store: str, build: ModuleType) -> Callable[..., str]:
    """Puts probes into the store, in that order: of each its id, and whether it was interrupted."""

    def keep(**interrupted: bool) -> str:
        with open_store(store) as kept:
            for number, (name, stopped) in enumerate(interrupted.items()):
                whole = replace(build.make_probe(), probe_id=name, created_at=f"2026-03-14T09:2{number}:00Z")
                part = replace(whole, links=whole.links[:1], warnings=(INTERRUPTED,))
                kept.save_probe(part if stopped else whole)
        return store

    return keep


@pytest.mark.parametrize(
    ("kept", "fitted"),
    [
        ({"a": False}, "a"),
        ({"a": False, "b": True}, "a"),
        ({"a": False, "b": True, "c": True}, "a"),
        ({"a": True, "b": False}, "b"),
        ({"a": True, "b": True}, "b"),
    ],
)
def test_calibrate_takes_the_newest_probe_that_was_not_interrupted(
    probes_kept: Callable[..., str], kept: dict[str, bool], fitted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    location = probes_kept(**kept)
    assert run_app(["calibrate", "--store", location, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["probe_id"] == fitted
    for name in kept:
        assert (f"--probe {name} fits it" in printed.err) == (name > fitted), "every newer one is named"
    assert (f"probe {fitted} was interrupted" in printed.err) == kept[fitted]


def test_an_interrupted_probe_is_fitted_where_it_is_named(
    probes_kept: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    location = probes_kept(a=False, b=True)
    assert run_app(["calibrate", "--store", location, "--probe", "b"]) == 0
    assert "warning: probe b was interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kept", "chosen", "said"),
    [
        ((True,), 0, None),
        ((True, False), 0, "has no cost model for disk_to_host to cpu:0; costs are those of calibration 0"),
        ((False, True), 1, None),
        ((True, False, False), 0, "calibration 2 has no cost model"),
        ((False, False), None, "calibration 1 has no cost model for disk_to_host to cpu:0, nor has an older one"),
    ],
)
def test_a_run_takes_the_newest_calibration_that_has_its_link(
    store: str, build: ModuleType, kept: tuple[bool, ...], chosen: int | None, said: str | None
) -> None:
    from caee_cli.calibrations import calibration_for

    whole = build.make_calibration()
    memory = tuple(replace(model, kind=LinkKind.HOST_MEMORY) for model in whole.models)
    with open_store(store) as opened:
        for number, has_disk in enumerate(kept):
            opened.save_calibration(
                replace(
                    whole,
                    calibration_id=str(number),
                    created_at=f"2026-03-14T09:2{number}:00Z",
                    models=whole.models if has_disk else memory,
                )
            )
        found, remark = calibration_for(opened, whole.fingerprint, "disk", whole.devices)
        assert (found and found.calibration_id) == (None if chosen is None else str(chosen))
        assert (remark is None) == (said is None)
        assert said is None or said in str(remark)
        newest_in_memory = max((number for number, has_disk in enumerate(kept) if not has_disk), default=None)
        found, remark = calibration_for(opened, whole.fingerprint, "host", whole.devices)
        assert (found and found.calibration_id) == (None if newest_in_memory is None else str(newest_in_memory))


@pytest.fixture
def calibrations_kept(store: str, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Puts calibrations into the store, in that order, named by their place: each whole or not, as its word says. The
    machine at hand is theirs, and holds all of their links."""
    whole = build.make_calibration(devices=2)
    memory = tuple(replace(model, model_id=f"m{n}", kind=LinkKind.HOST_MEMORY) for n, model in enumerate(whole.models))
    whole = replace(whole, models=(*whole.models, *memory))
    other = replace(whole.fingerprint, identity={**whole.fingerprint.identity, "torch": Field(value="0.1")})
    kinds = {
        "whole": whole,
        "no disk": replace(whole, models=memory),
        "no memory": replace(whole, models=whole.models[: -len(memory)]),
        "imported": replace(whole, fingerprint=None, probe_id=None, origin="nvbandwidth output x.txt"),
        "elsewhere": replace(whole, fingerprint=other),
        "part, elsewhere": replace(whole, fingerprint=other, models=memory),
    }
    monkeypatch.setattr("caee_cli.diagnosis.take_fingerprint", lambda devices, folder: whole.fingerprint)
    monkeypatch.setattr("caee_cli.diagnosis.machine_findings", lambda folder: ())

    def check(calibration: Any, *arguments: object, **options: object) -> DriftReport:
        return DriftReport(calibration_id=calibration.calibration_id, changed_identity=(), links=())

    monkeypatch.setattr("probes.drift.check_drift", check)

    def keep(*words: str) -> str:
        with open_store(store) as opened:
            for number, word in enumerate(words):
                name, at = f"c{number}", f"2026-03-14T09:2{number}:00Z"
                opened.save_calibration(replace(kinds[word], calibration_id=name, created_at=at))
        return store

    return keep


@pytest.mark.parametrize(
    ("kept", "chosen", "passed_over", "lacking"),
    [
        (("whole",), 0, {}, False),
        (("no disk", "whole"), 1, {}, False),
        (("whole", "no disk"), 0, {1: "has no cost model for disk_to_host to cpu:0"}, False),
        (("whole", "no memory"), 0, {1: "has no cost model for host_memory to cpu:0"}, False),
        (("whole", "imported"), 0, {1: "comes from nvbandwidth output x.txt"}, False),
        (("whole", "whole", "no memory", "imported", "no disk"), 1, {2: "host_mem", 3: "comes", 4: "disk_to_"}, False),
        (("whole", "elsewhere", "no disk"), 0, {1: "of another machine", 2: "disk_to_host"}, False),
        (("whole", "elsewhere"), 1, {}, False),
        (("whole", "part, elsewhere"), 1, {}, True),
        (("no memory", "no disk"), 1, {}, True),
        (("no disk", "imported"), 0, {1: "comes from"}, True),
    ],
)
def test_check_and_doctor_look_at_the_newest_calibration_that_has_what_runs_need(
    calibrations_kept: Callable[..., str],
    kept: tuple[str, ...],
    chosen: int,
    passed_over: dict[int, str],
    lacking: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    location = calibrations_kept(*kept)
    assert run_app(["calibrate", "--check", "--json", "--store", location]) == 0
    checked = capsys.readouterr()
    assert json.loads(checked.out)["calibration_id"] == f"c{chosen}"
    _, findings, _ = examined(capsys, "--store", location)
    found = findings["cost models"]
    assert f"calibration c{chosen} is" in found["detail"]
    assert found["status"] == ("fail" if "elsewhere" in kept[chosen] else "note" if lacking else "ok")
    for said in (checked.err, found["detail"]):
        for number, why in passed_over.items():
            assert re.search(f"calibration c{number} [^;]*{why}", said)
    assert checked.err.count("Passed over") == len(passed_over)
    assert ("passed over" in found["detail"]) == bool(passed_over)
    assert ("nor has an older one of that machine" in checked.err) == lacking


def test_imports_are_told_from_their_content(store: str, shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = shared_data / "hw" / "nvbandwidth" / "rtx4090_x8_v0.2.txt"
    imported = run_json(capsys, "calibrate", "--import", str(file), "--store", store)
    assert imported["probe_id"] is None
    assert file.name in imported["origin"]
    assert run_app(["calibrate", "--check", "--store", store]) == 1
    assert "not from a probe" in capsys.readouterr().err


def test_doctor_speaks_of_a_store_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"no database at all" * 100)
    code, findings, errors = examined(capsys, "--store", str(broken))
    assert (code, findings["store"]["status"]) == (3, "fail")
    assert "1 check failed: store" in errors
    assert "none are kept" not in findings["cost models"]["detail"]


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, findings by name and standard error of ``caee doctor``."""
    code = run_app(["doctor", "--json", *arguments])
    printed = capsys.readouterr()
    return code, {each["what"]: each for each in json.loads(printed.out)["findings"]}, printed.err


@pytest.mark.parametrize("missing", ["absent", "a file"])
def test_doctor_speaks_of_each_thing_under_its_own_name(
    tmp_path: Path, build: ModuleType, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "caee.db")
    with open_store(store) as kept:
        kept.save_calibration(build.make_calibration())
    (tmp_path / "a file").touch()
    _, before, _ = examined(capsys, "--store", store)
    code, findings, errors = examined(capsys, "--store", store, "--disk-path", str(tmp_path / missing))
    assert code == 3
    assert "disk" in errors.splitlines()[0]
    assert findings["disk"]["status"] == "fail"
    assert "is no folder" in findings["disk"]["detail"]
    assert {name: found for name, found in findings.items() if name in ("store", "cost models")} == {
        name: before[name] for name in ("store", "cost models")
    }


def test_doctor_fails_where_any_check_does(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from probes.checkup import Finding

    for failed in (0, 1, 2):
        found = tuple(Finding(what=f"thing {number}", status="fail", detail="it does not") for number in range(failed))
        fine = Finding(what="other", status="note", detail="it does, slowly")
        monkeypatch.setattr("caee_cli.diagnosis.machine_findings", lambda _, found=found, fine=fine: (fine, *found))
        code, _, errors = examined(capsys, "--store", store)
        assert code == (3 if failed else 0)
        assert ("check failed: thing 0" in errors, "2 checks failed: thing 0, thing 1" in errors) == (
            failed == 1,
            failed == 2,
        )


def test_a_stranger_in_the_place_of_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.machinery
    import importlib.util

    from caee_cli import guard
    from probes.errors import UsageError

    guard.check_packages()
    assert guard.strangers() == ()
    stranger = tmp_path / "store" / "__init__.py"
    genuine = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        if name == "store":
            return importlib.machinery.ModuleSpec("store", None, origin=str(stranger))
        return genuine(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(UsageError, match=str(stranger)):
        guard.check_packages()
