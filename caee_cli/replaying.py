"""What ``caee run --trace`` does around the runtime: choose, read the trace, launch, summarise, store."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caee_cli.interrupts import ended_by_interrupts
from probes.errors import Interrupted
from probes.text import plural

if TYPE_CHECKING:
    from runtime.tracerun.options import TraceRunOptions
    from runtime.tracerun.session import TraceRunReport
    from runtime.tracerun.traffic import Traffic, TrafficRequest
    from store.records import RunRecord

TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="Without a model: move and multiply bytes of the experts of --shape as this trace routes them.",
    ),
]
ShapeOption = Annotated[
    Path | None,
    typer.Option("--shape", metavar="CONFIG", help="With --trace: the model's config.json (or its folder)."),
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", help="With --trace: the first so many MoE layers. Default: all.")
]
MeasuredStepsOption = Annotated[
    int | None, typer.Option("--steps", help="With --trace: how many steps are measured. Default: 16.")
]
WarmupStepsOption = Annotated[
    int | None,
    typer.Option(
        "--warmup-steps",
        help="With --trace: steps before them that the caches and the policy see, on paper. Default: up to 64.",
    ),
]
DiskPathOption = Annotated[
    Path | None,
    typer.Option(
        "--disk-path",
        metavar="FOLDER",
        help="With --trace: on the disk where experts wait. Default: the store's folder.",
    ),
]

_ONLY_WITH_TRACE = ("shape", "layers", "steps", "warmup_steps", "disk_path")
# Everything else that is given beside --trace has no meaning there.
_WITH_TRACE = (
    "trace",
    *_ONLY_WITH_TRACE,
    "devices",
    "tier",
    "policy",
    "theta",
    "cache",
    "cache_experts",
    "batch_size",
    "pairs",
    "dtype",
    "check_ranks",
    "seed",
    "store",
    "json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """The command's options, as given."""

    trace: Path
    shape: Path
    traffic: TrafficRequest
    devices: str | None
    tier: str | None
    policy: str
    theta: float | None
    cache: str
    cache_experts: int | None
    disk_path: Path | None
    pairs: int | None
    dtype: str
    check_ranks: bool
    seed: int
    store: str | None


def replay_request(context: typer.Context) -> ReplayRequest | None:
    """What ``caee run`` was asked to replay; None where it was given no trace.

    Raises ``UsageError`` where an option of the one kind of run was given for the other.
    """
    from probes.errors import UsageError

    given, values = _given(context), context.params
    if values["trace"] is None:
        if stray := [name for name in given if name in _ONLY_WITH_TRACE]:
            raise UsageError(f"{given[stray[0]]} belongs to --trace", hint="give the trace to replay with --trace FILE")
        return None
    if stray := [name for name in given if name not in _WITH_TRACE]:
        raise UsageError(
            f"{given[stray[0]]} has no meaning with --trace, which replays routing without a model",
            hint="leave it out, or leave --trace and --shape out to run a model",
        )
    if values["shape"] is None:
        raise UsageError(
            "--trace needs the shapes of the model that it is of", hint="give the model's config.json with --shape"
        )
    return _request(values)


def _given(context: typer.Context) -> dict[str, str]:
    """Parameters that stood on the command line, as they are written there."""
    names = {each.name: max(each.opts, key=len) for each in context.command.params if each.name is not None}
    given = {}
    for name, written in names.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            given[name] = written if written.startswith("-") else written.upper()
    return given


def _request(values: Mapping[str, Any]) -> ReplayRequest:
    from runtime.tracerun.traffic import TrafficRequest

    batch = values["batch_size"]
    names = [field.name for field in dataclasses.fields(ReplayRequest) if field.name != "traffic"]
    return ReplayRequest(
        traffic=TrafficRequest(
            layers=values["layers"],
            batch_size=None if batch is None else str(batch),
            warmup_steps=values["warmup_steps"],
            steps=values["steps"],
        ),
        **{name: values[name] for name in names},
    )


