"""Runs, probes and calibrations made up for the report's tests: deterministic, with plausible figures, of any size."""

from __future__ import annotations

from typing import Any

import numpy as np

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
)
from store.records import (
    Estimate,
    LayerCost,
    PassStatistics,
    PolicyChoice,
    Prediction,
    Quality,
    Ratio,
    Roofline,
    RooflinePoint,
    RunRecord,
    SampleText,
    StepSeries,
    StepTimes,
    Workload,
)

SECONDS_PER_EXPERT = 412e-6
EXPERT_BYTES = 98_304
TOGETHER = (Concurrency.SOLO, Concurrency.ALL)


def make_run(
    *,
    run_id: str = "run-0001",
    layers: int = 8,
    devices: int = 4,
    steps: int = 64,
    theta: float = 0.8,
    ratio: float = 0.86,
    noise: float = 0.02,
    pairs: int = 12,
    loss_rise: float = 0.004,
    model: str = "caee-demo-moe",
    seed: int = 0,
) -> RunRecord:
    """A run whose TPOT with the policy is about ``ratio`` of the baseline's, with relative ``noise``."""
    draw = np.random.default_rng(seed)
    skew = draw.uniform(0.6, 1.6, size=(layers, 1, devices))
    before = draw.poisson(2.4 * skew, size=(layers, steps, devices))
    ceiling = np.ceil(before.mean(axis=2, keepdims=True) + 1.5 - theta)
    after = np.minimum(before, ceiling).astype(np.int64)
    baseline_fetches, policy_fetches = before.max(axis=2).sum(axis=0), after.max(axis=2).sum(axis=0)
    compute = 0.0106
    spread = draw.normal(1, noise, size=pairs)
    baseline_tpot = compute + float(baseline_fetches.mean()) * SECONDS_PER_EXPERT
    return RunRecord(
        run_id=run_id,
        created_at="2026-03-14T09:26:53Z",
        model=model,
        model_family="qwen3_moe",
        devices=make_devices(devices),
        tier="disk",
        policy=PolicyChoice(
            name="caee", parameters={"rule": "cir", "theta": theta, "compensation": "active", "reselect": "affected"}
        ),
        workload=Workload(
            batch_size=8,
            max_new_tokens=steps,
            prompts=8,
            pairs=pairs,
            seed=seed,
            dtype="float32",
            cache="lfu",
            cache_experts=16,
            experts_per_device=32 * layers // devices,
            top_k=4,
            num_experts=32,
            moe_layers=layers,
            expert_bytes=EXPERT_BYTES,
            phases="all",
            read_mode="direct",
        ),
        fingerprint=make_fingerprint(),
        calibration_id="calibration-0001",
        baseline=_pass(before, baseline_tpot, spread, removed=0.0, compute=compute),
        with_policy=_pass(after, baseline_tpot * ratio, spread[::-1], removed=0.105 * (1 - theta), compute=compute),
        gain_ttft=Ratio(ratio=ratio, ci95=(ratio - 2 * noise, ratio + 2 * noise)),
        gain_tpot=Ratio(ratio=ratio, ci95=(ratio - noise, ratio + noise)),
        quality=Quality(
            nll_baseline=1.432,
            nll_policy=1.432 * (1 + loss_rise),
            nll_difference_ci95=(1.432 * loss_rise - 0.0031, 1.432 * loss_rise + 0.0034),
            perplexity_ratio=float(np.exp(1.432 * loss_rise)),
            mean_kl=0.0061,
            top1_agreement=0.972,
            tokens=8192,
            sequences=32,
        ),
        layers=tuple(_layer(draw, layer, before[layer], after[layer]) for layer in range(layers)),
        series=StepSeries(
            baseline_max_misses=tuple(int(value) for value in baseline_fetches),
            policy_max_misses=tuple(int(value) for value in policy_fetches),
            baseline_hit_rate=tuple(float(value) for value in draw.uniform(0.55, 0.75, steps)),
            policy_hit_rate=tuple(float(value) for value in draw.uniform(0.62, 0.80, steps)),
        ),
        predicted=Prediction(
            tpot_seconds=baseline_tpot * ratio * 0.958,
            relative_error=-0.042,
            baseline_tpot_seconds=baseline_tpot * 0.971,
            baseline_relative_error=-0.029,
            calibration_id="calibration-0001",
            seconds_per_expert=(SECONDS_PER_EXPERT,) * devices,
        ),
        samples=(
            SampleText(
                prompt="In the beginning ",
                baseline="God created the heaven and the earth.",
                with_policy="God created the heavens and the earth.",
            ),
            SampleText(
                prompt="To be, or not to be, ",
                baseline="that is the question:",
                with_policy="that is the question:",
            ),
        ),
        warnings=("two processes use the CPU cores beside this run",),
        roofline=make_roofline(),
    )


