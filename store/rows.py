"""A record's document taken apart into rows, and put together again. Nothing here touches a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from store.codec import digest, from_text, to_text
from store.entries import RecordKind
from store.kinds import Kept
from store.schema import DEPENDENCIES, LINKS, MODELS, POLICIES, RECORDS, RUNS, SAMPLES

Row = Mapping[str, Any]
Rows = dict[sa.Table, list[dict[str, Any]]]

# Fields that are columns; a row's `details` has the rest.
LINK_FIELDS = ("kind", "source", "destination", "mode", "concurrency", "status")
MODEL_FIELDS = (
    *("model_id", "kind", "source", "destination", "mode", "concurrency", "form"),
    *("alpha", "bandwidth_bytes_per_s", "beta_seconds", "holdout_mape", "status"),
)


def take_apart(kept: Kept) -> Rows:
    """The rows of a record, table by table, in an order that satisfies the foreign keys."""
    document = dict(kept.document)
    links = document.pop("links") if kept.kind is RecordKind.PROBE else []
    models = document.pop("models") if kept.kind is RecordKind.CALIBRATION else []
    record = {
        "record_id": kept.record_id,
        "kind": kept.kind.value,
        "created_at": kept.created_at,
        "summary": kept.summary,
        "machine": kept.machine,
        "size_bytes": len(to_text(kept.document)),
        "sha256": digest(kept.document),
        "document": to_text(document),
    }
    return {
        RECORDS: [record],
        DEPENDENCIES: [{"record_id": kept.record_id, "needed_id": needed} for needed in sorted(kept.needs)],
        LINKS: [_link_row(kept.record_id, number, link) for number, link in enumerate(links)],
        SAMPLES: [row for number, link in enumerate(links) for row in _sample_rows(kept.record_id, number, link)],
        MODELS: [_model_row(kept.record_id, number, model) for number, model in enumerate(models)],
        POLICIES: [_policy_row(kept.record_id, document)] if kept.kind is RecordKind.POLICY else [],
        RUNS: [_run_row(kept.record_id, document)] if kept.kind is RecordKind.RUN else [],
    }


def put_together(
    record: Row, *, links: Sequence[Row] = (), samples: Sequence[Row] = (), models: Sequence[Row] = ()
) -> dict[str, Any]:
    """The whole document, from rows in the order of their positions. Raises ``ValueError`` where JSON is damaged."""
    document: dict[str, Any] = from_text(record["document"])
    if record["kind"] == RecordKind.PROBE:
        document["links"] = [_whole(row, LINK_FIELDS) | {"samples": []} for row in links]
        for row in samples:
            sample = {"size_bytes": row["size_bytes"], "seconds": from_text(row["seconds"])}
            document["links"][row["link"]]["samples"].append(sample)
    if record["kind"] == RecordKind.CALIBRATION:
        document["models"] = [_whole(row, MODEL_FIELDS) for row in models]
    return document


def _whole(row: Row, fields: tuple[str, ...]) -> dict[str, Any]:
    details: dict[str, Any] = from_text(row["details"])
    return {name: row[name] for name in fields} | details


def _link_row(probe_id: str, number: int, link: dict[str, Any]) -> dict[str, Any]:
    bandwidth = link["bandwidth_bytes_per_s"]
    details = {name: value for name, value in link.items() if name not in (*LINK_FIELDS, "samples")}
    return {
        "probe_id": probe_id,
        "link": number,
        **{name: link[name] for name in LINK_FIELDS},
        "bandwidth_median_bytes_per_s": bandwidth and bandwidth["median"],
        "details": to_text(details),
    }


def _sample_rows(probe_id: str, number: int, link: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "probe_id": probe_id,
            "link": number,
            "position": position,
            "size_bytes": sample["size_bytes"],
            "seconds": to_text(sample["seconds"]),
        }
        for position, sample in enumerate(link["samples"])
    ]


def _model_row(calibration_id: str, number: int, model: dict[str, Any]) -> dict[str, Any]:
    details = {name: value for name, value in model.items() if name not in MODEL_FIELDS}
    columns = {name: model[name] for name in MODEL_FIELDS}
    return {"calibration_id": calibration_id, "position": number, **columns, "details": to_text(details)}


def _run_row(run_id: str, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "model": document["model"].encode("utf-8", "backslashreplace").decode(),
        "model_family": document["model_family"],
        "tier": document["tier"],
        "devices": len(document["devices"]),
        "policy": document["policy"]["name"],
        "policy_parameters": to_text(document["policy"]["parameters"]),
        "gain_ttft": document["gain_ttft"] and document["gain_ttft"]["ratio"],
        "gain_tpot": document["gain_tpot"]["ratio"],
    }


def _policy_row(policy_id: str, document: dict[str, Any]) -> dict[str, Any]:
    policy = document["policy"]
    return {
        "policy_id": policy_id,
        "model": document["model"].encode("utf-8", "backslashreplace").decode(),
        "model_identity": document["model_identity"],
        "tier": document["tier"],
        "devices": len(document["devices"]),
        "cache": document["cache"],
        "cache_experts": document["cache_experts"],
        "knob": document["search"]["knob"],
        "max_quality_drop": document["search"]["max_quality_drop"],
        "chosen": document["search"]["chosen"],
        "policy": policy and policy["name"],
        "policy_parameters": policy and to_text(policy["parameters"]),
    }
