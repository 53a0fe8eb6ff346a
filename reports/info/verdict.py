"""The verdict: what a run showed, in plain words with figures and intervals, and in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from probes.units import format_seconds, format_size
from reports.info.advice import StepLimit, compares_alike, next_steps, step_limit
from reports.info.brake import brake_sentence
from reports.info.keyfigures import (
    NOTICEABLE_LOSS_RISE,
    KeyFigure,
    key_figures,
    loss_rise,
    movement_noun,
    tpot_name,
)
from reports.info.origin import origin_sentence
from reports.info.plain import (
    how_it_was_compared,
    how_long,
    what_it_cost,
    what_limits,
    what_moved,
    what_ran,
    what_the_brake_did,
)
from reports.info.replay import replay_sentence, replayed
from reports.info.roofline import roofline_info, roofline_sentence
from reports.info.words import certainty, change, change_with_interval, interval, number, percent, plural
from store.records import FEWEST_PAIRS, Quality, Ratio, RunRecord, Workload

FEW_PAIRS = 5


class Outcome(StrEnum):
    """What the time per output token did, by its 95 % interval; ``NOT_SHOWN``: there is none, so nothing is claimed."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_GAIN = "no gain"
    NOT_SHOWN = "not shown"

    @property
    def tone(self) -> str:
        """How it is coloured: ``good``, ``bad`` or ``neutral``."""
        return {Outcome.FASTER: "good", Outcome.SLOWER: "bad"}.get(self, "neutral")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictInfo:
    """``plain`` is for any engineer, ``sentences`` say the same exactly, with all that it rests on; ``one_sentence`` is
    for a terminal."""

    outcome: Outcome
    headline: str
    one_sentence: str
    plain: tuple[str, ...]
    sentences: tuple[str, ...]
    limit: StepLimit
    next_steps: tuple[str, ...]
    key_figures: tuple[KeyFigure, ...]


def verdict_info(run: RunRecord) -> VerdictInfo:
    """Judge a run by the paired interval of its TPOT, and say what it cost and what limits it now."""
    outcome = outcome_of(run.gain_tpot)
    limit = step_limit(run.with_policy.step_times)
    return VerdictInfo(
        outcome=outcome,
        headline=_headline(outcome, run),
        one_sentence=_one_sentence(outcome, run),
        plain=(
            what_ran(run),
            how_it_was_compared(run),
            what_moved(run),
            how_long(run),
            what_it_cost(run),
            *filter(None, [origin_sentence(run)]),
            *((what_the_brake_did(run.brake),) if run.brake else ()),
            *_cautions(run),
            what_limits(limit),
        ),
        sentences=(
            _compared(run),
            _busiest(run),
            _times(run),
            *_quality(run),
            *filter(None, [origin_sentence(run)]),
            *((brake_sentence(run.brake),) if run.brake else ()),
            *_cautions(run),
            *_roofline(run),
            _limits(limit),
        ),
        limit=limit,
        next_steps=next_steps(run, limit),
        key_figures=key_figures(run),
    )


def outcome_of(gain: Ratio) -> Outcome:
    """A gain or a loss only where the interval does not contain 1."""
    if gain.interval is None:
        return Outcome.NOT_SHOWN
    if not gain.outside_noise:
        return Outcome.NO_GAIN
    return Outcome.FASTER if gain.ratio < 1 else Outcome.SLOWER


def _headline(outcome: Outcome, run: RunRecord) -> str:
    gain = run.gain_tpot
    time = f"{tpot_name(run)[0].lower()}{tpot_name(run)[1:]}"
    if compares_alike(run):
        text = f"An A/A comparison: {time} differs by {change(gain.ratio)}, {interval(gain)}"
    elif outcome is Outcome.FASTER:
        text = f"{percent(1 - gain.ratio)} less {time}"
    elif outcome is Outcome.SLOWER:
        text = f"Slower: {percent(gain.ratio - 1)} more {time}"
    else:
        nothing = "Nothing is shown" if outcome is Outcome.NOT_SHOWN else "No gain beyond the noise"
        text = f"{nothing}: {time} changed by {change(gain.ratio)}, {interval(gain)}"
    if run.quality and loss_rise(run.quality) >= NOTICEABLE_LOSS_RISE:
        text += f"; held-out loss rises by {percent(loss_rise(run.quality))}"
    return f"{text}."


def _one_sentence(outcome: Outcome, run: RunRecord) -> str:
    word = "nothing is shown" if outcome is Outcome.NOT_SHOWN else f"{outcome}, {certainty(run.gain_tpot)}"
    before, after = run.baseline.max_device_misses_per_step, run.with_policy.max_device_misses_per_step
    quality = f"; held-out loss {percent(loss_rise(run.quality), signed=True)}" if run.quality else ""
    return (
        f"TPOT {format_seconds(run.baseline.tpot_seconds.median)} → "
        f"{format_seconds(run.with_policy.tpot_seconds.median)}, {change_with_interval(run.gain_tpot)}: {word}; "
        f"{movement_noun(run.tier)} of the busiest device {number(before)} → {number(after)} per step{quality}."
    )


