"""What a page is made of: sections of cards, each with its figures and the table behind them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reports.figures import theme
from reports.info.table import DataTable

SHOWN_DIGITS = 7
LEGEND_ROW_PIXELS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Picker:
    """A choice among a panel's variants."""

    label: str
    options: tuple[str, ...]
    selected: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a picker puts in place of a panel's traces; ``layout`` is laid over the panel's own."""

    data: list[Any]
    layout: dict[str, Any]
    alt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plotly figure (``data`` and ``layout`` in its JSON form) and ``alt``, the figure in a sentence.

    With pickers there is one variant for every combination of their options, the last picker's option running
    fastest.
    """

    key: str
    data: list[Any]
    layout: dict[str, Any]
    alt: str
    title: str = ""
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """``key`` names the card in the page and its CSV. A card without panels shows its table openly."""

    key: str
    title: str
    lede: str
    table: DataTable
    panels: tuple[Panel, ...] = ()
    pickers: tuple[Picker, ...] = ()
    wide: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and its cards."""

    key: str
    title: str
    cards: tuple[Card, ...]


def paired(cards: Sequence[Card]) -> tuple[Card, ...]:
    """Half-wide cards stand two in a row; one without a partner is made wide."""
    found: list[Card] = []
    waiting: Card | None = None
    for card in cards:
        if waiting is None and not card.wide:
            waiting = card
            continue
        if waiting is not None:
            found.append(replace(waiting, wide=True) if card.wide else waiting)
        found.append(card)
        waiting = None
    return (*found, replace(waiting, wide=True)) if waiting else tuple(found)


def plain(text: str) -> str:
    """``text`` for a plotly label, which would read tags and entities in it."""
    return html.escape(text, quote=False)


def series_colour(at: int) -> str:
    """Colour of the series at this position; they repeat after seven."""
    return theme.SERIES[at % len(theme.SERIES)]


def with_legend(height: int, entries: int) -> int:
    """``height`` in pixels and room for a legend that a narrow screen breaks into a row for each entry."""
    return height + LEGEND_ROW_PIXELS * max(0, entries - 2)


def error_bars(
    values: Sequence[float], bounds: Sequence[tuple[float, float] | None], colour: str, *, thickness: float = 1.5
) -> dict[str, Any]:
    """Plotly error bars from each of ``values`` to its lower and upper bound; of no length where there are none."""
    spans = [bound or (value, value) for value, bound in zip(values, bounds, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for value, (_, high) in zip(values, spans, strict=True)],
        "arrayminus": [value - low for value, (low, _) in zip(values, spans, strict=True)],
        "color": colour,
        "thickness": thickness,
        "width": 4,
    }


def traces(*made: Any) -> list[Any]:
    """Plotly traces as plain JSON values, numbers to seven significant digits."""
    return [rounded(trace.to_plotly_json()) for trace in made]


def rounded(value: Any) -> Any:
    """``value`` with every float to seven significant digits, so that a page carries no noise digits."""
    if isinstance(value, float):
        return float(f"{value:.{SHOWN_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [rounded(inner) for inner in value]
