"""What ``caee trace record`` does around the recording: choose, launch, keep what an interruption leaves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.errors import Interrupted, TraceError

if TYPE_CHECKING:
    from runtime.trace_recording import RecordOptions, RecordReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRequest:
    """The command's options, as given."""

    model: str | None
    output: Path
    prompts: Path | None
    full_scores: bool
    devices: str | None
    tier: str | None
    policy: str
    cache: str
    cache_experts: int | None
    batch_size: int
    max_new_tokens: int
    dtype: str
    force: bool


def record(request: RecordRequest) -> RecordReport | None:
    """Record; None on the ranks that torchrun started beside 0. After Ctrl-C what was recorded is kept."""
    from caee_cli.running import PROGRESS_FILE, progress_bar
    from runtime.launch import launch, started_by_torchrun
    from runtime.trace.writer import refuse_existing
    from runtime.trace_recording import record_rank

    refuse_existing(request.output, force=request.force)
    options = _options(request)
    if started_by_torchrun():
        return record_rank(options)
    with progress_bar("recording") as folder:
        run = dataclasses.replace(options.run, progress_file=folder / PROGRESS_FILE)
        options = dataclasses.replace(options, run=run)
        try:
            report: RecordReport | None = launch(record_rank, options, processes=len(run.devices))
        except KeyboardInterrupt as error:
            raise _interrupted(request) from error
    return report


def record_document(output: Path, report: RecordReport) -> dict[str, Any]:
    """The document of ``caee trace record --json``."""
    return {"schema": "caee.trace.record/1", "output": str(output), **dataclasses.asdict(report)}


def _interrupted(request: RecordRequest) -> Interrupted:
    """One rank joined its pieces itself; of several, which were stopped at once, the pieces are joined here."""
    from runtime.trace.reader import TraceReader, partial_folder
    from runtime.trace.writer import recover

    try:
        if partial_folder(request.output).is_dir():
            recover(request.output, force=request.force)
        tokens = TraceReader(request.output).tokens
    except TraceError:
        return Interrupted("interrupted before anything was recorded; nothing was kept")
    return Interrupted(f"interrupted; the {tokens} tokens recorded so far are kept in {request.output}")


def _options(request: RecordRequest) -> RecordOptions:
    from probes.devices import find_devices
    from runtime.demo import model_path, prompts_path
    from runtime.options import RunOptions, read_prompts, resolve_model
    from runtime.policy.spec import parse_policy
    from runtime.trace_recording import RecordOptions

    devices = find_devices(request.devices)
    return RecordOptions(
        run=RunOptions(
            model=model_path() if request.model is None else resolve_model(request.model),
            devices=devices,
            tier=request.tier or ("disk" if devices[0].kind == "cpu" else "host"),
            policy=parse_policy(request.policy),
            cache=request.cache,
            prompts=read_prompts(request.prompts or prompts_path()),
            held_out=None,
            calibration=None,
            cache_experts=request.cache_experts,
            batch_size=request.batch_size,
            max_new_tokens=request.max_new_tokens,
            dtype=request.dtype,
        ),
        output=request.output,
        model_name=request.model or "caee demo model",
        full_scores=request.full_scores,
        force=request.force,
    )
