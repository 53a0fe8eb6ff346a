"""Colours and layout of every figure. A light colour names its role; the page swaps it for its dark counterpart."""

from __future__ import annotations

from typing import Any

INK = "#1c2430"
MUTED = "#5b6675"
GRID = "#e4e8ed"
PAPER = "#ffffff"
BEFORE = "#818e9e"
AFTER = "#0f766e"
BLUE = "#3f6ea3"
PALE_BLUE = "#7a9bc0"
FETCH = "#c2702a"
EXCHANGE = "#7566b8"
DECIDE = "#a8577e"
DENSE = "#94a0ae"
OLIVE = "#67822f"

SERIES = (AFTER, FETCH, BLUE, DECIDE, OLIVE, EXCHANGE, BEFORE)
LOAD_SCALE = ("#f3f5f8", "#cdd9e6", "#8fabc8", "#4a749f", "#1e4068")
DIFFERENCE_SCALE = ("#0e756d", "#8cc5be", "#f4f5f7", "#e6b48a", "#b5530b")

DARK = {
    INK: "#e8ecf1",
    MUTED: "#a3aebb",
    GRID: "#2b333d",
    PAPER: "#171c22",
    BEFORE: "#8a97a7",
    AFTER: "#3cb8aa",
    BLUE: "#6ea3dd",
    PALE_BLUE: "#4c7196",
    FETCH: "#e2924d",
    EXCHANGE: "#a596e8",
    DECIDE: "#d987ad",
    DENSE: "#75818f",
    OLIVE: "#9dbd62",
    **dict(zip(LOAD_SCALE, ("#1c222a", "#23405f", "#356695", "#649cd0", "#b5d8f7"), strict=True)),
    **dict(zip(DIFFERENCE_SCALE, ("#3db9ab", "#1f5f5a", "#20262e", "#6b4a25", "#eea54f"), strict=True)),
}

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_AXIS: dict[str, Any] = {
    "automargin": True,
    "gridcolor": GRID,
    "linecolor": MUTED,
    "zeroline": False,
    "zerolinecolor": MUTED,
    "ticks": "outside",
    "ticklen": 6,
    "tickcolor": "rgba(0,0,0,0)",
    "title": {"font": {"size": 12, "color": MUTED}, "standoff": 10},
    "tickfont": {"size": 12, "color": MUTED},
}

# Sent to the page once, as the template of every figure.
TEMPLATE: dict[str, Any] = {
    "layout": {
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "colorway": list(SERIES),
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 12, "color": INK},
            "bgcolor": "rgba(0,0,0,0)",
            "itemclick": False,
            "itemdoubleclick": False,
        },
        "hoverlabel": {"font": {"family": FONT, "size": 12}, "bgcolor": PAPER, "bordercolor": MUTED, "align": "left"},
        "bargap": 0.36,
        "bargroupgap": 0.06,
        "dragmode": False,
    }
}


def colour_scale(colours: tuple[str, ...]) -> list[list[float | str]]:
    """Evenly spaced plotly colour scale."""
    return [[at / (len(colours) - 1), colour] for at, colour in enumerate(colours)]
