"""Text of someone else's making, before it reaches a terminal, and counts in sentences."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with control sequences shown, not obeyed; line breaks and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def plural(count: int, noun: str) -> str:
    """``1 device``, ``4 devices``, ``2,000 steps``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def verb(count: int, one: str, many: str) -> str:
    """The form of a verb that agrees with ``count``: ``1 token has``, ``4 tokens have``."""
    return one if count == 1 else many


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
