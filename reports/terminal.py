"""A page as rich renderables for the terminal: headline, key figures, what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.pages.page import Page

if TYPE_CHECKING:
    from rich.console import RenderableType

TONES = {"good": "green", "bad": "red", "neutral": "yellow"}


def summary(page: Page) -> list[RenderableType]:
    """The verdict for someone who has not opened the page yet. Text from outside is never read as rich markup."""
    from rich.table import Table
    from rich.text import Text

    shown: list[RenderableType] = [
        Text(page.headline, style=f"bold {TONES[page.tone]}"),
        Text(" ".join(page.sentences)),
    ]
    if page.key_figures:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("", "before", "after", "change", ""):
            table.add_column(heading, justify="left" if not heading else "right")
        for figure in page.key_figures:
            change = Text(figure.change, style=TONES[figure.tone])
            table.add_row(Text(figure.label), figure.before, figure.after, change, Text(figure.interval, style="dim"))
        shown += [Text(""), table, Text("")]
    shown += [Text(f"Next: {step}") for step in page.next_steps]
    shown += [Text(f"Warning: {warning}", style="yellow") for warning in page.warnings]
    return shown
