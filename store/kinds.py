"""The kinds of records: what each is called in a list, what it was made from, and its whole JSON document."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from probes.errors import StoreError
from probes.records import Calibration, Fingerprint, LinkStatus, Probe
from probes.text import plural
from store.codec import decode, digest, encode, from_text, to_text
from store.entries import RecordKind
from store.records import PolicyRecord, RunRecord

# As long as the column.
MOST_ID_CHARACTERS = 128

# Named in a simulation's summary.
MOST_POLICIES = 3

Record = Probe | Calibration | PolicyRecord | RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A record as it goes into the store: its whole document and what lists and checks need. ``created_at`` in UTC."""

    kind: RecordKind
    record_id: str
    created_at: str
    summary: str
    machine: str | None
    needs: tuple[str, ...]
    document: dict[str, Any]


def kept(record: Record) -> Kept:
    """``record`` ready to be written. Raises ``StoreError`` where it holds what JSON cannot."""
    if isinstance(record, Probe):
        return _kept(record, RecordKind.PROBE, record.probe_id, _probe_summary(record), ())
    needs: tuple[str | None, ...]
    if isinstance(record, Calibration):
        needs = (record.probe_id,)
        return _kept(record, RecordKind.CALIBRATION, record.calibration_id, _calibration_summary(record), needs)
    if isinstance(record, PolicyRecord):
        needs = (record.calibration_id,)
        return _kept(record, RecordKind.POLICY, record.policy_id, _policy_summary(record), needs)
    origin = record.policy_origin
    needs = (record.calibration_id, None if origin is None else origin.policy_id)
    return _kept(record, RecordKind.RUN, record.run_id, _run_summary(record), needs)


def kept_simulation(simulation_id: str, created_at: str, document: dict[str, Any]) -> Kept:
    """The document of a simulation, which is kept as ``caee simulate`` printed it."""
    return Kept(
        kind=RecordKind.SIMULATION,
        record_id=_identifier(simulation_id),
        created_at=_in_utc(created_at),
        summary=_simulation_summary(document),
        machine=None,
        needs=(),
        document=from_text(to_text(encode(document))),
    )


def revive(kind: RecordKind, document: Any) -> Record:
    """The record that ``document`` was made from. Raises ``StoreError`` naming the field that does not fit."""
    if kind is RecordKind.PROBE:
        return decode(document, Probe)
    if kind is RecordKind.CALIBRATION:
        return decode(document, Calibration)
    if kind is RecordKind.POLICY:
        return decode(document, PolicyRecord)
    if kind is RecordKind.RUN:
        return decode(document, RunRecord)
    raise StoreError(f"a {kind} is a plain document")


def rekept(kind: RecordKind, record_id: str, created_at: str, document: Any) -> Kept:
    """``document``, from a file or from the tables, checked against its kind, id and date. Raises ``StoreError``."""
    if kind is RecordKind.SIMULATION:
        if not isinstance(document, dict):
            raise StoreError("simulation: expected an object with named fields")
        return kept_simulation(record_id, created_at, document)
    found = kept(revive(kind, document))
    if (found.record_id, found.created_at) != (record_id, created_at):
        raise StoreError(f"the document says {found.record_id} of {found.created_at}, not {record_id} of {created_at}")
    return found


def machine_digest(fingerprint: Fingerprint) -> str:
    """Equal for two fingerprints exactly when no identity field changed; an unknown field counts as absent."""
    known = {name: field.value for name, field in fingerprint.identity.items() if field.value is not None}
    return digest(known)


def _identifier(text: str) -> str:
    """An id that can be typed: anything printable, without spaces."""
    if not text or len(text) > MOST_ID_CHARACTERS or not text.isprintable() or " " in text:
        raise StoreError(f"{text[:MOST_ID_CHARACTERS]!r} cannot be an id", hint="printable characters without spaces")
    return text


def _in_utc(created_at: str) -> str:
    """The same moment in UTC, so that text sorts as time does; without an offset it is taken for UTC."""
    try:
        moment = datetime.fromisoformat(created_at)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    except (ValueError, OverflowError) as error:
        raise StoreError(f"created_at is no ISO 8601 date: {created_at!r}") from error


def _kept(record: Record, kind: RecordKind, record_id: str, summary: str, needs: tuple[str | None, ...]) -> Kept:
    return Kept(
        kind=kind,
        record_id=_identifier(record_id),
        created_at=_in_utc(record.created_at),
        # A lone surrogate (from a file name that is no UTF-8) cannot be a column's text.
        summary=summary.encode("utf-8", "backslashreplace").decode(),
        machine=None if record.fingerprint is None else machine_digest(record.fingerprint),
        needs=tuple(dict.fromkeys(needed for needed in needs if needed is not None)),
        # There and back once: a record that could not be read again is refused here, before anything is written.
        document=encode(revive(kind, encode(record))),
    )


def _probe_summary(probe: Probe) -> str:
    waived = sum(link.status is LinkStatus.WAIVED for link in probe.links)
    measured = len(probe.links) - waived
    return f"{plural(len(probe.devices), 'device')}, {plural(measured, 'link')} measured, {waived} waived"


def _calibration_summary(calibration: Calibration) -> str:
    source = calibration.origin if calibration.probe_id is None else f"probe {calibration.probe_id}"
    return f"{plural(len(calibration.models), 'cost model')} from {source}"


def _run_summary(run: RunRecord) -> str:
    return f"{run.model} on {plural(len(run.devices), 'device')}, {run.policy}: TPOT × {run.gain_tpot.ratio:.3f}"


def _policy_summary(record: PolicyRecord) -> str:
    limit, devices = record.search.max_quality_drop, plural(len(record.devices), "device")
    found = f"no setting of {record.search.knob}" if record.policy is None else str(record.policy)
    return f"{record.model} on {devices}, tier {record.tier}: {found} within a loss of {100 * limit:.3g} %"


def _simulation_summary(document: dict[str, Any]) -> str:
    """What was replayed, where, under which policies. A document is not checked: what is not there is not named."""
    results = document.get("policies")
    if not isinstance(results, list):
        return "a simulation"
    devices = _inner(document, "machine", "devices")
    where = (
        _inner(document, "trace", "model") or _inner(document, "trace", "path"),
        plural(devices, "device") if isinstance(devices, int) else None,
    )
    written = (each.get("written") for each in results if isinstance(each, dict))
    policies = list(dict.fromkeys(text for text in written if isinstance(text, str)))
    more = [f"{len(policies) - MOST_POLICIES} more"] if len(policies) > MOST_POLICIES else []
    listed = ", ".join([*policies[:MOST_POLICIES], *more])
    what = "; ".join(filter(None, (listed, plural(len(results), "result"))))
    summary = ": ".join(filter(None, (" on ".join(str(part) for part in where if part), what)))
    return summary.encode("utf-8", "backslashreplace").decode()


def _inner(document: dict[str, Any], name: str, field: str) -> Any:
    inside = document.get(name)
    return inside.get(field) if isinstance(inside, dict) else None
