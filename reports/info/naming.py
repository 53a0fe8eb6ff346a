"""Short names that tell runs apart: the policy, its knob, and whatever else differs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from store.records import RunRecord

KNOBS = {"theta": "θ", "epsilon": "ε", "k0": "k0", "beta": "β", "lambda": "λ"}
"""The parameter that one turns to trade quality for time, by policy the first that it has."""

GIVEN_BY_MODEL = ("top k", "num experts", "moe layers", "expert bytes", "experts per device")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """``series`` names all that the runs of one sweep share; they differ in the value of their ``knob`` alone.

    ``label`` is short and unlike every other's.
    """

    label: str
    series: str
    knob: str | None
    value: float | None


def run_names(runs: Sequence[RunRecord]) -> tuple[RunName, ...]:
    """Names of ``runs``, in their order."""
    apart = [name for name in differing(runs) if name != "policy" and name not in GIVEN_BY_MODEL]
    short = [_label(run, _variant(run, runs)) for run in runs]
    long = [_joined(label, _settings(run, apart)) for run, label in zip(runs, short, strict=True)]
    whole = [f"{label} · {run.run_id}" for run, label in zip(runs, short, strict=True)]
    labels = next((each for each in (short, long) if len(set(each)) == len(each)), whole)
    return tuple(_name(run, label, _variant(run, runs), apart) for run, label in zip(runs, labels, strict=True))


def differing(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """Settings in which ``runs`` differ. The number of pairs changes how sure a figure is, not what it measures."""
    names = [name for name in settings(runs[0]) if name != "pairs"]
    return tuple(name for name in names if any(settings(run)[name] != settings(runs[0])[name] for run in runs))


def settings(run: RunRecord) -> dict[str, Any]:
    """What was asked for, by name: model, tier, devices, policy and workload."""
    work = {field.name.replace("_", " "): getattr(run.workload, field.name) for field in fields(run.workload)}
    trace = None
    if run.replay is not None:
        first, last = run.replay.warmup_steps + 1, run.replay.warmup_steps + run.replay.steps
        trace = f"{run.replay.trace}, steps {first} to {last}"
    return {
        "model": run.model,
        "tier": run.tier,
        "devices": len(run.devices),
        "policy": run.policy,
        "trace": trace,
        **work,
    }


def _name(run: RunRecord, label: str, variant: list[str], apart: list[str]) -> RunName:
    knob = _knob(run)
    return RunName(
        label=label,
        series=_joined(", ".join([run.policy.name, *variant]), _settings(run, apart)),
        knob=KNOBS[knob] if knob else None,
        value=float(run.policy.parameters[knob]) if knob else None,
    )


def _knob(run: RunRecord) -> str | None:
    return next((key for key in KNOBS if isinstance(run.policy.parameters.get(key), (int, float))), None)


def _variant(run: RunRecord, runs: Sequence[RunRecord]) -> list[str]:
    """Parameters other than the knob that differ from the first run of this policy: an ablation is named by them."""
    usual = next(other.policy.parameters for other in runs if other.policy.name == run.policy.name)
    given = run.policy.parameters
    return [f"{key} {given[key]}" for key in given if key != _knob(run) and given[key] != usual.get(key)]


def _label(run: RunRecord, variant: list[str]) -> str:
    knob = _knob(run)
    turned = f" {KNOBS[knob]}={run.policy.parameters[knob]}" if knob else ""
    return ", ".join([f"{run.policy.name}{turned}", *variant])


def _settings(run: RunRecord, names: Sequence[str]) -> str:
    values = settings(run)
    return ", ".join(f"{name} {values[name]}" for name in names)


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
