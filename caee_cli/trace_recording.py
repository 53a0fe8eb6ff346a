"""What ``caee trace record`` does around the recording: choose, launch, keep what an interruption leaves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caee_cli.interrupts import ended_by_interrupts
from probes.errors import Interrupted

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
    with ended_by_interrupts():
        from caee_cli.outputs import refuse_overwriting
        from caee_cli.running import PROGRESS_FILE, progress_bar
        from runtime.trace.writer import drop_pieces, refuse_existing

    model = None if request.model is None else Path(request.model)
    refuse_overwriting(request.output, inputs=[request.prompts, model])
    refuse_existing(request.output, force=request.force)
    options = _options(request)
    with ended_by_interrupts():
        from runtime.launch import launch, started_by_torchrun
        from runtime.trace_recording import record_rank

    if started_by_torchrun():
        return record_rank(options)
    drop_pieces(request.output)  # so that those which are there after an interruption are of this recording
    before = _version(request.output)
    with progress_bar("recording") as folder:
        run = dataclasses.replace(options.run, progress_file=folder / PROGRESS_FILE)
        options = dataclasses.replace(options, run=run)
        try:
            report: RecordReport | None = launch(record_rank, options, processes=len(run.devices))
        except KeyboardInterrupt as error:
            raise _interrupted(request, before) from error
        except Interrupted:
            raise
        except Exception:
            _say_what_is_left(request.output, before)
            raise
    return report


def record_document(output: Path, report: RecordReport) -> dict[str, Any]:
    """The document of ``caee trace record --json``."""
    return {"schema": "caee.trace.record/1", "output": str(output), **dataclasses.asdict(report)}


def _version(path: Path) -> tuple[int, int] | None:
    """What tells whether the file at ``path`` has been replaced; None: there is none."""
    if not path.exists():
        return None
    state = path.stat()
    return state.st_ino, state.st_mtime_ns


def _interrupted(request: RecordRequest, before: tuple[int, int] | None) -> Interrupted:
    """Of ranks that ended at once, the pieces are joined here, unless they were all written and joined already."""
    from runtime.trace.reader import TraceReader, holds_pieces, partial_folder
    from runtime.trace.writer import drop_pieces, recover
    from runtime.trace_recording import interrupted

    if _version(request.output) != before:
        drop_pieces(request.output)
        return interrupted(request.output, TraceReader(request.output).tokens)
    if holds_pieces(partial_folder(request.output)):
        recovered = recover(request.output, force=request.force)
        return interrupted(request.output, recovered.tokens, recovered.left_out)
    drop_pieces(request.output)
    return interrupted(request.output, 0)


def _say_what_is_left(output: Path, before: tuple[int, int] | None) -> None:
    """After a failure what was recorded is kept, too, by the rank itself or as its pieces."""
    from caee_cli.output import note
    from runtime.trace.reader import holds_pieces, partial_folder
    from runtime.trace.writer import drop_pieces

    folder = partial_folder(output)
    if _version(output) != before:
        note(f"What was recorded before is kept in {output}")
    elif holds_pieces(folder):
        note(f"What was recorded before is kept; make a file of it with: caee trace import {folder} -o {output}")
    else:
        drop_pieces(output)


def _options(request: RecordRequest) -> RecordOptions:
    from caee_cli.running import checked_model, devices_named
    from runtime.demo import prompts_path
    from runtime.options import RunOptions, read_prompts
    from runtime.policy.spec import parse_policy

    policy = parse_policy(request.policy)
    prompts = read_prompts(request.prompts or prompts_path())
    model = checked_model(request.model, input_len=None, max_new_tokens=request.max_new_tokens)
    devices = devices_named(request.devices)
    with ended_by_interrupts():
        from runtime.trace_recording import RecordOptions

    return RecordOptions(
        run=RunOptions(
            model=model,
            devices=devices,
            tier=request.tier or ("disk" if devices[0].kind == "cpu" else "host"),
            policy=policy,
            cache=request.cache,
            prompts=prompts,
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
