"""Import of measured MoE kernel tables: made ones with a known truth, and the real ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.errors import ImportFormatError
from probes.imports.detect import import_measurement
from probes.imports.kernel_tables import read_kernel_table
from probes.imports.routing import activated_experts
from probes.layer_model import holdout_errors
from probes.records import LinkKind, ModelForm

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPE = {"moe_dtype": "bfloat16", "hidden_size": 1024, "inter_size": 512, "topk": 2, "num_experts": 64}
ROW = {
    "device": "NVIDIA T",
    "kernel_source": "kernel",
    **SHAPE,
    "moe_ep_size": 1,
    "moe_tp_size": 1,
    "distribution": "balanced",
}
BETA, PER_EXPERT = 20e-6, 3e-6
Write = Callable[[list[dict[str, Any]]], Path]


def row(tokens: int, **changed: Any) -> dict[str, Any]:
    """A row whose time is BETA + n · PER_EXPERT."""
    made: dict[str, Any] = {**ROW, "num_tokens": tokens, **changed}
    count = activated_experts(tokens, made["topk"], made["num_experts"], made["moe_ep_size"])
    return {"latency": (BETA + count * PER_EXPERT) * 1e3, **made}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / "table.bin"
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    return written


def test_the_true_line_is_found_and_the_origin_stays_visible(write: Write) -> None:
    calibration = import_measurement(write([row(tokens) for tokens in TOKENS]))
    (layer,) = calibration.layers
    assert layer.fit.form is ModelForm.AFFINE
    assert layer.fit.beta_seconds == pytest.approx(BETA)
    assert layer.fit.seconds_per_expert == pytest.approx(PER_EXPERT)
    assert layer.shape.num_experts == 64
    assert (layer.status, layer.holdout_error) == ("ok", pytest.approx(0.0, abs=1e-9))
    assert calibration.origin == "kernel table table.bin"
    assert [device.name for device in calibration.devices] == ["NVIDIA T"]
    (memory,) = calibration.models
    assert memory.kind is LinkKind.DEVICE_MEMORY
    assert memory.seconds(3 * 1024 * 512 * 2) == pytest.approx(PER_EXPERT)


def test_rows_end_where_all_experts_of_the_device_are_active(write: Write) -> None:
    """Beyond that the time grows with tokens, which no count of experts explains."""
    rows = [row(tokens) for tokens in TOKENS] + [row(4096) | {"latency": 99.0}]
    (curve,) = read_kernel_table(write(rows)).curves
    assert curve.tokens == (1, 2, 4, 8, 16, 32)
    assert curve.experts[-1] == 64


def test_other_rows_are_left_aside(write: Write) -> None:
    rows = [row(tokens) for tokens in TOKENS]
    rows += [row(tokens) | {"distribution": "power_law_1.2", "latency": 50.0} for tokens in TOKENS]
    rows += [row(tokens) | {"moe_tp_size": 2, "latency": 50.0} for tokens in TOKENS]
    rows += [row(tokens, moe_ep_size=128) for tokens in TOKENS]
    (curve,) = read_kernel_table(write(rows)).curves
    assert max(curve.seconds) == pytest.approx(BETA + 64 * PER_EXPERT)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(1) | {"distribution": "power_law_1.2"}], "no balanced rows .only power_law_1.2."),
        ([row(1), row(2) | {"device": "another"}], "mixes"),
        ([row(1) | {"latency": 0.0}], "is no measurement"),
        ([row(1) | {"latency": float("nan")}], "is no measurement"),
        ([row(1) | {"num_tokens": -1, "latency": 1.0}], "is no measurement"),
        ([row(1) | {"latency": None}, row(2)], "empty cells"),
        ([row(1) | {"latency": "fast"}], "cannot be read"),
        ([{"x": 1}], "without the columns|cannot be read"),
        ([row(1), row(2)], "no shape was measured"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(write: Write, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ImportFormatError, match=words):
        import_measurement(write(rows))


def test_a_cut_file_is_refused(write: Write) -> None:
    path = write([row(tokens) for tokens in TOKENS])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ImportFormatError, match="cannot be read"):
        import_measurement(path)


@given(tokens=st.integers(1, 200), top_k=st.integers(1, 16), experts=st.sampled_from([16, 64, 128, 256, 512, 896]))
@settings(max_examples=60)
def test_counts_are_bounded_and_devices_add_up(tokens: int, top_k: int, experts: int) -> None:
    everywhere = activated_experts(tokens, top_k, experts, 1)
    assert top_k <= everywhere + 1
    assert everywhere <= min(tokens * top_k, experts)
    assert activated_experts(tokens, top_k, experts, experts) == 1, "the first expert always gets the first token"
    halves = activated_experts(tokens, top_k, experts, 2)
    assert halves <= min(everywhere, experts // 2)


def test_picks_coincide_among_many_experts() -> None:
    """Counted with torch's bfloat16 arithmetic, as the tables' author made the load."""
    torch = pytest.importorskip("torch")
    for tokens, top_k, experts in ((16, 22, 512), (32, 10, 512), (48, 10, 512), (32, 16, 896), (16, 8, 256)):
        stride = -(-experts // top_k)
        at = torch.arange(tokens).unsqueeze(1)
        pick = torch.arange(top_k).unsqueeze(0)
        chosen = ((at * stride).to(torch.bfloat16) / tokens + pick * stride) % experts
        assert activated_experts(tokens, top_k, experts, 1) == len(chosen.long().unique())
    assert activated_experts(48, 10, 512, 1) == 364 < 480


@pytest.mark.parametrize("gpu", ["h100_sxm", "h200_sxm"])
def test_real_tables_are_predicted(shared_data: Path, gpu: str) -> None:
    table = read_kernel_table(shared_data / "hw" / "moe_kernels" / f"{gpu}_moe_vllm_0.24.0_moe_perf.parquet")
    assert len(table.curves) > 200

    def share(naive: bool) -> float:
        errors = [holdout_errors(curve.experts, curve.seconds, naive=naive) for curve in table.curves]
        return statistics.fmean(statistics.median(each) <= 0.05 for each in errors if each)

    assert share(naive=False) >= 0.82
    assert share(naive=False) > share(naive=True) + 0.03


def test_real_device_memory_is_below_the_data_sheet_and_near_it(shared_data: Path) -> None:
    folder = shared_data / "hw" / "moe_kernels"
    for gpu, sheet in (("h100", 3.35e12), ("h200", 4.8e12)):
        calibration = import_measurement(folder / f"{gpu}_sxm_moe_vllm_0.24.0_moe_perf.parquet")
        assert 0.75 * sheet < calibration.models[0].bandwidth_bytes_per_s < sheet


def test_a_table_without_balanced_rows_says_so(shared_data: Path) -> None:
    with pytest.raises(ImportFormatError, match="no balanced rows"):
        import_measurement(shared_data / "hw" / "moe_kernels" / "a100_sxm_moe_vllm_0.14.0_moe_perf.parquet")
