"""``caee probe``, ``calibrate`` and ``doctor`` as a user meets them."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest

from caee_cli.main import run_app
from probes.records import Field, LinkKind, Probe


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
    from dataclasses import replace

    from store.session import open_store

    run_json(capsys, "probe", "--quick", "--devices", "cpu:2", "--store", store)
    with open_store(store) as kept:
        measured: Probe = kept.probe()
        identity = {**measured.fingerprint.identity, "torch": Field(value="0.1")}
        other = replace(measured.fingerprint, identity=identity)
        kept.save_probe(replace(measured, probe_id="0ther", fingerprint=other))
    assert run_app(["calibrate", "--probe", "0ther", "--store", store]) == 0
    assert run_app(["calibrate", "--check", "--store", store]) == 3
    assert "torch" in capsys.readouterr().err
    findings = run_json(capsys, "doctor", "--store", store)["findings"]
    models = next(finding for finding in findings if finding["what"] == "cost models")
    assert models["status"] == "fail"
    assert "torch" in models["detail"]


@pytest.mark.usefixtures("quick_machine")
def test_a_drifted_link_is_named_with_code_3(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored probe was ten times as slow as this machine is now."""
    from dataclasses import replace

    from store.session import open_store

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
    assert "1 of 1 links have drifted: host memory host → host" in printed.err


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
    from store.session import open_store

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
        assert kept.probe().probe_id in message
        assert len(kept.probe().links) == 1


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
    findings = run_json(capsys, "doctor", "--store", str(broken))["findings"]
    kept = next(finding for finding in findings if finding["what"] == "store")
    assert kept["status"] == "fail"


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
