"""What ``caee run`` does around the runtime: choose, launch, summarise, store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from caee_cli.interrupts import ended_by_interrupts
from caee_cli.signalling import SignalRequest, serving_signals
from probes.errors import CheckpointError, Interrupted, UsageError
from probes.text import plural

if TYPE_CHECKING:
    from probes.records import Device
    from runtime.options import RunOptions
    from runtime.tasks.files import TaskOptions
    from runtime.worker import RankReport
    from store.records import PolicyRecord, RunRecord
    from store.session import Store


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
    input_len: int | None
    prompts: Path | None
    held_out: Path | None
    quality: bool
    pairs: int | None
    phases: str | None
    max_quality_drop: str | None
    lm_eval: tuple[Path, ...]
    lm_eval_shape: str
    lm_eval_limit: int | None
    brake: str | None
    dtype: str
    check_ranks: bool
    data_parallel: bool
    seed: int
    store: str | None
    signals: SignalRequest = field(default_factory=SignalRequest)


def execute(request: RunRequest) -> tuple[RunRecord | PolicyRecord | None, str]:
    """Run, store, and return the record and where it is stored: the run, or only the search for a policy where that
    found nothing to run; None on the ranks that torchrun started beside 0.
    """
    with ended_by_interrupts():
        from caee_cli import tuning
        from caee_cli.calibrations import calibration_for
        from caee_cli.outputs import refuse_overwriting
        from store.session import open_store

    if request.signals.steps_jsonl is not None:
        refuse_overwriting(request.signals.steps_jsonl, store=request.store)
    # The store is opened before the work: a run that cannot be kept should not take its time first.
    with open_store(request.store) as store, contextlib.ExitStack() as stack:
        store.require_writable()
        options = _for_all_ranks(request, lambda: _options(request, store))
        with ended_by_interrupts():  # only now: they take seconds, and what is wrong should be said at once
            from probes.fingerprint import take_fingerprint
            from runtime.launch import launch, started_by_torchrun
            from runtime.worker import run_rank

            if len(options.devices) == 1:  # which runs in this process
                import transformers.modeling_utils  # noqa: F401

        joined = started_by_torchrun()
        asked = request.signals if not joined or os.environ["RANK"] == "0" else SignalRequest()
        signals = stack.enter_context(serving_signals(asked, _model_name(request)))
        options = dataclasses.replace(options, signals=signals)
        fingerprint = take_fingerprint(options.devices, options.model)
        calibration, why_none = calibration_for(store, fingerprint, options.tier, options.devices)
        options = dataclasses.replace(
            options, calibration=calibration, notes=(*options.notes, *filter(None, [why_none]))
        )

        def keep(report: RankReport) -> RunRecord | PolicyRecord:
            return tuning.keep(store, options, report, fingerprint, _model_name(request))

        if joined:
            report = run_rank(options)
            return (keep(report) if os.environ["RANK"] == "0" else None), store.location
        with progress_bar("measuring", hidden=request.signals.live) as folder:
            options = dataclasses.replace(
                options, progress_file=folder / PROGRESS_FILE, partial_file=folder / "partial.pickle"
            )
            try:
                report = launch(run_rank, options, processes=len(options.devices))
            except KeyboardInterrupt as error:
                raise _interrupted(options, keep) from error
        return keep(report), store.location


def _interrupted(options: RunOptions, keep: Callable[[RankReport], RunRecord | PolicyRecord]) -> Interrupted:
    """Keep the pairs that are complete, if they are enough for an interval."""
    file = options.partial_file
    if file is None or not file.exists():
        return Interrupted("interrupted before the first pair was complete; nothing was kept")
    # Our own rank wrote it, into a folder that only this user can write to.
    report: RankReport = pickle.loads(file.read_bytes())
    record = cast("RunRecord", keep(report))  # there is a pair
    complete = plural(record.workload.pairs, "complete pair")
    return Interrupted(f"interrupted; kept run {record.run_id} with its {complete}, without quality")


def _options(request: RunRequest, store: Store) -> RunOptions:
    from caee_cli.tuning import use_stored, wished
    from runtime.demo import held_out_path
    from runtime.models.config import read_moe_shape
    from runtime.options import RunOptions, check_device_count, read_text
    from runtime.policy.guard import parse_brake

    tasks = _tasks(request)
    wish = wished(request.policy, request.theta, request.max_quality_drop, quality=request.quality)
    text = read_text(request.held_out or held_out_path())
    prompts = _prompts(request, text)
    model = checked_model(request.model, input_len=request.input_len, max_new_tokens=request.max_new_tokens)
    devices = devices_named(request.devices)
    with contextlib.suppress(CheckpointError):  # of some families only the weights tell; then the ranks refuse
        check_device_count(len(devices), read_moe_shape(model).num_experts)
    tier = request.tier or ("disk" if devices[0].kind == "cpu" else "host")
    policy, origin = wish.spec, None
    notes: list[str] = []
    if policy is None:
        policy, origin, notes = use_stored(store, request, model, len(devices), tier)
    return RunOptions(
        model=model,
        devices=devices,
        tier=tier,
        policy=policy,
        cache=request.cache,
        prompts=prompts,
        held_out=text if request.quality else None,
        calibration=None,
        cache_experts=request.cache_experts,
        batch_size=request.batch_size,
        max_new_tokens=request.max_new_tokens,
        input_len=request.input_len,
        pairs=request.pairs,
        phases=request.phases,
        max_quality_drop=wish.limit,
        search=wish.search,
        policy_origin=origin,
        notes=(*crowding_notes(devices), *notes),
        brake=None if request.brake is None else parse_brake(request.brake),
        dtype=request.dtype,
        seed=request.seed,
        check_ranks=request.check_ranks,
        data_parallel=request.data_parallel,
        tasks=tasks,
    )


def _tasks(request: RunRequest) -> TaskOptions | None:
    from runtime.tasks.files import TaskOptions, read_task_files, require_harness

    if not request.lm_eval:
        if request.lm_eval_limit is not None or request.lm_eval_shape != "decode":
            raise UsageError("--lm-eval-limit and --lm-eval-shape belong to --lm-eval", hint="name a task file with it")
        return None
    require_harness()
    return TaskOptions(files=read_task_files(request.lm_eval), shape=request.lm_eval_shape, limit=request.lm_eval_limit)


def _for_all_ranks(request: RunRequest, prepare: Callable[[], RunOptions]) -> RunOptions:
    """What ``prepare`` returns; where it fails on one of several hosts, the ranks on the others are told why."""
    from probes.errors import CaeeError

    try:
        return prepare()
    except CaeeError as error:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            from runtime.parallel import end_together

            with contextlib.suppress(CaeeError):  # it may be the devices that are wrong
                end_together(error, devices_named(request.devices)[0].kind)
        raise


def checked_model(name: str | None, *, input_len: int | None, max_new_tokens: int) -> Path:
    """The folder of the model that is meant, looked at without loading anything. Raises ``CheckpointError``, and
    ``UsageError`` where prompts and answers are longer than its context."""
    from runtime.demo import model_path
    from runtime.options import resolve_model
    from runtime.workload import check_model

    folder = model_path() if name is None else resolve_model(name)
    check_model(folder, input_len=input_len, max_new_tokens=max_new_tokens)
    return folder


def devices_named(text: str | None) -> tuple[Device, ...]:
    """The devices that are meant; to know of GPUs takes an import of seconds."""
    with ended_by_interrupts():
        from probes.devices import find_devices

        return find_devices(text)


def crowding_notes(devices: Sequence[Device]) -> tuple[str, ...]:
    """For the record, and said at once, where more ranks on the CPU than there are processors would take turns."""
    from caee_cli.output import warn
    from probes.limits import cpus_allowed

    processors = cpus_allowed()
    if devices[0].kind != "cpu" or len(devices) <= processors:
        return ()
    remark = f"{len(devices)} ranks on the CPU take turns on {plural(processors, 'processor')}: this is slow, and noisy"
    if os.environ.get("RANK", "0") == "0":
        warn(remark)
    return (remark,)


def _prompts(request: RunRequest, text: str) -> tuple[str, ...]:
    """Those of --prompts, else those that ship; with --input-len the held-out text, to be cut, in their place."""
    from runtime.demo import prompts_path
    from runtime.options import read_prompts

    if request.prompts is None and request.input_len is not None:
        return (text,)
    return read_prompts(request.prompts or prompts_path())


def _model_name(request: RunRequest) -> str:
    return "caee demo model" if request.model is None else request.model


@contextlib.contextmanager
def progress_bar(doing: str, *, hidden: bool = False) -> Iterator[Path]:
    """A folder in which rank 0 writes its progress, shown as a bar on standard error; ``doing``: once it has loaded.

    ``hidden``: no bar, since the terminal shows something else.
    """
    from caee_cli.output import progress

    with tempfile.TemporaryDirectory() as folder, progress(hidden=hidden) as bar:
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
