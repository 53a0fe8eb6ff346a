"""A run while it runs, as a rich table: what each kind of pass has cost so far. Pure info first, then its rendering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from probes.text import printable
from reports.info.words import number, percent, plural
from runtime.signals.step import StepsHeader
from runtime.signals.totals import Series, Snapshot, Sums

if TYPE_CHECKING:
    from rich.console import Group, JustifyMethod

NAMES = ("pass", "phase", "policy")
FETCHES = "fetches\nper step"
FIGURES = ("steps", "last\nms", "mean\nms", FETCHES, "cached", "removed", "re-\nrouted")
MOST_DEVICES = 8
"""Fetches of more devices than these are shown as the mean and the busiest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveInfo:
    """The table's words: one row per kind of pass, phase and policy, in the order of ``NAMES`` and ``FIGURES``."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    caption: str


def live_info(snapshot: Snapshot) -> LiveInfo:
    """What to show of ``snapshot``."""
    return LiveInfo(
        title="loading" if snapshot.header is None else _title(snapshot.header),
        rows=tuple(_row(key, sums) for key, sums in snapshot.series.items()),
        caption=_caption(snapshot),
    )


def live_table(snapshot: Snapshot) -> Group:
    """``snapshot`` for the terminal. Names from outside are never read as markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    info = live_info(snapshot)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for heading in (*NAMES, *FIGURES):
        justify: JustifyMethod = "left" if heading in NAMES else "right"
        # On a narrow terminal only what has several figures, and they can stand below each other, gives way.
        table.add_column(heading, justify=justify, no_wrap=heading != FETCHES)
    for row in info.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # As its title the table would fold the line to its own width.
    return Group(Text(printable(info.title)), table, Text(printable(info.caption)))


def _title(header: StepsHeader) -> str:
    devices = plural(len(header.devices), "device")
    return f"{header.model} on {devices}, experts on tier {header.tier}, policy {header.policy}"


def _row(key: Series, sums: Sums) -> tuple[str, ...]:
    last = sums.last.seconds if sums.last else None
    return (
        key.pass_kind,
        key.phase,
        key.policy,
        str(sums.steps),
        number(None if last is None else last * 1e3),
        number(sums.seconds / sums.steps * 1e3),
        _fetches(sums),
        "–" if sums.hit_rate is None else percent(sums.hit_rate),
        "–" if sums.removed_importance is None else percent(sums.removed_importance),
        str(sums.rerouted_slots),
    )


def _fetches(sums: Sums) -> str:
    """By device, or of many devices the mean and the busiest."""
    per_step = [count / sums.steps for count in sums.fetches]
    if not per_step:
        return "–"
    if len(per_step) > MOST_DEVICES:
        return f"{number(sum(per_step) / len(per_step))}, busiest {number(max(per_step))}"
    return " ".join(number(count) for count in per_step)


def _caption(snapshot: Snapshot) -> str:
    latest, brake = snapshot.latest, snapshot.brake
    if latest is None:
        return ""
    said = [f"step {latest.step}, pass {latest.pass_number}"]
    if brake is not None:
        state = "engaged: the router's own choice is in force" if brake.engaged else "not engaged"
        said.append(f"brake {state}, {plural(brake.trips, 'trip')} so far")
    return "; ".join(said)
