"""``caee simulate`` as a user runs it: outputs, exit codes, what is kept, and every kind of broken input."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caee_cli.main import run_app
from probes.records import Fingerprint, Probe
from runtime.profiles import PROFILES
from runtime.simulate.reference import PolicyPass
from runtime.trace.writer import write_trace
from store.session import open_store

Run = Callable[..., Any]


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "simulate")


@pytest.fixture
def trace(tmp_path: Path, make_trace: Any, in_memory: Any) -> Path:
    path = tmp_path / "trace.parquet"
    source = in_memory(make_trace(lengths=(20, 20, 20)))
    write_trace(path, source)
    return path


def line(sequence: str, position: int, ids: object, weights: object) -> str:
    return json.dumps({"seq": sequence, "pos": position, "ids": ids, "p": weights})


def test_json_is_one_document_that_the_store_keeps(run: Run, trace: Path, tmp_path: Path) -> None:
    done = run(trace, "--batch-size", 2, "--devices", 3, "--seconds-per-expert", 0.002, "--warmup-steps", 4, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "caee.simulate/1"
    assert [entry["name"] for entry in document["policies"]] == ["router", "caee"]
    assert document["machine"]["tier"] == "host"
    assert {entry["cache"] for entry in document["policies"]} == {"lfu"}
    assert document["policies"][0]["steps"] == 16
    with open_store(str(tmp_path / "store.db")) as store:
        assert store.simulation(document["simulation_id"]) == document


def test_the_first_layers_and_steps(run: Run, trace: Path) -> None:
    given = (trace, "--seconds-per-expert", "0.001", "--devices", 2, "--batch-size", 2, "--cache-experts", 4, "--json")
    few = json.loads(run(*given, "--warmup-steps", 3, "--steps", 5, "--layers", 2).stdout)
    assert few["trace"]["planned_steps"] == 8
    assert few["trace"]["moe_layers"] == 2
    for policy in few["policies"]:
        assert policy["steps"] == 5
        assert [layer["layer"] for layer in policy["layers"]] == [0, 1]
    refused = run(*given, "--layers", 4)
    assert refused.returncode == 2
    assert "--layers 4 is not possible: the trace has 3 MoE layers" in refused.stderr


def test_a_table_and_a_page(run: Run, trace: Path, tmp_path: Path) -> None:
    arguments = (trace, "--seconds-per-expert", 0.001, "--devices", 2, "-o", "page.html")
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "caee:rule=cir,theta=0.8" in done.stdout
    assert "Wrote page.html" in done.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>") or page.lower().startswith("<!doctype html>")
    refused = run(*arguments)
    assert refused.returncode == 2
    assert "exists already" in refused.stderr
    assert run(*arguments, "--force").returncode == 0


def test_a_foreign_dump_is_read_directly(run: Run, tmp_path: Path) -> None:
    lines = [line("a", at, [[at % 3, 3]], [[0.7, 0.3]]) for at in range(6)]
    (tmp_path / "dump.jsonl").write_text("\n".join(lines))
    done = run("dump.jsonl", "--devices", 2, "--seconds-per-expert", 1, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["trace"]["num_experts"] == 4
    assert any("inferred from the highest id" in note for note in document["notes"])
    known = run("dump.jsonl", "--num-experts", 8, "--devices", 2, "--seconds-per-expert", 1, "--json")
    assert json.loads(known.stdout)["trace"]["num_experts"] == 8


def test_times_with_units_are_those_without(run: Run, trace: Path) -> None:
    given = (trace, "--devices", 2, "--batch-size", 2, "--json")
    plain = run(*given, "--seconds-per-expert", "0.000412,2", "--dense-seconds", 0.003)
    written = run(*given, "--seconds-per-expert", "412us,2000ms", "--dense-seconds", "3ms", "--num-experts", 12)
    assert written.returncode == 0, written.stderr
    documents = [json.loads(done.stdout) for done in (plain, written)]
    assert documents[0]["machine"] == documents[1]["machine"]
    assert [cost["seconds_per_expert"] for cost in documents[1]["machine"]["cost"]] == [0.000412, 2.0]
    assert documents[0]["policies"] == documents[1]["policies"]


def test_the_experts_size_from_a_models_config(run: Run, trace: Path, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 12}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 3}))
    done = run(trace, "--machine", "l4", "--model", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["machine"]["expert_bytes"] == 3 * 64 * 32 * 2
    assert document["machine"]["cost"][0]["seconds_per_expert"] == pytest.approx(3 * 64 * 32 * 2 / 32e9)


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "empty.jsonl": ("", "empty"),
    "nan.jsonl": ('{"seq": "a", "pos": 0, "ids": [[1, 2]], "p": [[NaN, 0.4]]}', "not finite"),
    "range.jsonl": (line("a", 0, [[1, 99]], [[0.6, 0.4]]), "99 is not in -1..11"),
    "below.jsonl": (line("a", 0, [[1, -2]], [[0.6, 0.4]]), "not in -1"),
    "repeated-id.jsonl": (line("a", 0, [[1, 1]], [[0.6, 0.4]]), "twice in one token"),
    "repeated-token.jsonl": (
        "\n".join([line("a", 5, [[1, 2]], [[0.6, 0.4]])] * 2),
        "position 5 of sequence 'a' comes after position 5",
    ),
    "two-models.jsonl": (
        "\n".join([line("a", 0, [[1, 2]], [[0.6, 0.4]]), line("a", 1, [[1, 2]] * 2, [[0.6, 0.4]] * 2)]),
        "two models",
    ),
    "cut-off.jsonl": (line("a", 0, [[1, 2]], [[0.6, 0.4]]) + '\n{"seq": "a", "pos": 1, "ids": [[', "line 2"),
    "cut-off.parquet": (b"PAR1" + bytes(100), "not a complete Parquet file"),
    "counts.json": ('{"logical_count": [[1, 2, 3, 4]]}', "counts, not tokens"),
    "noise.bin": (bytes(range(256)), "looked for"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_an_error_of_a_line_or_two(name: str, run: Run, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    number = ("--num-experts", 12) if name.endswith(".jsonl") else ()
    done = run(path, *number, "--devices", 2, "--seconds-per-expert", 0.001, "--json")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stderr.replace(str(path), "").splitlines())) < 240
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the machine is not described"),
        (("--machine", "h100-sxm"), "depends on its size"),
        (("--seconds-per-expert", "fast"), "fast"),
        (("--seconds-per-expert", "0.4ms,2 fortnights"), "'2 fortnights' is not a time"),
        (("--seconds-per-expert", "1", "--dense-seconds", "soon"), "'soon' is not a time between 0 and 1e+06 seconds"),
        (("--seconds-per-expert", "1e300"), "--seconds-per-expert: '1e300' is not a time between 0 and 1e+06 seconds"),
        (("--seconds-per-expert=-1",), "--seconds-per-expert: '-1' is not a time between 0 and 1e+06 seconds"),
        (("--seconds-per-expert", "1", "--expert-compute-seconds=-1"), "'-1' is not a time between 0 and 1e+06"),
        (("--seconds-per-expert", "1", "--devices", "999999999"), "not between 1 and 4096"),
        (("--seconds-per-expert", "1", "--devices", "13"), "13 devices are more than the 12 experts of a layer"),
        (("--seconds-per-expert", "1", "--devices", "13", "--placement", "round-robin"), "13 devices are more than"),
        (("--seconds-per-expert", "1", "-o", "."), ". is a folder"),
        (("--seconds-per-expert", "1", "-o", "trace.parquet", "--force"), "trace.parquet is what the command reads"),
        (("--seconds-per-expert", "1", "-o", "store.db", "--force"), "store.db is the store's own file"),
        (("--seconds-per-expert", "1", "--num-experts", "13"), "has 12 experts a layer, not --num-experts 13"),
        (("--seconds-per-expert", "1", "--policy", "caee:theta=2"), "out of range"),
        (("--seconds-per-expert", "1", "--policy", "xshare:budget=3"), "needs full scores"),
        (("--seconds-per-expert", "1", "--cache", "mru"), "unknown cache"),
        (("--seconds-per-expert", "1", "--tier", "moon"), "unknown tier"),
        (("--seconds-per-expert", "1", "--batch-size", "4"), "the trace has 3"),
        (("--seconds-per-expert", "1", "--batch-size", "recorded"), "no recorded steps"),
        (("--seconds-per-expert", "1", "--warmup-steps=-1"), "--warmup-steps"),
        (("--seconds-per-expert", "1", "--batch-size", "many"), "neither a number nor 'recorded'"),
        (("--seconds-per-expert", "1,2", "--devices", "3"), "give one for all devices, or 3"),
        (("--seconds-per-expert", "1", "--placement", "balanced"), "needs loads"),
        (("--machine", "l4", "--expert-bytes", "1MB", "--model", "x"), "both give"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, run: Run, trace: Path) -> None:
    done = run(trace, *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert "→" in done.stderr or "Usage:" in done.stderr, "it says what to do"


def test_no_file_that_is_read_is_written(run: Run, trace: Path, tmp_path: Path) -> None:
    for option, name in (("--load-profile", "loads.parquet"), ("--placement", "placed.json"), ("--model", "c.json")):
        file = tmp_path / name
        file.write_text("read")
        (tmp_path / f"link-{name}").symlink_to(file)
        done = run(trace, "--seconds-per-expert", 1, option, name, "-o", f"link-{name}", "--force")
        assert done.returncode == 2
        assert "is what the command reads" in done.stderr
        assert file.read_text() == "read"


@pytest.mark.parametrize("output", ["absent/page.html", "/proc/page.html", "trace.parquet/page.html"])
def test_a_page_that_cannot_be_written_is_said_before_the_work(output: str, run: Run, trace: Path) -> None:
    done = run(trace, "--seconds-per-expert", 0.001, "-o", output)
    assert done.returncode == 1
    assert "cannot write in" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("cache", ["lfu", "lru", "belady", "forecast:prefetch=1", "lfu:decay=0.9,admit=1"])
def test_a_cache_of_any_size_holds_what_there_is(
    cache: str, run: Run, tmp_path: Path, make_trace: Any, in_memory: Any
) -> None:
    """The compiled pass and the plain one; a device has 18 of 3 layers' 12 experts."""
    write_trace(tmp_path / "scores.parquet", in_memory(make_trace(lengths=(5, 5), scores=True)))
    given = ("scores.parquet", "--seconds-per-expert", 0.001, "--devices", 2, "--cache", cache, "--json")
    policies = ("--policy", "router", "--policy", "random:theta=0.5")
    found = [
        json.loads(run(*given, *policies, "--cache-experts", size).stdout)["policies"] for size in (18, 999_999_999)
    ]
    for entry, other in zip(*found, strict=True):
        assert other.pop("cache_experts") == 999_999_999
        assert entry.pop("cache_experts") == 18
        assert entry == other


