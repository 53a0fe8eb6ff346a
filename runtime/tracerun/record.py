"""From the passes of a trace-driven run to the record that is stored and reported."""

from __future__ import annotations

import datetime
import uuid

import numpy as np

from probes.records import Fingerprint
from probes.text import plural, verb
from probes.units import format_size
from runtime.cache import parse_cache
from runtime.cost import uniform_costs
from runtime.pairs import remarks
from runtime.passes import gains, layer_costs, pass_statistics, prediction, step_series
from runtime.policy.spec import resolve
from runtime.predict import StepCosts, measure_costs
from runtime.summary import policy_choice
from runtime.tracerun.options import TraceRunOptions
from runtime.tracerun.session import TraceRunReport
from store.records import Replay, RunRecord, Workload


def trace_run_record(
    options: TraceRunOptions, report: TraceRunReport, fingerprint: Fingerprint, model_name: str
) -> RunRecord:
    """The record of one trace-driven run: no quality, no text, no time to first token."""
    seed, numbers = options.seed, options.traffic.meta.layer_numbers
    baseline, treated = report.baseline[0], report.treated[0]
    # What computing takes is known without a calibration, too.
    measured = measure_costs(report.baseline, report.costs or uniform_costs(0.0, len(report.devices)))
    costs = measured if report.costs is not None else None
    before = pass_statistics(report.baseline, costs, seed)
    after = pass_statistics(report.treated, costs, seed)
    gain_ttft, gain_tpot = gains(baseline, treated, seed=seed)
    calibration_id = options.calibration.calibration_id if options.calibration else None
    return RunRecord(
        run_id=uuid.uuid4().hex[:12],
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=model_name,
        model_family=options.shape.model_type or "unknown",
        devices=report.devices,
        tier=options.tier,
        policy=policy_choice(resolve(options.policy, offloading=options.offloading)),
        workload=_workload(options, report),
        fingerprint=fingerprint,
        calibration_id=calibration_id,
        baseline=before,
        with_policy=after,
        gain_ttft=gain_ttft,
        gain_tpot=gain_tpot,
        quality=None,
        layers=layer_costs(treated, numbers, report.costs),
        series=step_series(baseline[-1], treated[-1]),
        predicted=prediction(calibration_id, report.costs, before, after),
        samples=(),
        warnings=_warnings(options, report),
        replay=_replay(options, report, measured),
    )


def _workload(options: TraceRunOptions, report: TraceRunReport) -> Workload:
    traffic, shape = options.traffic, options.shape
    return Workload(
        batch_size=traffic.batch_size or round(float(np.diff(traffic.offsets_S1)[traffic.warmup_steps :].mean())),
        max_new_tokens=traffic.steps,
        prompts=0,
        pairs=len(report.baseline[0]),
        seed=options.seed,
        dtype=report.dtype,
        cache=str(parse_cache(options.cache)),
        cache_experts=report.cache_experts,
        experts_per_device=report.experts_per_device,
        top_k=shape.top_k,
        num_experts=shape.num_experts,
        moe_layers=options.layers,
        expert_bytes=report.expert_bytes,
        phases="decode",
        read_mode=report.read_mode,
    )


def _replay(options: TraceRunOptions, report: TraceRunReport, measured: StepCosts) -> Replay:
    return Replay(
        trace=options.trace,
        model_layers=options.shape.moe_layers,
        warmup_steps=options.traffic.warmup_steps,
        steps=options.traffic.steps,
        recorded=options.traffic.batch_size is None,
        storage=options.shape.storage.name,
        multiplies=report.multiplies,
        distinct_experts=report.distinct_experts,
        checked_experts=report.checked_experts,
        expert_compute_seconds=measured.compute,
        rest_seconds=max(0.0, measured.rest),
    )


def _warnings(options: TraceRunOptions, report: TraceRunReport) -> tuple[str, ...]:
    found = [*options.notes, *options.traffic.notes, *remarks(options, report)]
    if report.distinct_experts < report.experts_per_device:
        found.append(
            f"{report.distinct_experts} of {plural(report.experts_per_device, 'expert')} per device "
            f"{verb(report.distinct_experts, 'has', 'have')} bytes of their own "
            f"({format_size(report.distinct_experts * report.expert_bytes)}); the others share them"
        )
    if not options.traffic.meta.scores_recorded:
        found.append(
            "the trace has only the chosen experts' weights: lost slots stay empty (compensation acts as none)"
        )
    return tuple(found)
