"""Text of someone else's making, before it reaches a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with control sequences shown, not obeyed; line breaks and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)
