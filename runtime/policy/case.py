"""One layer's decision from a JSON document, and its outcome as one: what ``caee explain`` computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.errors import CaseError, UsageError
from runtime.policy.inputs import MOST_DEVICES, check_top_k, make_machine, make_tokens
from runtime.policy.make import make_policy
from runtime.policy.reasons import reasons_for_pruning
from runtime.policy.spec import parse_policy, policy_as_mapping, policy_from_mapping
from runtime.policy.types import PICOSECONDS, SHARE_UNIT, Decision, Machine, PolicySpec, Summary, Tokens

SCHEMA = "caee.explain/1"
KEYS = (
    "scores",
    "selection_scores",
    "top_k",
    "topk_ids",
    "token_mask",
    "placement",
    "cost",
    "resident",
    "link_groups",
    "rate",
    "policy",
)
# What each of them holds: said where it holds something else.
_FORMS = {
    "scores": "numbers of at least 0, a list of one for each expert, for each token",
    "selection_scores": "finite numbers, a list of one for each expert, for each token",
    "top_k": "an integer from 1 to the number of experts",
    "topk_ids": "for each token a list of top_k different experts, numbered from 0; -1 is an empty slot",
    "token_mask": "true or false for each token",
    "placement": "for each expert its device, numbered from 0",
    "cost": "for each expert the seconds to move it, at least 0",
    "resident": "true or false for each expert",
    "rate": "for each expert the share of recent steps that used it, from 0 to 1",
    "link_groups": 'a list such as [{"devices": [0, 1], "factor": 1}], with 0 < factor ≤ 1',
    "policy": 'such as "caee:theta=0.8" or {"name": "caee", "theta": 0.8}; docs/policies.md lists all',
}


def explain_case(document: object) -> dict[str, Any]:
    """The decision of one case, with its figures; shapes and keys as in ``docs/policies.md``.

    Raises ``CaseError`` that names field, row and value.
    """
    spec, tokens, machine = read_inputs(document)
    try:
        policy = make_policy(spec, offloading=machine.resident_NR is not None, compiled=False)
    except UsageError as error:
        raise CaseError(error.message, hint=error.hint) from error
    summary = policy.summarise(tokens, machine)
    decision = policy.decide(summary, machine)
    routed = policy.reroute(tokens, decision, machine)

    outcome: dict[str, Any] = {
        "schema": SCHEMA,
        "policy": policy_as_mapping(policy.spec),
        "active": _members(decision.active_N),
        "kept": _members(decision.kept_N),
        "pruned": _members(decision.active_N & ~decision.kept_N),
    }
    if policy.spec.name in ("caee", "importance") and decision.mandatory_N is not None:
        outcome["mandatory"] = _members(decision.mandatory_N)
        outcome["f_base"] = _seconds(decision.f_base or 0)
    return outcome | {
        "importance": [int(value) / SHARE_UNIT for value in summary.importance_N],
        "f_before": _seconds(decision.f_before),
        "f_after": _seconds(decision.f_after),
        "device_cost_before": [_seconds(load) for load in decision.load_before_D],
        "device_cost_after": [_seconds(load) for load in decision.load_after_D],
        "topk_ids": routed.topk_ids_TK.tolist(),
        "topk_weights": routed.topk_weights_TK.tolist(),
        "removed_importance": routed.removed / SHARE_UNIT / summary.tokens if summary.tokens else 0.0,
        "rerouted_slots": routed.rerouted_slots,
        "reasons": _reasons(policy.spec, summary, decision, machine),
    }


def read_inputs(document: object) -> tuple[PolicySpec, Tokens, Machine]:
    """A case's policy, tokens and machine, checked. Raises ``CaseError``, always with a hint."""
    case = _case(document)
    try:
        spec = _policy(case)
        machine = _machine(case)
        return spec, _tokens(case, len(machine.placement_NR)), machine
    except CaseError as error:
        field = next((name for name in sorted(_FORMS, key=len, reverse=True) if error.message.startswith(name)), None)
        if error.hint is not None or field is None:
            raise
        raise CaseError(error.message, hint=f"{field}: {_FORMS[field]}") from error


def _reasons(spec: PolicySpec, summary: Summary, decision: Decision, machine: Machine) -> list[dict[str, Any]]:
    return [
        {"expert": expert, "device": int(decision.device_N[expert]), "reason": reason}
        for expert, reason in reasons_for_pruning(spec, summary, decision, machine)
    ]


def _case(document: object) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise CaseError(
            f"a case is a JSON object, not {_shown(document)}", hint="it holds scores, placement, cost and policy"
        )
    for key in document:
        if key not in KEYS:
            raise CaseError(f"unknown key {key!r} in the case", hint=f"keys: {', '.join(KEYS)}")
    case = {key: value for key, value in document.items() if value is not None}
    for key in ("scores", "placement", "cost", "policy"):
        if key not in case:
            raise CaseError(
                f"{key} is missing", hint=f"a case needs scores, placement, cost and policy; keys: {', '.join(KEYS)}"
            )
    return case


def _policy(case: Mapping[str, Any]) -> PolicySpec:
    given = case["policy"]
    try:
        if isinstance(given, str):
            spec = parse_policy(given)
        elif isinstance(given, Mapping):
            spec = policy_from_mapping(given)
        else:
            raise UsageError(f"policy: {_shown(given)} is neither an object nor a name")
    except UsageError as error:
        raise CaseError(error.message, hint=error.hint) from error
    if spec.name == "budget" and "price" not in spec.parameters:
        raise CaseError(
            "policy budget needs a price to decide a single case: epsilon is met over a run",
            hint='write {"name": "budget", "price": 2}',
        )
    return spec


