"""What is recorded of a live model, and that a simulation of it decides as the model's run did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from caee_cli.main import app, run_app
from probes.devices import find_devices
from probes.errors import UsageError
from runtime.cache import parse_cache
from runtime.cost import uniform_costs
from runtime.execution import ExpertExecution
from runtime.launch import launch
from runtime.options import RunOptions
from runtime.policy.spec import parse_policy, resolve
from runtime.policy.types import Tokens
from runtime.simulate.placement import make_placement
from runtime.simulate.records import PassFigures, PassSpec, SimulatedMachine
from runtime.simulate.run import simulate
from runtime.trace.live import RecordingObserver
from runtime.trace.reader import TraceReader, partial_folder, read_trace
from runtime.trace.records import Phase, ScoreFunction, TokenKind
from runtime.trace.writer import recover
from runtime.trace_recording import PIECE_TOKENS, RecordOptions, RecordReport, record_rank
from runtime.worker import RankSession

Checkpoint = Callable[..., Path]

PROMPTS = ("Hello there, my", "And he", "Now is the time", "So", "What did she say of it?")
CACHE_EXPERTS = 5


def record(
    folder: Path, output: Path, *, devices: int = 1, full_scores: bool = False, **changes: object
) -> RecordReport:
    run = {
        "tier": "disk",
        "policy": parse_policy("router"),
        "cache": "lfu",
        "cache_experts": CACHE_EXPERTS,
        "batch_size": 3,
        "max_new_tokens": 5,
        "dtype": "float32",
        "prompts": PROMPTS,
        **changes,
    }
    options = RecordOptions(
        run=RunOptions(model=folder, devices=find_devices(f"cpu:{devices}"), held_out=None, calibration=None, **run),
        output=output,
        model_name="tiny",
        full_scores=full_scores,
    )
    report: RecordReport = launch(record_rank, options, processes=devices)
    return report


def replay(trace: Path, policy: str, cache: str, devices: int = 1) -> PassFigures:
    """The recorded steps, on the machine that they were recorded on."""
    source = TraceReader(trace)
    machine = SimulatedMachine(tier="disk", costs=uniform_costs(1e-3, devices))
    placement = make_placement(
        "contiguous", layers=source.meta.moe_layers, experts=source.meta.num_experts, devices=devices
    )
    plan = PassSpec(
        policy=resolve(parse_policy(policy), offloading=True),
        cache=parse_cache(cache),
        cache_experts=CACHE_EXPERTS,
        placement=placement,
        machine=machine,
    )
    return simulate(source, [plan]).passes[0]


def fetches(figures: PassFigures) -> tuple[tuple[int, ...], ...]:
    return tuple(layer.device_misses_after for layer in figures.layers)


@pytest.mark.parametrize(
    ("family", "policy", "cache"),
    [
        ("qwen3_moe", "router", "lfu"),
        ("qwen3_moe", "caee:theta=0.6", "lfu"),
        ("qwen3_moe", "caee:theta=0.6", "forecast"),
        ("qwen3_moe", "importance:theta=0.5,reselect=all", "lfu:decay=0.9,admit=1"),
        ("deepseek_v3", "caee:theta=0.7", "lfu"),
        ("gpt_oss", "caee:theta=0.6", "lru"),
    ],
)
def test_a_simulation_fetches_what_the_run_fetched(
    checkpoint: Checkpoint, tmp_path: Path, family: str, policy: str, cache: str
) -> None:
    trace = tmp_path / "t.parquet"
    folder = checkpoint(family, experts=12, top_k=4)
    report = record(folder, trace, full_scores=True, policy=parse_policy(policy), cache=cache)
    figures = replay(trace, policy, cache)
    assert fetches(figures) == report.device_misses
    assert figures.steps == report.steps
    assert (figures.removed_importance > 0) == (policy != "router")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["lfu", "forecast:decay=0.9,prefetch=1"])
def test_so_it_is_on_several_devices(checkpoint: Checkpoint, tmp_path: Path, cache: str) -> None:
    trace = tmp_path / "t.parquet"
    policy = "caee:theta=0.6"
    folder = checkpoint("qwen3_moe", experts=12, top_k=4)
    report = record(folder, trace, devices=2, full_scores=True, policy=parse_policy(policy), cache=cache)
    figures = replay(trace, policy, cache, devices=2)
    assert fetches(figures) == report.device_misses
    assert all(len(devices) == 2 and min(devices) > 0 for devices in report.device_misses)


def test_without_full_scores_the_router_is_replayed_alike(checkpoint: Checkpoint, tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    report = record(checkpoint("qwen3_moe", experts=12, top_k=4), trace)
    assert fetches(replay(trace, "router", "lfu")) == report.device_misses


def test_sequences_steps_phases_and_positions(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    report = record(checkpoint("qwen3_moe"), path)
    trace = read_trace(path)
    assert trace.sequence_names == tuple(f"prompt {n}" for n in range(1, len(PROMPTS) + 1))
    # Two batches, of three prompts and of the other two: a prefill and four decode steps each.
    assert report.steps == 10
    assert trace.meta.layer_numbers == (0, 1)
    for number, prompt in enumerate(PROMPTS):
        mine = (trace.token_sequence_T == number) & (trace.token_kind_T == TokenKind.REAL)
        assert trace.token_position_T[mine].tolist() == list(range(len(prompt) + 4))
        phases = [Phase.PREFILL] * len(prompt) + [Phase.DECODE] * 4
        assert trace.token_phase_T[mine].tolist() == phases
        first = 0 if number < 3 else 5
        assert trace.token_step_T[mine].tolist() == [first] * len(prompt) + [first + n for n in range(1, 5)]
    padding = trace.token_kind_T == TokenKind.PADDING
    widths = [max(map(len, PROMPTS[:3])) * 3, max(map(len, PROMPTS[3:])) * 2]
    assert padding.sum() == sum(widths) - sum(map(len, PROMPTS))
    assert (trace.ids_TLK[padding] == -1).all()
    assert report.tokens == (~padding).sum()


def test_gates_are_the_scores_of_the_chosen(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    record(checkpoint("deepseek_v3"), path, full_scores=True)
    trace = read_trace(path)
    meta = trace.meta
    assert (meta.score_function, meta.engine, meta.routed_scaling_factor) == (
        ScoreFunction.SIGMOID,
        "transformers",
        pytest.approx(2.5, rel=1e-3),
    )
    assert meta.scores_recorded
    assert meta.selection_recorded
    real = trace.token_kind_T == TokenKind.REAL
    ids = trace.ids_TLK[real].astype(np.int64)
    assert trace.scores_TLN is not None
    assert trace.selection_TLN is not None
    np.testing.assert_array_equal(trace.gates_TLK[real], np.take_along_axis(trace.scores_TLN[real], ids, axis=2))
    assert not np.array_equal(trace.selection_TLN[real], trace.scores_TLN[real])


def test_a_model_that_ranks_by_its_scores_has_no_selection_scores(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    record(checkpoint("qwen3_moe"), path, full_scores=True)
    trace = read_trace(path)
    assert trace.selection_TLN is None
    assert trace.scores_TLN is not None
    real = trace.token_kind_T == TokenKind.REAL
    np.testing.assert_allclose(trace.scores_TLN[real].sum(axis=2), 1, rtol=1e-5)
    best = np.sort(np.argsort(-trace.scores_TLN[real], axis=2)[..., : trace.meta.top_k], axis=2)
    np.testing.assert_array_equal(best, np.sort(trace.ids_TLK[real], axis=2))


@pytest.mark.parametrize("full_scores", [False, True])
def test_a_token_whose_scores_are_no_numbers_is_marked(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_scores: bool
) -> None:
    """The run goes on with the router's own choice; the trace stays readable."""
    path = tmp_path / "t.parquet"
    plain = ExpertExecution._tokens

    def spoilt(self: ExpertExecution, layer: int, *others: object) -> object:
        tokens, sound = plain(self, layer, *others)  # type: ignore[arg-type]  # handed on as they come
        if layer == 1 and len(tokens.gates_TK) == 3:
            tokens.gates_TK[1, 0], sound = np.nan, False
        return tokens, sound

    monkeypatch.setattr(ExpertExecution, "_tokens", spoilt)
    report = record(checkpoint("qwen3_moe"), path, full_scores=full_scores)
    trace = read_trace(path)
    assert report.unsound == 4
    bad = (trace.token_kind_T == TokenKind.PADDING) & (trace.token_phase_T == Phase.DECODE)
    assert [trace.sequence_names[n] for n in trace.token_sequence_T[bad]] == ["prompt 2"] * 4
    assert fetches(replay(path, "router", "lfu"))


