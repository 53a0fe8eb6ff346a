"""A page as Markdown: the verdict, and every table that a person would read to its end."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from reports.figures.card import Card
from reports.pages.page import Page

MOST_ROWS = 40
_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")


def markdown_page(page: Page) -> str:
    """GitHub-flavoured Markdown; whatever came from outside is escaped."""
    lines = [f"# {page.title}", "", f"**{escaped(page.headline)}**", ""]
    lines += [f"- {label}: {escaped(value)}" for label, value in page.facts]
    lines += ["", *(line for sentence in page.sentences for line in (escaped(sentence), ""))]
    lines += _figures(page)
    lines += _bullets("What to try next", page.next_steps)
    lines += _bullets("Warnings", page.warnings)
    lines += _bullets("How this was decided", page.details)
    for section in page.sections:
        lines += [f"## {section.title}", ""]
        for card in section.cards:
            lines += _card(card)
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """``text`` so that Markdown and the HTML within it show it as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _figures(page: Page) -> list[str]:
    if not page.key_figures:
        return []
    rows = [(each.label, each.before, each.after, each.change, each.interval) for each in page.key_figures]
    return [*_table(("", "before", "after", "change", "certainty"), rows), ""]


def _bullets(title: str, items: Sequence[str]) -> list[str]:
    return [f"**{title}**", "", *(f"- {escaped(item)}" for item in items), ""] if items else []


def _card(card: Card) -> list[str]:
    lines = [f"### {card.title}", "", escaped(card.lede), ""]
    lines += [f"- {escaped(panel.alt)}" for panel in card.panels]
    if card.panels:
        lines.append("")
    columns, rows = card.table.columns, card.table.rows
    shown = [[column.shown(cell) for column, cell in zip(columns, row, strict=True)] for row in rows[:MOST_ROWS]]
    lines += _table([column.title if column.scaled else column.heading for column in columns], shown)
    if len(rows) > MOST_ROWS:
        lines += ["", f"… {len(rows) - MOST_ROWS:,} more rows: caee report --format csv-dir writes them all."]
    return [*lines, ""]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [
        line([escaped(heading) for heading in headings]),
        line(["---"] * len(headings)),
        *(line([escaped(cell) for cell in row]) for row in rows),
    ]
