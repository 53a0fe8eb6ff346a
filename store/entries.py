"""What the store says about what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RecordKind(StrEnum):
    """What is kept. An export lists its records in this order: what others are made from comes first."""

    PROBE = "probe"
    CALIBRATION = "calibration"
    RUN = "run"
    SIMULATION = "simulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record in a list. ``size_bytes``: length of the record as JSON."""

    kind: RecordKind
    record_id: str
    created_at: str
    summary: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding of a check. ``damage`` is False where a record is whole but what it was made from is absent."""

    record_id: str | None
    message: str
    damage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Ids of the records that an import added, and of those that were there already with the same content."""

    added: tuple[str, ...]
    present: tuple[str, ...]
