"""What ``caee run`` does around the runtime: choose, launch, summarise, store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.errors import Interrupted

if TYPE_CHECKING:
    from runtime.options import RunOptions
    from runtime.policy.types import PolicySpec
    from runtime.worker import RankReport
    from store.records import RunRecord


PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The command's options, as given."""

    model: str | None
    devices: str | None
    tier: str | None
    policy: str
    theta: float | None
    cache: str
    cache_experts: int | None
    batch_size: int
    max_new_tokens: int
    prompts: Path | None
    held_out: Path | None
    quality: bool
    pairs: int | None
    phases: str | None
    dtype: str
    check_ranks: bool
    seed: int
    store: str | None


def execute(request: RunRequest) -> tuple[RunRecord | None, str]:
    """Run, store, and return the record and where it is stored; None on the ranks that torchrun started beside 0."""
    with ended_by_interrupts():
        from caee_cli.calibrations import calibration_for
        from probes.fingerprint import take_fingerprint
        from runtime.launch import launch, started_by_torchrun
        from runtime.summary import run_record
        from runtime.worker import run_rank
        from store.session import open_store

    joined = started_by_torchrun()
    # The store is opened before the work: a run that cannot be kept should not take its time first.
    with open_store(request.store) as store:
        options = _options(request)
        fingerprint = take_fingerprint(options.devices, options.model)
        calibration, why_none = calibration_for(store, fingerprint, options.tier)
        options = dataclasses.replace(options, calibration=calibration, notes=(why_none,) if why_none else ())

        def keep(report: RankReport) -> RunRecord:
            record = run_record(options, report, fingerprint, _model_name(request))
            store.save_run(record)
            return record

        if joined:
            report = run_rank(options)
            return (keep(report) if os.environ["RANK"] == "0" else None), store.location
        with progress_bar("measuring") as folder:
            options = dataclasses.replace(
                options, progress_file=folder / PROGRESS_FILE, partial_file=folder / "partial.pickle"
            )
            try:
                report = launch(run_rank, options, processes=len(options.devices))
            except KeyboardInterrupt as error:
                raise _interrupted(options, keep) from error
        return keep(report), store.location


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C ends the process at once: large libraries swallow it while they are imported, and are
    left half-imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end(number: int, frame: object) -> None:
    from caee_cli.output import complain

    complain("interrupted")
    os._exit(Interrupted.exit_code)


def _interrupted(options: RunOptions, keep: Callable[[RankReport], RunRecord]) -> Interrupted:
    """Keep the pairs that are complete, if they are enough for an interval."""
    file = options.partial_file
    if file is None or not file.exists():
        return Interrupted("interrupted before the first pair was complete; nothing was kept")
    # Our own rank wrote it, into a folder that only this user can write to.
    report: RankReport = pickle.loads(file.read_bytes())
    record = keep(report)
    return Interrupted(
        f"interrupted; kept run {record.run_id} with its {record.workload.pairs} complete pairs, without quality"
    )


def _options(request: RunRequest) -> RunOptions:
    from probes.devices import find_devices
    from runtime.demo import held_out_path, model_path, prompts_path
    from runtime.options import RunOptions, read_prompts, read_text, resolve_model

    devices = find_devices(request.devices)
    return RunOptions(
        model=model_path() if request.model is None else resolve_model(request.model),
        devices=devices,
        tier=request.tier or ("disk" if devices[0].kind == "cpu" else "host"),
        policy=_policy(request),
        cache=request.cache,
        prompts=read_prompts(request.prompts or prompts_path()),
        held_out=read_text(request.held_out or held_out_path()) if request.quality else None,
        calibration=None,
        cache_experts=request.cache_experts,
        batch_size=request.batch_size,
        max_new_tokens=request.max_new_tokens,
        pairs=request.pairs,
        phases=request.phases,
        dtype=request.dtype,
        seed=request.seed,
        check_ranks=request.check_ranks,
    )


def _policy(request: RunRequest) -> PolicySpec:
    from runtime.policy.spec import parse_policy

    if request.theta is None:
        return parse_policy(request.policy)
    separator = "," if ":" in request.policy else ":"
    return parse_policy(f"{request.policy}{separator}theta={request.theta}")


def _model_name(request: RunRequest) -> str:
    return "caee demo model" if request.model is None else request.model


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Path]:
    """A folder in which rank 0 writes its progress, shown as a bar on standard error; ``doing``: once it has loaded."""
    from caee_cli.output import progress

    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        file = Path(folder) / PROGRESS_FILE
        task = bar.add_task("loading", total=None)
        stop = threading.Event()

        def follow() -> None:
            while not stop.wait(0.25):
                with contextlib.suppress(OSError, ValueError):
                    state: dict[str, Any] = json.loads(file.read_text())
                    bar.update(task, description=doing, completed=state["done"], total=state["total"])

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield Path(folder)
        finally:
            stop.set()
            follower.join()
