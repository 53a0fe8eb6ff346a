"""Whatever is wrong with a case is said with its field, row and value."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from probes.errors import CaseError
from runtime.policy.case import explain_case

NAN, INFINITY = float("nan"), float("inf")
CASE: dict[str, Any] = {
    "scores": [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]],
    "selection_scores": [[4, 3, 2, 1], [-1, -2, -3, -4], [0, 0, 0, 0]],
    "topk_ids": [[0, 1], [0, 1], [2, -1]],
    "token_mask": [True, True, True],
    "placement": [0, 0, 1, 1],
    "cost": [0.001, 0.001, 0.001, 0.002],
    "resident": [True, False, False, False],
    "rate": [1, 0.5, 0, 0.25],
    "link_groups": [{"devices": [0, 1], "factor": 0.5}],
    "policy": {"name": "caee", "theta": 0.5},
}


def with_entry(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The sound case with one entry replaced."""
    case = copy.deepcopy(CASE)
    inner: Any = case
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return case


FAULTS = [
    (("scores", 1, 2), NAN, ["scores", "row 1", "NaN"]),
    (("scores", 1, 2), INFINITY, ["scores", "row 1", "Infinity"]),
    (("scores", 1, 2), 10**400, ["scores", "row 1", "too large"]),
    (("scores", 2, 0), -0.1, ["scores", "row 2", "-0.1", "negative"]),
    (("scores", 2, 0), "x", ["scores", "row 2", '"x"']),
    (("scores", 2, 0), True, ["scores", "row 2", "true"]),
    (("scores", 2), None, ["scores", "row 2", "null"]),
    (("scores", 0), [1, 2, 3], ["scores", "row 0", "3", "4"]),
    (("scores",), {}, ["scores", "{}"]),
    (("selection_scores", 0, 3), NAN, ["selection_scores", "row 0", "NaN"]),
    (("selection_scores", 1, 0), -INFINITY, ["selection_scores", "row 1", "-Infinity"]),
    (("selection_scores",), [[1, 2, 3, 4]], ["selection_scores", "1", "3"]),
    (("selection_scores", 2), [1], ["selection_scores", "row 2", "1", "4"]),
    (("topk_ids", 1, 0), 4, ["topk_ids", "row 1", "4"]),
    (("topk_ids", 1, 0), -2, ["topk_ids", "row 1", "-2"]),
    (("topk_ids", 1, 0), 0.5, ["topk_ids", "row 1", "0.5"]),
    (("topk_ids", 1, 0), 2**70, ["topk_ids", "row 1"]),
    (("topk_ids", 1), [3, 3], ["topk_ids", "row 1", "expert 3", "twice"]),
    (("topk_ids", 2), [3], ["topk_ids", "row 2", "1", "2"]),
    (("topk_ids",), [[0, 1]], ["topk_ids", "1", "3"]),
    (("top_k",), 3, ["topk_ids", "row 0", "2", "3"]),
    (("top_k",), 5, ["top_k", "5", "4"]),
    (("top_k",), 0, ["top_k", "0"]),
    (("top_k",), "2", ["top_k", '"2"']),
    (("token_mask", 1), 2, ["token_mask", "row 1", "2"]),
    (("token_mask",), [True], ["token_mask", "1", "3"]),
    (("placement", 3), -1, ["placement", "row 3", "-1", "negative"]),
    (("placement", 3), 10**9, ["placement", "row 3", "1000000000"]),
    (("placement", 3), 0.5, ["placement", "row 3", "0.5"]),
    (("placement",), [0, 0, 1], ["cost", "4", "3"]),
    (("cost", 2), -1, ["cost", "row 2", "-1", "negative"]),
    (("cost", 2), NAN, ["cost", "row 2", "NaN"]),
    (("cost", 2), INFINITY, ["cost", "row 2", "Infinity"]),
    (("cost", 2), 1e9, ["cost", "row 2", "1e+09"]),
    (("cost",), [0.001], ["cost", "1", "4"]),
    (("resident", 0), "yes", ["resident", "row 0", '"yes"']),
    (("resident",), [True], ["resident", "1", "4"]),
    (("rate", 0), "often", ["rate", "row 0", '"often"']),
    (("rate", 1), 1.5, ["rate", "row 1", "1.5"]),
    (("rate", 1), -0.5, ["rate", "row 1", "-0.5"]),
    (("rate", 1), NAN, ["rate", "row 1", "NaN"]),
    (("rate",), [0.5], ["rate", "1", "4"]),
    (("link_groups", 0, "devices"), [0, 2], ["link_groups", "row 0", "device 2"]),
    (("link_groups", 0, "devices"), [-1], ["link_groups", "row 0", "device -1"]),
    (("link_groups", 0, "devices"), [1, 1], ["link_groups", "row 0", "twice"]),
    (("link_groups", 0, "devices"), 1, ["link_groups", "row 0", "1"]),
    (("link_groups", 0, "factor"), 0, ["link_groups", "row 0", "0"]),
    (("link_groups", 0, "factor"), 1.5, ["link_groups", "row 0", "1.5"]),
    (("link_groups", 0, "factor"), NAN, ["link_groups", "row 0", "NaN"]),
    (("link_groups", 0), {"devices": [0]}, ["link_groups", "row 0"]),
    (("policy",), {"name": "cae"}, ["policy", "cae"]),
    (("policy",), {}, ["policy", "name"]),
    (("policy",), 3, ["policy", "3"]),
    (("policy", "name"), ["caee"], ["policy", "caee"]),
    (("policy", "thta"), 0.5, ["caee", "thta"]),
    (("policy", "theta"), 1.5, ["theta", "1.5", "cir"]),
    (("policy", "theta"), 0, ["theta", "0", "cir"]),
    (("policy", "theta"), -0.5, ["theta", "-0.5"]),
    (("policy", "theta"), NAN, ["theta", "nan"]),
    (("policy", "theta"), "much", ["theta", "much"]),
    (("policy",), {"name": "caee", "rule": "score", "theta": -1}, ["theta", "-1"]),
    (("policy", "rule"), "top", ["rule", "top"]),
    (("policy", "compensation"), "some", ["compensation", "some"]),
    (("policy", "reselect"), "none", ["reselect", "none"]),
    (("policy", "renormalize"), True, ["renormalize", "True"]),
    (("policy", "routed_scaling_factor"), INFINITY, ["routed_scaling_factor", "inf"]),
    (("policy",), {"name": "top-k"}, ["top-k", "k0"]),
    (("policy",), {"name": "top-k", "k0": 1.5}, ["k0", "1.5"]),
    (("policy",), {"name": "xshare"}, ["xshare", "budget", "per_device"]),
    (("policy",), {"name": "xshare", "budget": 1, "per_device": 1}, ["xshare", "budget", "per_device"]),
    (("policy",), {"name": "budget"}, ["budget", "price"]),
    (("policy",), {"name": "budget", "epsilon": 0.1}, ["budget", "price"]),
    (("policy",), {"name": "budget", "epsilon": 0.1, "price": 1}, ["budget", "price", "epsilon"]),
    (("topk_id",), [], ["topk_id"]),
]