def test_the_id_is_said_that_a_report_needs(run: Run, trace: Path, tmp_path: Path) -> None:
    for as_json in ((), ("--json",)):
        done = run(trace, "--seconds-per-expert", 0.001, *as_json)
        with open_store(str(tmp_path / "store.db")) as store:
            kept = store.simulation()["simulation_id"]
        assert f"Stored simulation {kept} in {tmp_path / 'store.db'}" in done.stderr
        assert f"`caee report {kept}`" in done.stderr
        assert kept not in done.stdout or as_json
        assert run_app(["report", kept]) == 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_most_warm_up_steps_are_named_and_possible(batch_size: int, run: Run, trace: Path) -> None:
    given = (trace, "--seconds-per-expert", 1, "--batch-size", batch_size, "--json", "--warmup-steps")
    done = run(*given, 60)
    assert done.returncode == 2
    found = re.search(r"no step is left.*use --warmup-steps from 0 to (\d+)(.*)", " ".join(done.stderr.split()))
    assert found is not None
    assert ("smaller --batch-size" in found[2]) == (batch_size > 1)
    most = int(found[1])
    assert json.loads(run(*given, most).stdout)["policies"][0]["steps"] == 1
    assert run(*given, most + 1).returncode == 2


@pytest.mark.parametrize(
    ("machine", "says", "close"),
    [
        ("h100-sx", "'h100-sx' is neither a profile nor the id of a calibration", "h100-sxm"),
        ("RTX-Pro-600", "is neither", "rtx-pro-6000"),
        ("nothing", "is neither", None),
        ("", "is neither", None),
        ("probe-0001", "'probe-0001' is the id of a probe", None),
    ],
)
def test_a_machine_that_is_not_known_is_wrong_usage(
    machine: str, says: str, close: str | None, run: Run, trace: Path, tmp_path: Path
) -> None:
    probe = Probe(
        probe_id="probe-0001",
        created_at="2026-01-01T00:00:00+00:00",
        fingerprint=Fingerprint(identity={}, state={}),
        devices=(),
        links=(),
        link_groups=(),
    )
    with open_store(str(tmp_path / "store.db")) as store:
        store.save_probe(probe)
    done = run(trace, "--machine", machine, "--expert-bytes", "1MB")
    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert says in said
    assert all(profile in said.partition("profiles: ")[2] for profile in PROFILES)
    assert "caee store list" in said
    assert (f"did you mean {close}" in said) if close else ("did you mean" not in said)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the placement"),
        ("[[", "is not JSON"),
        ("{}", "a list of 3 layers"),
        ("[[], [], []]", "layer 0: a list of 12 experts"),
        (json.dumps([[[]] * 12] * 3), "layer 0, expert 0: the expert is on no device"),
        (json.dumps([[[7]] * 12] * 3), "7 is no device"),
    ],
)
def test_a_placement_that_cannot_be_used_says_what_to_write(
    content: str | None, says: str, run: Run, trace: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "placed.json").write_text(content)
    done = run(trace, "--seconds-per-expert", 1, "--devices", 2, "--placement", "placed.json")
    assert done.returncode == 1
    assert says in done.stderr
    assert "→" in done.stderr


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"num_experts": 16}, "12 experts per layer (the model 16)"),
        ({"num_experts_per_tok": 2}, "3 experts per token (the model 2)"),
        ({"num_hidden_layers": 5}, "3 MoE layers (the model 5)"),
    ],
)
def test_a_trace_that_does_not_fit_the_model_is_noted(
    changes: dict[str, int], says: str | None, run: Run, trace: Path, tmp_path: Path
) -> None:
    """With fewer layers replayed too: it is the trace that does not fit, not what is asked of it."""
    config = {"num_hidden_layers": 3, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 12}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 3} | changes))
    given = (trace, "--machine", "l4", "--model", tmp_path, "--layers", 2)
    table, document = run(*given), run(*given, "--json")
    noted = [note for note in json.loads(document.stdout)["notes"] if "does not fit --model" in note]
    assert ("does not fit --model" in table.stdout) == ("does not fit --model" in document.stderr) == bool(noted)
    assert bool(noted) == (says is not None)
    assert says is None or says in noted[0]


