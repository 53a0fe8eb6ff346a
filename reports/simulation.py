"""What ``caee simulate`` shows: a page, and tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probes.text import plural, printable
from probes.units import format_seconds
from reports.tables import Sheet

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = ("", "policy", "cache", "step", "p95", "cut", "movements/step", "gap", "removed", "front")


def simulation_page(document: dict[str, Any]) -> str:
    """One self-contained HTML page of the document that ``caee simulate --json`` prints. Raises ``InputError``."""
    from reports.html.render import render_page
    from reports.info.simulation import simulation_info
    from reports.pages.simulation import simulation_content

    return render_page(simulation_content(simulation_info(document)))


def simulation_tables(document: dict[str, Any]) -> list[RenderableType]:
    """One row for each pass of the document, then what the columns mean, and the notes."""
    from rich.text import Text

    trace, machine = document["trace"], document["machine"]
    batch = "recorded batches" if trace["batch_size"] == "recorded" else f"batch {trace['batch_size']}"
    steps = document["policies"][0]["steps"]
    shape = f"{plural(trace['moe_layers'], 'layer')} × {plural(trace['num_experts'], 'expert')}, top-{trace['top_k']}"
    heading = (
        f"{trace['model'] or 'trace'}: {shape}, {batch}, {plural(steps, 'step')} on "
        f"{plural(machine['devices'], 'device')} ({machine['origin']})"
    )
    return [
        Text(printable(heading)),
        _passes(document),
        Text(
            "cut: of the mean step time, against router on the same cache, placement and tier. movements/step: Σ over "
            "layers of the busiest device's. gap: between the busiest device and the least busy, mean over layer-steps."
            " removed: importance, per token and layer. front: nothing else is faster and removes less."
        ),
        *(Text(printable(f"note: {note}")) for note in document["notes"]),
    ]


def _passes(document: dict[str, Any]) -> Sheet:
    table = Sheet(None, _COLUMNS, right=tuple(column for column in _COLUMNS if column not in ("policy", "cache")))
    several = len({(each["tier"], each["placement"]) for each in document["policies"]}) > 1
    for place, each in enumerate(document["policies"]):
        cut = each["cut_against_router"]
        where = f"{each['cache']} {each['cache_experts']}" if each["cache"] else "in device memory"
        if several:
            where += f", {each['tier']}, {each['placement']}"
        table.add_row(
            str(place),
            each["written"],
            where,
            format_seconds(each["time_per_step_seconds"]["mean"]),
            format_seconds(each["time_per_step_seconds"]["p95"]),
            "–" if cut is None else f"{cut:.1%}",
            f"{each['max_device_misses_per_step']:.2f}",
            f"{each['gap']['mean']:.2f}",
            f"{each['removed_importance']:.4f}",
            "●" if place in document["pareto"] else "",
        )
    return table
