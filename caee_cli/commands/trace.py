"""``caee trace``: routing traces from a live model or other tools' files, what is in one, and synthetic ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caee_cli.interrupts import ended_by_interrupts
from caee_cli.options import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_NEW_TOKENS,
    BatchSizeOption,
    CacheExpertsOption,
    CacheOption,
    DevicesOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    MaxNewTokensOption,
    ModelArgument,
    PromptsOption,
    SeedOption,
    TierOption,
)

app = typer.Typer(no_args_is_help=True, help="Routing traces: record, import, look into, and synthesise them.")

NumExpertsOption = Annotated[
    int | None,
    typer.Option(
        "--num-experts",
        metavar="N",
        min=1,
        help="Experts of a layer, where the file does not say; else the highest id.",
    ),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="N", min=1, help="Experts per token; needed by counts only.")
]
FormatOption = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="Format of the file; else told from its content.")
]
TraceArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A trace, or another tool's dump (.gz and .zst too).")
]


@app.command()
def record(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.parquet", help="The trace to write.")],
    model: ModelArgument = None,
    prompts: PromptsOption = None,
    full_scores: Annotated[
        bool, typer.Option("--full-scores", help="Keep the scores of all experts: a simulation can then re-route.")
    ] = False,
    devices: DevicesOption = None,
    tier: TierOption = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME[:KEY=VALUE,…]",
            help="What decides meanwhile; recorded is what the router itself chooses in each step.",
        ),
    ] = "router",
    cache: CacheOption = "lfu",
    cache_experts: CacheExpertsOption = None,
    batch_size: BatchSizeOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    dtype: DtypeOption = "auto",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a model over prompts and record which experts its routers choose, and with what scores.

    Decoding is greedy, in batches of prompts in file order. An interrupted recording keeps what it has.
    """
    with ended_by_interrupts():
        from caee_cli.output import emit_json, note, warn
        from caee_cli.trace_recording import RecordRequest, record_document
        from caee_cli.trace_recording import record as record_trace
        from probes.text import plural

    report = record_trace(
        RecordRequest(
            model=model,
            output=output,
            prompts=prompts,
            full_scores=full_scores,
            devices=devices,
            tier=tier,
            policy=policy,
            cache=cache,
            cache_experts=cache_experts,
            batch_size=DEFAULT_BATCH_SIZE if batch_size is None else batch_size,
            max_new_tokens=DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
            dtype=dtype,
            force=force,
        )
    )
    if report is None:
        return  # another rank's process reports
    if report.unsound:
        warn(f"{plural(report.unsound, 'token')} with scores that are no numbers: marked as padding")
    if as_json:
        emit_json(record_document(output, report))
    else:
        size = f"{plural(report.tokens, 'token')} of {plural(report.sequences, 'sequence')}"
        note(f"Wrote {output}: {size} in {plural(report.steps, 'step')}")


@app.command("import")
def import_(
    file: TraceArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.parquet", help="The trace to write.")],
    format_name: FormatOption = None,
    num_experts: NumExpertsOption = None,
    top_k: TopKOption = None,
    model: Annotated[str | None, typer.Option("--model", help="Name of the model, where the file says none.")] = None,
    phase: Annotated[
        str, typer.Option("--phase", help="decode or prefill: the phase of tokens of which the file says none.")
    ] = "unknown",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn another tool's routing log, dump or counts into a trace.

    Reads topk-jsonl, vllm-jsonl, sglang-recorder, routed-experts, logical-count, olmoe-counts, glm-counts and
    eplb-weight files, and the .partial folder of an interrupted recording. Counts become a load profile.
    """
    with ended_by_interrupts():
        from caee_cli.output import emit_json, note, progress
        from caee_cli.outputs import check_output
        from runtime.trace.importers.formats import ImportOptions, phase_named
        from runtime.trace.importing import import_trace, imported_info

    check_output(output, force=force, inputs=[file])
    options = ImportOptions(num_experts=num_experts, top_k=top_k, model=model, phase=phase_named(phase))
    with progress() as bar:
        task = bar.add_task(f"importing {file.name}", total=1.0)
        imported = import_trace(
            file,
            output,
            options,
            format_name=format_name,
            force=force,
            on_progress=lambda fraction: bar.update(task, completed=fraction),
        )
    for remark in imported.notes:
        note(remark)
    if as_json:
        emit_json(imported_info(file, output, imported))
    else:
        note(f"Wrote {output}")


@app.command()
def show(
    file: TraceArgument,
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", min=1, help="Devices of the balance figures [default: 8, or fewer]."),
    ] = None,
    format_name: FormatOption = None,
    num_experts: NumExpertsOption = None,
    top_k: TopKOption = None,
    all_layers: Annotated[
        bool,
        typer.Option("--all-layers", help="Show every layer, not only the eight whose devices are least even."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a trace: tokens, importance and load balance by layer, hot experts, and dirt.

    Balance is given by every formula that engines use, each named, over devices (experts placed contiguously) and
    over single experts.
    """
    with ended_by_interrupts():
        from caee_cli.output import emit_json
        from caee_cli.output import show as print_tables
        from reports.trace import trace_tables
        from runtime.trace.importers.detect import detect_and_open
        from runtime.trace.importers.formats import ImportOptions, check_asked
        from runtime.trace.show import show_info

    options = ImportOptions(num_experts=num_experts, top_k=top_k)
    source = detect_and_open(file, options, format_name=format_name)
    check_asked(file, source.meta, options)
    info = show_info(file, source, devices)
    if as_json:
        emit_json(info)
    else:
        print_tables(*trace_tables(info, all_layers=all_layers))


@app.command()
def synth(
    like: Annotated[
        Path, typer.Option("--like", metavar="TRACE", help="Token-level trace with gate weights: its rhythm is taken.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.parquet", help="The trace to write.")],
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Whose expert loads to have [default: TRACE's].")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option("--sequences", metavar="N", min=1, help="Default: as in TRACE.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", metavar="N", min=1, help="Decode tokens of all sequences together. Default: as in TRACE."
        ),
    ] = None,
    num_experts: Annotated[
        int | None, typer.Option("--num-experts", metavar="N", min=1, help="Default: as in the profile.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", min=1, help="Default: as in the profile.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", min=1, help="Default: as in the profile.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name of the model to write down.")] = None,
    seed: SeedOption = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a trace for a model that is out of reach.

    Expert loads come from a load profile; how often choices repeat, how shares fall and how long sequences are, from
    a token-level trace of another model. The parameters stand in the trace's metadata.
    """
    with ended_by_interrupts():
        from caee_cli.output import emit_json, note, progress
        from caee_cli.outputs import check_output
        from probes.text import plural
        from runtime.trace.synth.synthesise import SynthOptions, synthesise_file

    check_output(output, force=force, inputs=[like, profile])
    options = SynthOptions(
        sequences=sequences,
        tokens=tokens,
        num_experts=num_experts,
        top_k=top_k,
        layers=layers,
        model=model,
        seed=seed,
    )
    with progress() as bar:
        task = bar.add_task("synthesising", total=1.0)
        document = synthesise_file(
            like,
            profile,
            output,
            options,
            force=force,
            on_progress=lambda fraction: bar.update(task, completed=fraction),
        )
    for remark in document["notes"]:
        note(remark)
    if as_json:
        emit_json(document)
    else:
        size = f"{plural(document['tokens'], 'token')} in {plural(document['sequences'], 'sequence')}"
        note(f"Wrote {output}: {size}")
