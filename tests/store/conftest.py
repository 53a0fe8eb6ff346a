"""Records as the tests of the store need them: small, complete, with every optional part present."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from probes.records import (
    Bandwidth,
    Calibration,
    Concurrency,
    Device,
    Field,
    Fingerprint,
    Intervals,
    LinkGroup,
    LinkKind,
    LinkMeasurement,
    LinkMode,
    LinkModel,
    LinkStatus,
    ModelForm,
    Probe,
    Sample,
    Segment,
)
from store.records import (
    Estimate,
    LayerCost,
    PassStatistics,
    PolicyChoice,
    PolicyOrigin,
    PolicyPoint,
    PolicyRecord,
    PolicySearch,
    Prediction,
    Quality,
    Ratio,
    RunRecord,
    SampleText,
    StepSeries,
    StepTimes,
    Workload,
)
from store.session import Store, open_store

CREATED_AT = "2026-03-01T12:00:00+00:00"


class Records(Protocol):
    """The fixture ``records``."""

    def probe(self, probe_id: str = "probe-1", created_at: str = CREATED_AT) -> Probe: ...

    def calibration(
        self, calibration_id: str = "calibration-1", probe_id: str | None = "probe-1", created_at: str = CREATED_AT
    ) -> Calibration: ...

    def run(
        self, run_id: str = "run-1", calibration_id: str | None = "calibration-1", created_at: str = CREATED_AT
    ) -> RunRecord: ...

    def policy(
        self, policy_id: str = "policy-1", calibration_id: str | None = "calibration-1", created_at: str = CREATED_AT
    ) -> PolicyRecord: ...

    def origin(self, policy_id: str = "policy-1") -> PolicyOrigin: ...


class _Records:
    @staticmethod
    def probe(probe_id: str = "probe-1", created_at: str = CREATED_AT) -> Probe:
        return Probe(
            probe_id=probe_id,
            created_at=created_at,
            fingerprint=_fingerprint(),
            devices=_devices(),
            links=(
                LinkMeasurement(
                    kind=LinkKind.DISK_TO_HOST,
                    source="disk",
                    destination="host",
                    mode=LinkMode.DIRECT,
                    concurrency=Concurrency.ALL,
                    status=LinkStatus.UNSTABLE,
                    bandwidth_bytes_per_s=Bandwidth(median=1.1e9, p05=0.9e9, p95=1.3e9, n=9),
                    burst_bytes_per_s=4.0e9,
                    samples=(
                        Sample(size_bytes=4096, seconds=(1e-4, 1.1e-4, 9.3e-5)),
                        Sample(size_bytes=1 << 30, seconds=(1.0, 1.02)),
                    ),
                    warnings=("the slowest of 9 is 50 % above the median",),
                ),
                LinkMeasurement(
                    kind=LinkKind.HOST_TO_DEVICE,
                    source="host",
                    destination="cuda:0",
                    mode=None,
                    concurrency=Concurrency.SOLO,
                    status=LinkStatus.WAIVED,
                    reason="no CUDA device",
                ),
            ),
            link_groups=(LinkGroup(kind=LinkKind.DISK_TO_HOST, devices=(0, 1), factor=1.0),),
            warnings=("two of four cores",),
        )

    @staticmethod
    def calibration(
        calibration_id: str = "calibration-1", probe_id: str | None = "probe-1", created_at: str = CREATED_AT
    ) -> Calibration:
        return Calibration(
            calibration_id=calibration_id,
            created_at=created_at,
            probe_id=probe_id,
            origin="probe",
            fingerprint=_fingerprint(),
            devices=_devices(),
            models=(
                LinkModel(
                    model_id="disk",
                    kind=LinkKind.DISK_TO_HOST,
                    source="disk",
                    destination="host",
                    mode=LinkMode.DIRECT,
                    concurrency=Concurrency.SOLO,
                    form=ModelForm.PIECEWISE,
                    alpha=1.07,
                    bandwidth_bytes_per_s=1.1e9,
                    beta_seconds=9.5e-5,
                    n_half_bytes=9.8e4,
                    segments=(Segment(from_bytes=0, slope_seconds_per_byte=9.7e-10, beta_seconds=9.5e-5),),
                    ci95=Intervals(effective_bandwidth_bytes_per_s=(1.0e9, 1.06e9), beta_seconds=(9.1e-5, 9.9e-5)),
                    holdout_mape=0.021,
                    max_relative_error=0.04,
                    status="ok",
                    warnings=("fitted on what lasts",),
                ),
            ),
            link_groups=(LinkGroup(kind=LinkKind.DISK_TO_HOST, devices=(0, 1), factor=1.0),),
        )

    @staticmethod
    def run(
        run_id: str = "run-1", calibration_id: str | None = "calibration-1", created_at: str = CREATED_AT
    ) -> RunRecord:
        return RunRecord(
            run_id=run_id,
            created_at=created_at,
            model="demo",
            model_family="qwen3_moe",
            devices=_devices(),
            tier="disk",
            policy=PolicyChoice(name="caee", parameters={"rule": "cir", "theta": 0.8, "seed": 0, "strict": True}),
            workload=Workload(
                batch_size=4,
                max_new_tokens=8,
                prompts=4,
                pairs=2,
                seed=0,
                dtype="float32",
                cache="lfu",
                cache_experts=64,
                experts_per_device=64,
                top_k=4,
                num_experts=32,
                moe_layers=4,
                expert_bytes=73728,
                phases="all",
                read_mode="direct",
            ),
            fingerprint=_fingerprint(),
            calibration_id=calibration_id,
            baseline=_passes(0.031),
            with_policy=_passes(0.027),
            gain_ttft=Ratio(ratio=0.99, ci95=(0.97, 1.02)),
            gain_tpot=Ratio(ratio=0.87, ci95=(0.85, 0.9)),
            quality=Quality(
                nll_baseline=1.31,
                nll_policy=1.314,
                nll_difference_ci95=(0.001, 0.007),
                perplexity_ratio=1.004,
                mean_kl=0.003,
                top1_agreement=0.97,
                tokens=2048,
                sequences=8,
            ),
            layers=(
                LayerCost(
                    layer=0,
                    device_cost_before=(1e-3, 2e-3),
                    device_cost_after=(9e-4, 1e-3),
                    device_misses_before=(3.5, 4.25),
                    device_misses_after=(3.0, 3.0),
                    gap_histogram_before=(1, 4, 3),
                    gap_histogram_after=(8,),
                    importance_highest=0.6,
                    importance_lowest=None,
                ),
            ),
            series=StepSeries(
                baseline_max_misses=(5, 4), policy_max_misses=(4, 3), baseline_hit_rate=(0.5, 0.6), policy_hit_rate=()
            ),
            predicted=Prediction(
                tpot_seconds=0.028,
                relative_error=0.037,
                baseline_tpot_seconds=0.03,
                baseline_relative_error=-0.03,
                calibration_id="calibration-1",
                seconds_per_expert=(1.6e-4, 1.6e-4),
            ),
            samples=(SampleText(prompt="It was a", baseline=" dark night\n", with_policy=" dunkle Nacht — “ö”"),),
            warnings=("the gain in TTFT is inside the noise",),
        )

    @staticmethod
    def policy(
        policy_id: str = "policy-1", calibration_id: str | None = "calibration-1", created_at: str = CREATED_AT
    ) -> PolicyRecord:
        run = _Records.run()
        return PolicyRecord(
            policy_id=policy_id,
            created_at=created_at,
            model="demo",
            model_identity="0f" * 16,
            model_family="qwen3_moe",
            devices=_devices(),
            tier="disk",
            cache="lfu",
            cache_experts=32,
            experts_per_device=64,
            batch_size=4,
            dtype="float32",
            phases="all",
            seed=0,
            fingerprint=_fingerprint(),
            calibration_id=calibration_id,
            policy=run.policy,
            search=_search(),
            run_id=run.run_id,
            measured=run.quality,
            gain_tpot=run.gain_tpot,
        )

    @staticmethod
    def origin(policy_id: str = "policy-1") -> PolicyOrigin:
        return PolicyOrigin(policy_id=policy_id, created_at=CREATED_AT, searched_here=True, search=_search())


def _search() -> PolicySearch:
    """Three settings, of which the mildest two are within the limit."""
    return PolicySearch(
        knob="theta",
        max_quality_drop=0.01,
        nll_baseline=1.31,
        sequences=8,
        tokens=760,
        points=tuple(
            PolicyPoint(
                value=value,
                nll=1.31 * (1 + rise),
                loss_rise=rise,
                loss_rise_ci95=(rise - 0.002, rise + 0.002),
                removed_importance=0.1 * (1 - value),
                max_device_misses_per_step=20 * value,
                within_limit=rise + 0.002 <= 0.01,
            )
            for value, rise in ((0.7, 0.004), (0.5, 0.02), (0.6, 0.007))
        ),
        chosen=0.6,
    )


def _fingerprint() -> Fingerprint:
    return Fingerprint(
        identity={
            "cpu": Field(value="Example CPU"),
            "cores": Field(value=2),
            "gpu": Field(value=None, reason="no driver"),
        },
        state={"load": Field(value=0.25), "turbo": Field(value=True)},
    )


def _devices() -> tuple[Device, ...]:
    return tuple(Device(index=index, kind="cpu", name="rank", uuid=None, memory_bytes=1 << 33) for index in range(2))


def _passes(tpot: float) -> PassStatistics:
    return PassStatistics(
        ttft_seconds=Estimate(median=0.2, ci95=(0.19, 0.21), samples=(0.19, 0.2, 0.21)),
        tpot_seconds=Estimate(median=tpot, ci95=(tpot, tpot), samples=(tpot,)),
        tokens=32,
        steps=8,
        misses_per_device=(40, 41),
        max_device_misses_per_step=5.5,
        hit_rate=0.55,
        removed_importance=0.0,
        rerouted_slots=0,
        step_times=StepTimes(total=tpot, fetch_wait=0.01, experts=0.004, exchange=0.001, decide=0.0005, other=0.002),
        predicted_tpot_seconds=None,
    )


@pytest.fixture(scope="session")
def records() -> Records:
    return _Records()


@pytest.fixture
def store_file(tmp_path: Path) -> Path:
    return tmp_path / "caee.db"


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    with open_store(str(store_file)) as opened:
        yield opened


@pytest.fixture
def full_store(store: Store, records: Records) -> Store:
    """A probe, the calibration from it, the run that used that, and a simulation."""
    store.save_probe(records.probe())
    store.save_calibration(records.calibration())
    store.save_run(records.run())
    document = {"schema": "caee.simulate/1", "policies": [{"name": "router"}, {"name": "caee"}], "pareto": []}
    store.save_simulation("simulation-1", CREATED_AT, document)
    return store
