"""What measuring and fitting yield: the dataclasses that the floors above store, use and show.

Times are in seconds, sizes in bytes, bandwidths in bytes per second. GB = 10⁹ bytes.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from enum import StrEnum


class LinkKind(StrEnum):
    """What lies between source and destination.

    The last three are collectives over all devices, timed on each of them: tokens to their experts' devices and back
    (expert parallelism), and a sum over all devices (tensor parallelism). Their sizes are the bytes one device gives.
    """

    DEVICE_MEMORY = "device_memory"
    HOST_MEMORY = "host_memory"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    DEVICE_TO_DEVICE = "device_to_device"
    DISK_TO_HOST = "disk_to_host"
    ALL_TO_ALL_DISPATCH = "all_to_all_dispatch"
    ALL_TO_ALL_COMBINE = "all_to_all_combine"
    ALL_REDUCE = "all_reduce"


class LinkMode(StrEnum):
    """How the bytes travel: page-locked or pageable host memory; disk past or through the page cache.

    ``staged``: between devices, but through host memory, as where peer access is off.
    """

    PINNED = "pinned"
    PAGEABLE = "pageable"
    DIRECT = "direct"
    BUFFERED = "buffered"
    STAGED = "staged"


class Concurrency(StrEnum):
    """Whether the link was measured alone, while every device used its own, or while bytes came the opposite way."""

    SOLO = "solo"
    ALL = "all"
    BOTH_WAYS = "both_ways"


class LinkStatus(StrEnum):
    """``broken``: bytes arrived wrong, so there is no speed. ``waived``: not measurable here, with a reason."""

    OK = "ok"
    UNSTABLE = "unstable"
    BROKEN = "broken"
    WAIVED = "waived"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Repeated timings of moving ``size_bytes`` once, in the order they were taken.

    Bytes are counted by the link's convention: inside one memory, a copy of n bytes moves 2n (``read+write``).
    """

    size_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Distribution of bytes per second over the samples at the largest sizes, which is what lasts."""

    median: float
    p05: float
    p95: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """One link, measured one way.

    ``source`` and ``destination`` are device names as in ``Device.name_on_link`` (``cpu:0``, ``cuda:1``), ``host`` or
    ``disk``. ``convention`` says how bytes are counted: ``copy`` once, ``read+write`` both ways.
    ``burst_bytes_per_s`` is set where a short burst was clearly faster than what lasts.
    """

    kind: LinkKind
    source: str
    destination: str
    mode: LinkMode | None
    concurrency: Concurrency
    status: LinkStatus
    reason: str | None = None
    convention: str = "copy"
    bandwidth_bytes_per_s: Bandwidth | None = None
    burst_bytes_per_s: float | None = None
    samples: tuple[Sample, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that can hold and run experts: a GPU, or a rank of CPU cores."""

    index: int
    kind: str
    name: str
    uuid: str | None
    memory_bytes: int | None

    @property
    def name_on_link(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One fact about the machine: a value, or the reason why it is unknown."""

    value: str | int | float | bool | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """``identity``: a change voids the cost models. ``state``: what may differ from run to run."""

    identity: dict[str, Field]
    state: dict[str, Field]

    def changed_identity(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the identity fields in which ``other`` differs, in alphabetical order."""
        names = sorted(self.identity.keys() | other.identity.keys())
        unknown = Field(value=None)
        return tuple(
            name for name in names if self.identity.get(name, unknown).value != other.identity.get(name, unknown).value
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGroup:
    """Devices behind one shared link. ``factor`` 1: the link serves one at a time; 1/n: n do not disturb each other."""

    kind: LinkKind
    devices: tuple[int, ...]
    factor: float


INTERRUPTED = "interrupted: not all links were measured"
"""The warning of a probe that was stopped by the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Everything one ``caee probe`` measured."""

    probe_id: str
    created_at: str
    fingerprint: Fingerprint
    devices: tuple[Device, ...]
    links: tuple[LinkMeasurement, ...]
    link_groups: tuple[LinkGroup, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether links are missing because the user stopped it."""
        return INTERRUPTED in self.warnings


class ModelForm(StrEnum):
    """Shape of a fitted cost model, simplest first."""

    AFFINE = "affine"
    PIECEWISE = "piecewise"
    TABLE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """``seconds = beta + size · slope`` for sizes from ``from_bytes`` on (``table``: a line between two knots)."""

    from_bytes: int
    slope_seconds_per_byte: float
    beta_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """95 % intervals, low and high."""

    effective_bandwidth_bytes_per_s: tuple[float, float]
    beta_seconds: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """C(S) = α·S/B + β of one link (arXiv:2606.29982, eq. 3), or its piecewise or tabulated form.

    B (``bandwidth_bytes_per_s``) is fixed at the link's probed peak, since α and B are not separately identifiable;
    the effective bandwidth is B/α, and ``n_half_bytes`` = β·B/α is the size that reaches half of it.
    """

    model_id: str
    kind: LinkKind
    source: str
    destination: str
    mode: LinkMode | None
    concurrency: Concurrency
    form: ModelForm
    alpha: float
    bandwidth_bytes_per_s: float
    beta_seconds: float
    n_half_bytes: float
    segments: tuple[Segment, ...] | None
    ci95: Intervals | None
    holdout_mape: float | None
    max_relative_error: float | None
    status: str
    warnings: tuple[str, ...] = ()

    def seconds(self, size_bytes: float) -> float:
        """Predicted time to move ``size_bytes`` once."""
        if not self.segments:
            return self.alpha * size_bytes / self.bandwidth_bytes_per_s + self.beta_seconds
        at = bisect.bisect_right([segment.from_bytes for segment in self.segments], size_bytes) - 1
        segment = self.segments[max(at, 0)]
        return segment.beta_seconds + size_bytes * segment.slope_seconds_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFit:
    """Seconds of a MoE layer by n, the experts activated on the device: a line β + n·αS/B, or a table.

    ``knots``: (n, seconds), ascending, for the form ``table``; empty for a line. ``seconds_per_expert``: αS/B, for a
    table the mean slope of its upper half.
    """

    form: ModelForm
    beta_seconds: float
    seconds_per_expert: float
    knots: tuple[tuple[float, float], ...] = ()

    def seconds(self, experts: float) -> float:
        """Predicted time with ``experts`` activated; a table goes on with the slope of its last two points."""
        if not self.knots:
            return self.beta_seconds + self.seconds_per_expert * experts
        counts = [count for count, _ in self.knots]
        at = min(max(bisect.bisect_right(counts, experts), 1), len(counts) - 1)
        (low, low_seconds), (high, high_seconds) = self.knots[at - 1 : at + 1]
        slope = (high_seconds - low_seconds) / (high - low)
        if experts > high:
            return high_seconds + max(slope, 0.0) * (experts - high)
        return low_seconds + slope * (max(experts, low) - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What a layer's time depends on beside n. ``num_experts`` counts those of all devices together."""

    kernel: str
    dtype: str
    hidden_size: int
    intermediate_size: int
    top_k: int
    num_experts: int
    expert_parallel_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModel:
    """On-device cost of one layer shape. ``holdout_error``: median |relative error| on rows left out of a fit."""

    shape: LayerShape
    fit: LayerFit
    holdout_error: float | None
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The cost models fitted from one probe or one import. ``origin`` is ``probe`` or says what was imported.

    ``layers``: whole layers on a device, where kernels were measured and not only links. ``facts``: what an import says
    of its machine, named as in a fingerprint (``gpu0-gpu1.path``).
    """

    calibration_id: str
    created_at: str
    probe_id: str | None
    origin: str
    fingerprint: Fingerprint | None
    devices: tuple[Device, ...]
    models: tuple[LinkModel, ...]
    link_groups: tuple[LinkGroup, ...]
    warnings: tuple[str, ...] = ()
    layers: tuple[LayerModel, ...] = ()
    facts: dict[str, Field] = field(default_factory=dict)
