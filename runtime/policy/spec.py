"""Policies by name: which there are, which parameters they take, and how they are written.

A policy is written ``NAME`` or ``NAME:key=value,key=value`` on the command line, and as an object with ``name`` and the
same keys in JSON. ``resolve`` fills in what depends on the machine, so that reports show every parameter.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from probes.errors import UsageError
from runtime.policy.types import ParameterValue, PolicySpec

DEFAULT_THETA = {"cir": 0.8, "score": 0.6}
DEFAULT_EPSILON = 0.005

CHOICES = {
    "rule": ("cir", "score"),
    "compensation": ("active", "resident", "none"),
    "reselect": ("affected", "all"),
    "renormalize": ("survivors", "original", "none"),
}
SHARED_KEYS = ("compensation", "reselect", "renormalize", "routed_scaling_factor")


class Slots(StrEnum):
    """What becomes of slots whose expert was pruned."""

    COMPENSATED = "compensated"  # as ``compensation`` and ``reselect`` say
    RESELECTED = "reselected"  # compensated, with ``reselect`` fixed to ``all``
    DROPPED = "dropped"  # ``compensation`` fixed to ``none``
    OWN = "own"  # the policy fills its slots itself


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """One parameter: its type, its range in words and as a test, its default (None: must be given, or ``optional``)."""

    kind: type
    range: str = ""
    holds: Callable[[Any], bool] = lambda value: True
    default: ParameterValue | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """One line of the table of policies. ``needs_scores``: cannot work on a trace that kept only the chosen weights."""

    rule: str
    source: str
    slots: Slots = Slots.COMPENSATED
    keys: Mapping[str, _Key] = field(default_factory=dict)
    one_of: tuple[str, ...] = ()
    needs_scores: bool = False


_RULE = _Key(kind=str, optional=True)
_THETA = _Key(kind=float, range="at least 0", holds=lambda value: value >= 0, optional=True)
_CEILING = _Key(kind=float, range="at least 0 and below 1", holds=lambda value: 0 <= value < 1, optional=True)
_K0 = _Key(kind=int, range="at least 1", holds=lambda value: value >= 1)
_COUNT = _Key(kind=int, range="at least 0", holds=lambda value: value >= 0)
_OPTIONAL_COUNT = dataclasses.replace(_COUNT, optional=True)
_J = dataclasses.replace(_COUNT, default=1)
_NOT_NEGATIVE = _Key(kind=float, range="at least 0", holds=lambda value: value >= 0)
_THRESHOLD = {"rule": _RULE, "theta": _THETA}

PAPER = "arXiv:2606.29982"

POLICIES: dict[str, PolicyInfo] = {
    "router": PolicyInfo(rule="nothing is pruned", source="the model", slots=Slots.OWN),
    "caee": PolicyInfo(
        rule="mandatory experts by theta, then whatever does not raise the layer's cost",
        source=PAPER,
        keys={**_THRESHOLD, "ceiling": _CEILING},
    ),
    "importance": PolicyInfo(
        rule="mandatory experts by theta alone",
        source=f"{PAPER}, without its cost model",
        keys={**_THRESHOLD, "ceiling": _CEILING},
    ),
    "budget": PolicyInfo(
        rule="the level of cost that saves the most time at a price on importance",
        source="this project",
        keys={
            "epsilon": _Key(kind=float, range="between 0 and 1", holds=lambda value: 0 < value < 1, optional=True),
            "price": dataclasses.replace(_NOT_NEGATIVE, optional=True),
            "reuse": _Key(
                kind=float, range="between 0 and 1000", holds=lambda value: 0 <= value <= 1000, optional=True
            ),
            "ceiling": _CEILING,
        },
    ),
    "top-k": PolicyInfo(
        rule="every token keeps its k0 best", source="static reduction", slots=Slots.DROPPED, keys={"k0": _K0}
    ),
    "skip": PolicyInfo(
        rule="a token drops experts below beta times its best",
        source="arXiv:2402.14800",
        slots=Slots.DROPPED,
        keys={"beta": _Key(kind=float, range="between 0 and 1", holds=lambda value: 0 <= value <= 1)},
    ),
    "oea": PolicyInfo(rule="the union of every token's k0 best", source="arXiv:2511.02237", keys={"k0": _K0}),
    "xshare": PolicyInfo(
        rule="every token's best, then the highest summed scores within a budget of experts",
        source="arXiv:2602.07265",
        slots=Slots.RESELECTED,
        keys={"budget": _OPTIONAL_COUNT, "per_device": _OPTIONAL_COUNT},
        one_of=("budget", "per_device"),
        needs_scores=True,
    ),
    "lynx": PolicyInfo(
        rule="every token's best, and the experts with the most votes",
        source="arXiv:2411.08982",
        keys={
            "alpha": dataclasses.replace(_NOT_NEGATIVE, default=1.0),
            "beta": _Key(kind=int, range="between 0 and 30", holds=lambda value: 0 <= value <= 30, default=10),
            "keep": _COUNT,
        },
        needs_scores=True,
    ),
    "max-rank": PolicyInfo(
        rule="beyond its j best, a token prefers resident experts among its m best",
        source="cache-aware routing in public engines",
        slots=Slots.OWN,
        keys={"j": _J, "m": _Key(kind=int, range="at least 1", holds=lambda value: value >= 1)},
    ),
    "cache-prior": PolicyInfo(
        rule="beyond its j best, a token ranks with a bonus for resident experts",
        source="arXiv:2412.00099",
        slots=Slots.OWN,
        keys={"lambda": _NOT_NEGATIVE, "j": _J},
        needs_scores=True,
    ),
    "random": PolicyInfo(
        rule="the pruned set of caee, lost slots to kept experts at random",
        source=f"{PAPER}, Fig. 9",
        slots=Slots.OWN,
        keys={**_THRESHOLD, "seed": dataclasses.replace(_COUNT, default=0)},
        needs_scores=True,
    ),
}


def parse_policy(text: str) -> PolicySpec:
    """The policy written ``NAME`` or ``NAME:key=value,key=value``. Raises ``UsageError``."""
    name, _, rest = text.partition(":")
    keys: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"policy {text!r}: {part!r} is not key=value", hint="write for example caee:theta=0.8")
        if key.strip() in keys:
            raise UsageError(f"policy {text!r}: {key.strip()} is given twice")
        keys[key.strip()] = value.strip()
    return policy_from_mapping({"name": name.strip(), **keys})


def policy_from_mapping(mapping: Mapping[str, Any]) -> PolicySpec:
    """The policy of a JSON object: ``name``, its parameters, and the shared keys. A null is an absent key.

    Raises ``UsageError`` for an unknown policy or key, and for a value of the wrong type or out of range.
    """
    given = {key: value for key, value in mapping.items() if value is not None}
    name = given.pop("name", None)
    if name is None:
        raise UsageError("the policy has no name", hint=f"policies: {', '.join(POLICIES)}")
    info = POLICIES.get(name) if isinstance(name, str) else None
    if info is None:
        raise UsageError(f"unknown policy {name!r}", hint=_suggestion(str(name), POLICIES, "policies"))
    for key in given:
        if key not in info.keys and key not in SHARED_KEYS:
            known = (*info.keys, *SHARED_KEYS)
            raise UsageError(f"policy {name}: unknown key {key!r}", hint=_suggestion(str(key), known, "keys"))
    parameters: dict[str, ParameterValue] = {}
    for key, description in info.keys.items():
        if key in given:
            parameters[key] = _value(name, key, description, given[key])
        elif description.default is not None:
            parameters[key] = description.default
        elif not description.optional:
            wanted = f"{'an integer' if description.kind is int else 'a number'} {description.range}"
            raise UsageError(
                f"policy {name} needs {key}, {wanted}",
                hint=f"write for example {name}:{key}={2 if description.kind is int else 0.5}",
            )
    _check_together(name, info, parameters)
    factor = given.get("routed_scaling_factor")
    spec = PolicySpec(
        name=name,
        parameters=parameters,
        compensation=_choice(name, "compensation", given.get("compensation", "active")),
        reselect=_choice(name, "reselect", given.get("reselect", "affected")),
        renormalize=_choice(name, "renormalize", given["renormalize"]) if "renormalize" in given else None,
        routed_scaling_factor=None if factor is None else float(_number(name, "routed_scaling_factor", factor)),
    )
    rule = parameters.get("rule")
    return _with_threshold(spec, str(rule)) if rule is not None else spec


def resolve(spec: PolicySpec, *, offloading: bool) -> PolicySpec:
    """``spec`` with every default filled in: ``rule`` is ``cir`` when offloading, else ``score``.

    Raises ``UsageError`` where a value does not fit the machine.
    """
    if spec.compensation == "resident" and not offloading:
        raise UsageError(
            f"policy {spec.name}: compensation=resident needs expert caches (resident)",
            hint="on-device inference has none: use compensation=active or compensation=none",
        )
    if "rule" in POLICIES[spec.name].keys and "rule" not in spec.parameters:
        spec = _with_threshold(spec, "cir" if offloading else "score")
    slots = POLICIES[spec.name].slots
    return dataclasses.replace(
        spec,
        compensation="none" if slots is Slots.DROPPED else spec.compensation,
        reselect="all" if slots is Slots.RESELECTED else spec.reselect,
        renormalize=spec.renormalize or "survivors",
        routed_scaling_factor=1.0 if spec.routed_scaling_factor is None else spec.routed_scaling_factor,
    )


def refuse_without_scores(
    spec: PolicySpec,
    top_k: int,
    source: str = "the trace",
    hint: str = "record a trace with full scores, or leave this policy out",
) -> None:
    """Raise ``UsageError`` when ``spec`` cannot work on a ``source`` that has only the ``top_k`` chosen weights."""
    reason = None
    if POLICIES[spec.name].needs_scores:
        reason = "it ranks or weighs experts that the router did not choose"
    elif spec.name == "max-rank" and int(spec.parameters["m"]) > top_k:
        reason = f"m={spec.parameters['m']} reaches beyond the {top_k} experts that the router chose"
    if reason:
        raise UsageError(
            f"policy {spec.name} needs full scores, and {source} has only the weights of the chosen experts: {reason}",
            hint=hint,
        )


def policy_as_mapping(spec: PolicySpec) -> dict[str, ParameterValue | None]:
    """The inverse of ``policy_from_mapping``; keys that do not apply to the policy are left out."""
    document: dict[str, ParameterValue | None] = {"name": spec.name, **spec.parameters}
    if POLICIES[spec.name].slots is not Slots.OWN:
        document |= {"compensation": spec.compensation, "reselect": spec.reselect}
    return document | {"renormalize": spec.renormalize, "routed_scaling_factor": spec.routed_scaling_factor}


def format_policy(spec: PolicySpec) -> str:
    """The policy as the command line writes it, with the shared keys only where they differ from the default."""
    plain = PolicySpec(name=spec.name)
    shared = {key: getattr(spec, key) for key in SHARED_KEYS if getattr(spec, key) not in (getattr(plain, key), None)}
    if POLICIES[spec.name].slots is not Slots.COMPENSATED:
        shared = {key: value for key, value in shared.items() if key not in ("compensation", "reselect")}
    if shared.get("renormalize") == "survivors":
        del shared["renormalize"]
    if shared.get("routed_scaling_factor") == 1:
        del shared["routed_scaling_factor"]
    written = ",".join(f"{key}={value}" for key, value in {**spec.parameters, **shared}.items())
    return f"{spec.name}:{written}" if written else spec.name


def _with_threshold(spec: PolicySpec, rule: str) -> PolicySpec:
    theta = float(spec.parameters.get("theta", DEFAULT_THETA[rule]))
    if rule == "cir" and not 0 < theta <= 1:
        raise UsageError(
            f"policy {spec.name}: theta={theta:g} is out of range for rule cir",
            hint="rule cir takes 0 < theta <= 1, the share of a token's gate weight that must stay",
        )
    others = {key: value for key, value in spec.parameters.items() if key not in ("rule", "theta")}
    return dataclasses.replace(spec, parameters={"rule": rule, "theta": theta, **others})


def _check_together(name: str, info: PolicyInfo, parameters: dict[str, ParameterValue]) -> None:
    if name == "budget":
        if "epsilon" in parameters and "price" in parameters:
            raise UsageError("policy budget: epsilon and price exclude each other", hint="give one of them")
        if "price" not in parameters:
            parameters.setdefault("epsilon", DEFAULT_EPSILON)
    if info.one_of and sum(key in parameters for key in info.one_of) != 1:
        raise UsageError(
            f"policy {name} needs exactly one of {' and '.join(info.one_of)}",
            hint=f"write for example {name}:{info.one_of[0]}=8",
        )


def _value(name: str, key: str, description: _Key, value: Any) -> ParameterValue:
    if description.kind is str:
        return _choice(name, key, value)
    number = _number(name, key, value)
    if description.kind is int:
        if not float(number).is_integer():
            raise UsageError(f"policy {name}: {key}={value} is not an integer")
        number = int(number)
    else:
        number = float(number)
    if not description.holds(number):
        raise UsageError(f"policy {name}: {key}={value} is out of range", hint=f"{key} must be {description.range}")
    return number


def _number(name: str, key: str, value: Any) -> float | int:
    number: float | int
    try:
        if isinstance(value, bool):
            raise TypeError
        number = value if isinstance(value, (int, float)) else _parse_number(value)
        finite = math.isfinite(number)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"policy {name}: {key}={value!r} is not a number") from None
    if not finite:
        raise UsageError(f"policy {name}: {key}={value} is not finite")
    return number


def _parse_number(value: str) -> float | int:
    try:
        return int(value)
    except ValueError:
        return float(value)


def _choice(name: str, key: str, value: Any) -> str:
    if not isinstance(value, str) or value not in CHOICES[key]:
        raise UsageError(f"policy {name}: {key}={value!r} is unknown", hint=f"{key}: {', '.join(CHOICES[key])}")
    return value


def _suggestion(word: str, known: Any, what: str) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    listed = f"{what}: {', '.join(known)}"
    return f"did you mean {close[0]}? {listed}" if close else listed
