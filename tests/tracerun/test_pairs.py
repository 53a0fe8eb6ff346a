"""Interleaved pairs: how many there are, in which order, what survives of them, and what is said of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes.fingerprint import take_fingerprint
from runtime.pairs import MOST_PAIRS, PassesOfRanks, how_many_pairs, measure_pairs
from runtime.recording import PassRecord
from runtime.tracerun.options import TraceRunOptions
from runtime.tracerun.record import trace_run_record
from runtime.tracerun.session import TraceRunSession

Options = Callable[..., TraceRunOptions]
Open = Callable[[TraceRunOptions], TraceRunSession]


@pytest.mark.parametrize(
    ("asked", "pass_seconds", "expected"),
    [(None, 1.0, 10), (None, 1.01, 9), (None, 60.0, 3), (None, 1e-3, MOST_PAIRS), (2, 1.0, 2), (99, 60.0, 99)],
)
def test_as_many_pairs_as_were_asked_for_or_as_fit(
    asked: int | None, pass_seconds: float, expected: int, make_options: Options, open_session: Open
) -> None:
    session = open_session(make_options(pairs=asked, seconds_for_pairs=20.0))
    assert how_many_pairs(session, pass_seconds, fewest=3) == expected


def test_the_order_alternates_and_every_complete_pair_is_kept(
    make_options: Options, open_session: Open, tmp_path: Path
) -> None:
    partial = tmp_path / "partial.pickle"
    session = open_session(make_options(partial_file=partial))
    order, kept = [], []

    def run_pass(pair: int, with_policy: bool) -> PassRecord:
        order.append((pair, with_policy))
        kept.append(pickle.loads(partial.read_bytes()) if partial.exists() else None)
        return PassRecord(ttft_seconds=None, tpot_seconds=pair + 0.5 * with_policy, token_ids=[], steps=[])

    def of_one_rank(*passes: PassesOfRanks) -> list[list[float]]:
        return [[record.tpot_seconds for record in records] for (records,) in passes]

    passes = measure_pairs(session, 3, run_pass, of_one_rank)
    assert order == [(0, False), (0, True), (1, True), (1, False), (2, False), (2, True)]
    assert of_one_rank(*passes) == [[0, 1, 2], [0.5, 1.5, 2.5]]
    assert kept == [None, None, [[0], [0.5]], [[0], [0.5]], [[0, 1], [0.5, 1.5]], [[0, 1], [0.5, 1.5]]]
    assert pickle.loads(partial.read_bytes()) == [[0, 1, 2], [0.5, 1.5, 2.5]]


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"pairs": 3, "cache_experts": 36}, None, []),
        ({"pairs": 2}, None, ["fewer than 3 pairs"]),
        ({"pairs": 3, "cache_experts": 37}, None, ["--cache-experts 37: a device holds 36, all cached"]),
        ({"pairs": 3}, "refused", ["reads were not direct (refused)"]),
        ({"pairs": 3, "tier": "host"}, "refused", []),
    ],
)
def test_what_is_not_as_asked_is_said(
    changes: dict[str, Any],
    reason: str | None,
    said: list[str],
    make_options: Options,
    open_session: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason is not None:
        monkeypatch.setattr("probes.disk._open_direct", lambda path: (-1, reason))
    options = make_options(**changes)
    report = open_session(options).run()
    record = trace_run_record(options, report, take_fingerprint(options.devices, options.folder), "tiny")
    remarks = ("fewer than", "--cache-experts", "reads were")
    found = [each for each in record.warnings if each.startswith(remarks)]
    assert [each.startswith(start) for each, start in zip(found, said, strict=True)] == [True] * len(said)
