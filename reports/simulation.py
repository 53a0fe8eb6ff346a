"""The page of ``caee simulate``."""

from __future__ import annotations

from typing import Any


def simulation_page(document: dict[str, Any]) -> str:
    """One self-contained HTML page of the document that ``caee simulate --json`` prints. Raises ``InputError``."""
    from reports.html.render import render_page
    from reports.info.simulation import simulation_info
    from reports.pages.simulation import simulation_content

    return render_page(simulation_content(simulation_info(document)))
