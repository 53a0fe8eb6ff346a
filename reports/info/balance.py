"""What each device pays at each layer, before and after pruning, and how unequal the devices are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from store.records import LayerCost, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBalance:
    """One layer. Movements are experts per decode step, costs seconds per step (None without a calibration), by device.

    ``imbalance_*``: busiest ÷ mean device; None where no device moved anything.
    """

    layer: int
    movements_before: tuple[float, ...]
    movements_after: tuple[float, ...]
    seconds_before: tuple[float | None, ...]
    seconds_after: tuple[float | None, ...]
    imbalance_before: float | None
    imbalance_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceInfo:
    """``before`` is the router's own choice on the very caches and tokens of ``after``."""

    devices: tuple[str, ...]
    layers: tuple[LayerBalance, ...]

    @property
    def priced(self) -> bool:
        """Whether movements have a price in seconds."""
        return all(None not in (*layer.seconds_before, *layer.seconds_after) for layer in self.layers)

    @property
    def most_relieved(self) -> LayerBalance | None:
        """The layer whose busiest device was relieved most, in movements per step."""
        return max(
            self.layers, key=lambda layer: _peak(layer.movements_before) - _peak(layer.movements_after), default=None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GapInfo:
    """Layer-steps by gap: busiest minus least busy device, in experts (paper, Fig. 5)."""

    gaps: tuple[int, ...]
    count_before: tuple[int, ...]
    count_after: tuple[int, ...]
    share_before: tuple[float, ...]
    share_after: tuple[float, ...]
    mean_before: float | None
    mean_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceInfo:
    """Mean highest and lowest importance among a layer's activated experts (paper, Fig. 4)."""

    layers: tuple[int, ...]
    highest: tuple[float, ...]
    lowest: tuple[float, ...]


def balance_info(run: RunRecord) -> BalanceInfo:
    """Per-device figures of every layer, in layer order."""
    return BalanceInfo(
        devices=tuple(device.name_on_link for device in run.devices),
        layers=tuple(
            _layer(layer, priced=run.predicted is not None)
            for layer in sorted(run.layers, key=lambda layer: layer.layer)
        ),
    )


def gap_info(run: RunRecord) -> GapInfo:
    """Gap histograms added up over layers."""
    before = sum_histograms([layer.gap_histogram_before for layer in run.layers])
    after = sum_histograms([layer.gap_histogram_after for layer in run.layers])
    length = max(len(before), len(after))
    return GapInfo(
        gaps=tuple(range(length)),
        count_before=(padded_before := _padded(before, length)),
        count_after=(padded_after := _padded(after, length)),
        share_before=_shares(padded_before),
        share_after=_shares(padded_after),
        mean_before=_mean_gap(before),
        mean_after=_mean_gap(after),
    )


def importance_info(run: RunRecord) -> ImportanceInfo | None:
    """None where no layer recorded importance."""
    known = [
        (layer.layer, layer.importance_highest, layer.importance_lowest)
        for layer in sorted(run.layers, key=lambda layer: layer.layer)
        if layer.importance_highest is not None and layer.importance_lowest is not None
    ]
    if not known:
        return None
    return ImportanceInfo(
        layers=tuple(layer for layer, _, _ in known),
        highest=tuple(highest for _, highest, _ in known),
        lowest=tuple(lowest for _, _, lowest in known),
    )


def imbalance(movements: Sequence[float]) -> float | None:
    """Busiest ÷ mean device; None where no device moved anything."""
    total = sum(movements)
    return _peak(movements) * len(movements) / total if total else None


def sum_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Counts added up by position; a shorter histogram counts 0 beyond its end."""
    length = max((len(histogram) for histogram in histograms), default=0)
    return tuple(sum(histogram[at] for histogram in histograms if at < len(histogram)) for at in range(length))


def _layer(layer: LayerCost, *, priced: bool) -> LayerBalance:
    """Without a price for an expert the record's costs are 0: they are unknown."""
    unknown = (None,) * len(layer.device_cost_before)
    return LayerBalance(
        layer=layer.layer,
        movements_before=layer.device_misses_before,
        movements_after=layer.device_misses_after,
        seconds_before=layer.device_cost_before if priced else unknown,
        seconds_after=layer.device_cost_after if priced else unknown,
        imbalance_before=imbalance(layer.device_misses_before),
        imbalance_after=imbalance(layer.device_misses_after),
    )


def _peak(movements: Sequence[float]) -> float:
    return max(movements, default=0.0)


def _padded(histogram: Sequence[int], length: int) -> tuple[int, ...]:
    return (*histogram, *(0 for _ in range(length - len(histogram))))


def _shares(histogram: Sequence[int]) -> tuple[float, ...]:
    total = sum(histogram)
    return tuple(count / total if total else 0.0 for count in histogram)


def _mean_gap(histogram: Sequence[int]) -> float | None:
    total = sum(histogram)
    return sum(gap * count for gap, count in enumerate(histogram)) / total if total else None
