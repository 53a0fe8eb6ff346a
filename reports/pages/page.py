"""The content of a page, free of markup."""

from __future__ import annotations

from dataclasses import dataclass

from reports.figures.card import Card, Section
from reports.info.keyfigures import KeyFigure


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """``tone`` colours the badge: ``good``, ``bad`` or ``neutral``; ``facts`` are label and value. ``sentences`` are
    for any reader, ``details`` for who wants to know how it was decided."""

    title: str
    facts: tuple[tuple[str, str], ...]
    badge: str
    tone: str
    headline: str
    sentences: tuple[str, ...]
    details: tuple[str, ...]
    next_steps: tuple[str, ...]
    key_figures: tuple[KeyFigure, ...]
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]

    @property
    def cards(self) -> tuple[Card, ...]:
        return tuple(card for section in self.sections for card in section.cards)