def make_roofline() -> Roofline:
    """A core of 96 GFLOP/s and 12 GB/s, which reaches 70 % of its roofs after 2 µs of overhead."""
    flops = EXPERT_BYTES / 4 * 2
    return Roofline(
        device="cpu",
        dtype="float32",
        peak_flops_per_s=96e9,
        memory_bytes_per_s=12e9,
        expert_bytes=EXPERT_BYTES,
        fetch_seconds=SECONDS_PER_EXPERT,
        points=tuple(
            RooflinePoint(
                tokens=tokens,
                flops=flops * tokens,
                seconds=2e-6 + max(EXPERT_BYTES / 12e9, flops * tokens / 96e9) / 0.7,
            )
            for tokens in (1, 2, 4, 8, 16, 32, 64, 128)
        ),
    )


def make_devices(count: int) -> tuple[Device, ...]:
    return tuple(
        Device(index=index, kind="cpu", name="Xeon core", uuid=None, memory_bytes=8_000_000_000)
        for index in range(count)
    )


def make_fingerprint(**changes: str) -> Fingerprint:
    """The machine's fingerprint; ``changes`` replace identity fields."""
    identity = {
        "cpu": Field(value="Intel Xeon Platinum 8481C"),
        "kernel": Field(value="6.8.0-45-generic"),
        "gpu": Field(value=None, reason="no NVIDIA driver is loaded"),
        "torch": Field(value="2.9.0"),
        "numa_nodes": Field(value=1),
        "file_system": Field(value="ext4"),
    }
    state = {
        "load_average": Field(value=0.42),
        "clock_mhz": Field(value=None, reason="not readable in this container"),
    }
    return Fingerprint(identity=identity | {name: Field(value=value) for name, value in changes.items()}, state=state)


def make_probe(*, devices: int = 4, seed: int = 0) -> Probe:
    """Disk links whose samples follow 52 µs + size ÷ 1.9 GB/s with 3 % noise, and a waived GPU link."""
    draw = np.random.default_rng(seed)
    sizes = [4096 * 4**power for power in range(7)]

    def link(device: int, concurrency: Concurrency) -> LinkMeasurement:
        rate = 1.9e9 if concurrency is Concurrency.SOLO else 0.71e9
        samples = tuple(
            Sample(
                size_bytes=size,
                seconds=tuple(float(value) for value in (52e-6 + size / rate) * draw.normal(1, 0.03, size=5)),
            )
            for size in sizes
        )
        return LinkMeasurement(
            kind=LinkKind.DISK_TO_HOST,
            source="disk",
            destination=f"cpu:{device}",
            mode=LinkMode.DIRECT,
            concurrency=concurrency,
            status=LinkStatus.OK,
            bandwidth_bytes_per_s=Bandwidth(median=rate, p05=rate * 0.95, p95=rate * 1.04, n=15),
            samples=samples,
        )

    waived = LinkMeasurement(
        kind=LinkKind.HOST_TO_DEVICE,
        source="host",
        destination="cuda:0",
        mode=LinkMode.PINNED,
        concurrency=Concurrency.SOLO,
        status=LinkStatus.WAIVED,
        reason="no NVIDIA GPU here",
    )
    return Probe(
        probe_id="probe-0001",
        created_at="2026-03-14T09:20:00Z",
        fingerprint=make_fingerprint(),
        devices=make_devices(devices),
        links=(
            *(
                link(device, concurrency)
                for device in range(devices)
                for concurrency in (Concurrency.SOLO, Concurrency.ALL)
            ),
            waived,
        ),
    )


