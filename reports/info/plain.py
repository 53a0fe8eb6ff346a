"""A run in words that need nothing but engineering: no formula, no name of a parameter, each term explained."""

from __future__ import annotations

from probes.units import format_seconds
from reports.info.advice import StepLimit, compares_alike
from reports.info.keyfigures import loss_rise
from reports.info.policies import policy_words
from reports.info.words import change, interval, number, percent, plural, with_bounds
from store.records import BrakeStatistics, Quality, Ratio, RunRecord, Workload

TIERS = {"host": "in host memory", "disk": "on disk", "device": "in device memory"}
STEP_PARTS = {
    "fetch_wait": "waiting for experts to arrive",
    "experts": "the experts' own computing",
    "exchange": "passing results between the devices, with waiting for the slowest",
    "decide": "deciding which experts to run",
    "other": "the rest of the model, such as attention, and overhead",
}


def what_ran(run: RunRecord) -> str:
    """What was compared, in a sentence."""
    kinds = sorted({device.kind for device in run.devices})
    devices = plural(len(run.devices), f"{'/'.join(kinds).upper()} device")
    ran = f"{run.model} ran" if run.replay is None else f"A trace for {run.model} was replayed"
    if compares_alike(run):
        return f"{ran} on {devices} as its router decides, both times: what differs is noise."
    return (
        f"{ran} on {devices} in two ways: as its router decides, and with the policy {run.policy.name}, "
        f"which {policy_words(run.policy.name)}."
    )


def how_it_was_compared(run: RunRecord) -> str:
    """The passes, and what made them alike."""
    work = run.workload
    each = (
        f"generated {plural(work.max_new_tokens, 'token')} for each of {plural(work.batch_size, 'sequence')} at once"
        if run.replay is None
        else f"routed the same {plural(run.replay.steps, 'step')} of the trace"
    )
    return (
        f"Each way {each}, {plural(work.pairs, 'time')} in turns; both ways of a turn started with the same experts in "
        "the caches."
    )


def what_moved(run: RunRecord) -> str:
    """Where experts wait, and what the busiest device moves."""
    before, after = run.baseline.max_device_misses_per_step, run.with_policy.max_device_misses_per_step
    verb = "reads" if run.tier == "device" else "fetches"
    text = (
        f"{_where(run.tier, run.workload)} In a step, which gives every sequence one more token, the device with the "
        f"most work {verb} {number(after)} experts instead of {number(before)}"
    )
    if before > 0:
        text += f" ({change(after / before)})"
    return f"{text}." if len(run.devices) == 1 else f"{text}; the others wait for it."


def how_long(run: RunRecord) -> str:
    """Both times, and whether the change may be chance."""
    before, after = run.baseline, run.with_policy
    what = "Each further token takes" if run.replay is None else "The MoE layers of a step take"
    text = _time(what, before.tpot_seconds.median, after.tpot_seconds.median, run.gain_tpot)
    if before.ttft_seconds and after.ttft_seconds and run.gain_ttft:
        first = _time("The first token takes", before.ttft_seconds.median, after.ttft_seconds.median, run.gain_ttft)
        text += f" {first}"
    return text


def what_it_cost(run: RunRecord) -> str:
    """What became of the output's quality."""
    if run.replay is not None:
        return (
            "No model ran: stand-ins of its experts were moved and multiplied as the trace says. So times leave out "
            "attention and the other layers, and nothing is known of the output's quality, only that the skipped "
            f"experts carry {percent(run.with_policy.removed_importance)} of the router's weights."
        )
    return _loss(run.quality) if run.quality else "Quality was not measured in this run."


def what_the_brake_did(brake: BrakeStatistics) -> str:
    """How often the router's own choice came back."""
    where = f"where a layer's output was found to be more than {percent(brake.budget)} off"
    if brake.trips == 0 and brake.braked_layer_steps == 0:
        return f"The brake, which brings the router's own choice back {where}, never acted."
    share = brake.braked_layer_steps / max(1, brake.layer_steps)
    return f"The brake brought the router's own choice back {where}: for {percent(share)} of the layers' steps."


def what_limits(limit: StepLimit) -> str:
    """The largest part of a step, and what fetching still takes."""
    text = (
        f"A step with the policy takes {format_seconds(limit.step_seconds)}. The largest part, "
        f"{percent(limit.share)}, is {STEP_PARTS[limit.part]}"
    )
    if limit.part == "fetch_wait":
        return f"{text}; with no fetch at all a step would still take {format_seconds(limit.floor_seconds)}."
    return f"{text}; {percent(limit.fetch_share)} is {STEP_PARTS['fetch_wait']}."


def _where(tier: str, work: Workload) -> str:
    if tier == "device":
        return "All experts are in device memory."
    return (
        f"Experts wait {TIERS[tier]}; each device keeps {number(work.cache_experts)} of its "
        f"{number(work.experts_per_device)} in a cache and fetches another one when it is needed."
    )


def _time(what: str, before: float, after: float, gain: Ratio) -> str:
    text = f"{what} {format_seconds(after)} instead of {format_seconds(before)}, {change(gain.ratio)}"
    if gain.interval is None:
        return f"{text}; whether that is chance cannot be said of so few pairs."
    low, high = gain.interval
    return f"{text} ({interval(gain)}), {_chance(low <= 1 <= high)}."


def _loss(quality: Quality) -> str:
    low, high = (bound / quality.nll_baseline for bound in quality.nll_difference_ci95)
    return (
        "On text set aside for this, the model's loss (how far its predictions are off; lower is better) goes from "
        f"{number(quality.nll_baseline, 4)} to {number(quality.nll_policy, 4)}, "
        f"{with_bounds(loss_rise(quality), (low, high))}, {_chance(low <= 0 <= high)}. It predicts the same next token "
        f"for {percent(quality.top1_agreement)} of {plural(quality.tokens, 'token')}."
    )


def _chance(may_be: bool) -> str:
    return "which may be chance" if may_be else "more than chance"
