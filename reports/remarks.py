"""What is doubtful about links: one line for each cause, with the links that it concerns. Records hold every detail."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from probes.records import LinkMeasurement, LinkModel

# Of many links only so many are named.
MOST_NAMES = 4
_NUMBER = re.compile(r"(\d+(?:,\d+)*(?:\.\d+)?)( ?(?:%|[kMGTP]?B/s|[kMGTP]?B|[mµn]?s)(?!\w))?")
_DETAIL = re.compile(r" \([^()]*\)")
_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "m": 1e-3, "µ": 1e-6, "n": 1e-9}

Link = LinkMeasurement | LinkModel


def link_name(link: Link) -> str:
    """As in the tables: what, from where to where, and how."""
    mode = f" ({link.mode})" if link.mode else ""
    return f"{link.kind.replace('_', ' ')} {link.source} → {link.destination}{mode}"


def grouped_remarks(remarks: Iterable[tuple[Link, Sequence[str]]]) -> list[str]:
    """One line for each cause, in the order in which they first occur.

    Remarks that differ in their figures alone have one cause; the line then gives the figures' range, and leaves out
    what stands in parentheses, which is each link's own.
    """
    causes: dict[tuple[str, int], list[tuple[Link, str]]] = {}
    for link, texts in remarks:
        for text in dict.fromkeys(texts):
            causes.setdefault(_NUMBER.subn("#", _DETAIL.sub("", text)), []).append((link, text))
    return [_line(found) for found in causes.values()]


def _line(found: Sequence[tuple[Link, str]]) -> str:
    if len(found) == 1:
        link, text = found[0]
        return f"{link_name(link)}, {link.concurrency}: {text}"
    return f"{len(found)} links: {_spanned([_DETAIL.sub('', text) for _, text in found])} – {_names(found)}"


def _spanned(texts: Sequence[str]) -> str:
    """The texts' common words, with the range of each figure."""
    columns = zip(*([match[0] for match in _NUMBER.finditer(text)] for text in texts), strict=True)
    spans = iter([_span(list(column)) for column in columns])
    return _NUMBER.sub(lambda match: next(spans), texts[0])


def _span(figures: Sequence[str]) -> str:
    low, high = min(figures, key=_value), max(figures, key=_value)
    return low if low == high else f"{low} to {high}"


def _value(figure: str) -> float:
    match = _NUMBER.fullmatch(figure)
    assert match is not None
    unit = (match[2] or "").strip()
    scale = _SCALES.get(unit[0], 1.0) if len(unit) > 1 else 1.0
    return float(match[1].replace(",", "")) * scale


def _names(found: Sequence[tuple[Link, str]]) -> str:
    """Each link with the ways in which it was measured."""
    ways: dict[str, list[str]] = {}
    for link, _ in found:
        ways.setdefault(link_name(link), []).append(link.concurrency.replace("_", " "))
    named = [f"{name}, {' and '.join(dict.fromkeys(of))}" for name, of in ways.items()]
    more = f"; and {len(named) - MOST_NAMES} more" if len(named) > MOST_NAMES else ""
    return "; ".join(named[:MOST_NAMES]) + more