def make_calibration(*, devices: int = 4) -> Calibration:
    """What fitting :func:`make_probe` yields."""

    def model(device: int, concurrency: Concurrency) -> LinkModel:
        rate = 1.9e9 if concurrency is Concurrency.SOLO else 0.71e9
        return LinkModel(
            model_id=f"disk-cpu{device}-{concurrency}",
            kind=LinkKind.DISK_TO_HOST,
            source="disk",
            destination=f"cpu:{device}",
            mode=LinkMode.DIRECT,
            concurrency=concurrency,
            form=ModelForm.AFFINE,
            alpha=1.04,
            bandwidth_bytes_per_s=rate * 1.04,
            beta_seconds=52e-6,
            n_half_bytes=52e-6 * rate,
            segments=None,
            ci95=Intervals(effective_bandwidth_bytes_per_s=(rate * 0.985, rate * 1.012), beta_seconds=(49e-6, 54.5e-6)),
            holdout_mape=0.021,
            max_relative_error=0.048,
            status="ok",
        )

    return Calibration(
        calibration_id="calibration-0001",
        created_at="2026-03-14T09:21:10Z",
        probe_id="probe-0001",
        origin="probe",
        fingerprint=make_fingerprint(),
        devices=make_devices(devices),
        models=tuple(
            model(device, concurrency)
            for device in range(devices)
            for concurrency in (Concurrency.SOLO, Concurrency.ALL)
        ),
        link_groups=(LinkGroup(kind=LinkKind.DISK_TO_HOST, devices=tuple(range(devices)), factor=0.62),),
    )


def make_simulation(*, layers: int = 6, devices: int = 4, steps: int = 200, seed: int = 0) -> dict[str, Any]:
    """A document as ``caee simulate --json`` prints it: four policies on two caches."""
    draw = np.random.default_rng(seed)
    passes: list[dict[str, Any]] = []
    for cache, fetched in (("lfu", 3.0), ("lru", 3.4)):
        before = draw.poisson(fetched, size=(layers, steps, devices))
        for written, ceiling, removed in (
            ("router", 99, 0.0),
            ("caee:rule=cir,theta=0.8", 4, 0.018),
            ("caee:rule=cir,theta=0.6", 3, 0.041),
            ("importance:rule=cir,theta=0.8", 5, 0.055),
        ):
            passes.append(_simulated(written, cache, before, np.minimum(before, ceiling), removed, passes))
    cost = [{"device": device, "seconds_per_expert": SECONDS_PER_EXPERT} for device in range(devices)]
    machine = {"devices": devices, "tier": "host", "origin": "seconds per expert as given", "cost": cost}
    return {
        "schema": "caee.simulate/1",
        "simulation_id": "simulation-0001",
        "created_at": "2026-03-14T10:00:00Z",
        "trace": {"model": "demo", "tokens": 8 * steps, "moe_layers": layers, "num_experts": 32, "top_k": 4},
        "machine": machine | {"placement": "contiguous"},
        "machines": [machine],
        "policies": passes,
        "pareto": [2, 1, 0],
        "interrupted": False,
        "notes": ["the trace has only the chosen experts' weights"],
    }


