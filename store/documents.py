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
    if record.replay is not None:
        document["replay"]["tokens_per_step"] = record.workload.batch_size
        if record.replay.recorded:
            document["workload"]["batch_size"] = "recorded"
    return {"schema": "caee.run/1", **document}


def _pass(statistics: PassStatistics) -> dict[str, Any]:
    return dataclasses.asdict(statistics)


def policy_document(record: PolicyRecord) -> dict[str, Any]:
    """Schema ``caee.policy/1``. Losses in nats per token, rises and drops as shares."""
    document = dataclasses.asdict(record)
    if record.policy is not None:
        document["policy"] = {"name": record.policy.name, **record.policy.parameters}
    return {"schema": "caee.policy/1", **document}
