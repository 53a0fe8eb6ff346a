"""What the store keeps, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from probes.text import printable
from probes.units import format_rate, format_seconds, format_size
from reports.tables import Sheet
from store.entries import Entry, Problem

if TYPE_CHECKING:
    from rich.console import RenderableType

# The columns worth a look, of those lists that are shown as tables; any other list is shown by its length.
_COLUMNS = {
    "devices": ("index", "kind", "name", "uuid", "memory_bytes"),
    "links": (
        *("kind", "source", "destination", "mode", "concurrency", "status"),
        *("bandwidth_bytes_per_s.median", "bandwidth_bytes_per_s.n", "reason"),
    ),
    "models": (
        *("kind", "source", "destination", "mode", "concurrency", "form", "alpha", "bandwidth_bytes_per_s"),
        *("beta_seconds", "n_half_bytes", "holdout_mape", "status"),
    ),
    "link_groups": ("kind", "devices", "factor"),
    "search.points": (
        *("value", "loss_rise", "loss_rise_ci95", "nll", "removed_importance", "max_device_misses_per_step"),
        "within_limit",
    ),
    "layers": ("layer", "device_misses_before", "device_misses_after", "device_cost_before", "device_cost_after"),
    "policies": (
        *("name", "cache", "cache_experts", "time_per_step_seconds.mean", "max_device_misses_per_step"),
        *("removed_importance", "rerouted_slots"),
    ),
}


def entries_table(entries: Sequence[Entry], location: str) -> Sheet:
    """One row for each record."""
    rows = [
        (entry.kind, entry.record_id, entry.created_at[:19], format_size(entry.size_bytes), entry.summary)
        for entry in entries
    ]
    return _table(f"{location}: {len(entries)} kept", ("kind", "id", "created (UTC)", "size", "what"), rows)


def problems_view(problems: Sequence[Problem], location: str) -> Sheet | str:
    """One row for each problem, or a sentence that there is none."""
    if not problems:
        return printable(f"{location} is sound: the database and every record in it")
    rows = [("damage" if problem.damage else "note", problem.record_id or "", problem.message) for problem in problems]
    return _table(f"{location}: {len(problems)} found", ("what", "id", "problem"), rows)


def record_view(entry: Entry, document: dict[str, Any]) -> tuple[RenderableType, ...]:
    """A record's single values in one table, then a table for each list of the kinds that have columns here."""
    from rich.text import Text

    heading = f"{entry.kind} {entry.record_id} · {entry.created_at[:19]} UTC · {entry.summary}"
    facts = [(name, _text(name, value)) for name, value in _flat(document) if name not in _COLUMNS]
    tables = [_list_table(name, found) for name in _COLUMNS if (found := _at(document, name))]
    return (Text(printable(heading)), _table(None, ("field", "value"), facts), *tables)


def _at(document: dict[str, Any], name: str) -> Any:
    """What is under a name with dots, None where nothing is."""
    found: Any = document
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _list_table(name: str, items: Sequence[dict[str, Any]]) -> Sheet:
    flat = [dict(_flat(item)) for item in items]
    columns = [column for column in _COLUMNS[name] if any(item.get(column) is not None for item in flat)]
    return _table(name, columns, [[_text(column, item.get(column)) for column in columns] for item in flat])


def _flat(document: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict) and value.keys() == {"value", "reason"}:
            yield f"{prefix}{name}", f"unknown: {value['reason']}" if value["value"] is None else value["value"]
        elif isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(name: str, value: Any) -> str:
    if value is None or value in ([], {}):
        return "–"
    if isinstance(value, list):
        if len(value) > 16 or any(isinstance(item, (dict, list)) for item in value):
            return f"{len(value)} values"
        return ", ".join(_text(name, item) for item in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(name, value)
    return str(value)


def _number(name: str, value: float) -> str:
    if "bytes_per_s" in name:
        return str(value) if name.endswith(".n") else format_rate(value)
    if name.endswith("_bytes"):
        return format_size(value)
    if any(part in name for part in ("seconds", "step_times", "device_cost")):
        return format_seconds(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Sheet:
    sheet = Sheet(title, columns)
    for row in rows:
        sheet.add_row(*row)
    return sheet