def replay(request: ReplayRequest) -> tuple[RunRecord | None, str]:
    """Run, store, and return the record and where it is stored; None on the ranks that torchrun started beside 0."""
    with ended_by_interrupts():
        from caee_cli.calibrations import calibration_for
        from caee_cli.measuring import disk_folder
        from caee_cli.running import PROGRESS_FILE, crowding_notes, progress_bar
        from store.session import open_store

    with open_store(request.store) as store:
        store.require_writable()
        options = _options(request, disk_folder(store, request.disk_path))
        with ended_by_interrupts():
            from probes.fingerprint import take_fingerprint
            from runtime.launch import launch, started_by_torchrun
            from runtime.tracerun.record import trace_run_record
            from runtime.tracerun.session import run_trace_rank

        fingerprint = take_fingerprint(options.devices, options.folder)
        calibration, why_none = calibration_for(store, fingerprint, options.tier, options.devices)
        notes = (*crowding_notes(options.devices), *filter(None, [why_none]))
        options = dataclasses.replace(options, calibration=calibration, notes=notes)

        def keep(report: TraceRunReport) -> RunRecord:
            record = trace_run_record(options, report, fingerprint, model_name(request.shape))
            store.save_run(record)
            return record

        if started_by_torchrun():
            report = run_trace_rank(options)
            return (keep(report) if os.environ["RANK"] == "0" else None), store.location
        with progress_bar("measuring") as folder:
            options = dataclasses.replace(
                options, progress_file=folder / PROGRESS_FILE, partial_file=folder / "partial.pickle"
            )
            try:
                report = launch(run_trace_rank, options, processes=len(options.devices))
            except KeyboardInterrupt as error:
                raise _interrupted(options, keep) from error
        return keep(report), store.location


def model_name(shape: Path) -> str:
    """What the model is called: its folder, or the name of a config that stands alone."""
    path = shape.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == "config.json" else path.stem


def _options(request: ReplayRequest, folder: Path) -> TraceRunOptions:
    from caee_cli.running import devices_named
    from runtime.models.config import read_moe_shape
    from runtime.policy.spec import parse_policy
    from runtime.tracerun.options import TraceRunOptions

    policy = request.policy
    if request.theta is not None:
        policy += f"{',' if ':' in policy else ':'}theta={request.theta}"
    spec = parse_policy(policy)
    shape = read_moe_shape(request.shape)
    traffic = _traffic(request, shape)
    devices = devices_named(request.devices)
    return TraceRunOptions(
        trace=request.trace.name,
        shape=shape,
        traffic=traffic,
        devices=devices,
        tier=request.tier or ("disk" if devices[0].kind == "cpu" else "host"),
        policy=spec,
        cache=request.cache,
        folder=folder,
        calibration=None,
        cache_experts=request.cache_experts,
        pairs=request.pairs,
        dtype=request.dtype,
        seed=request.seed,
        check_ranks=request.check_ranks,
    )


def _traffic(request: ReplayRequest, shape: Any) -> Traffic:
    from caee_cli.output import progress
    from runtime.simulate.source import open_for_replay
    from runtime.trace.importers.formats import ImportOptions
    from runtime.tracerun.traffic import read_traffic

    with progress() as bar:
        task = bar.add_task(f"reading {request.trace.name}", total=1.0)
        options = ImportOptions(num_experts=shape.num_experts)
        with open_for_replay(
            request.trace, options, on_progress=lambda share: bar.update(task, completed=share)
        ) as source:
            return read_traffic(source, shape, request.traffic)


def _interrupted(options: TraceRunOptions, keep: Callable[[TraceRunReport], RunRecord]) -> Interrupted:
    """Keep the pairs that are complete, if there is one."""
    file = options.partial_file
    if file is None or not file.exists():
        return Interrupted("interrupted before the first pair was complete; nothing was kept")
    # Our own rank wrote it, into a folder that only this user can write to.
    report: TraceRunReport = pickle.loads(file.read_bytes())
    record = keep(report)
    return Interrupted(
        f"interrupted; kept run {record.run_id} with its {plural(record.workload.pairs, 'complete pair')}"
    )