@pytest.mark.parametrize(("path", "value", "words"), FAULTS, ids=lambda part: str(part)[:40])
def test_a_fault_names_field_row_and_value(path: tuple[Any, ...], value: Any, words: list[str]) -> None:
    with pytest.raises(CaseError) as caught:
        explain_case(with_entry(path, value))
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint, "every fault says what would be right"
    for python in ("None", "True", "nan ", "inf "):
        if path[0] != "policy":
            assert python not in caught.value.message


@pytest.mark.parametrize("key", ["scores", "placement", "cost", "policy"])
def test_what_a_case_cannot_do_without_is_named(key: str) -> None:
    for document in ({**CASE, key: None}, {name: value for name, value in CASE.items() if name != key}):
        with pytest.raises(CaseError, match=f"{key} is missing"):
            explain_case(document)


def test_without_top_k_and_ids_the_choice_is_unknown() -> None:
    with pytest.raises(CaseError, match="top_k is missing"):
        explain_case({**CASE, "topk_ids": None})


def test_compensation_by_residents_needs_residents() -> None:
    case = {**CASE, "resident": None, "policy": {"name": "caee", "compensation": "resident"}}
    with pytest.raises(CaseError, match="resident"):
        explain_case(case)


@pytest.mark.parametrize("document", [None, 3, [], "case", [CASE]])
def test_a_case_is_an_object(document: object) -> None:
    with pytest.raises(CaseError, match="JSON object"):
        explain_case(document)


@pytest.mark.parametrize("rows", [[NAN] * 4, [-1, 2, 3, 4], [], None, "padding", [1, 2]])
def test_rows_of_padding_are_not_read(rows: Any) -> None:
    case = with_entry(("token_mask", 1), False)
    for field in ("scores", "selection_scores", "topk_ids"):
        case[field][1] = rows
    outcome = explain_case(case)
    assert outcome["topk_ids"][1] == [-1, -1]
    assert outcome["topk_weights"][1] == [0, 0]
    unmasked = with_entry(("token_mask", 1), False)
    assert outcome == explain_case(unmasked)