def _simulated(
    written: str,
    cache: str,
    before_LSD: np.ndarray,
    after_LSD: np.ndarray,
    removed: float,
    passes: list[dict[str, Any]],
) -> dict[str, Any]:
    layers, steps, _ = before_LSD.shape
    gap = (after_LSD.max(axis=2) - after_LSD.min(axis=2)).ravel()
    busiest = after_LSD.max(axis=2).sum(axis=0)
    times = busiest * SECONDS_PER_EXPERT
    mean = float(times.mean())
    router = next((each for each in passes if each["name"] == "router" and each["cache"] == cache), None)
    return {
        "name": written.partition(":")[0],
        "parameters": dict(pair.split("=") for pair in written.partition(":")[2].split(",") if pair),
        "written": written,
        "cache": cache,
        "cache_experts": 32,
        "placement": "contiguous",
        "tier": "host",
        "compensated": True,
        "steps": steps,
        "layer_steps": steps * layers,
        "time_per_step_seconds": {
            "mean": mean,
            "p50": float(np.quantile(times, 0.5)),
            "p95": float(np.quantile(times, 0.95)),
        },
        "cut_against_router": 1 - mean / router["time_per_step_seconds"]["mean"] if router else 0.0,
        "misses_per_device": [int(count) for count in after_LSD.sum(axis=(0, 1))],
        "max_device_misses_per_step": float(busiest.mean()),
        "gap": {"mean": float(gap.mean()), "histogram": [int(count) for count in np.bincount(gap)]},
        "removed_importance": removed,
        "rerouted_slots": int(removed * 10_000),
        "layers": [
            {
                "layer": layer,
                "device_misses_before": [int(count) for count in before_LSD[layer].sum(axis=0)],
                "device_misses_after": [int(count) for count in after_LSD[layer].sum(axis=0)],
            }
            for layer in range(layers)
        ],
    }


def _pass(
    fetches_LSD: np.ndarray, tpot: float, spread: np.ndarray, *, removed: float, compute: float
) -> PassStatistics:
    layers, steps, _ = fetches_LSD.shape
    busiest = float(fetches_LSD.max(axis=2).sum(axis=0).mean())
    fetch_wait = tpot - compute
    return PassStatistics(
        ttft_seconds=_estimate(tpot * 6.1 * spread),
        tpot_seconds=_estimate(tpot * spread),
        tokens=8 * steps,
        steps=steps,
        misses_per_device=tuple(int(value) for value in fetches_LSD.sum(axis=(0, 1))),
        max_device_misses_per_step=busiest,
        hit_rate=0.66 if removed == 0 else 0.71,
        removed_importance=removed,
        rerouted_slots=0 if removed == 0 else 3 * layers * steps,
        step_times=StepTimes(
            total=tpot,
            fetch_wait=fetch_wait,
            experts=compute * 0.41,
            exchange=compute * 0.17,
            decide=compute * 0.02,
            other=compute * 0.40,
        ),
        predicted_tpot_seconds=tpot * 0.96,
    )


def _estimate(samples: np.ndarray) -> Estimate:
    resampled = np.random.default_rng(1).choice(samples, size=(999, len(samples)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return Estimate(
        median=float(np.median(samples)),
        ci95=(float(low), float(high)),
        samples=tuple(float(value) for value in samples),
    )


def _layer(draw: np.random.Generator, layer: int, before_SD: np.ndarray, after_SD: np.ndarray) -> LayerCost:
    def per_device(fetches_SD: np.ndarray, unit: float) -> tuple[float, ...]:
        return tuple(float(value) * unit for value in fetches_SD.mean(axis=0))

    def gaps(fetches_SD: np.ndarray) -> tuple[int, ...]:
        return tuple(int(count) for count in np.bincount(fetches_SD.max(axis=1) - fetches_SD.min(axis=1)))

    highest = 0.9 + 0.6 * min(layer / 10, 1.0) + float(draw.normal(0, 0.04))
    return LayerCost(
        layer=layer,
        device_cost_before=per_device(before_SD, SECONDS_PER_EXPERT),
        device_cost_after=per_device(after_SD, SECONDS_PER_EXPERT),
        device_misses_before=per_device(before_SD, 1.0),
        device_misses_after=per_device(after_SD, 1.0),
        gap_histogram_before=gaps(before_SD),
        gap_histogram_after=gaps(after_SD),
        importance_highest=highest,
        importance_lowest=highest / (1.6 + 2.0 * min(layer / 10, 1.0)),
    )
