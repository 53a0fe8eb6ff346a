"""From a log that times one link at many sizes to a cost model, as from a probe's own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from probes.errors import ImportFormatError
from probes.fit import fit_link
from probes.ids import new_id
from probes.imports.figures import Figures, named_gpus
from probes.records import Concurrency, LinkKind, LinkMeasurement, LinkMode, LinkStatus, Sample

NO_INTERVAL = "each size was timed once: there is no interval"
# The search for segments looks at all pairs of sizes: of a denser sweep, this many spread over its range.
_MOST_SIZES = 32


def swept(
    kind: LinkKind,
    source: str,
    destination: str,
    seconds_by_size: Mapping[int, float],
    *,
    mode: LinkMode | None = None,
    concurrency: Concurrency = Concurrency.SOLO,
    convention: str = "copy",
) -> LinkMeasurement:
    """A link with one timing at each size; times of zero, which rounding makes, are left out."""
    times = _thinned(sorted((size, seconds) for size, seconds in seconds_by_size.items() if seconds > 0))
    return LinkMeasurement(
        kind=kind,
        source=source,
        destination=destination,
        mode=mode,
        concurrency=concurrency,
        status=LinkStatus.OK,
        convention=convention,
        samples=tuple(Sample(size_bytes=size, seconds=(seconds,)) for size, seconds in times),
    )


def fitted(links: Sequence[LinkMeasurement], names: Sequence[str], *, how: str) -> Figures:
    """Models of all links. Raises ``ImportFormatError``, with ``how`` to run the tool, where none can be fitted."""
    models = tuple(replace(model, ci95=None) for model in map(fit_link, links) if model is not None)
    if not models:
        raise ImportFormatError("this log times no link at three sizes or more", hint=how)
    return Figures(devices=named_gpus(names), models=models, link_groups=(), warnings=(NO_INTERVAL,))


def for_all_ranks(figures: Figures) -> Figures:
    """The models of one rank, for every device: the log gives one time for all."""
    models = [
        replace(model, model_id=new_id(), source=device.name_on_link)
        for model in figures.models
        for device in figures.devices
    ]
    return replace(figures, models=tuple(models))


def _thinned(times: list[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(times) <= _MOST_SIZES:
        return times
    smallest, largest = math.log(times[0][0]), math.log(times[-1][0])
    steps = [smallest + (largest - smallest) * at / (_MOST_SIZES - 1) for at in range(_MOST_SIZES)]
    nearest = {min(times, key=lambda row: abs(math.log(row[0]) - step)) for step in steps}
    return sorted(nearest)