def _machine(case: Mapping[str, Any]) -> Machine:
    placement = [_integer("placement", row, value) for row, value in enumerate(_list("placement", case["placement"]))]
    for row, device in enumerate(placement):
        if not 0 <= device < MOST_DEVICES:
            problem = "negative" if device < 0 else "too high"
            raise CaseError(f"placement, row {row}: {device} is {problem}")
    num_experts = len(placement)
    cost = [_number("cost", row, value) for row, value in enumerate(_list("cost", case["cost"], num_experts))]
    resident = None
    if "resident" in case:
        values = _list("resident", case["resident"], num_experts)
        resident = [_truth("resident", row, value) for row, value in enumerate(values)]
    rate = None
    if "rate" in case:
        rate = [_number("rate", row, value) for row, value in enumerate(_list("rate", case["rate"], num_experts))]
    groups = [_group(row, group) for row, group in enumerate(_list("link_groups", case.get("link_groups", [])))]
    return make_machine(placement=placement, cost_seconds=cost, resident=resident, link_groups=groups, rate=rate)


def _group(row: int, group: object) -> tuple[list[int], float]:
    if not isinstance(group, Mapping) or set(group) != {"devices", "factor"}:
        raise CaseError(f"link_groups, row {row}: {_shown(group)} is not an object with devices and factor")
    if not isinstance(group["devices"], list):
        raise CaseError(f"link_groups, row {row}: devices is {_shown(group['devices'])}, not a list")
    devices = [_integer("link_groups", row, device) for device in group["devices"]]
    return devices, _number("link_groups", row, group["factor"])


def _tokens(case: Mapping[str, Any], num_experts: int) -> Tokens:
    scores = _list("scores", case["scores"])
    count = len(scores)
    mask = [True] * count
    if "token_mask" in case:
        values = _list("token_mask", case["token_mask"], count)
        mask = [_truth("token_mask", row, value) for row, value in enumerate(values)]
    top_k = _top_k(case, mask, num_experts)
    ids = ranks = None
    if "topk_ids" in case:
        rows = _list("topk_ids", case["topk_ids"], count)
        ids = _matrix("topk_ids", rows, mask, top_k, _integer, dtype=np.int64)
        for row, slot in np.argwhere((ids < -1) | (ids >= num_experts))[:1]:
            raise CaseError(f"topk_ids, row {row}: {ids[row, slot]} is no expert, they go from 0 to {num_experts - 1}")
    if "selection_scores" in case:
        rows = _list("selection_scores", case["selection_scores"], count)
        ranks = _matrix("selection_scores", rows, mask, num_experts, _number, dtype=np.float64)
    return make_tokens(
        scores_TN=_matrix("scores", scores, mask, num_experts, _number, dtype=np.float64),
        selection_scores_TN=ranks,
        topk_ids_TK=ids,
        token_mask_T=np.array(mask, dtype=np.bool_),
        top_k=top_k,
        num_experts=num_experts,
    )


def _top_k(case: Mapping[str, Any], mask: list[bool], num_experts: int) -> int:
    """``top_k`` as given, or the width of ``topk_ids`` (of its first real row)."""
    if "top_k" in case:
        top_k = _integer("top_k", None, case["top_k"])
    elif "topk_ids" not in case:
        raise CaseError("top_k is missing", hint="give top_k, or the router's own choice as topk_ids")
    else:
        rows = _list("topk_ids", case["topk_ids"], len(mask))
        real = [row for row, counts in zip(rows, mask, strict=True) if counts]
        widths = [len(row) for row in [*real, *rows] if isinstance(row, list)]
        top_k = widths[0] if widths else 1
    check_top_k(top_k, num_experts)
    return top_k


def _matrix(
    field: str, rows: list[Any], mask: list[bool], width: int, entry: Callable[[str, int, Any], Any], *, dtype: type
) -> npt.NDArray[Any]:
    """Rows of ``width`` entries as an array; rows of padding are not read, and hold 0."""
    values: npt.NDArray[Any] = np.zeros((len(rows), width), dtype=dtype)
    for row, content in enumerate(rows):
        if mask[row]:
            values[row] = [entry(field, row, value) for value in _list(f"{field}, row {row}", content, width)]
    return values


def _list(field: str, value: object, length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise CaseError(f"{field}: {_shown(value)} is not a list")
    if length is not None and len(value) != length:
        raise CaseError(
            f"{field}: {len(value)} entries where {length} were expected",
            hint="scores are tokens × experts, topk_ids tokens × top_k, the others experts long",
        )
    return value


def _number(field: str, row: int, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CaseError(f"{field}, row {row}: {_shown(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise CaseError(f"{field}, row {row}: {_shown(value)} is too large") from None


def _integer(field: str, row: int | None, value: object) -> int:
    where = field if row is None else f"{field}, row {row}"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CaseError(f"{where}: {_shown(value)} is not an integer")
    if abs(value) >= 1 << 62:
        raise CaseError(f"{where}: {_shown(value)} is out of range")
    return value


def _truth(field: str, row: int, value: object) -> bool:
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise CaseError(f"{field}, row {row}: {_shown(value)} is neither true nor false")
    return bool(value)


def _shown(value: object) -> str:
    """As JSON spells it, in as many characters as a line has room for."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _members(marks_N: Any) -> list[int]:
    return [int(expert) for expert in np.flatnonzero(marks_N)]


def _seconds(load: Any) -> float:
    return int(load) / PICOSECONDS
