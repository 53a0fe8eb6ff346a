"""How far the expert matmuls are from the limits of their device, resident and fetched (paper, Fig. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from reports.info.words import number, percent, plural
from store.records import RunRecord

# A timing may beat a roof that was itself measured by as much as this before it needs an explanation.
TOLERANCE = 1.05
# Further below its roof than this, a matmul is not bound by it.
NEAR_ROOF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """min(peak, intensity × bandwidth). ``ridge``: the intensity in FLOP/byte from which on compute is the limit."""

    bytes_per_s: float
    peak_flops_per_s: float

    @property
    def ridge(self) -> float:
        return self.peak_flops_per_s / self.bytes_per_s

    def flops_per_s(self, intensity: float) -> float:
        return min(self.peak_flops_per_s, intensity * self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineSample:
    """One expert on ``tokens`` tokens. ``intensity``: FLOP per byte of the expert, each byte moved once.

    ``fetched_*`` are derived, not measured: the calibrated fetch, then the measured matmuls. None without a fetch.
    """

    tokens: int
    flops: float
    intensity: float
    seconds: float
    flops_per_s: float
    fetched_seconds: float | None
    fetched_flops_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineInfo:
    """``memory`` is the roof of resident experts, ``fetch`` that of experts that are fetched; None where unknown.

    ``step_tokens``: how many tokens an expert has in a decode step, on average and at least one.
    """

    device: str
    dtype: str
    tier: str
    expert_bytes: int
    peak_flops_per_s: float
    memory: Roof | None
    fetch: Roof | None
    step_tokens: int
    samples: tuple[RooflineSample, ...]

    @property
    def above_memory_roof(self) -> int:
        """Samples faster than their bytes could come from memory: such experts stayed in the processor's cache."""
        if self.memory is None:
            return 0
        return sum(each.flops_per_s > TOLERANCE * self.memory.flops_per_s(each.intensity) for each in self.samples)


def roofline_info(run: RunRecord) -> RooflineInfo | None:
    """None where the run has no roofline."""
    measured = run.roofline
    if measured is None:
        return None
    # With all experts in device memory, what a movement costs is a read of that memory: no fetch.
    fetch_seconds = measured.fetch_seconds if run.tier != "device" else None
    peak, expert_bytes = measured.peak_flops_per_s, measured.expert_bytes
    memory = measured.memory_bytes_per_s
    return RooflineInfo(
        device=measured.device,
        dtype=measured.dtype,
        tier=run.tier,
        expert_bytes=expert_bytes,
        peak_flops_per_s=peak,
        memory=Roof(bytes_per_s=memory, peak_flops_per_s=peak) if memory else None,
        fetch=Roof(bytes_per_s=expert_bytes / fetch_seconds, peak_flops_per_s=peak) if fetch_seconds else None,
        step_tokens=_tokens_per_expert(run),
        samples=tuple(
            RooflineSample(
                tokens=point.tokens,
                flops=point.flops,
                intensity=point.flops / expert_bytes,
                seconds=point.seconds,
                flops_per_s=point.flops / point.seconds,
                fetched_seconds=point.seconds + fetch_seconds if fetch_seconds else None,
                fetched_flops_per_s=point.flops / (point.seconds + fetch_seconds) if fetch_seconds else None,
            )
            for point in measured.points
        ),
    )


def _tokens_per_expert(run: RunRecord) -> int:
    work, passes = run.workload, run.with_policy
    if not passes.dispatches:
        return 1
    chosen = work.batch_size * work.top_k * work.moe_layers * passes.steps
    return max(1, round(chosen / passes.dispatches))


def roofline_sentence(info: RooflineInfo) -> str | None:
    """What limits the expert matmuls of a decode step; None where neither memory nor fetch has a known roof."""
    step = max((each for each in info.samples if each.tokens <= info.step_tokens), key=_tokens, default=None)
    if step is None or not (info.memory or info.fetch):
        return None
    found = []
    if info.memory:
        found.append(_resident(info.memory, step))
    if info.fetch:
        slower = (info.expert_bytes / info.fetch.bytes_per_s) / step.seconds
        found.append(f"fetching an expert from {info.tier} takes {number(slower)} times as long as its matmuls")
    return f"Roofline, about {plural(step.tokens, 'token')} per expert in a decode step: {'; '.join(found)}."


def _resident(memory: Roof, step: RooflineSample) -> str:
    share = step.flops_per_s / memory.flops_per_s(step.intensity)
    limit = "memory" if step.intensity < memory.ridge else "compute"
    if share < NEAR_ROOF:
        return (
            f"matmuls of resident experts reach {percent(share)} of their roof ({limit}), so overhead is what limits "
            "them"
        )
    return f"matmuls of resident experts are {limit}-bound, at {percent(share)} of that roof"


def _tokens(sample: RooflineSample) -> int:
    return sample.tokens
