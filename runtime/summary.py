"""From the passes of a live run to the record that is stored and reported."""

from __future__ import annotations

import datetime
import hashlib
import math
import uuid
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from probes.records import Fingerprint
from runtime.cache import parse_cache
from runtime.options import RunOptions
from runtime.policy.spec import policy_as_mapping
from runtime.policy.types import SHARE_UNIT
from runtime.predict import StepCosts, measure_costs, predicted_tpot
from runtime.recording import Counts, PassRecord, StepRecord
from runtime.statistics import estimate, paired_ratio
from runtime.worker import RankReport
from store.records import (
    BrakeStatistics,
    LayerCost,
    PassStatistics,
    PolicyChoice,
    Prediction,
    RunRecord,
    SampleText,
    StepSeries,
    StepTimes,
    Workload,
)

SAMPLE_TEXTS = 4
FEWEST_PAIRS = 3


def run_record(options: RunOptions, report: RankReport, fingerprint: Fingerprint, model_name: str) -> RunRecord:
    """The record of one run. Steps are decode steps of the policy's passes unless said otherwise."""
    seed = options.seed
    baseline, treated = report.baseline[0], report.treated[0]
    costs = None
    if report.costs is not None:
        costs = measure_costs(report.baseline, report.costs)
    before = _pass_statistics(report.baseline, costs, report.moe_layers, seed)
    after = _pass_statistics(report.treated, costs, report.moe_layers, seed)
    return RunRecord(
        run_id=uuid.uuid4().hex[:12],
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=model_name,
        model_family=report.family,
        devices=report.devices,
        tier=options.tier,
        policy=_choice(report),
        workload=_workload(options, report, len(baseline)),
        fingerprint=fingerprint,
        calibration_id=options.calibration.calibration_id if options.calibration else None,
        baseline=before,
        with_policy=after,
        gain_ttft=paired_ratio([p.ttft_seconds for p in baseline], [p.ttft_seconds for p in treated], seed=seed),
        gain_tpot=paired_ratio([p.tpot_seconds for p in baseline], [p.tpot_seconds for p in treated], seed=seed),
        quality=report.quality,
        layers=_layers(treated, report),
        series=StepSeries(
            baseline_max_misses=_max_misses(baseline[-1]),
            policy_max_misses=_max_misses(treated[-1]),
            baseline_hit_rate=_hit_rates(baseline[-1]),
            policy_hit_rate=_hit_rates(treated[-1]),
        ),
        predicted=_prediction(options, report, before, after),
        samples=tuple(
            SampleText(prompt=prompt, baseline=theirs, with_policy=ours)
            for prompt, theirs, ours in zip(
                report.prompt_texts[:SAMPLE_TEXTS], report.baseline_texts, report.treated_texts, strict=False
            )
        ),
        warnings=_warnings(options, report),
        roofline=report.roofline,
        brake=_brake(options, report),
    )


def _pass_statistics(
    by_rank: Sequence[Sequence[PassRecord]], costs: StepCosts | None, layers: int, seed: int
) -> PassStatistics:
    passes = by_rank[0]
    misses = np.concatenate([record.decode_misses() for record in passes])
    dispatched = np.concatenate([record.decode_dispatched() for record in passes])
    steps = [step for record in passes for step in record.decode_steps()]
    removed = sum(layer.removed for step in steps for layer in step.layers)
    tokens = sum(step.tokens for step in steps)
    return PassStatistics(
        ttft_seconds=estimate([record.ttft_seconds for record in passes], seed=seed),
        tpot_seconds=estimate([record.tpot_seconds for record in passes], seed=seed),
        tokens=sum(len(ids) for ids in passes[0].token_ids),
        steps=len(steps),
        misses_per_device=tuple(int(n) for n in misses.sum((0, 1))),
        max_device_misses_per_step=float(misses.max(-1).sum(-1).mean()),
        hit_rate=float(1 - misses.sum() / max(1, dispatched.sum())),
        removed_importance=removed / SHARE_UNIT / max(1, tokens * layers),
        rerouted_slots=sum(layer.rerouted_slots for step in steps for layer in step.layers),
        step_times=_step_times(by_rank),
        output_digest=_digest(passes),
        dispatches=int(dispatched.sum()),
        predicted_tpot_seconds=None if costs is None else predicted_tpot(costs, misses, dispatched),
    )


def _brake(options: RunOptions, report: RankReport) -> BrakeStatistics | None:
    """What the brake did in all steps of the policy's passes, prefill included."""
    if options.brake is None:
        return None
    steps = [step for record in report.treated[0] for step in record.steps]
    watched = [layer.brake for step in steps for layer in step.layers if layer.brake is not None]
    samples = [each.error for each in watched if each.error is not None]
    errors = [error for error in samples if math.isfinite(error)]
    quality = report.quality_brake if report.quality is not None else None
    return BrakeStatistics(
        budget=options.brake.budget,
        sample_every=options.brake.sample_every,
        layer_steps=len(watched),
        braked_layer_steps=sum(each.braked for each in watched),
        samples=len(samples),
        mean_error=float(np.mean(errors)) if errors else None,
        highest_error=max(errors, default=None),
        trips=sum(each.tripped for each in watched),
        shadow_seconds=sum(step.timers.shadow for step in steps),
        shadow_fetches=sum(each.fetches for each in watched),
        quality_layer_steps=None if quality is None else quality.layer_steps,
        quality_braked_layer_steps=None if quality is None else quality.braked_steps,
        quality_trips=None if quality is None else quality.trips,
    )


def _digest(passes: Sequence[PassRecord]) -> str:
    """Over all generated token ids: two runs with the same digest wrote the same text."""
    return hashlib.sha256(repr([record.token_ids for record in passes]).encode()).hexdigest()[:16]


