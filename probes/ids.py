"""Names and dates of records."""

from __future__ import annotations

import datetime
import uuid


def new_id() -> str:
    """Twelve hexadecimal digits that no other record has."""
    return uuid.uuid4().hex[:12]


def now() -> str:
    """This moment in UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