def test_an_interrupted_recording_keeps_what_it_has(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    see = RecordingObserver.see

    def interrupted(self: RecordingObserver, layer: int, tokens: Tokens) -> None:
        see(self, layer, tokens)
        if self.steps == 30 and layer == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RecordingObserver, "see", interrupted)
    arguments = ["trace", "record", str(checkpoint("qwen3_moe")), "-o", str(path), "--devices", "cpu:1"]
    result = CliRunner().invoke(app, [*arguments, "--prompts", str(_prompts(tmp_path)), "--max-new-tokens", "64"])
    assert result.exception is not None
    assert "kept in" in str(result.exception)
    assert not partial_folder(path).exists()
    trace = read_trace(path)
    assert set(trace.token_step_T) == set(range(30))


def test_the_command(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    arguments = ["trace", "record", str(checkpoint("qwen3_moe")), "--prompts", str(_prompts(tmp_path))]
    arguments += ["-o", str(path), "--devices", "cpu:1", "--batch-size", "2", "--max-new-tokens", "4", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["schema"] == "caee.trace.record/1"
    assert document["output"] == str(path)
    assert document["sequences"] == len(PROMPTS)
    assert document["tokens"] == sum(map(len, PROMPTS)) + 3 * len(PROMPTS)
    assert document["meta"]["parameters"]["renormalize"] == "survivors"
    assert document["size_bytes"] == path.stat().st_size
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, UsageError)
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0


@pytest.mark.parametrize("full_scores", [False, True])
def test_recording_changes_nothing(
    checkpoint: Checkpoint, open_session: Callable[..., RankSession], tmp_path: Path, full_scores: bool
) -> None:
    """The same prompts without an observer, from empty caches: the same fetches in every layer."""
    folder = checkpoint("gpt_oss", experts=12, top_k=4)
    session = open_session(folder, cache_experts=CACHE_EXPERTS, max_new_tokens=5, policy="caee:theta=0.6")
    empty = session.execution.snapshot()
    prompts = session.encoded_prompts()
    session.run_pass(prompts, session.router, new_tokens=2)
    session.execution.restore(empty)
    steps = session.run_pass(prompts, session.asked_policy()).steps
    misses = np.sum([[layer.misses_after_D for layer in step.layers] for step in steps], axis=0)
    report = record(
        folder,
        tmp_path / "t.parquet",
        full_scores=full_scores,
        policy=parse_policy("caee:theta=0.6"),
        prompts=session.options.prompts,
    )
    assert np.array_equal(report.device_misses, misses)


def _prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


# ---------------------------------------------------------------- as it is started from a shell

CAEE = Path(sys.executable).with_name("caee")
ENOUGH_SECONDS = 120


@contextlib.contextmanager
def recording(folder: Path, model: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, on more tokens than it gets to; what is left of it is ended."""
    arguments = ["trace", "record", str(model), "-o", "t.parquet", "--prompts", str(_prompts(folder))]
    process = subprocess.Popen(
        [str(CAEE), *arguments, "--batch-size", "1", "--max-new-tokens", "100000", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CAEE_STORE": str(folder / "store.db")},
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _ in range(ENOUGH_SECONDS * 20):
        if there():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the recording did not get that far")


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("force", [False, True])
def test_ctrl_c_keeps_what_was_recorded(checkpoint: Checkpoint, tmp_path: Path, devices: str, force: bool) -> None:
    """Long before a piece is full."""
    path = tmp_path / "t.parquet"
    model = checkpoint("qwen3_moe", max_position_embeddings=200_000)
    if force:  # neither what is replaced nor what is dropped is mistaken for this recording
        path.write_bytes(b"old")
        partial_folder(path).mkdir()
        (partial_folder(path) / "00000000.parquet").write_bytes(b"old")
    with recording(tmp_path, model, "--devices", devices, *["--force"] * force) as process:
        piece = partial_folder(path) / "00000001.parquet"
        wait_until(piece.exists, process)
        written = TraceReader(partial_folder(path)).tokens
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=ENOUGH_SECONDS)
    assert process.returncode == 130, errors
    assert output == ""
    tokens = TraceReader(path).tokens
    assert f"interrupted; {tokens:,} tokens recorded so far, kept in t.parquet" in errors
    assert "Traceback" not in errors
    assert tokens >= written
    assert written < PIECE_TOKENS * 2
    assert not partial_folder(path).exists()


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_ctrl_c_before_anything_is_recorded_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, devices: str
) -> None:
    path = tmp_path / "t.parquet"
    model = checkpoint("qwen3_moe", max_position_embeddings=200_000)
    path.write_bytes(b"old")
    partial_folder(path).mkdir()
    (partial_folder(path) / "00000000.parquet").write_bytes(b"old")
    with recording(tmp_path, model, "--devices", devices, "--force") as process:
        wait_until(lambda: not list(partial_folder(path).glob("*.parquet")), process)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=ENOUGH_SECONDS)
    assert process.returncode == 130, errors
    assert output == ""
    assert "interrupted" in errors
    assert "kept in" not in errors
    assert path.read_bytes() == b"old"
    assert not partial_folder(path).exists()


@pytest.mark.slow
def test_what_a_killed_recording_leaves_is_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    model = checkpoint("qwen3_moe", max_position_embeddings=200_000)
    with recording(tmp_path, model, "--devices", "cpu:2") as process:
        wait_until((partial_folder(path) / "00000000.parquet").exists, process)
        ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if not each.children()]
        max(ranks, key=lambda rank: rank.cpu_times().user).kill()
        _, errors = process.communicate(timeout=ENOUGH_SECONDS)
    assert process.returncode == 1, errors
    assert f"caee trace import {partial_folder(Path('t.parquet'))} -o t.parquet" in errors
    assert "Traceback" not in errors
    assert recover(path).tokens > 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", ".", "--force"], 2, ". is a folder"),
        (["-o", "..", "--force"], 2, ".. is a folder"),
        (["-o", "absent/t.parquet"], 1, "cannot write in absent"),
        (["-o", "/proc/t.parquet", "--force"], 1, "cannot write in /proc"),
        (["-o", "prompts.txt", "--force"], 2, "prompts.txt is what the command reads"),
        (["-o", "link", "--force"], 2, "link is what the command reads"),
        (["-o", "MODEL/config.json", "--force"], 2, "config.json is what the command reads"),
        (["-o", "store.db", "--force"], 2, "store.db is the store's own file"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_a_model_is_loaded(
    arguments: list[str],
    code: int,
    message: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loaded(*anything: object) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr("caee_cli.trace_recording._options", loaded)
    monkeypatch.setenv("CAEE_STORE", str(tmp_path / "store.db"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store.db").write_text("store")
    (tmp_path / "link").symlink_to(_prompts(tmp_path))
    model = checkpoint("qwen3_moe")
    before = sorted(model.iterdir()), sorted(tmp_path.iterdir())
    written = [each.replace("MODEL", str(model)) for each in arguments]
    assert run_app(["trace", "record", str(model), "--prompts", "prompts.txt", *written]) == code
    assert message in capsys.readouterr().err
    assert (sorted(model.iterdir()), sorted(tmp_path.iterdir())) == before
