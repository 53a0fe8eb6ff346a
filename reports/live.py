"""A run while it runs, as a rich table: what each kind of pass has cost so far. Pure info first, then its rendering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from probes.text import printable
from reports.info.words import number, percent, plural
from runtime.signals.step import StepsHeader
from runtime.signals.totals import Series, Snapshot, Sums

if TYPE_CHECKING:
    from rich.table import Table

NAMES = ("pass", "phase", "policy")
FIGURES = ("steps", "last ms", "mean ms", "fetches per step", "cached", "removed", "re-routed")
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


def live_table(snapshot: Snapshot) -> Table:
    """``snapshot`` for the terminal. Names from outside are never read as markup."""
    from rich.table import Table
    from rich.text import Text

    info = live_info(snapshot)
    table = Table(
        title=Text(printable(info.title)),
        caption=Text(printable(info.caption)),
        title_justify="left",
        caption_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for heading in (*NAMES, *FIGURES):
        table.add_column(heading, justify="left" if heading in NAMES else "right", no_wrap=True)
    for row in info.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


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
