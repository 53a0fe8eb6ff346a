"""A table of plain values: what stands behind every figure, and what is downloaded as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from probes.units import format_flops, format_rate, format_seconds, format_size
from reports.info.words import MINUS, percent

SCALED_UNITS: dict[str, Callable[[float], str]] = {
    "s": format_seconds,
    "B": format_size,
    "B/s": format_rate,
    "FLOP/s": format_flops,
    "share": percent,
}

Cell = str | int | float | bool | None

# A spreadsheet runs a cell that starts like this as a formula, and texts come from models and prompts.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """``key`` names the column in CSV; ``title`` and ``unit`` head it on the page."""

    key: str
    title: str
    unit: str = ""

    def shown(self, cell: Cell) -> str:
        """A cell as it is read: with its unit scaled, else to six significant digits; the unknown is a dash."""
        if cell is None:
            return "–"
        if isinstance(cell, bool):
            return "yes" if cell else "no"
        if isinstance(cell, str):
            return cell
        if self.unit in SCALED_UNITS:
            return SCALED_UNITS[self.unit](cell).replace("-", MINUS)
        return (f"{cell:,}" if isinstance(cell, int) else f"{cell:.6g}").replace("-", MINUS)

    @property
    def scaled(self) -> bool:
        """Whether ``shown`` writes the unit into the cell."""
        return self.unit in SCALED_UNITS

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTable:
    """Rows of plain values, full precision; None is unknown."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def csv(self) -> str:
        """RFC 4180, with a header of column keys; an unknown value is an empty field."""
        stream = io.StringIO()
        writer = csv.writer(stream)
        writer.writerow([column.key for column in self.columns])
        writer.writerows([[_csv_cell(cell) for cell in row] for row in self.rows])
        return stream.getvalue()


def table(*columns: tuple[str, str] | tuple[str, str, str], rows: Iterable[Sequence[Cell]]) -> DataTable:
    """``DataTable`` from ``(key, title[, unit])`` and an iterable of rows."""
    made = tuple(Column(key=column[0], title=column[1], unit="".join(column[2:])) for column in columns)
    return DataTable(columns=made, rows=tuple(tuple(row) for row in rows))


def _csv_cell(cell: Cell) -> Cell:
    if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS):
        return f"'{cell}"
    return cell
