"""A trace-driven run against the simulator and against the bytes that it wrote."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.devices import find_devices
from probes.errors import RunError, UsageError
from probes.fingerprint import take_fingerprint
from runtime.cache import parse_cache
from runtime.cost import uniform_costs
from runtime.launch import launch
from runtime.layout import lay_out
from runtime.policy.spec import parse_policy, resolve
from runtime.policy.types import NO_GROUPS
from runtime.predict import StepCosts, predicted_tpot
from runtime.recording import PassRecord
from runtime.simulate.placement import make_placement
from runtime.simulate.records import PassFigures, PassSpec, SimulatedMachine
from runtime.simulate.run import simulate
from runtime.trace.layers import FirstLayers
from runtime.tracerun import session, sources
from runtime.tracerun.content import ExpertContent
from runtime.tracerun.kernel import ExpertWeights, slot_bytes, stored_dtype
from runtime.tracerun.options import TraceRunOptions
from runtime.tracerun.record import trace_run_record
from runtime.tracerun.session import TraceRunReport, TraceRunSession, run_trace_rank
from runtime.tracerun.sources import Units

Options = Callable[..., TraceRunOptions]
Open = Callable[[TraceRunOptions], TraceRunSession]


def simulated(
    source: Any,
    options: TraceRunOptions,
    devices: int,
    policies: Sequence[str],
    *,
    seconds: float = 1e-3,
    **machine_options: Any,
) -> list[PassFigures]:
    """What the simulator says of the same steps."""
    machine = SimulatedMachine(tier=options.tier, costs=uniform_costs(seconds, devices), **machine_options)
    first = FirstLayers(source, options.layers)
    passes = [
        PassSpec(
            policy=resolve(parse_policy(policy), offloading=options.offloading),
            cache=parse_cache(options.cache) if options.offloading else None,
            cache_experts=options.cache_experts if options.offloading else None,
            placement=make_placement(
                "contiguous", layers=options.layers, experts=options.shape.num_experts, devices=devices, loads_LN=None
            ),
            machine=machine,
        )
        for policy in policies
    ]
    traffic = options.traffic
    return list(
        simulate(
            first, passes, batch_size=traffic.batch_size, warmup_steps=traffic.warmup_steps, steps=traffic.steps
        ).passes
    )


def test_a_run_predicts_what_a_staged_simulation_does(
    make_source: Any, make_options: Options, open_session: Open
) -> None:
    source, policy = make_source(), "caee:theta=0.6"
    options = make_options(source, policy=policy)
    report = open_session(options).run()
    costs = StepCosts(fetch_D=(2e-3,), compute=7e-4, rest=1e-3, groups=NO_GROUPS)
    machine = {"expert_compute_seconds": 7e-4, "dense_seconds": 1e-3, "staged": True}
    baseline, treated = simulated(source, options, 1, ["router", policy], seconds=2e-3, **machine)
    for record, figures in ((report.baseline[0][0], baseline), (report.treated[0][0], treated)):
        predicted = predicted_tpot(costs, record.decode_misses(), record.decode_dispatched())
        assert predicted == pytest.approx(figures.time_per_step.mean, rel=1e-6)


def test_what_is_complete_survives_an_interruption(make_options: Options, open_session: Open, tmp_path: Path) -> None:
    partial = tmp_path.parent / "partial.pickle"
    options = make_options(partial_file=partial, pairs=2)
    whole = open_session(options).run()
    kept = pickle.loads(partial.read_bytes())
    fingerprint = take_fingerprint(options.devices, options.folder)
    records = [trace_run_record(options, report, fingerprint, "tiny") for report in (kept, whole)]
    assert [record.workload.pairs for record in records] == [2, 2]
    assert [record.replay.checked_experts for record in records if record.replay] == [0, 7]
    assert records[0].with_policy.misses_per_device == records[1].with_policy.misses_per_device
    assert records[0].predicted is None


def assert_same(measured: PassRecord, figures: PassFigures) -> None:
    """Every fetch by device and layer, before and after, and what was removed."""
    for before, name in ((False, "device_misses_after"), (True, "device_misses_before")):
        expected = [getattr(layer, name) for layer in figures.layers]
        assert measured.decode_misses(before=before).sum(0).tolist() == [list(each) for each in expected]
    assert len(measured.steps) == figures.steps
    tokens = sum(step.tokens for step in measured.steps) * len(figures.layers)
    removed = sum(layer.removed for step in measured.steps for layer in step.layers)
    assert removed / 2**30 / tokens == pytest.approx(figures.removed_importance, rel=1e-12)


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("caee:theta=0.6", {}),
        ("budget:epsilon=0.2", {"layers": 2}),
        ("budget:epsilon=0.2,reuse=0.5", {"cache": "lfu:decay=0.9,admit=1"}),
        ("caee:theta=0.5", {"tier": "host", "cache": "lru", "warmup_steps": 0}),
        ("importance:theta=0.5", {"cache": "forecast:decay=0.9,prefetch=1", "cache_experts": 11}),
        ("caee:rule=score,theta=0.6", {"tier": "device"}),
        ("random:theta=0.6", {"scores": True, "cache": "lfu:decay=0.9,admit=1"}),
        ("caee:theta=0.5,compensation=resident", {"scores": True}),
    ],
)
def test_fetches_are_those_of_the_simulator(
    policy: str, changes: dict[str, Any], make_source: Any, make_options: Options, open_session: Open
) -> None:
    source = make_source(scores=changes.pop("scores", False))
    options = make_options(source, policy=policy, **changes)
    report = open_session(options).run()
    baseline, treated = simulated(source, options, 1, ["router", policy])
    assert_same(report.baseline[0][0], baseline)
    assert_same(report.treated[0][0], treated)
    assert treated.removed_importance > 0


def test_every_pass_of_two_ranks_fetches_as_simulated(
    make_source: Any, make_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    source, policy = make_source(), "budget:epsilon=0.2,reuse=0.5"
    options = make_options(source, policy=policy, devices="cpu:2", pairs=2, cache_experts=4, check_ranks=True)
    report: TraceRunReport = launch(run_trace_rank, options, processes=2)
    expected = simulated(source, options, 2, ["router", policy])
    for passes, figures in zip((report.baseline, report.treated), expected, strict=True):
        assert [len(records) for records in passes] == [2, 2]
        for record in (record for records in passes for record in records):
            assert_same(record, figures)
            assert record.ttft_seconds is None
    assert report.checked_experts == 4
    assert len(report.devices) == 2
    # Python's own folder goes with the process.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("pymp-")] == []


def without_room_on_rank_1(options: TraceRunOptions) -> TraceRunReport:
    """The rank's program, where the second rank cannot write its stand-ins."""

    def full(*_: object, **__: object) -> None:
        raise RunError("the disk is full")

    if os.environ["RANK"] == "1":
        session.ScratchSource = full  # type: ignore[assignment, misc]  # in a process of its own
    return run_trace_rank(options)