def _compared(run: RunRecord) -> str:
    work, kinds = run.workload, sorted({device.kind for device in run.devices})
    devices = plural(len(run.devices), f"{'/'.join(kinds).upper()} device")
    what = f"{plural(work.batch_size, 'sequence')} of {plural(work.max_new_tokens, 'new token')}"
    if run.replay is not None:
        what = replayed(run, run.replay)
    compared = f"Policy {_policy(run)} against the router's own choice"
    if compares_alike(run):
        compared = "The router's own choice against itself (A/A: what differs is noise)"
    return (
        f"{compared}, on {run.model}: {what} on {devices}, "
        f"{_where(run.tier, work)}; {plural(work.pairs, 'interleaved pair')} from equal cache states."
    )


def _policy(run: RunRecord) -> str:
    theta = run.policy.parameters.get("theta")
    return f"{run.policy.name} (θ = {theta})" if theta is not None else run.policy.name


def _where(tier: str, work: Workload) -> str:
    if tier == "device":
        return "all experts in device memory"
    return (
        f"experts of {format_size(work.expert_bytes)} on {tier}, "
        f"{number(work.cache_experts)} of {number(work.experts_per_device)} cached per device ({work.cache})"
    )


def _busiest(run: RunRecord) -> str:
    before, after = run.baseline.max_device_misses_per_step, run.with_policy.max_device_misses_per_step
    verb = "reads" if run.tier == "device" else "fetches"
    text = f"The busiest device {verb} {number(after)} experts per step instead of {number(before)}"
    if before > 0:
        text += f" ({change(after / before)})"
    if run.predicted and run.predicted.seconds_per_expert:
        cost = max(run.predicted.seconds_per_expert)
        text += (
            f": at the calibrated {format_seconds(cost)} per expert, a predicted {format_seconds(after * cost)} of "
            f"transfers in each step instead of {format_seconds(before * cost)}"
        )
    return f"{text}."


def _times(run: RunRecord) -> str:
    def phase(name: str, before: float, after: float, gain: Ratio) -> str:
        return (
            f"{name} goes from {format_seconds(before)} to {format_seconds(after)}, "
            f"{change_with_interval(gain)}, {certainty(gain)}"
        )

    baseline, policy = run.baseline, run.with_policy
    tpot = phase(tpot_name(run), baseline.tpot_seconds.median, policy.tpot_seconds.median, run.gain_tpot)
    if baseline.ttft_seconds is None or policy.ttft_seconds is None or run.gain_ttft is None:
        return f"{tpot}."
    ttft = phase("time to first token", baseline.ttft_seconds.median, policy.ttft_seconds.median, run.gain_ttft)
    return f"{tpot}; {ttft}."


def _quality(run: RunRecord) -> tuple[str, ...]:
    if run.replay is not None:
        return (replay_sentence(run, run.replay),)
    return (_held_out(run.quality) if run.quality else "Quality was not measured in this run.",)


def _held_out(quality: Quality) -> str:
    low, high = (bound / quality.nll_baseline for bound in quality.nll_difference_ci95)
    sure = ", inside the noise" if low <= 0 <= high else ""
    return (
        f"Held-out loss goes from {number(quality.nll_baseline, 4)} to {number(quality.nll_policy, 4)} nats per token, "
        f"{percent(loss_rise(quality), signed=True)} (95 % interval {percent(low, signed=True)} to "
        f"{percent(high, signed=True)}){sure}; the most likely next token agrees for {percent(quality.top1_agreement)} "
        f"of {plural(quality.tokens, 'token')}."
    )


def _cautions(run: RunRecord) -> tuple[str, ...]:
    if run.workload.pairs < FEWEST_PAIRS:
        return (f"Fewer than {FEWEST_PAIRS} pairs give no interval of times.",)
    if run.workload.pairs < FEW_PAIRS:
        return (f"With only {plural(run.workload.pairs, 'pair')} these intervals are rough.",)
    return ()


def _roofline(run: RunRecord) -> tuple[str, ...]:
    info = roofline_info(run)
    sentence = roofline_sentence(info) if info else None
    return (sentence,) if sentence else ()


def _limits(limit: StepLimit) -> str:
    text = (
        f"What limits it now: {limit.name}, {percent(limit.share)} of a step of {format_seconds(limit.step_seconds)} "
        f"with the policy"
    )
    if limit.part == "fetch_wait":
        return f"{text}; with no fetch at all a step would still take {format_seconds(limit.floor_seconds)}."
    return f"{text}; waiting for the remaining fetches was measured as {percent(limit.fetch_share)} of it."
