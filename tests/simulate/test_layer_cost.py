"""Measured layers as the cost of experts on the device: which one is found, what it costs, and where it is named."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from probes.errors import CheckpointError
from probes.records import (
    Calibration,
    Concurrency,
    Device,
    LayerFit,
    LayerModel,
    LayerShape,
    LinkKind,
    LinkModel,
    ModelForm,
)
from runtime.cost import ExpertShape, cost_table, layer_of
from runtime.models.config import moe_shape
from runtime.models.expert_shape import expert_shape
from runtime.models.fetch import config_path
from runtime.simulate.compiled import CompiledPass
from runtime.simulate.document import simulation_document
from runtime.simulate.machine import MachineRequest, machine_for
from runtime.simulate.reference import PolicyPass
from runtime.simulate.run import simulate

LINE = LayerFit(form=ModelForm.AFFINE, beta_seconds=20e-6, seconds_per_expert=3e-6)
TABLE = LayerFit(
    form=ModelForm.TABLE,
    beta_seconds=10e-6,
    seconds_per_expert=4e-6,
    knots=((1.0, 30e-6), (2.0, 31e-6), (4.0, 50e-6), (6.0, 58e-6)),
)
SHAPE = ExpertShape(hidden_size=64, intermediate_size=32, top_k=2, num_experts=12, dtypes=("bfloat16", "float16"))


def layer(fit: LayerFit = LINE, **changes: Any) -> LayerModel:
    shape = {
        "kernel": "triton",
        "dtype": "bfloat16",
        "hidden_size": 64,
        "intermediate_size": 32,
        "top_k": 2,
        "num_experts": 12,
        "expert_parallel_size": 2,
    }
    return LayerModel(shape=LayerShape(**(shape | changes)), fit=fit, holdout_error=0.012, status="ok")


def imported(*layers: LayerModel) -> Calibration:
    memory = LinkModel(
        model_id="memory",
        kind=LinkKind.DEVICE_MEMORY,
        source="cuda:0",
        destination="cuda:0",
        mode=None,
        concurrency=Concurrency.SOLO,
        form=ModelForm.AFFINE,
        alpha=1.0,
        bandwidth_bytes_per_s=3e12,
        beta_seconds=0.0,
        n_half_bytes=0.0,
        segments=None,
        ci95=None,
        holdout_mape=None,
        max_relative_error=None,
        status="ok",
    )
    return Calibration(
        calibration_id="abc",
        created_at="2026-01-01T00:00:00+00:00",
        probe_id=None,
        origin="kernel table h100.parquet",
        fingerprint=None,
        devices=(Device(index=0, kind="cuda", name="H100", uuid=None, memory_bytes=None),),
        models=(memory,),
        link_groups=(),
        layers=layers,
    )


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_size": 65},
        {"intermediate_size": 33},
        {"top_k": 3},
        {"num_experts": 13},
        {"expert_parallel_size": 4},
        {"dtype": "fp8"},
    ],
)
def test_only_a_layer_of_exactly_the_shape_is_taken(other: dict[str, Any]) -> None:
    calibration = imported(layer(**other))
    assert layer_of(calibration, SHAPE, 2) is None
    table = cost_table(calibration, "device", ["cuda:0"] * 2, 3_000_000, SHAPE)
    assert table.layer is None
    assert table.seconds_per_expert == pytest.approx((1e-6,) * 2), "the memory's speed"
    assert not len(table.layer_picoseconds(12))


def test_of_several_kernels_the_fastest_is_taken() -> None:
    slow, fast = layer(TABLE), layer(dataclasses.replace(LINE, beta_seconds=1e-6), kernel="cutlass", dtype="float16")
    assert layer_of(imported(slow, fast), SHAPE, 2) is fast


def test_one_more_expert_costs_the_slope_and_a_layer_its_beta_once() -> None:
    table = cost_table(imported(layer()), "device", ["cuda:0"] * 2, 10**9, SHAPE)
    assert table.seconds_per_expert == (3e-6, 3e-6), "the size does not count: the layer was measured"
    assert table.layer_picoseconds(3).tolist() == [0, 23_000_000, 26_000_000, 29_000_000]
    assert not list(table.groups)


def test_without_a_shape_the_memory_is_read() -> None:
    assert cost_table(imported(layer()), "device", ["cuda:0"] * 2, 3_000_000).layer is None


def run(machine: Any, policy: str, trace: Any, make_pass: Any, in_memory: Any) -> Any:
    (figures,) = simulate(in_memory(trace), [make_pass(policy, machine, trace)], batch_size=3).passes
    return figures


def test_a_layer_takes_what_the_busiest_device_was_measured_to_take(
    make_trace: Any, make_pass: Any, in_memory: Any
) -> None:
    """Against the definition, written out: every step's layers, each at its fullest device."""
    trace = make_trace(lengths=(6, 6, 6), experts=12, top_k=2, layers=2)
    request = MachineRequest(machine="abc", expert_bytes=10**6, shape=SHAPE, devices=2)
    machine = machine_for(request, lambda _: imported(layer(TABLE)), "device")
    times = []
    for step in range(6):
        seconds = 0.0
        for at in range(2):
            ids = {int(e) for t in range(3) for e in trace.ids_TLK[t * 6 + step, at] if e >= 0}
            seconds += max(TABLE.seconds(n) for half in (0, 1) if (n := sum(e * 2 // 12 == half for e in ids)))
        times.append(seconds)
    figures = run(machine, "router", trace, make_pass, in_memory)
    assert figures.time_per_step.mean == pytest.approx(np.mean(times), rel=1e-9)
    pruned = run(machine, "caee:theta=0.3", trace, make_pass, in_memory)
    assert pruned.time_per_step.mean < figures.time_per_step.mean


@pytest.mark.parametrize("policy", ["router", "caee:theta=0.4", "budget:price=0.3", "top-k:k0=1"])
def test_the_compiled_pass_equals_the_plain_one(policy: str, make_trace: Any, make_pass: Any, in_memory: Any) -> None:
    trace = make_trace(lengths=(9, 9, 9, 9), experts=12, top_k=2, layers=2, empty_slots=True)
    for fit, changes in ((LINE, {"dense_seconds": 1e-3}), (TABLE, {"expert_compute_seconds": 1e-6})):
        request = MachineRequest(machine="abc", expert_bytes=10**6, shape=SHAPE, devices=2, **changes)
        machine = machine_for(request, lambda _, fit=fit: imported(layer(fit)), "device")
        each = make_pass(policy, machine, trace)
        totals = [counts_of(kind, each, trace, in_memory) for kind in (CompiledPass, PolicyPass)]
        np.testing.assert_array_equal(*totals)


def counts_of(kind: Any, each: Any, trace: Any, in_memory: Any) -> Any:
    from runtime.simulate.batches import plan
    from runtime.simulate.index import index_of
    from runtime.simulate.prepare import prepare

    source = in_memory(trace)
    running = kind(each, top_k=2, has_scores=False) if kind is CompiledPass else kind(each, compiled=False)
    for block in plan(source, index_of(source), 3).blocks():
        running.run(block, prepare(block.offsets_S1, block.rows.ids_RLK, block.rows.gates_RLK, 12), None, 0)
    return np.concatenate(running.counts().step_times)


def test_the_result_names_the_kernel_and_where_it_was_imported_from(
    make_trace: Any, make_pass: Any, in_memory: Any
) -> None:
    trace = make_trace(lengths=(6, 6, 6), experts=12, top_k=2, layers=2)
    request = MachineRequest(machine="abc", expert_bytes=10**6, shape=SHAPE, devices=2)
    machine = machine_for(request, lambda _: imported(layer(TABLE)), "device")
    assert machine.origin == (
        "calibration abc, imported from kernel table h100.parquet: layer times of triton in bfloat16 on 2 devices, "
        "held-out rows within 1.2% in the median"
    )
    simulation = simulate(in_memory(trace), [make_pass("router", machine, trace)], batch_size=3)
    document = simulation_document(
        simulation, simulation_id="s", created_at="2026-01-01", trace="t", expert_bytes=10**6
    )
    described = json.loads(json.dumps(document, allow_nan=False))["machine"]
    assert described["origin"] == machine.origin
    assert described["layer_model"]["kernel"] == "triton"
    assert described["layer_model"]["knots"] == [list(knot) for knot in TABLE.knots]


@pytest.mark.parametrize(
    ("request_changes", "why"),
    [
        ({"shape": None}, "the memory's speed alone; with --model"),
        ({"devices": 4}, "no layer of 12 experts of 64 × 32, 2 per token, in bfloat16 or float16 was measured on 4"),
        ({"shape": dataclasses.replace(SHAPE, dtypes=())}, "in a weight type that no table knows"),
    ],
)
def test_why_no_layer_was_taken(request_changes: dict[str, Any], why: str) -> None:
    fields: dict[str, Any] = {"machine": "abc", "expert_bytes": 10**6, "shape": SHAPE, "devices": 2}
    machine = machine_for(MachineRequest(**(fields | request_changes)), lambda _: imported(layer()), "device")
    assert machine.costs.layer is None
    assert "imported from kernel table h100.parquet" in machine.origin
    assert why in machine.origin


BASE = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize(
    ("config", "dtypes"),
    [
        ({}, ("bfloat16", "float16")),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, ("fp8_block",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("fp8",)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ("w4a16_mxfp4",)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, ("int4_wo",)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128}}, ()),
        ({"torch_dtype": "float32"}, ()),
    ],
)
def test_a_config_leads_to_the_tables_names(config: dict[str, Any], dtypes: tuple[str, ...]) -> None:
    assert expert_shape(moe_shape(BASE | config)) == dataclasses.replace(SHAPE, dtypes=dtypes)


def test_the_config_of_a_hub_id_alone_is_fetched(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, str]] = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        if name == "org/absent":
            raise OSError("no such repository\nat all")
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert config_path("org/model") == tmp_path / "config.json"
    assert asked == [("org/model", "config.json")]
    with pytest.raises(CheckpointError, match=r"^org/absent is neither .*: no such repository$"):
        config_path("org/absent")
    (tmp_path / "here").mkdir()
    assert config_path(str(tmp_path / "here")) == tmp_path / "here", "a folder is taken as it is"
    assert len(asked) == 2
