"""Which devices share a link, and how much they are in each other's way: solo against contended times.

When n devices each move one transfer of solo cost c at the same time and it takes t, the group's factor f in
F = f · Σ load is t / (n·c): 1 when the link serves one at a time, 1/n when the devices do not disturb each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from probes.records import Concurrency, Device, LinkGroup, LinkKind, LinkMeasurement, LinkMode, LinkModel, Sample

# Slower by less than this, all at once, counts as undisturbed: no group.
DISTURBED = 1.10
# Below this size latency is what is measured, not what devices share.
_SHARED_FROM_BYTES = 64 << 10
_NEAR = 4
_PREFERRED_MODES = (LinkMode.DIRECT, LinkMode.PINNED, None, LinkMode.BUFFERED, LinkMode.PAGEABLE)
_SHARED_KINDS = (
    LinkKind.HOST_MEMORY,
    LinkKind.DISK_TO_HOST,
    LinkKind.HOST_TO_DEVICE,
    LinkKind.DEVICE_TO_HOST,
)


def link_groups(
    links: Sequence[LinkMeasurement], devices: Sequence[Device], *, sizes: Sequence[int] = ()
) -> tuple[LinkGroup, ...]:
    """One group per kind of link that the devices disturb each other on.

    The factor is taken around ``sizes`` (those of the experts to be moved) where these are given, else over all sizes
    from 64 KiB on. Of several modes the one that is used for fetching counts: direct, pinned.
    """
    groups = []
    for kind in _SHARED_KINDS:
        slowdown = _slowdown([link for link in links if link.kind is kind], devices, sizes)
        by_index = {
            device.index: slowdown[device.name_on_link] for device in devices if device.name_on_link in slowdown
        }
        group = group_of(kind, by_index)
        if group is not None:
            groups.append(group)
    return tuple(groups)


def group_of(kind: LinkKind, slowdown: Mapping[int, float]) -> LinkGroup | None:
    """The devices that are slower by ``slowdown`` when all move at once, or None where fewer than two are."""
    members = sorted(index for index, ratio in slowdown.items() if ratio > DISTURBED)
    if len(members) < 2:
        return None
    mean = statistics.fmean(slowdown[index] for index in members)
    return LinkGroup(kind=kind, devices=tuple(members), factor=_factor(mean, len(members)))


def contention_factor(solo: LinkModel, contended: LinkModel, devices: int, size_bytes: int) -> float:
    """The factor of ``devices`` behind one link at one size, from its two fitted models."""
    return _factor(contended.seconds(size_bytes) / solo.seconds(size_bytes), devices)


def _factor(slowdown: float, devices: int) -> float:
    return min(1.0, max(1.0 / devices, slowdown / devices))


def _slowdown(links: Sequence[LinkMeasurement], devices: Sequence[Device], sizes: Sequence[int]) -> dict[str, float]:
    """Contended ÷ solo time by device; a link that belongs to no device in particular counts for all of them."""
    for mode in _PREFERRED_MODES:
        measured = [link for link in links if link.mode == mode and link.samples]
        found: dict[str, float] = {}
        for link in measured:
            if link.concurrency is not Concurrency.ALL:
                continue
            alone = _same_link_alone(link, measured)
            ratio = None if alone is None else _ratio(alone.samples, link.samples, sizes)
            if ratio is None:
                continue
            ends = {device.name_on_link for device in devices} & {link.source, link.destination}
            for name in ends or {device.name_on_link for device in devices}:
                found[name] = ratio
        if found:
            return found
    return {}


def _same_link_alone(link: LinkMeasurement, links: Sequence[LinkMeasurement]) -> LinkMeasurement | None:
    for other in links:
        if other.concurrency is Concurrency.SOLO and (other.source, other.destination) == (
            link.source,
            link.destination,
        ):
            return other
    return None


def _ratio(solo: Sequence[Sample], contended: Sequence[Sample], sizes: Sequence[int]) -> float | None:
    alone = {sample.size_bytes: statistics.median(sample.seconds) for sample in solo}
    ratios = {
        sample.size_bytes: statistics.median(sample.seconds) / alone[sample.size_bytes]
        for sample in contended
        if sample.size_bytes in alone
    }
    # Single sizes scatter: the neighbours of an expert's size say the same.
    chosen = [ratio for size, ratio in ratios.items() if any(near / _NEAR <= size <= near * _NEAR for near in sizes)]
    chosen = chosen or [ratio for size, ratio in ratios.items() if size >= _SHARED_FROM_BYTES]
    return statistics.median(chosen) if chosen else None
