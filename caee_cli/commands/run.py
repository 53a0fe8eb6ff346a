"""``caee run``: a live model with and without the policy, measured in interleaved pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.options import JsonOption, SeedOption, StoreOption


def command(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or Hugging Face id. Default: the model that ships with caee.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", metavar="KIND:COUNT", help="For example cpu:2 or cuda:4. Default: what is here."),
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option("--tier", help="Where experts wait: device, host or disk. Default: disk on CPUs, host on GPUs."),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", metavar="NAME[:KEY=VALUE,…]", help="What decides.")] = "caee",
    theta: Annotated[
        float | None, typer.Option("--theta", help="Short for the policy's theta: the share that must be kept.")
    ] = None,
    cache: Annotated[
        str, typer.Option("--cache", help="Expert cache: lfu, lru, lfu:decay=0.97,admit=1, forecast:prefetch=1.")
    ] = "lfu",
    cache_experts: Annotated[
        int | None,
        typer.Option("--cache-experts", help="Cached experts per device, all layers. Default: half of its experts."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences that decode together.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens per sequence.")] = 48,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="One prompt per line. Default: those that ship.")
    ] = None,
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
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    check_ranks: Annotated[
        bool, typer.Option("--check-ranks", help="Compare every decision between the ranks (slow).")
    ] = False,
    seed: SeedOption = 0,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Run a model with and without cost-aware expert execution, in interleaved pairs, and store what it did.

    Measures time to first token, time per output token, expert fetches per device and layer, and quality on held-out
    text, teacher-forced in lockstep. Quality and times are of the same policy, caches and devices.
    """
    from caee_cli.output import emit_json, note, show, warn
    from caee_cli.running import RunRequest, execute
    from store.documents import run_document

    record, location = execute(
        RunRequest(
            model=model,
            devices=devices,
            tier=tier,
            policy=policy,
            theta=theta,
            cache=cache,
            cache_experts=cache_experts,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            prompts=prompts,
            held_out=held_out,
            quality=quality,
            pairs=pairs,
            phases=phases,
            dtype=dtype,
            check_ranks=check_ranks,
            seed=seed,
            store=store,
        )
    )
    if record is None:
        return  # another rank's process reports
    for warning in record.warnings:
        warn(warning)
    if json:
        emit_json(run_document(record))
    else:
        from reports.terminal import run_summary

        show(*run_summary(record))
    note(f"Stored run {record.run_id} in {location}; `caee report` makes a page of it.")
