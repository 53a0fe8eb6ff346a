"""The one parameter by which a policy trades quality for time, and the settings that a search tries."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from probes.errors import UsageError
from runtime.policy.spec import resolve
from runtime.policy.types import PolicySpec

_STEPS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_SHARES = (0.98, 0.95, 0.92, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3, 0.2)
_EPSILONS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """``settings``: from the mildest to the most aggressive, none of which leaves everything as it is."""

    key: str
    settings: tuple[float, ...]


def knob_of(spec: PolicySpec, *, offloading: bool) -> Knob:
    """What there is to search in ``spec``. Raises ``UsageError`` for a policy without such a parameter."""
    parameters = resolve(spec, offloading=offloading).parameters
    if "epsilon" in parameters:
        return Knob(key="epsilon", settings=_EPSILONS)
    if "theta" in parameters:
        # `cir` keeps a share of each token's weight; `score` asks for a sum of shares over the batch.
        return Knob(key="theta", settings=_SHARES if parameters.get("rule") == "cir" else _STEPS)
    raise UsageError(
        f"policy {spec.name} has no theta or epsilon to search by --max-quality-drop",
        hint="choose caee, importance or budget, or give every parameter: then its quality is only checked",
    )


def is_given(text: str) -> bool:
    """Whether a policy as written on the command line says itself how much it prunes, so that nothing is searched.

    Of caee, importance, random and budget the parameter may be left out; other policies always say it.
    """
    name, _, rest = text.partition(":")
    keys = {part.partition("=")[0].strip() for part in rest.split(",")}
    return name.strip() not in ("caee", "importance", "random", "budget") or bool(keys & {"theta", "epsilon", "price"})


def turned(spec: PolicySpec, knob: Knob, value: float) -> PolicySpec:
    """``spec`` with its knob at ``value``."""
    return dataclasses.replace(spec, parameters={**spec.parameters, knob.key: value})


def furthest(settings: tuple[float, ...], acceptable: Callable[[float], bool]) -> float | None:
    """The last of ``settings`` that is acceptable, by bisection: a setting after an unacceptable one is never tried.

    None where not even the first is. What it says is exact where acceptable settings all come first.
    """
    at = bisect.bisect_left(settings, True, key=lambda setting: not acceptable(setting))
    return settings[at - 1] if at else None
