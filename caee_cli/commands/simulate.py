"""``caee simulate``: what policies, caches and placements would do to the traffic of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.options import ForceOption, JsonOption, SeedOption, StoreOption, seconds_option


def command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, or another tool's token-level dump.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME[:KEY=VALUE,…]", help="Repeatable. Default: router and caee."),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            metavar="NAME[:KEY=VALUE,…]",
            help="lfu, lru, lfu:decay=0.97,admit=1, forecast:prefetch=1, belady.",
        ),
    ] = None,
    cache_experts: Annotated[
        list[int] | None,
        typer.Option(
            "--cache-experts", metavar="N", help="Cached experts per device, all layers; repeatable. Default: half."
        ),
    ] = None,
    placement: Annotated[
        list[str] | None,
        typer.Option(
            "--placement",
            metavar="NAME|FILE",
            help="contiguous, round-robin, balanced, such as balanced:redundant=8,groups=4,nodes=2, or a JSON file: of "
            "each layer the list of its experts, of each expert its device or list of devices; repeatable.",
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", metavar="TIER", help="Where experts wait: host, disk or device; repeatable."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", min=1, help="Default: as many as were calibrated, else 8, or fewer."),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option("--batch-size", metavar="B|recorded", help="Default: recorded where there are step ids, else 8."),
    ] = None,
    warmup_steps: Annotated[
        int, typer.Option("--warmup-steps", metavar="N", min=0, help="Steps that count in no figure.")
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", min=1, help="How many count at most, after the warm-up. Default: all."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", min=1, help="Replay the first so many MoE layers. Default: all."),
    ] = None,
    seconds_per_expert: Annotated[
        str | None,
        typer.Option(
            "--seconds-per-expert", metavar="S[,S…]", help="To move one, on all or each device: 412us, 0.4ms, 0.002."
        ),
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="PROFILE", help="A calibration's id, or a profile (h100-sxm, …).")
    ] = None,
    expert_bytes: Annotated[str | None, typer.Option("--expert-bytes", metavar="SIZE", help="Such as 43MB.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Whose experts they are: a config.json, its folder or a Hugging Face id. Tells their size.",
        ),
    ] = None,
    expert_compute_seconds: Annotated[
        float,
        typer.Option(
            "--expert-compute-seconds", parser=seconds_option, metavar="S", help="To run one dispatched expert."
        ),
    ] = 0.0,
    overlap: Annotated[bool, typer.Option("--overlap", help="Compute runs while experts move.")] = False,
    staged: Annotated[
        bool, typer.Option("--staged", help="As caee run: experts that are there compute while others move.")
    ] = False,
    dense_seconds: Annotated[
        float, typer.Option("--dense-seconds", parser=seconds_option, metavar="S", help="Everything else of a step.")
    ] = 0.0,
    num_experts: Annotated[
        int | None, typer.Option("--num-experts", metavar="N", min=1, help="Where the file does not say.")
    ] = None,
    load_profile: Annotated[
        Path | None, typer.Option("--load-profile", help="Loads for balanced placements. Default: the warm-up steps'.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="REPORT.html", help="Write a page.")] = None,
    force: ForceOption = False,
    store: StoreOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace on a described machine, under any policies, caches, placements and tiers.

    One result for each combination, from one read of the trace: predicted step times, expert movements by device and
    layer, imbalance, removed importance, and the Pareto front of time against importance. Kept in the store.
    """
    from caee_cli.simulating import finish, request_of, simulate_and_store
    from store.session import open_store

    request = request_of(
        trace,
        scenario={
            "policies": policy,
            "caches": cache,
            "cache_experts": cache_experts,
            "placements": placement,
            "tiers": tier,
            "batch_size": batch_size,
            "warmup_steps": warmup_steps,
            "seed": seed,
            "steps": steps,
        },
        machine={
            "devices": devices,
            "machine": machine,
            "expert_compute_seconds": expert_compute_seconds,
            "overlap": overlap,
            "staged": staged,
            "dense_seconds": dense_seconds,
        },
        seconds_per_expert=seconds_per_expert,
        expert_bytes=expert_bytes,
        model=model,
        layers=layers,
        num_experts=num_experts,
        load_profile=load_profile,
        output=output,
        force=force,
        store=store,
    )
    with open_store(store) as opened:
        document = simulate_and_store(request, opened)
    finish(document, request, opened.location, as_json=as_json)
