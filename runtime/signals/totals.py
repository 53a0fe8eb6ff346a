"""Running sums over the steps of a run, by pass, phase and policy: behind the metrics endpoint and the live table."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runtime.signals.step import BrakeState, StepsHeader, StepSignal

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the step times' histogram; one bucket more takes the rest."""


@dataclass(frozen=True, slots=True, order=True)
class Series:
    """What sums are kept apart by. ``policy``: its name alone, so that a search over parameters stays one series."""

    pass_kind: str
    phase: str
    policy: str


@dataclass(slots=True, kw_only=True)
class Sums:
    """Over all steps of one series. ``seconds_buckets``: steps by ``SECONDS_BOUNDS``, each step in one bucket.

    ``removed``: importance, in shares of one token at one layer, of ``token_layers`` in all. ``last``: the latest step.
    """

    steps: int = 0
    tokens: int = 0
    token_layers: int = 0
    removed: float = 0.0
    rerouted_slots: int = 0
    fallbacks: int = 0
    seconds: float = 0.0
    seconds_buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    fetches: list[int] = field(default_factory=list)
    dispatches: list[int] = field(default_factory=list)
    decide_seconds: float = 0.0
    fetch_wait_seconds: float = 0.0
    experts_seconds: float = 0.0
    exchange_seconds: float = 0.0
    last: StepSignal | None = None

    def add(self, signal: StepSignal, moe_layers: int) -> None:
        """Count ``signal`` in."""
        self.steps += 1
        self.tokens += signal.tokens
        self.token_layers += signal.tokens * moe_layers
        self.removed += (signal.removed_importance or 0.0) * signal.tokens * moe_layers
        self.rerouted_slots += signal.rerouted_slots
        self.fallbacks += signal.fallbacks
        self.seconds += signal.seconds
        self.seconds_buckets[sum(signal.seconds > bound for bound in SECONDS_BOUNDS)] += 1
        self.fetches = _added(self.fetches, signal.fetches)
        self.dispatches = _added(self.dispatches, signal.dispatches)
        self.decide_seconds += signal.decide_seconds
        self.fetch_wait_seconds += signal.fetch_wait_seconds
        self.experts_seconds += signal.experts_seconds
        self.exchange_seconds += signal.exchange_seconds
        self.last = signal

    @property
    def hit_rate(self) -> float | None:
        """Share of dispatched experts that needed no fetch."""
        dispatched = sum(self.dispatches)
        return 1 - sum(self.fetches) / dispatched if dispatched else None

    @property
    def removed_importance(self) -> float | None:
        """Per real token and layer."""
        return self.removed / self.token_layers if self.token_layers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All sums at one moment. ``header`` is None and everything empty before the model is loaded."""

    header: StepsHeader | None
    series: dict[Series, Sums]
    brake: BrakeState | None
    latest: StepSignal | None


class StepTotals:
    """Sums that one thread adds to while others read ``snapshot``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._header: StepsHeader | None = None
        self._series: dict[Series, Sums] = {}
        self._latest: StepSignal | None = None

    def add(self, told: StepsHeader | StepSignal) -> None:
        """Count one line of the steps in."""
        with self._lock:
            if isinstance(told, StepsHeader):
                self._header = told
                return
            layers = self._header.moe_layers if self._header else 0
            key = Series(told.pass_kind, told.phase, told.policy.partition(":")[0])
            self._series.setdefault(key, Sums()).add(told, layers)
            self._latest = told

    def snapshot(self) -> Snapshot:
        """A copy, in the order of the series."""
        with self._lock:
            return Snapshot(
                header=self._header,
                series={key: _copy(self._series[key]) for key in sorted(self._series)},
                brake=self._latest.brake if self._latest else None,
                latest=self._latest,
            )


def _copy(sums: Sums) -> Sums:
    # ``add`` makes new lists of fetches and dispatches, but counts up the buckets in place.
    return replace(sums, seconds_buckets=list(sums.seconds_buckets))


def _added(totals: Sequence[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(totals, more, strict=True)] if totals else list(more)
