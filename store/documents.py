"""The JSON documents of a stored run and a stored policy, as other programs read them. Keys stay, and are added to."""

from __future__ import annotations

import dataclasses
from typing import Any

from store.records import PassStatistics, PolicyRecord, RunRecord


def run_document(record: RunRecord) -> dict[str, Any]:
    """Schema ``caee.run/1``. Times in seconds, sizes in bytes; unknown is None.

    The ``batch_size`` of a trace's own steps is ``recorded``, as in a simulation's document.
    """
    document = dataclasses.asdict(record)
    document["policy"] = {"name": record.policy.name, **record.policy.parameters}
    document["baseline"] = _pass(record.baseline)
    document["with_policy"] = _pass(record.with_policy)
    del document["gain_ttft"], document["gain_tpot"]
    document["gain"] = {
        name: None if ratio is None else {**dataclasses.asdict(ratio), "outside_noise": ratio.outside_noise}
        for name, ratio in (("ttft", record.gain_ttft), ("tpot", record.gain_tpot))
    }
    say_tokens_per_step(document)
    return {"schema": "caee.run/1", **document}


def say_tokens_per_step(run: dict[str, Any]) -> None:
    """Say in a run's document that a trace's own steps were ``recorded``, and how many tokens one has on average. The
    record itself has this number as its ``batch_size``, and a decoded record of an export needs it there."""
    if (replay := run.get("replay")) is None:
        return
    replay["tokens_per_step"] = run["workload"]["batch_size"]
    if replay["recorded"]:
        run["workload"]["batch_size"] = "recorded"


def _pass(statistics: PassStatistics) -> dict[str, Any]:
    return dataclasses.asdict(statistics)


def policy_document(record: PolicyRecord) -> dict[str, Any]:
    """Schema ``caee.policy/1``. Losses in nats per token, rises and drops as shares."""
    document = dataclasses.asdict(record)
    if record.policy is not None:
        document["policy"] = {"name": record.policy.name, **record.policy.parameters}
    return {"schema": "caee.policy/1", **document}
