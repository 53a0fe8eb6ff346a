"""Probes, calibrations, drift checks and findings about the machine, as tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from probes.checkup import Finding
from probes.drift import CheckedLink, DriftReport
from probes.records import (
    Calibration,
    Device,
    Field,
    LayerModel,
    LinkGroup,
    LinkMeasurement,
    LinkModel,
    LinkStatus,
    ModelForm,
    Probe,
)
from probes.text import printable
from probes.units import format_rate, format_seconds, format_size
from reports.remarks import grouped_remarks, link_name
from reports.tables import Sheet

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_COLOURS = {"ok": "green", "holds": "green", "unstable": "yellow", "poor": "yellow", "note": "yellow"}
_COLOURS |= {"broken": "red", "drifted": "red", "fail": "red", "waived": "dim", "not checked": "dim"}


def probe_tables(probe: Probe) -> list[RenderableType]:
    """Bandwidths of what was measured, why the rest was not, shared links, and what makes figures doubtful."""
    measured = [link for link in probe.links if link.status is not LinkStatus.WAIVED]
    table = Sheet(
        f"Probe {probe.probe_id}: {_devices(probe.devices)}",
        ("link", "at once", "status", "bandwidth", "p05 – p95", "smallest transfer", "burst"),
    )
    for link in measured:
        table.add_row(*_link_row(link))
    return [
        table,
        *_lines(_waived(probe.links)),
        *_lines(_groups(probe.link_groups)),
        *_lines(grouped_remarks((link, (*filter(None, [link.reason]), *link.warnings)) for link in measured)),
        *_lines(probe.warnings),
    ]


def calibration_tables(calibration: Calibration) -> list[RenderableType]:
    """One row for each cost model, then shared links and warnings."""
    table = Sheet(
        f"Calibration {calibration.calibration_id} from {calibration.origin} {calibration.probe_id or ''}".rstrip(),
        ("link", "at once", "form", "α", "B", "B/α (95 %)", "β (95 %)", "n½", "hold-out", "worst", "status"),
    )
    for model in calibration.models:
        table.add_row(*_model_row(model))
    return [
        table,
        *([layers_table(calibration.layers)] if calibration.layers else []),
        *([_facts_table(calibration.facts)] if calibration.facts else []),
        *_lines(_groups(calibration.link_groups)),
        *_lines(grouped_remarks((model, model.warnings) for model in calibration.models)),
        *_lines(calibration.warnings),
    ]


def layers_table(layers: Sequence[LayerModel]) -> Sheet:
    """Layers on the device by kernel and weight type: the JSON holds every shape."""
    table = Sheet(
        "Layer time by activated experts",
        ("kernel", "weights", "shapes", "lines", "β", "per expert", "hold-out", "poor"),
    )
    kinds = sorted({(layer.shape.kernel, layer.shape.dtype) for layer in layers})
    for kernel, dtype in kinds:
        found = [layer for layer in layers if (layer.shape.kernel, layer.shape.dtype) == (kernel, dtype)]
        errors = [layer.holdout_error for layer in found if layer.holdout_error is not None]
        table.add_row(
            printable(kernel),
            printable(dtype),
            str(len(found)),
            str(sum(layer.fit.form is ModelForm.AFFINE for layer in found)),
            _span([layer.fit.beta_seconds for layer in found]),
            _span([layer.fit.seconds_per_expert for layer in found]),
            _share(statistics.median(errors) if errors else None),
            str(sum(layer.status == "poor" for layer in found)),
        )
    return table


def _facts_table(facts: Mapping[str, Field]) -> Sheet:
    table = Sheet("What the import says of its machine", ("fact", "value"))
    for name, fact in facts.items():
        table.add_row(printable(name), printable(str(fact.value) if fact.value is not None else f"– ({fact.reason})"))
    return table


def _span(seconds: Sequence[float]) -> str:
    return f"{format_seconds(min(seconds))} – {format_seconds(max(seconds))}"


def drift_tables(report: DriftReport) -> list[RenderableType]:
    """Predicted and measured times of each link, then the verdict."""
    table = Sheet(
        f"Calibration {report.calibration_id} against new measurements",
        ("link", "size", "predicted", "expected within", "measured", "verdict"),
    )
    for link in report.links:
        for row in _drift_rows(link):
            table.add_row(*row)
    return [table, *_lines([report.summary])]


def findings_table(findings: Sequence[Finding]) -> Sheet:
    """What the machine can and cannot do."""
    table = Sheet("This machine", ("what", "status", "why", "what to do"))
    for finding in findings:
        table.add_row(finding.what, _status(finding.status), printable(finding.detail), printable(finding.fix or ""))
    return table


def _link_row(link: LinkMeasurement) -> tuple[str | Text, ...]:
    rates = link.bandwidth_bytes_per_s
    smallest = min(link.samples, key=lambda sample: sample.size_bytes, default=None)
    latency = sorted(smallest.seconds)[len(smallest.seconds) // 2] if smallest else None
    return (
        link_name(link),
        _together(link),
        _status(link.status),
        format_rate(rates.median) if rates else "–",
        f"{format_rate(rates.p05)} – {format_rate(rates.p95)}" if rates else "–",
        f"{format_seconds(latency)} for {format_size(smallest.size_bytes)}" if smallest and latency else "–",
        format_rate(link.burst_bytes_per_s) if link.burst_bytes_per_s else "–",
    )


def _model_row(model: LinkModel) -> tuple[str | Text, ...]:
    effective = f"{format_rate(model.bandwidth_bytes_per_s / model.alpha)}"
    beta = format_seconds(model.beta_seconds)
    if model.ci95 is not None:
        low, high = model.ci95.effective_bandwidth_bytes_per_s
        effective += f" ({format_rate(low)} – {format_rate(high)})"
        low, high = model.ci95.beta_seconds
        beta += f" ({format_seconds(low)} – {format_seconds(high)})"
    segments = f" ({len(model.segments)})" if model.segments else ""
    return (
        link_name(model),
        _together(model),
        f"{model.form}{segments}",
        f"{model.alpha:.3f}",
        format_rate(model.bandwidth_bytes_per_s),
        effective,
        beta,
        format_size(model.n_half_bytes),
        _share(model.holdout_mape),
        _share(model.max_relative_error),
        _status(model.status),
    )


def _drift_rows(link: CheckedLink) -> Iterable[tuple[str | Text, ...]]:
    if not link.sizes:
        yield (link.name, "–", "–", "–", printable(link.reason or "not measured"), _status("not checked"))
    for size in link.sizes:
        yield (
            link.name,
            format_size(size.size_bytes),
            format_seconds(size.predicted_seconds),
            f"{format_seconds(size.low_seconds)} – {format_seconds(size.high_seconds)}",
            format_seconds(size.measured_seconds) + (" outside" if size.outside else ""),
            _status("drifted" if link.drifted else "holds"),
        )


def _waived(links: Sequence[LinkMeasurement]) -> list[str]:
    """One line for each reason, with the kinds of links that it stands in the way of."""
    by_reason: dict[str, list[str]] = {}
    for link in links:
        if link.status is LinkStatus.WAIVED:
            names = by_reason.setdefault(link.reason or "no reason known", [])
            name = link.kind.replace("_", " ")
            if name not in names:
                names.append(name)
    return [f"not measured: {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _groups(groups: Sequence[LinkGroup]) -> list[str]:
    return [
        f"devices {', '.join(map(str, group.devices))} share {group.kind.replace('_', ' ')}: factor {group.factor:.2f} "
        f"({1 / len(group.devices):.2f}: undisturbed, 1: one at a time)"
        for group in groups
    ]


def _devices(devices: Sequence[Device]) -> str:
    return f"{len(devices)} × {devices[0].name} ({devices[0].kind})"


def _together(link: LinkMeasurement | LinkModel) -> str:
    return str(link.concurrency)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _status(status: str) -> Text:
    from rich.text import Text

    return Text(status, style=_COLOURS.get(status, ""))


def _lines(texts: Iterable[str]) -> list[Text]:
    from rich.text import Text

    return [Text(printable(f"· {text}")) for text in texts if text]
