"""What a trace-driven run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from probes.errors import UsageError
from probes.records import Calibration, Device
from runtime.cache import parse_cache
from runtime.models.config import MoeShape
from runtime.options import DTYPES, TIERS, check_device_count
from runtime.policy.spec import refuse_without_scores, resolve
from runtime.policy.types import PolicySpec
from runtime.tracerun.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRunOptions:
    """One trace-driven run. ``devices``: this host's, one rank each. ``folder``: on the disk where experts wait.

    ``shape``: of the whole model; ``traffic``: what is replayed of the trace. ``pairs`` None: as many interleaved pairs
    as fit ``seconds_for_pairs``. ``cache_experts``: cached experts per device over all replayed layers; None: half of
    the device's own. ``notes``: remarks for the record. ``partial_file``: where rank 0 leaves what is complete after
    every pair.
    """

    trace: str
    shape: MoeShape
    traffic: Traffic
    devices: tuple[Device, ...]
    tier: str
    policy: PolicySpec
    cache: str
    folder: Path
    calibration: Calibration | None
    cache_experts: int | None = None
    pairs: int | None = None
    seconds_for_pairs: float = 20.0
    dtype: str = "auto"
    seed: int = 0
    check_ranks: bool = False
    notes: tuple[str, ...] = ()
    progress_file: Path | None = None
    partial_file: Path | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (("tier", self.tier, TIERS), ("dtype", self.dtype, DTYPES)):
            if value not in allowed:
                raise UsageError(f"--{name} {value} is unknown", hint=f"choose one of {', '.join(allowed)}")
        for name, number in (("pairs", self.pairs), ("cache-experts", self.cache_experts)):
            if number is not None and number < 1:
                raise UsageError(f"--{name} {number} is too small", hint="give at least 1")
        check_device_count(len(self.devices), self.shape.num_experts)
        resolve(self.policy, offloading=self.offloading)
        if not self.traffic.meta.scores_recorded:
            refuse_without_scores(self.policy, self.traffic.meta.top_k)
        if parse_cache(self.cache).kind == "belady":
            raise UsageError("cache belady looks ahead, which a run cannot", hint="choose lfu, lru or forecast")

    @property
    def offloading(self) -> bool:
        return self.tier != "device"

    @property
    def layers(self) -> int:
        """How many MoE layers are replayed."""
        return len(self.traffic.meta.layer_numbers)
