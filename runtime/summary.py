"""From the passes of a live run to the record that is stored and reported."""

from __future__ import annotations

import datetime
import math
import uuid

import numpy as np

from probes.records import Fingerprint
from probes.text import plural, verb
from runtime.cache import parse_cache
from runtime.options import RunOptions
from runtime.pairs import remarks
from runtime.passes import gains, layer_costs, pass_statistics, prediction, step_series
from runtime.policy.spec import policy_as_mapping
from runtime.policy.types import PolicySpec
from runtime.predict import measure_costs
from runtime.worker import RankReport
from store.records import BrakeStatistics, PolicyChoice, RunRecord, SampleText, Workload

SAMPLE_TEXTS = 4


def run_record(options: RunOptions, report: RankReport, fingerprint: Fingerprint, model_name: str) -> RunRecord:
    """The record of one run. Steps are decode steps of the policy's passes unless said otherwise."""
    seed = options.seed
    baseline, treated = report.baseline[0], report.treated[0]
    costs = None
    if report.costs is not None:
        costs = measure_costs(report.baseline, report.costs)
    before = pass_statistics(report.baseline, costs, seed)
    after = pass_statistics(report.treated, costs, seed)
    gain_ttft, gain_tpot = gains(baseline, treated, seed=seed)
    calibration_id = options.calibration.calibration_id if options.calibration else None
    return RunRecord(
        run_id=uuid.uuid4().hex[:12],
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=model_name,
        model_family=report.family,
        devices=report.devices,
        tier=options.tier,
        policy=policy_choice(report.policy),
        workload=_workload(options, report, len(baseline)),
        fingerprint=fingerprint,
        calibration_id=calibration_id,
        baseline=before,
        with_policy=after,
        gain_ttft=gain_ttft,
        gain_tpot=gain_tpot,
        quality=report.quality,
        layers=layer_costs(treated, report.layer_numbers, report.costs),
        series=step_series(baseline[-1], treated[-1]),
        predicted=prediction(calibration_id, report.costs, before, after),
        samples=tuple(
            SampleText(prompt=prompt, baseline=theirs, with_policy=ours)
            for prompt, theirs, ours in zip(
                report.prompt_texts[:SAMPLE_TEXTS], report.baseline_texts, report.treated_texts, strict=False
            )
        ),
        warnings=_warnings(options, report),
        roofline=report.roofline,
        brake=_brake(options, report),
        max_quality_drop=options.max_quality_drop,
        policy_origin=options.policy_origin,
        tasks=report.tasks,
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


def policy_choice(spec: PolicySpec) -> PolicyChoice:
    """A policy as it is kept, with every parameter."""
    mapping = policy_as_mapping(spec)
    return PolicyChoice(
        name=spec.name,
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
    found = [*options.notes, *remarks(options, report)]
    if options.data_parallel and len(report.devices) > 1:
        found.append("data-parallel: each device computed the dense layers of its own share of the sequences")
    if not report.scores_known:
        found.append(
            f"how the router of {report.family} makes its weights is not known: they alone say what an expert "
            "contributes, and lost slots stay empty (compensation acts as none)"
        )
    if report.batch_size < options.batch_size:
        found.append(f"only {plural(options.prompt_count, 'prompt')}: the batch size is {report.batch_size}")
    pairs = len(report.baseline[0])
    used = min(pairs, options.prompt_count // report.batch_size) * report.batch_size
    if options.input_len is None and used < options.prompt_count:
        found.append(
            f"only the first {used} of {options.prompt_count} prompts were used: {plural(pairs, 'pair')}, "
            f"{plural(report.batch_size, 'prompt')} each"
        )
    found += [
        f"task {task.task}: of {plural(task.requests, 'request')} {task.requests_cut} "
        f"{verb(task.requests_cut, 'was', 'were')} longer than the model's context, and cut at the beginning"
        for task in report.tasks
        if task.requests_cut
    ]
    fallbacks = sum(layer.fell_back for record in report.treated[0] for step in record.steps for layer in step.layers)
    if fallbacks:
        found.append(
            f"{plural(fallbacks, 'layer-step')} had scores that are not numbers and fell back to the router's choice"
        )
    return tuple(found)
