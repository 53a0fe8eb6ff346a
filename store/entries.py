"""What the store says about what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from probes.errors import UsageError


class RecordKind(StrEnum):
    """What is kept. An export lists its records in this order: what others are made from comes first."""

    PROBE = "probe"
    CALIBRATION = "calibration"
    POLICY = "policy"
    RUN = "run"
    SIMULATION = "simulation"


def record_kind(name: str) -> RecordKind:
    """Raises ``UsageError`` where there is no such kind."""
    try:
        return RecordKind(name)
    except ValueError as error:
        raise UsageError(f"{name!r} is no kind of record", hint=f"one of: {', '.join(RecordKind)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record in a list. ``created_at`` in UTC; ``size_bytes``: length of the record as JSON."""

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
class Checked:
    """What a check found in the store at ``location``."""

    location: str
    problems: tuple[Problem, ...]

    @property
    def damage(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.damage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Ids of the records that an import added, and of those that were there already with the same content."""

    added: tuple[str, ...]
    present: tuple[str, ...]
