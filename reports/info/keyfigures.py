"""The few figures that a verdict rests on, before and after."""

from __future__ import annotations

from dataclasses import dataclass

from probes.units import format_seconds
from reports.info.words import certainty, change, interval, number, percent, plural
from store.records import Quality, Ratio, RunRecord

NOTICEABLE_LOSS_RISE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """One figure before and after, ready to read; ``tone`` is ``good``, ``bad`` or ``neutral``."""

    label: str
    before: str
    after: str
    change: str
    interval: str
    tone: str


def key_figures(run: RunRecord) -> tuple[KeyFigure, ...]:
    """TPOT, TTFT where something was generated, the busiest device and, where it was measured, quality."""

    def timed(label: str, before: float, after: float, gain: Ratio) -> KeyFigure:
        tone = "neutral" if not gain.outside_noise else "good" if gain.ratio < 1 else "bad"
        return KeyFigure(
            label=label,
            before=format_seconds(before),
            after=format_seconds(after),
            change=change(gain.ratio),
            interval=interval(gain) + (": inside the noise" if certainty(gain) == "inside the noise" else ""),
            tone=tone,
        )

    baseline, policy = run.baseline, run.with_policy
    before, after = baseline.max_device_misses_per_step, policy.max_device_misses_per_step
    figures = [
        timed(tpot_name(run), baseline.tpot_seconds.median, policy.tpot_seconds.median, run.gain_tpot),
        *(
            [timed("Time to first token", baseline.ttft_seconds.median, policy.ttft_seconds.median, run.gain_ttft)]
            if baseline.ttft_seconds and policy.ttft_seconds and run.gain_ttft
            else []
        ),
        KeyFigure(
            label=f"Busiest device, {movement_noun(run.tier)} per step",
            before=number(before),
            after=number(after),
            change=change(after / before) if before else "–",
            interval=f"mean of {plural(policy.steps, 'decode step')}",
            tone="good" if after < before else "bad" if after > before else "neutral",
        ),
    ]
    if run.quality:
        low, high = (bound / run.quality.nll_baseline for bound in run.quality.nll_difference_ci95)
        figures.append(
            KeyFigure(
                label="Held-out loss, nats per token",
                before=number(run.quality.nll_baseline, 4),
                after=number(run.quality.nll_policy, 4),
                change=percent(loss_rise(run.quality), signed=True),
                interval=f"95 % interval {percent(low, signed=True)} to {percent(high, signed=True)}"
                + (": inside the noise" if low <= 0 <= high else ""),
                tone="bad" if low > 0 and loss_rise(run.quality) >= NOTICEABLE_LOSS_RISE else "neutral",
            )
        )
    return tuple(figures)


def tpot_name(run: RunRecord) -> str:
    """What a step's time is of: without a model it is that of its MoE layers."""
    return "Time per output token" if run.replay is None else "Time per output token, MoE layers alone"


def loss_rise(quality: Quality) -> float:
    """Rise of the held-out loss as a share of the baseline's."""
    return quality.nll_policy / quality.nll_baseline - 1


def movement_noun(tier: str) -> str:
    """What a paid movement is called: a fetch from host or disk, or a read of device memory."""
    return "expert reads" if tier == "device" else "expert fetches"
