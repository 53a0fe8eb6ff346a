"""``caee run --trace`` as a user runs it: what is stored and shown, and every way to ask for what cannot be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caee_cli.replaying import model_name
from runtime.trace.profile import write_profile
from runtime.trace.records import LoadProfile, TraceMeta
from runtime.trace.writer import write_trace

Run = Callable[..., Any]


@pytest.fixture
def trace(tmp_path: Path, make_source: Any) -> Path:
    write_trace(tmp_path / "tiny.parquet", make_source())
    return tmp_path / "tiny.parquet"


@pytest.fixture
def config(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    folder = tmp_path / "tiny-moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config))
    return folder / "config.json"


def test_a_run_is_stored_shown_and_equal_to_its_simulation(run: Run, trace: Path, config: Path, tmp_path: Path) -> None:
    sizes = ("--cache-experts", 5, "--batch-size", 3, "--layers", 2, "--steps", 5, "--warmup-steps", 2)
    same = ("--policy", "caee:theta=0.6", "--tier", "disk", *sizes)
    done = run("run", "--trace", trace, "--shape", config, *same, "--devices", "cpu:1", "--pairs", 1, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "caee.run/1"
    assert document["model"] == "tiny-moe"
    assert document["gain"]["ttft"] is None
    assert document["baseline"]["ttft_seconds"] is None
    assert document["quality"] is None
    assert document["predicted"] is None
    assert document["replay"]["multiplies"] == "the fetched bytes, as bfloat16"
    assert (document["replay"]["model_layers"], document["workload"]["moe_layers"]) == (3, 2)
    assert (document["replay"]["warmup_steps"], document["replay"]["steps"]) == (2, 5)
    assert document["replay"]["expert_compute_seconds"] > 0
    assert any("there is no calibration yet" in warning for warning in document["warnings"])
    simulated = run(
        "simulate", trace, *same, "--policy", "router", "--devices", 1, "--seconds-per-expert", 0.001, "--json"
    )
    ours, baseline = json.loads(simulated.stdout)["policies"]
    for name, figures in (("with_policy", ours), ("baseline", baseline)):
        assert document[name]["misses_per_device"] == figures["misses_per_device"]
        assert document[name]["removed_importance"] == pytest.approx(figures["removed_importance"])
        assert document[name]["steps"] == 5
    assert ours["removed_importance"] > 0
    assert [layer["layer"] for layer in document["layers"]] == [0, 1]

    page = tmp_path / "page.html"
    assert run("report", "-o", page).returncode == 0
    text = page.read_text()
    assert "A trace was replayed, without a checkpoint" in text
    assert "the first 2 of 3 MoE layers" in text
    assert "Time to first token" not in text
    shown = run("report", "-o", tmp_path / "page.md", "--format", "md")
    assert "MoE layers alone" in shown.stderr + shown.stdout


def test_runs_of_a_trace_are_compared(run: Run, trace: Path, config: Path, tmp_path: Path) -> None:
    for theta in (0.9, 0.5):
        given = ("--trace", trace, "--shape", config.parent, "--theta", theta, "--devices", "cpu:1", "--pairs", 1)
        assert run("run", *given, "--steps", 4, "--tier", "host").returncode == 0
    runs = [record["record_id"] for record in json.loads(run("store", "list", "--json").stdout)["records"]]
    done = run("report", *runs, "-o", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    assert "Sweep of θ" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "TRACE"), "--trace needs the shapes of the model"),
        (("--shape", "CONFIG"), "--shape belongs to --trace"),
        (("--layers", 2), "--layers belongs to --trace"),
        (("--steps", 2), "--steps belongs to --trace"),
        (("some/model", "--trace", "TRACE", "--shape", "CONFIG"), "MODEL has no meaning with --trace"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--prompts", "p.txt"), "--prompts has no meaning with --trace"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--held-out", "h.txt"), "--held-out has no meaning with --trace"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--no-quality"), "has no meaning with --trace"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--max-new-tokens", 4), "--max-new-tokens has no meaning"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--phases", "all"), "--phases has no meaning"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--layers", 4), "--layers 4 is not possible"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--layers", 0), "--layers 0 is not possible"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--steps", 0), "--steps 0 is too small"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--steps", 99), "fewer than the 0 of the warm-up and 99 to measure"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--warmup-steps", 30), "fewer than the 30 of the warm-up"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--batch-size", 9), "a batch of 9 needs 9 sequences"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--policy", "lynx:keep=2"), "needs full scores"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--policy", "nothing"), "nothing"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--cache", "belady"), "belady looks ahead"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--tier", "tape"), "--tier tape is unknown"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--pairs", 0), "--pairs 0 is too small"),
        (("--trace", "TRACE", "--shape", "CONFIG", "--steps-jsonl", "s"), "--steps-jsonl has no meaning with --trace"),
    ],
)
def test_wrong_usage(arguments: tuple[object, ...], message: str, run: Run, trace: Path, config: Path) -> None:
    files = {"TRACE": trace, "CONFIG": config}
    done = run("run", *(files.get(str(each), each) for each in arguments), "--devices", "cpu:1")
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 16}, "it has 12 experts per layer, the config 16"),
        ({"num_experts_per_tok": 2}, "it has 3 experts per token, the config 2"),
        ({"num_hidden_layers": 5}, "it has 3 MoE layers, the config 5"),
    ],
)
def test_a_trace_of_another_model(
    changes: dict[str, int], message: str, run: Run, trace: Path, tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**tiny_config, **changes}))
    done = run("run", "--trace", trace, "--shape", other, "--devices", "cpu:1")
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("batch", [(), ("--batch-size", 2)])
def test_without_a_batch_size_run_and_simulation_replay_the_same(
    steps: bool, batch: tuple[object, ...], run: Run, make_source: Any, config: Path, tmp_path: Path
) -> None:
    """The recorded steps where there are any, else batches; the document says which."""
    source = make_source()
    if steps:
        source.trace = dataclasses.replace(source.trace, token_step_T=np.arange(48) // 5)
    path = tmp_path / "t.parquet"
    write_trace(path, source)
    same = ("--tier", "disk", "--cache-experts", 5, "--warmup-steps", 2, "--steps", 6, *batch)
    done = run("run", "--trace", path, "--shape", config, *same, "--devices", "cpu:1", "--pairs", 1, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    simulated = json.loads(run("simulate", path, *same, "--devices", 1, "--seconds-per-expert", 0.001, "--json").stdout)
    wanted = 2 if batch else "recorded" if steps else 4
    assert measured["workload"]["batch_size"] == simulated["trace"]["batch_size"] == wanted
    assert measured["replay"]["tokens_per_step"] == (5 if wanted == "recorded" else wanted)
    assert measured["replay"]["recorded"] == (wanted == "recorded")
    _shown_as_printed(run, measured, tmp_path)
    for name, figures in zip(("baseline", "with_policy"), simulated["policies"], strict=True):
        assert measured[name]["misses_per_device"] == figures["misses_per_device"]


def _shown_as_printed(run: Run, printed: dict[str, Any], tmp_path: Path) -> None:
    """What the store shows of a run is what the run said of itself, also after an export and an import."""
    own = {"schema", "policy", "gain", "gain_ttft", "gain_tpot"}
    away, file = tmp_path / "elsewhere.db", tmp_path / "export.json"
    name = printed["run_id"]
    assert run("store", "export", name, "-o", file).returncode == 0
    assert run("store", "import", file, "--store", away).returncode == 0
    for store in (tmp_path / "store.db", away):
        shown = json.loads(run("store", "show", name, "--json", "--store", store).stdout)["document"]
        assert {key: value for key, value in shown.items() if key not in own} == {
            key: value for key, value in printed.items() if key not in own
        }
        assert f"{printed['workload']['batch_size']}" in run("store", "show", name, "--store", store).stdout
        assert run("store", "check", "--store", store).returncode == 0


@pytest.mark.parametrize("experts", [8, 12])
@pytest.mark.parametrize("form", ["logical_count", "weight", "counts", "layers", "parquet"])
def test_counts_cannot_be_replayed(experts: int, form: str, run: Run, config: Path, tmp_path: Path) -> None:
    """Whatever their size: the user has given no number of experts that could be wrong."""
    rows = [[1] * experts] * 3
    path = tmp_path / "counts"
    if form == "parquet":
        meta = TraceMeta(model=None, num_experts=experts, top_k=0, layer_numbers=(0, 1, 2), gates_recorded=False)
        write_profile(path, LoadProfile(meta=meta, counts_LN=np.array(rows, np.float64), tokens=None))
    else:
        by_layer = {str(number): row for number, row in enumerate(rows)}
        table: Any = {"counts": by_layer, "layers": {key: {"cnt": row} for key, row in by_layer.items()}}
        path.write_text(json.dumps({form: table.get(form, rows), "num_replicas": experts}))
    done = run("run", "--trace", path, "--shape", config, "--devices", "cpu:1")
    assert done.returncode == 1
    assert "holds counts, not tokens" in done.stderr
    assert "--num-experts" not in done.stderr


def test_fewer_layers_of_a_deeper_model(run: Run, trace: Path, tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    deeper = tmp_path / "deeper.json"
    deeper.write_text(json.dumps({**tiny_config, "num_hidden_layers": 61}))
    given = ("--trace", trace, "--shape", deeper, "--devices", "cpu:1", "--pairs", 1, "--steps", 2, "--tier", "host")
    done = run("run", *given, "--layers", 3, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["model"] == "deeper"
    assert (document["replay"]["model_layers"], document["workload"]["moe_layers"]) == (61, 3)


def test_files_that_are_not_there_or_hold_something_else(run: Run, trace: Path, config: Path, tmp_path: Path) -> None:
    for given, message in (
        (("--trace", tmp_path / "absent.parquet", "--shape", config), "cannot read"),
        (("--trace", trace, "--shape", tmp_path / "absent.json"), "cannot read"),
        (("--trace", config, "--shape", config), "caee:"),
    ):
        done = run("run", *given, "--devices", "cpu:1")
        assert done.returncode == 1, (given, done.stderr)
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_names_of_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert model_name(tmp_path) == model_name(tmp_path / "config.json") == tmp_path.name
    assert model_name(tmp_path / "org--name.json") == "org--name"
