"""What ``caee simulate`` does around the simulator: open the trace, describe the machine, keep the result."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.records import Calibration
    from runtime.models.config import MoeShape
    from runtime.simulate.machine import MachineRequest
    from runtime.simulate.scenario import Scenario
    from store.session import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """The command's options, parsed. ``model``: the shape of the model whose experts give the times, where it is
    known."""

    trace: Path
    scenario: Scenario
    machine: MachineRequest
    model: MoeShape | None
    layers: int | None
    num_experts: int | None
    load_profile: Path | None
    output: Path | None
    force: bool


def request_of(
    trace: Path,
    *,
    scenario: Mapping[str, Any],
    machine: Mapping[str, Any],
    seconds_per_expert: str | None,
    expert_bytes: str | None,
    model: str | None,
    layers: int | None,
    num_experts: int | None,
    load_profile: Path | None,
    output: Path | None,
    force: bool,
    store: str | None,
) -> SimulationRequest:
    """The request of the command's options; what was not given keeps its default. Raises ``UsageError``, and
    ``InputError`` where ``output`` cannot be written."""
    from caee_cli.outputs import check_output
    from probes.errors import UsageError
    from probes.units import parse_size
    from runtime.models.config import read_moe_shape
    from runtime.models.expert_shape import expert_shape
    from runtime.models.fetch import config_path
    from runtime.simulate.machine import MachineRequest
    from runtime.simulate.scenario import Scenario

    files = [trace, load_profile, model, *(scenario.get("placements") or ())]
    check_output(output, force=force, inputs=[Path(file) for file in files if file is not None], store=store)
    if expert_bytes is not None and model is not None:
        raise UsageError("--expert-bytes and --model both give the experts' size", hint="give one of them")
    size = None if expert_bytes is None else parse_size(expert_bytes)
    described, shape = None, None
    if model is not None:
        described = read_moe_shape(config_path(model))
        size, shape = described.expert_bytes, expert_shape(described)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in scenario.items() if value
    }
    return SimulationRequest(
        trace=trace,
        scenario=Scenario(**given),
        machine=MachineRequest(
            seconds_per_expert=_times(seconds_per_expert), expert_bytes=size, shape=shape, **machine
        ),
        model=described,
        layers=layers,
        num_experts=num_experts,
        load_profile=load_profile,
        output=output,
        force=force,
    )


def simulate_and_store(request: SimulationRequest, store: Store) -> dict[str, Any]:
    """The document of the simulation, which is kept; after Ctrl-C it covers the steps that were complete.

    Raises ``UsageError`` where the machine is neither a profile nor a calibration.
    """
    from probes.ids import new_id, now
    from runtime.simulate.document import simulation_document
    from runtime.simulate.machine import machine_for
    from runtime.simulate.run import simulate
    from runtime.simulate.scenario import make_plan
    from runtime.simulate.source import model_notes, open_for_replay, read_loads
    from runtime.trace.importers.formats import ImportOptions, check_asked
    from runtime.trace.layers import FirstLayers

    loads = None if request.load_profile is None else read_loads(request.load_profile)
    options = ImportOptions(num_experts=request.num_experts)
    with (
        _progress("reading", request.trace) as reading,
        open_for_replay(request.trace, options, on_progress=reading) as whole,
    ):
        check_asked(request.trace, whole.meta, options)
        source = whole if request.layers is None else FirstLayers(whole, request.layers)
        experts = source.meta.num_experts
        plan = make_plan(
            request.scenario,
            source,
            lambda tier: machine_for(request.machine, partial(_calibration, store), tier, experts=experts),
            loads,
        )
        with _progress("replaying", request.trace) as replaying, _Stopping() as stopping:

            def progress(done: int, steps: int) -> None:
                stopping.something_to_keep = done > request.scenario.warmup_steps
                replaying(done / steps)

            simulation = simulate(
                source,
                plan.passes,
                batch_size=plan.batch_size,
                warmup_steps=request.scenario.warmup_steps,
                steps=request.scenario.steps,
                index=plan.index,
                progress=progress,
                stop=lambda: stopping.asked,
            )
        unlike = () if request.model is None else model_notes(request.model, whole.meta)
    document = simulation_document(
        dataclasses.replace(simulation, notes=(*unlike, *simulation.notes)),
        simulation_id=new_id(),
        created_at=now(),
        trace=str(request.trace),
        expert_bytes=request.machine.expert_bytes,
    )
    store.save_simulation(document["simulation_id"], document["created_at"], document)
    return document


def _calibration(store: Store, machine: str) -> Calibration:
    """The stored calibration; whatever else ``machine`` may be is a ``UsageError`` that says what it can be."""
    from probes.errors import StoreError, UsageError
    from runtime.profiles import machine_choices
    from store.entries import RecordKind

    try:
        return store.calibration(machine)
    except StoreError as error:
        named = [entry for entry in store.entries() if machine and entry.record_id.startswith(machine)]
        if any(entry.kind is RecordKind.CALIBRATION for entry in named):
            raise
        unknown = f"--machine {machine!r} is neither a profile nor the id of a calibration"
        raise UsageError(error.message if named else unknown, hint=machine_choices("" if named else machine)) from error


def finish(document: dict[str, Any], request: SimulationRequest, location: str, *, as_json: bool) -> None:
    """Write the page, print the result, say where in the store at ``location`` it is. Raises ``Interrupted`` if the
    replay was stopped."""
    from caee_cli.output import emit_json, note, show, warn
    from probes.errors import Interrupted
    from probes.files import written_whole
    from reports.simulation import simulation_page, simulation_tables

    if request.output is not None:
        with written_whole(request.output, force=request.force) as stream:
            stream.write(simulation_page(document).encode())
        note(f"Wrote {request.output}")
    if as_json:
        emit_json(document)
        for remark in document["notes"]:
            warn(remark)
    else:
        show(*simulation_tables(document))
    kept = document["simulation_id"]
    if document["interrupted"]:
        raise Interrupted(
            f"interrupted; {document['policies'][0]['steps']} of "
            f"{document['trace']['planned_steps'] - document['trace']['warmup_steps']} steps complete, and kept as "
            f"simulation {kept}",
            hint=f"`caee report {kept}` makes a page of them",
        )
    note(f"Stored simulation {kept} in {location}; `caee report {kept}` makes a page of it.")


def _times(written: str | None) -> tuple[float, ...]:
    from probes.errors import UsageError
    from runtime.simulate.machine import parse_machine_seconds

    try:
        return tuple(parse_machine_seconds(time) for time in (written or "").split(",") if time.strip())
    except UsageError as error:
        raise UsageError(f"--seconds-per-expert: {error.message}", hint="such as 412us, 0.002 or 2ms,3ms") from error


class _Stopping:
    """Ctrl-C asks for a stop at the next block once there is something to keep; before that, and twice, it stops."""

    def __init__(self) -> None:
        self.asked = False
        self.something_to_keep = False
        self._before: Any = None

    def __enter__(self) -> _Stopping:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self.something_to_keep:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def _progress(what: str, path: Path) -> Iterator[Callable[[float], None]]:
    """A bar that is told fractions."""
    from caee_cli.output import progress

    with progress() as bar:
        task = bar.add_task(f"{what} {path.name}", total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)
