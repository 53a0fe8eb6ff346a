"""``caee run``: a live model with and without the policy, measured in interleaved pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.interrupts import ended_by_interrupts
from caee_cli.options import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_NEW_TOKENS,
    BrakeOption,
    CacheExpertsOption,
    CacheOption,
    ConcurrencyOption,
    DataParallelOption,
    DevicesOption,
    DtypeOption,
    InputLenOption,
    JsonOption,
    LiveOption,
    LmEvalLimitOption,
    LmEvalOption,
    LmEvalShapeOption,
    MaxNewTokensOption,
    MetricsHostOption,
    MetricsPortOption,
    ModelArgument,
    OutputLenOption,
    PromptsOption,
    RunBatchSizeOption,
    SeedOption,
    StepsOption,
    StoreOption,
    TierOption,
    either,
)
from caee_cli.replaying import (
    DiskPathOption,
    LayersOption,
    MeasuredStepsOption,
    ShapeOption,
    TraceOption,
    WarmupStepsOption,
    replay,
    replay_request,
)
from caee_cli.signalling import LOOPBACK, SignalRequest


def command(
    context: typer.Context,
    model: ModelArgument = None,
    devices: DevicesOption = None,
    tier: TierOption = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME[:KEY=VALUE,…]|stored",
            help="What decides; stored: what --max-quality-drop found for this model, tier, cache and device count.",
        ),
    ] = "caee",
    theta: Annotated[
        float | None, typer.Option("--theta", help="Short for the policy's theta: the share that must be kept.")
    ] = None,
    cache: CacheOption = "lfu",
    cache_experts: CacheExpertsOption = None,
    batch_size: RunBatchSizeOption = None,
    concurrency: ConcurrencyOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    output_len: OutputLenOption = None,
    input_len: InputLenOption = None,
    prompts: PromptsOption = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", metavar="FILE", help="Text for quality. Default: the one that ships.")
    ] = None,
    quality: Annotated[bool, typer.Option("--quality/--no-quality", help="Measure loss on held-out text.")] = True,
    pairs: Annotated[
        int | None, typer.Option("--pairs", help="Interleaved pairs of passes. Default: as many as fit 20 s.")
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option("--phases", help="Where the policy applies: all, decode or prefill. Default by tier."),
    ] = None,
    max_quality_drop: Annotated[
        str | None,
        typer.Option(
            "--max-quality-drop",
            metavar="SHARE",
            help="Allowed rise of held-out loss, 1% or 0.01. Searches theta or epsilon within it, on other passages "
            "than are measured afterwards, and stores the policy; one that is given in full is only checked.",
        ),
    ] = None,
    lm_eval: LmEvalOption = None,
    lm_eval_shape: LmEvalShapeOption = "decode",
    lm_eval_limit: LmEvalLimitOption = None,
    brake: BrakeOption = None,
    dtype: DtypeOption = "auto",
    check_ranks: Annotated[
        bool, typer.Option("--check-ranks", help="Compare every decision between the ranks (slow).")
    ] = False,
    data_parallel: DataParallelOption = False,
    trace: TraceOption = None,
    shape: ShapeOption = None,
    layers: LayersOption = None,
    steps: MeasuredStepsOption = None,
    warmup_steps: WarmupStepsOption = None,
    disk_path: DiskPathOption = None,
    seed: SeedOption = 0,
    store: StoreOption = None,
    steps_jsonl: StepsOption = None,
    live: LiveOption = False,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = LOOPBACK,
    json: JsonOption = False,
) -> None:
    """Run a model with and without cost-aware expert execution, in interleaved pairs, and store what it did.

    Measures time to first token, time per output token, expert fetches per device and layer, and quality on held-out
    text, teacher-forced in lockstep. Quality and times are of the same policy, caches and devices.

    With --trace and --shape no model is needed: bytes of its experts' sizes are moved and multiplied as the trace
    routes them, which tells what its MoE layers would cost here.
    """
    with ended_by_interrupts():
        from caee_cli.output import emit_json, note, show, warn
        from caee_cli.running import RunRequest, execute
        from caee_cli.tuning import check_quality, nothing_found
        from store.documents import policy_document, run_document
        from store.records import PolicyRecord

    asked = replay_request(context)
    record, location = (
        replay(asked)
        if asked is not None
        else execute(
            RunRequest(
                model=model,
                devices=devices,
                tier=tier,
                policy=policy,
                theta=theta,
                cache=cache,
                cache_experts=cache_experts,
                batch_size=either(("--batch-size", batch_size), ("--concurrency", concurrency), DEFAULT_BATCH_SIZE),
                max_new_tokens=either(
                    ("--max-new-tokens", max_new_tokens), ("--output-len", output_len), DEFAULT_NEW_TOKENS
                ),
                input_len=input_len,
                prompts=prompts,
                held_out=held_out,
                quality=quality,
                pairs=pairs,
                phases=phases,
                max_quality_drop=max_quality_drop,
                lm_eval=tuple(lm_eval or ()),
                lm_eval_shape=lm_eval_shape,
                lm_eval_limit=lm_eval_limit,
                brake=brake,
                dtype=dtype,
                check_ranks=check_ranks,
                data_parallel=data_parallel,
                seed=seed,
                store=store,
                signals=SignalRequest(
                    steps_jsonl=steps_jsonl, live=live, metrics_port=metrics_port, metrics_host=metrics_host
                ),
            )
        )
    )
    if record is None:
        return  # another rank's process reports
    if isinstance(record, PolicyRecord):
        if json:
            emit_json(policy_document(record))
        else:
            from reports.terminal import search_summary

            show(*search_summary(record.search))
        raise nothing_found(record)
    for warning in record.warnings:
        warn(warning)
    if json:
        emit_json(run_document(record))
    else:
        from reports.terminal import run_summary

        show(*run_summary(record))
    note(f"Stored run {record.run_id} in {location}; `caee report` makes a page of it.")
    if record.policy_origin is not None and record.policy_origin.searched_here:
        note(f"Stored policy {record.policy_origin.policy_id}; `caee run --policy stored` uses it.")
    check_quality(record)