def test_the_seed_is_that_of_random_alone(run: Run, tmp_path: Path, make_trace: Any, in_memory: Any) -> None:
    path = tmp_path / "scores.parquet"
    write_trace(path, in_memory(make_trace(lengths=(5, 5), scores=True)))
    given = (path, "--seconds-per-expert", 0.001, "--batch-size", 2, "--cache-experts", 4, "--json")
    policies = ("--policy", "caee:theta=0.3", "--policy", "random:theta=0.3", "--policy", "random:theta=0.3,seed=5")
    found = [json.loads(run(*given, *policies, "--seed", seed).stdout)["policies"] for seed in (5, 6)]
    assert [entry["parameters"].get("seed") for entry in found[1]] == [None, 6, 5]
    assert found[0][1]["parameters"] == found[0][2]["parameters"], "the option is the key's default"
    for entry, other in ((found[0][0], found[1][0]), (found[0][2], found[1][2])):
        assert entry == other


def test_ctrl_c_keeps_the_steps_that_are_complete(
    run: Run, tmp_path: Path, make_trace: Any, in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.parquet"
    source = in_memory(make_trace(lengths=[100] * 2, scores=True))
    write_trace(path, source)
    pass_run, calls = PolicyPass.run, []

    def interrupted(self: PolicyPass, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        pass_run(self, *arguments)

    monkeypatch.setattr(PolicyPass, "run", interrupted)
    done = run(path, "--policy", "random", "--batch-size", 2, "--seconds-per-expert", 0.001, "--json")
    assert done.returncode == 130, done.stderr
    document = json.loads(done.stdout)
    assert document["interrupted"]
    # The block that was being replayed is finished: three of eight steps.
    assert document["policies"][0]["steps"] == 24
    assert "24 of 100 steps" in done.stderr
    assert f"`caee report {document['simulation_id']}`" in done.stderr
    with open_store(str(tmp_path / "store.db")) as store:
        assert store.simulation() == document


def test_ctrl_c_before_anything_is_complete_keeps_nothing(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: PolicyPass, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("runtime.simulate.compiled.CompiledPass.run", interrupted)
    done = run(trace, "--seconds-per-expert", 0.001, "--json")
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert done.stdout == ""


def test_same_input_same_output(run: Run, trace: Path) -> None:
    arguments = (trace, "--seconds-per-expert", 0.001, "--policy", "budget", "--policy", "caee", "--json")
    documents = [json.loads(run(*arguments).stdout) for _ in range(2)]
    for document in documents:
        del document["simulation_id"], document["created_at"]
    assert documents[0] == documents[1]
    assert np.isfinite(documents[0]["policies"][0]["removed_importance"])
