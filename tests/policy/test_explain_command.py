"""``caee explain`` against an independent implementation, and the shape of what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from runtime.policy.case import KEYS

CAEE = Path(sys.executable).with_name("caee")


def explain(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([CAEE, "explain", *arguments], input=stdin, capture_output=True, text=True, check=False)


def assert_same(found: dict[str, Any], expected: dict[str, Any], case: dict[str, Any]) -> None:
    for key, value in expected.items():
        if key in ("topk_weights", "removed_importance"):
            assert np.allclose(found[key], value, rtol=1e-9, atol=1e-12), (key, found[key], value, case)
        else:
            assert found[key] == value, (key, found[key], value, case)
    assert ("mandatory" in found) == ("mandatory" in expected), case


def test_agrees_with_an_independent_implementation_on_random_cases(page: ModuleType, cases: ModuleType) -> None:
    rng = np.random.default_rng(20260728)
    documents = [cases.make_case(rng) for _ in range(1000)]
    documents += [cases.make_case(rng, name=name) for name in ("caee", "importance", "budget") for _ in range(100)]
    documents += [cases.make_case(rng, large=True) for _ in range(30)]
    lines = "\n".join(json.dumps(document) for document in documents)
    result = explain("-", "--json", stdin=lines)
    assert result.returncode == 0, result.stderr
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(outcomes) == len(documents)
    for found, case in zip(outcomes, documents, strict=True):
        assert_same(found, page.outcome(case), case)


CASE: dict[str, Any] = {
    "scores": [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]],
    "top_k": 2,
    "placement": [0, 0, 1, 1],
    "cost": [0.001, 0.001, 0.001, 0.002],
    "resident": [True, False, False, False],
    "policy": {"name": "caee", "theta": 0.5},
}


def test_the_worked_example() -> None:
    # Token 0 needs expert 0 (resident, free), token 1 expert 3: F_base is 2 ms on device 1. Expert 1 fits on device 0,
    # expert 2 would take device 1 to 3 ms: it is pruned, and its token takes the best kept expert it does not hold.
    outcome = json.loads(explain("-", "--json", stdin=json.dumps(CASE)).stdout)
    assert outcome["mandatory"] == [0, 3]
    assert outcome["kept"] == [0, 1, 3]
    assert outcome["pruned"] == [2]
    assert (outcome["f_before"], outcome["f_base"], outcome["f_after"]) == (0.003, 0.002, 0.002)
    assert outcome["topk_ids"] == [[0, 1], [3, 1]]
    assert np.allclose(outcome["topk_weights"], [[4 / 7, 3 / 7], [2 / 3, 1 / 3]])
    assert np.isclose(outcome["removed_importance"], 3 / 7 / 2)
    assert outcome["rerouted_slots"] == 1
    (reason,) = outcome["reasons"]
    assert (reason["expert"], reason["device"]) == (2, 1)
    assert "from 2.00 ms to 3.00 ms" in reason["reason"]


def test_a_file_gives_one_document_and_a_table_that_says_why(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASE, indent=2))
    assert json.loads(explain(str(file), "--json").stdout)["pruned"] == [2]
    table = explain(str(file))
    assert table.returncode == 0
    assert "Expert 2 on device 1" in table.stdout
    assert "beyond the mandatory experts' 2.00 ms" in table.stdout


def test_every_policy_says_why_it_pruned(cases: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    file = tmp_path / "cases.jsonl"
    documents = [cases.make_case(rng, name=name) for name in cases.PARAMETERS for _ in range(12)]
    random = {"name": "random", "theta": 0.3}
    documents.append({**CASE, "policy": random})
    file.write_text("\n".join(map(json.dumps, documents)))
    outcomes = [json.loads(line) for line in explain(str(file), "--json").stdout.splitlines()]
    silent = {document["policy"]["name"] for document in documents} - {"router"}
    for outcome in outcomes:
        assert [entry["expert"] for entry in outcome["reasons"]] == outcome["pruned"]
        assert all(entry["reason"].endswith(".") for entry in outcome["reasons"])
        if outcome["pruned"]:
            silent.discard(outcome["policy"]["name"])
    assert not silent
    assert explain(str(file)).returncode == 0


def test_an_erroneous_line_does_not_stop_the_others(tmp_path: Path) -> None:
    lines = [json.dumps(CASE), "{not json", "", json.dumps({**CASE, "top_k": 9}), json.dumps(CASE)]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(lines))
    result = explain(str(file), "--json")
    assert result.returncode == 1
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert ["error" in outcome for outcome in outcomes] == [False, True, True, False]
    assert "top_k" in outcomes[2]["error"]
    assert "2 of 4" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_null_is_an_absent_key() -> None:
    nulls = {"selection_scores": None, "topk_ids": None, "token_mask": None, "link_groups": None}
    policy = {**CASE["policy"], "rule": None, "compensation": None, "renormalize": None}
    lines = "\n".join([json.dumps(CASE), json.dumps({**CASE, **nulls, "policy": policy})])
    plain, with_nulls = explain("-", "--json", stdin=lines).stdout.splitlines()
    assert plain == with_nulls


def test_no_real_token_gives_empty_sets_and_zeros() -> None:
    policies = ("router", "caee", "importance", "top-k:k0=1", "budget:price=1", "cache-prior:lambda=1")
    documents = [
        {**CASE, **emptied, "policy": policy}
        for emptied in ({"scores": []}, {"token_mask": [False, False]})
        for policy in policies
    ]
    outcomes = explain("-", "--json", stdin="\n".join(map(json.dumps, documents))).stdout.splitlines()
    assert len(outcomes) == len(documents)
    for outcome in map(json.loads, outcomes):
        assert outcome["active"] == outcome["kept"] == outcome["pruned"] == []
        assert outcome["f_before"] == outcome["f_after"] == outcome["removed_importance"] == 0
        assert all(row == [-1, -1] for row in outcome["topk_ids"])


def test_a_missing_file_and_a_damaged_one_are_clear_errors(tmp_path: Path) -> None:
    damaged = tmp_path / "case.json"
    damaged.write_bytes(b"\xff\x00{")
    for name in (tmp_path / "absent.json", tmp_path / "absent.jsonl", damaged):
        result = explain(str(name), "--json")
        assert result.returncode == 1
        assert result.stdout == ""
        assert result.stderr.startswith("caee: ")
        assert "Traceback" not in result.stderr


def test_the_table_counts_the_experts_and_names_them(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASE))
    shown = " ".join(explain(str(file)).stdout.split())
    for row in (
        "active experts 4 (experts 0, 1, 2, 3)",
        "mandatory experts 2 (experts 0, 3)",
        "kept experts 3 (experts 0, 1, 3)",
        "pruned experts 1 (expert 2)",
    ):
        assert row in shown
    file.write_text(json.dumps({**CASE, "policy": "router"}))
    assert "pruned experts 0 " in " ".join(explain(str(file)).stdout.split())


def test_of_many_experts_the_first_are_named() -> None:
    count = 200
    scores = [[1.0 / (1 + expert) for expert in range(count)]]
    case = {"scores": scores, "top_k": count, "placement": [0] * count, "cost": [1e-3] * count, "policy": "router"}
    shown = " ".join(explain("-", stdin=json.dumps(case)).stdout.split())
    assert "active experts 200 (experts 0, 1, " in shown
    assert "31, …)" in shown


def test_every_error_of_a_file_names_it(tmp_path: Path) -> None:
    for content in (
        "{not json",
        "[]",
        "{}",
        json.dumps({**CASE, "top_k": 9}),
        json.dumps({**CASE, "rate": [2, 0, 0, 0]}),
    ):
        for name, where in (("bad.json", ""), ("bad.jsonl", ", line 1")):
            file = tmp_path / name
            file.write_text(content)
            result = explain(str(file))
            assert result.returncode == 1
            assert f"caee: {file}{where}: " in result.stderr
        assert "caee: standard input, line 1: " in explain("-", stdin=content).stderr
    absent = tmp_path / "absent.json"
    assert explain(str(absent)).stderr.count(str(absent)) == 1


def test_every_key_of_a_case_is_in_the_help_and_the_docs() -> None:
    told = " ".join(explain("--help").stdout.split())
    docs = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    for key in KEYS:
        assert key in told
        assert f"`{key}`" in docs
