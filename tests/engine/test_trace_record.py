"""What is recorded of a live model, and that a simulation of it decides as the model's run did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from caee_cli.main import app
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
from runtime.trace_recording import RecordOptions, RecordReport, record_rank
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
        tokens = plain(self, layer, *others)  # type: ignore[arg-type]  # handed on as they come
        if layer == 1 and len(tokens.gates_TK) == 3:
            tokens.gates_TK[1, 0] = np.nan
        return tokens

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
