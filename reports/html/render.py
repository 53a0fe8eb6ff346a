"""One HTML file with everything in it: style, script, plotly and data. The same content gives the same bytes."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from reports.figures import theme
from reports.figures.card import Card, Panel
from reports.html.bundle import as_script
from reports.pages.page import Page

if TYPE_CHECKING:
    from jinja2 import Template

_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|[kMGT]?B(?:/s)?)(?:\W|$))")
_CLOSING_TAG = re.compile(r"</(?=script)", re.IGNORECASE)


def render_page(page: Page) -> str:
    """The page as HTML. Nothing in it is fetched, and its policy (CSP) forbids fetching."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    bundle = as_script(get_plotlyjs())
    return _template().render(
        page=page,
        data=Markup(_script_json(_page_data(page))),  # escaped for a script element by _script_json
        style=Markup(_asset("style.css")),
        script=Markup(_asset("page.js")),
        plotly={"text": Markup(_CLOSING_TAG.sub(r"<\\/", bundle.text)), "module": bundle.module},
        version=version("caee"),
    )


def _page_data(page: Page) -> dict[str, Any]:
    return {
        "dark": theme.DARK,
        "template": theme.TEMPLATE,
        "cards": {card.key: _card_data(card) for card in page.cards},
    }


def _card_data(card: Card) -> dict[str, Any]:
    return {
        "counts": [len(picker.options) for picker in card.pickers],
        "panels": {panel.key: _panel_data(panel) for panel in card.panels},
        "columns": [{"key": column.key, "heading": column.heading} for column in card.table.columns],
        "rows": card.table.rows,
    }


def _panel_data(panel: Panel) -> dict[str, Any]:
    return {
        "data": panel.data,
        "layout": panel.layout,
        "alt": panel.alt,
        "variants": [
            {"data": variant.data, "layout": variant.layout, "alt": variant.alt} for variant in panel.variants
        ],
    }


def _script_json(value: Any) -> str:
    """JSON that cannot end its script element, open a comment or break a line of JavaScript."""
    text = json.dumps(_finite(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _unbroken(text: str) -> str:
    """Keeps a number and its unit on one line."""
    return _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)


def _asset(name: str) -> str:
    return files("reports.html").joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["unbroken"] = _unbroken
    environment.tests["numeric"] = lambda cell: isinstance(cell, (int, float)) and not isinstance(cell, bool)
    return environment.from_string(_asset("page.html.j2"))
