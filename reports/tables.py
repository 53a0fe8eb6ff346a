"""The one kind of table that commands print: as wide as it must be, and stacked where the terminal is narrower.

A table whose columns fit is a table. Where they do not, long texts are folded; where even that leaves no room to read,
every row becomes a block of lines, one for each cell, under its column's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probes.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

PROSE_CHARACTERS = 32
"""A column that is wider is prose, which may be folded; a narrower one holds figures and names, which are not."""

FEWEST_PROSE_CHARACTERS = 24
"""Prose in less is not readable."""

_GAP = 3


class Sheet:
    """Rows under headings, for ``Console.print``. Text from outside is never read as markup.

    ``right``: the headings, or places, of columns that are aligned to the right. ``ruled``: a line below the headings.
    """

    def __init__(
        self, title: str | None, headings: Sequence[str], *, right: Sequence[str | int] = (), ruled: bool = True
    ) -> None:
        self.title = None if title is None else printable(title)
        self.headings = tuple(headings)
        self.rows: list[tuple[Text, ...]] = []
        self._right = {place for place, heading in enumerate(headings) if heading in right or place in right}
        self._ruled = ruled

    def add_row(self, *cells: str | Text) -> None:
        """One cell for each heading."""
        from rich.text import Text

        if len(cells) != len(self.headings):
            raise ValueError(f"{len(cells)} cells under {len(self.headings)} headings")
        self.rows.append(tuple(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title is not None:
            from rich.text import Text

            yield Text(self.title, style="bold")
        widths = zip(self._widths(), self._columns(), strict=True)
        least = [_least(width, column) for width, column in widths]
        if sum(least) + _GAP * len(least) <= options.max_width:
            yield self._table()
        else:
            yield from self._blocks()

    def _columns(self) -> list[list[Text]]:
        return [list(column) for column in zip(*self.rows, strict=True)] or [[] for _ in self.headings]

    def _widths(self) -> list[int]:
        from rich.cells import cell_len

        return [
            max([cell_len(heading), *(_width(cell) for cell in column)])
            for heading, column in zip(self.headings, self._columns(), strict=True)
        ]

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        if self._ruled:
            table = Table(box=box.SIMPLE_HEAD)
        else:
            table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for place, (heading, width) in enumerate(zip(self.headings, self._widths(), strict=True)):
            table.add_column(
                Text(heading),
                justify="right" if place in self._right else "left",
                overflow="fold",
                no_wrap=width <= PROSE_CHARACTERS,
            )
        for row in self.rows:
            table.add_row(*row)
        return table

    def _blocks(self) -> RenderResult:
        """Each row as lines; a cell without a heading in first place is the block's own heading."""
        from rich.table import Table
        from rich.text import Text

        for row in self.rows:
            yield Text("")
            grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for place, (heading, cell) in enumerate(zip(self.headings, row, strict=True)):
                if place == 0 and not heading:
                    yield Text.assemble(cell, style="bold")
                elif cell.plain:
                    grid.add_row(Text(f"  {heading}"), cell)
            yield grid
        yield Text("")


def _least(width: int, column: Sequence[Text]) -> int:
    """Characters that a column needs to be readable."""
    if width <= PROSE_CHARACTERS:
        return width
    longest = max((len(word) for cell in column for word in cell.plain.split()), default=0)
    return max(FEWEST_PROSE_CHARACTERS, min(longest, PROSE_CHARACTERS))


def _width(cell: Text) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for line in cell.plain.splitlines()), default=0)
