"""The machine to simulate, from a calibration, a data sheet or a plain number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from probes.calibration import ORIGIN_PROBE
from probes.errors import UsageError
from probes.records import Calibration, LayerModel
from probes.units import parse_seconds
from runtime.cost import CostTable, ExpertShape, cost_table, uniform_costs
from runtime.policy.types import NO_GROUPS
from runtime.profiles import PROFILES, profile_costs
from runtime.simulate.records import SimulatedMachine

DEFAULT_DEVICES = 8
MOST_DEVICES = 4096
"""Ten times the largest expert parallelism in use; time and memory of a replay grow with the devices."""

LONGEST_SECONDS = 1e6
TIMES = "such as 412us, 0.4ms or 0.002"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRequest:
    """``devices`` None: as many as were calibrated, else 8, and no more than a layer has experts.
    ``seconds_per_expert``: one for all devices or one each.

    ``shape``: the model's, where it is known: what is measured of such layers is then used in the tier ``device``.
    """

    devices: int | None = None
    seconds_per_expert: tuple[float, ...] = ()
    machine: str | None = None
    expert_bytes: int | None = None
    shape: ExpertShape | None = None
    expert_compute_seconds: float = 0.0
    overlap: bool = False
    staged: bool = False
    dense_seconds: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.seconds_per_expert) == (self.machine is not None):
            raise UsageError(
                "the machine is not described" if self.machine is None else "two machines are described",
                hint="give either --seconds-per-expert S, or --machine with --expert-bytes or --model "
                f"(profiles: {', '.join(PROFILES)}; or the id of a calibration)",
            )
        if self.machine is not None and self.expert_bytes is None:
            raise UsageError(
                "how long an expert takes on this machine depends on its size",
                hint="give --expert-bytes 43MB, or --model with the model's config.json",
            )
        if self.overlap and self.staged:
            raise UsageError("--overlap and --staged are two ways for compute to run", hint="give one of them")
        if self.devices is not None and not 1 <= self.devices <= MOST_DEVICES:
            raise UsageError(
                f"--devices {self.devices} is not between 1 and {MOST_DEVICES}",
                hint="leave it out for as many as were calibrated, else 8",
            )
        for name in ("expert_compute_seconds", "dense_seconds"):
            _check_seconds(name, getattr(self, name))
        for seconds in self.seconds_per_expert:
            _check_seconds("seconds_per_expert", seconds)


def machine_for(
    request: MachineRequest, calibration_of: Callable[[str], Calibration], tier: str, *, experts: int = MOST_DEVICES
) -> SimulatedMachine:
    """The machine with ``experts`` of a layer in ``tier``. ``calibration_of``: the stored calibration of an id.

    Raises ``UsageError`` and ``InputError``, and what ``calibration_of`` raises.
    """
    costs, origin = _costs(request, calibration_of, tier, experts)
    return SimulatedMachine(
        tier=tier,
        costs=costs,
        expert_compute_seconds=request.expert_compute_seconds,
        overlap=request.overlap,
        staged=request.staged,
        dense_seconds=request.dense_seconds,
        origin=origin,
    )


def _costs(
    request: MachineRequest, calibration_of: Callable[[str], Calibration], tier: str, experts: int
) -> tuple[CostTable, str]:
    default = min(DEFAULT_DEVICES, experts)
    if request.seconds_per_expert:
        given = request.seconds_per_expert
        devices = request.devices or (len(given) if len(given) > 1 else default)
        if len(given) not in (1, devices):
            raise UsageError(
                f"{len(given)} values of --seconds-per-expert do not fit {devices} devices",
                hint=f"give one for all devices, or {devices} with commas between them",
            )
        if len(given) == 1:
            return uniform_costs(given[0], devices), "seconds per expert as given"
        return CostTable(seconds_per_expert=given, groups=NO_GROUPS), "seconds per expert as given"
    assert request.machine is not None
    assert request.expert_bytes is not None
    if request.machine in PROFILES:
        costs = profile_costs(request.machine, tier, request.devices or default, request.expert_bytes)
        return costs, f"{PROFILES[request.machine].source}, at its stated rate"
    calibration = calibration_of(request.machine)
    measured = [device.name_on_link for device in calibration.devices] or ["cpu:0"]
    devices = request.devices or min(len(measured), experts)
    # More devices than were measured: the further ones are like the first, behind the same shared links.
    names = [measured[device % len(measured)] for device in range(devices)]
    costs = cost_table(calibration, tier, names, request.expert_bytes, request.shape)
    origin = f"calibration {calibration.calibration_id}"
    if calibration.fingerprint is None and calibration.origin != ORIGIN_PROBE:
        origin += f", imported from {calibration.origin}"
    if tier == "device" and calibration.layers:
        return costs, f"{origin}: {_about_layer(costs.layer, request.shape, devices)}"
    if devices > len(measured):
        origin += f", which measured {len(measured)} of {devices} devices; the others are taken to be like them"
    return costs, origin


def _about_layer(layer: LayerModel | None, shape: ExpertShape | None, devices: int) -> str:
    """Which measured layer the times are of, or why none is."""
    if layer is not None:
        error = "" if layer.holdout_error is None else f", held-out rows within {layer.holdout_error:.1%} in the median"
        return f"layer times of {layer.shape.kernel} in {layer.shape.dtype} on {devices} devices{error}"
    if shape is None:
        return "the memory's speed alone; with --model its measured layers of that shape are used, where it has them"
    weights = " or ".join(shape.dtypes) or "a weight type that no table knows"
    return (
        f"the memory's speed alone, since no layer of {shape.num_experts} experts of {shape.hidden_size} × "
        f"{shape.intermediate_size}, {shape.top_k} per token, in {weights} was measured on {devices} devices"
    )


def parse_machine_seconds(text: str) -> float:
    """Seconds of ``412us``, ``0.4ms`` or a number. Raises ``UsageError``, also for what no machine takes."""
    with contextlib.suppress(UsageError):
        seconds = parse_seconds(text)
        if 0 <= seconds < LONGEST_SECONDS:
            return seconds
    raise UsageError(f"{text!r} is not a time between 0 and {LONGEST_SECONDS:g} seconds", hint=TIMES)


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds < LONGEST_SECONDS:
        raise UsageError(
            f"--{name.replace('_', '-')} {seconds:g} is not between 0 and {LONGEST_SECONDS:g} seconds", hint=TIMES
        )