def _step_times(by_rank: Sequence[Sequence[PassRecord]]) -> StepTimes:
    """Of the slowest rank: the one that waits least for the others."""
    ranks = [[step for record in passes for step in record.decode_steps()] for passes in by_rank]
    slowest = min(ranks, key=lambda steps: sum(step.timers.exchange for step in steps))
    total = _mean(slowest, lambda step: step.seconds)
    parts = {
        "fetch_wait": _mean(slowest, lambda step: step.timers.fetch_wait),
        "experts": _mean(slowest, lambda step: step.timers.experts),
        "exchange": _mean(slowest, lambda step: step.timers.exchange),
        "decide": _mean(slowest, lambda step: step.timers.decide),
    }
    return StepTimes(total=total, other=total - sum(parts.values()), **parts)


def _mean(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float:
    return float(np.mean([value(step) for step in steps]))


def _layers(treated: Sequence[PassRecord], report: RankReport) -> tuple[LayerCost, ...]:
    before = np.concatenate([record.decode_misses(before=True) for record in treated])
    after = np.concatenate([record.decode_misses() for record in treated])
    steps = [step for record in treated for step in record.decode_steps()]
    seconds = np.asarray(report.costs.seconds_per_expert if report.costs else (0.0,) * before.shape[-1])
    return tuple(
        LayerCost(
            layer=report.layer_numbers[layer],
            device_cost_before=_floats(before[:, layer].mean(0) * seconds),
            device_cost_after=_floats(after[:, layer].mean(0) * seconds),
            device_misses_before=_floats(before[:, layer].mean(0)),
            device_misses_after=_floats(after[:, layer].mean(0)),
            gap_histogram_before=_gaps(before[:, layer]),
            gap_histogram_after=_gaps(after[:, layer]),
            importance_highest=_mean(steps, lambda step: step.layers[layer].importance_highest),  # noqa: B023  # used at once
            importance_lowest=_mean(steps, lambda step: step.layers[layer].importance_lowest),  # noqa: B023  # used at once
        )
        for layer in range(report.moe_layers)
    )


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _gaps(misses_SD: Counts) -> tuple[int, ...]:
    return tuple(int(n) for n in np.bincount(misses_SD.max(-1) - misses_SD.min(-1)))


def _max_misses(record: PassRecord) -> tuple[int, ...]:
    return tuple(int(n) for n in record.decode_misses().max(-1).sum(-1))


def _hit_rates(record: PassRecord) -> tuple[float, ...]:
    misses, dispatched = record.decode_misses().sum((1, 2)), record.decode_dispatched().sum((1, 2))
    return _floats(1 - misses / np.maximum(1, dispatched))


def _prediction(
    options: RunOptions, report: RankReport, baseline: PassStatistics, treated: PassStatistics
) -> Prediction | None:
    if options.calibration is None or report.costs is None:
        return None
    expected, expected_before = treated.predicted_tpot_seconds, baseline.predicted_tpot_seconds
    assert expected is not None
    assert expected_before is not None
    return Prediction(
        tpot_seconds=expected,
        relative_error=expected / treated.tpot_seconds.median - 1,
        baseline_tpot_seconds=expected_before,
        baseline_relative_error=expected_before / baseline.tpot_seconds.median - 1,
        calibration_id=options.calibration.calibration_id,
        seconds_per_expert=report.costs.seconds_per_expert,
    )


def _choice(report: RankReport) -> PolicyChoice:
    mapping = policy_as_mapping(report.policy)
    return PolicyChoice(
        name=report.policy.name,
        parameters={key: value for key, value in mapping.items() if key != "name" and value is not None},
    )


def _workload(options: RunOptions, report: RankReport, pairs: int) -> Workload:
    return Workload(
        batch_size=report.batch_size,
        max_new_tokens=options.max_new_tokens,
        prompts=options.prompt_count,
        input_len=options.input_len,
        pairs=pairs,
        seed=options.seed,
        dtype=report.dtype,
        cache=str(parse_cache(options.cache)),
        cache_experts=report.cache_experts,
        experts_per_device=report.experts_per_device,
        top_k=report.top_k,
        num_experts=report.num_experts,
        moe_layers=report.moe_layers,
        expert_bytes=report.expert_bytes,
        phases=options.phases or ("all" if options.offloading else "decode"),
        read_mode=report.read_mode,
    )


def _warnings(options: RunOptions, report: RankReport) -> tuple[str, ...]:
    found = list(options.notes)
    if len(report.baseline[0]) < FEWEST_PAIRS:
        found.append(f"fewer than {FEWEST_PAIRS} pairs: the intervals of the gain say little")
    if options.cache_experts is not None and options.cache_experts > report.experts_per_device:
        found.append(f"--cache-experts {options.cache_experts}: a device holds {report.experts_per_device}, all cached")
    if report.read_reason is not None and options.tier == "disk":
        found.append(f"reads were not direct ({report.read_reason}): the page cache may hide the cost of fetches")
    if report.batch_size < options.batch_size:
        found.append(f"only {options.prompt_count} prompts: the batch size is {report.batch_size}")
    pairs = len(report.baseline[0])
    used = min(pairs, options.prompt_count // report.batch_size) * report.batch_size
    if options.input_len is None and used < options.prompt_count:
        found.append(
            f"only the first {used} of {options.prompt_count} prompts were used: {pairs} pairs, {report.batch_size} "
            "prompts each"
        )
    fallbacks = sum(layer.fell_back for record in report.treated[0] for step in record.steps for layer in step.layers)
    if fallbacks:
        found.append(f"{fallbacks} layer-steps had scores that are not numbers and fell back to the router's choice")
    return tuple(found)