def test_all_ranks_end_with_the_reason_of_the_one_that_cannot_begin(
    make_options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Behind the packages under test, so that ranks find this module.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    start = time.monotonic()
    with pytest.raises(RunError, match="the disk is full"):
        launch(without_room_on_rank_1, make_options(devices="cpu:2"), processes=2)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("storage", ["bfloat16", "float32", "fp8", "mxfp4"])
def test_slots_hold_the_bytes_of_their_experts(
    tier: str, storage: str, make_options: Options, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = slot_bytes(make_options(storage=storage).shape)
    # Room for five stand-ins only: experts beyond them share.
    monkeypatch.setattr(sources, "MOST_SCRATCH_BYTES", 5 * size + size // 2)
    monkeypatch.setattr("runtime.tracerun.session.memory_room", lambda taken, ranks: 5 * size)
    session = open_session(make_options(storage=storage, tier=tier, cache_experts=9))
    report = session.run()
    assert (report.distinct_experts, report.experts_per_device, report.checked_experts) == (5, 36, 9)
    held = session.execution.held()
    assert len({(layer, expert) for _, layer, expert in held}) == 9
    for slot, layer, expert in held:
        unit = (layer * 12 + expert) % 5
        data = session.pool.stored[slot].numpy()
        assert data.tobytes() == session.content.unit(unit).tobytes()
        assert [other for other in range(5) if session.content.matches(other, data)] == [unit]
    session.pool.stored[held[3][0], 17] ^= 1
    with pytest.raises(
        RunError, match=r"the bytes fetched for expert \d+ of MoE layer \d are not those that were stored"
    ):
        session.check_bytes()


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_what_is_multiplied_is_what_was_fetched(storage: str, make_options: Options, open_session: Open) -> None:
    """The rows of a step, against plain matmuls on the bytes that were stored."""
    options = make_options(storage=storage)
    session = open_session(options)
    session.run()
    assert session.weights.multiplies == f"the fetched bytes, as {storage}"
    kernel, hidden = session.execution.kernels[0], torch.randn((4, 32)).to(session.dtype)
    slots = {expert: slot for slot, layer, expert in session.execution.held() if layer == 1}
    expert, slot = next(iter(slots.items()))
    ids = np.array([[expert, -1], [-1, -1], [expert, -1], [-1, expert]])
    rows = torch.zeros((8, 32), dtype=session.dtype)
    kernel.rows(hidden, ids, kernel.row_order(ids), {expert: slot}, rows)
    flat = torch.from_numpy(session.content.unit(session.units.of(1, expert)).view(np.uint8)).view(session.dtype)
    gate, up = (flat[at * 512 : (at + 1) * 512].view(16, 32).float() for at in range(2))
    down = flat[1024:1536].view(32, 16).float()
    for row, token in ((0, 0), (4, 2), (7, 3)):
        x = hidden[token].float()
        expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        torch.testing.assert_close(rows[row].float(), expected, rtol=5e-2, atol=1e-4)
    assert not rows[[1, 2, 3, 5, 6]].any()


@pytest.mark.parametrize(("storage", "bytes_"), [("fp8", 1536 + 6 * 4), ("mxfp4", 768 + 3 * 16)])
def test_quantised_experts_move_as_stored_and_say_what_is_multiplied(
    storage: str, bytes_: int, make_options: Options, open_session: Open
) -> None:
    session = open_session(make_options(storage=storage, dtype="float32"))
    assert session.options.shape.expert_bytes == bytes_
    assert session.pool.stored.shape == (7 + 8, -(-bytes_ // 64) * 64)
    assert session.weights.multiplies == f"float32 matrices of the same shape in place of the fetched {storage} bytes"
    first, second = session.weights.of(3)
    assert (first.shape, second.shape, first.dtype) == ((32, 32), (32, 16), torch.float32)


def test_experts_without_a_gate(make_shape: Any) -> None:
    shape = make_shape(mlp_hidden_act="relu2")
    pool = make_pool(shape)
    first, second = ExpertWeights(shape, pool, torch.bfloat16).of(1)
    assert (first.shape, second.shape) == ((16, 32), (32, 16))


def make_pool(shape: Any) -> Any:
    from runtime.tracerun.kernel import BytePool

    return BytePool(2, slot_bytes(shape), torch.device("cpu"))


def test_a_run_leaves_no_file_behind(make_options: Options, open_session: Open) -> None:
    options = make_options()
    session = open_session(options)
    assert list(options.folder.iterdir()) == []
    session.run()
    assert list(options.folder.iterdir()) == []


def test_no_room(make_options: Options, open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    options = make_options()
    with monkeypatch.context() as patch:
        patch.setattr("runtime.tracerun.session.memory_available_bytes", lambda: 10_000)
        with pytest.raises(RunError, match=r"15 slots of .* need .* are free") as caught:
            open_session(options)
    assert "--layers" in str(caught.value.hint)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "MOST_SCRATCH_BYTES", 100)
        with pytest.raises(RunError, match="does not fit on the disk") as caught:
            open_session(options)
    assert "--disk-path" in str(caught.value.hint)
    options.folder.rmdir()
    with pytest.raises(RunError, match="cannot write in"):
        open_session(options)


def test_more_devices_than_experts(make_options: Options) -> None:
    with pytest.raises(UsageError, match="13 devices for 12 experts"):
        make_options(devices="cpu:13")
    sizes = {"num_experts": 12, "layers": 2, "expert_bytes": 8, "tier": "host", "cache_experts": None}
    with pytest.raises(UsageError, match="13 devices for 12 experts"):  # ranks of several hosts
        lay_out(find_devices("cpu:13"), **sizes, calibration=None)
    lay_out(find_devices("cpu:12"), **sizes, calibration=None)


def test_stand_ins_of_a_device_are_all_used() -> None:
    units = Units(count=7, own=np.arange(6, 12))
    numbers = [units.of(layer, expert) for layer in range(3) for expert in range(6, 12)]
    assert numbers == [number % 7 for number in range(18)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_ordinary_numbers(dtype: torch.dtype) -> None:
    content = ExpertContent(1 << 16, dtype=dtype, seed=3)
    values = torch.from_numpy(content.unit(2).view(np.uint8)).view(dtype).float()
    assert values.isfinite().all()
    assert values.std().item() == pytest.approx(0.02, rel=0.05)
    assert content.unit(2).tobytes() != content.unit(3).tobytes()
    assert ExpertContent(1 << 16, dtype=dtype, seed=3).matches(2, content.unit(2).view(np.uint8))


def test_stored_dtypes(make_shape: Any) -> None:
    assert stored_dtype(make_shape()) is torch.bfloat16
    assert stored_dtype(make_shape("fp8")) is None


def test_the_clock_starts_when_all_ranks_are_ready(
    make_options: Options, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank does before, such as collecting garbage, takes ranks unequal times; none of it is anybody's step."""
    opened, happened = open_session(make_options(tier="host", policy="router")), []
    for name in ("collect", "disable", "enable"):
        monkeypatch.setattr(f"gc.{name}", lambda name=name: happened.append(name))
    monkeypatch.setattr(type(opened.ranks), "barrier", lambda _: happened.append("barrier"))
    step = opened.execution.step
    monkeypatch.setattr(opened.execution, "step", lambda *given: (happened.append("step"), step(*given))[1])
    opened.run_pass(opened.router, steps=2)
    start = happened.index("step")
    assert happened[start - 1] == "barrier"
    assert happened[:start].count("collect") == 1


def test_the_time_of_a_pass_is_that_of_its_steps(make_options: Options) -> None:
    options = make_options(tier="host", pairs=1)
    report = run_trace_rank(options)
    for passes in (report.baseline, report.treated):
        for record in passes[0]:
            assert record.tpot_seconds == pytest.approx(np.mean([step.seconds for step in record.steps]))
    found = trace_run_record(options, report, take_fingerprint(options.devices, options.folder), "tiny")
    for statistics in (found.baseline, found.with_policy):
        assert statistics.step_times.total == pytest.approx(statistics.tpot_seconds.median)
