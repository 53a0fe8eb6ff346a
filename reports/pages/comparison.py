"""The page of several runs side by side."""

from __future__ import annotations

from probes.units import format_seconds
from reports.figures.card import Section
from reports.figures.comparison import busiest_card, side_by_side_card, tpot_card
from reports.figures.facts import verdicts_card
from reports.figures.frontier import frontier_card
from reports.figures.sweep import sweep_cards
from reports.info.comparison import ComparedRun, ComparisonInfo
from reports.info.keyfigures import NOTICEABLE_LOSS_RISE, KeyFigure
from reports.info.policies import explained
from reports.info.run import RunInfo
from reports.info.words import change, change_with_interval, interval, percent, plural
from reports.pages.page import Page
from store.records import Ratio

MOST_IN_WORDS = 3


def comparison_page(info: ComparisonInfo, runs: tuple[RunInfo, ...]) -> Page:
    """Which run is fastest, what it gives up, and how sure that is. ``runs`` has each run's own verdict."""
    best = min(info.runs, key=lambda run: run.tpot_policy.median)
    differs = best.tpot_against_first is not None and best.tpot_against_first.outside_noise
    ahead = differs and best not in info.unsteady
    return Page(
        title=f"{plural(len(info.runs), 'run')} side by side",
        facts=(("Runs", ", ".join(run.run_id for run in info.runs)), ("Compared with", info.runs[0].run_id)),
        badge="A faster run, outside the noise" if ahead else "Not sure" if differs else "Inside the noise",
        tone="good" if ahead else "neutral",
        headline=_headline(info, best, ahead=ahead, differs=differs),
        sentences=_sentences(info, best, ahead=ahead),
        details=(
            "Both times of a run come from passes in turns, with the router's own choice and with the policy, from "
            "equal cache states. Intervals are bootstraps over those pairs.",
            *explained([run.policy for run in runs]),
        ),
        next_steps=(),
        key_figures=tuple(_key_figure(run) for run in info.runs),
        warnings=_warnings(info),
        sections=(
            Section(key="times", title="Times", cards=(tpot_card(info), side_by_side_card(info))),
            Section(key="policies", title="Policies", cards=(frontier_card(info), *sweep_cards(info))),
            Section(key="devices", title="Devices", cards=(busiest_card(info),)),
            Section(key="verdicts", title="Verdicts", cards=(verdicts_card(runs),)),
        ),
    )


def _headline(info: ComparisonInfo, best: ComparedRun, *, ahead: bool, differs: bool) -> str:
    first = info.runs[0]
    if ahead and best.tpot_against_first:
        cut = percent(1 - best.tpot_against_first.ratio)
        return f"{best.label} is fastest: {cut} less time per output token than {first.label}."
    if differs:
        return "It is not shown which run is fastest: the machine was not equally fast in all of them."
    return f"No run is faster than the first, {first.label}, beyond the noise."


def _sentences(info: ComparisonInfo, best: ComparedRun, *, ahead: bool) -> tuple[str, ...]:
    head = (
        f"{plural(len(info.runs), 'run')} side by side. Each took turns between the router's own choice of experts and "
        "its policy, which skips some of them; the runs are compared with the first."
    )
    if len(info.runs) <= MOST_IN_WORDS:
        return (head, *map(_sentence, info.runs))
    mild = [run for run in info.runs if run.loss_rise and run.loss_rise.value < NOTICEABLE_LOSS_RISE]
    gentle = min(mild, key=lambda run: run.gain_tpot.ratio, default=None)
    found = [head, f"{'Fastest is' if ahead else 'The lowest time is that of'} {_sentence(best)}"]
    if gentle is not None and gentle is not best:
        rise = percent(NOTICEABLE_LOSS_RISE)
        found.append(f"Where the loss rises by less than {rise}, the largest cut is that of {_sentence(gentle)}")
    return tuple(found)


def _sentence(run: ComparedRun) -> str:
    text = f"{run.label}: {format_seconds(run.tpot_policy.median)} per output token"
    text += f", {change_with_interval(run.gain_tpot)} against the router's own choice in the same run"
    if run.tpot_against_first:
        text += f", {change_with_interval(run.tpot_against_first)} against the first run"
    if run.loss_rise:
        text += f"; loss on text set aside {percent(run.loss_rise.value, signed=True)} (higher is worse)"
    return f"{text}."


def _warnings(info: ComparisonInfo) -> tuple[str, ...]:
    found = []
    if info.unlike_hosts:
        found.append(f"These runs were measured on unlike hosts: {', '.join(info.unlike_hosts)} differ.")
    if info.unsteady:
        changed = ", ".join(f"{change_with_interval(ratio)} in {run.label}" for run, ratio in _baselines(info))
        found.append(
            f"The machine was not equally fast: against the first run the router's own choice took {changed}. What "
            "each policy changed within its run holds; times of different runs do not compare."
        )
    settings = [name for name in info.differing if name != "policy"]
    if settings:
        found.append(f"More than the policy differs between these runs: {', '.join(settings)}.")
    return tuple(found)


def _baselines(info: ComparisonInfo) -> list[tuple[ComparedRun, Ratio]]:
    return [(run, run.baseline_against_first) for run in info.unsteady if run.baseline_against_first]


def _key_figure(run: ComparedRun) -> KeyFigure:
    return KeyFigure(
        label=run.label,
        before=format_seconds(run.tpot_baseline.median),
        after=format_seconds(run.tpot_policy.median),
        change=change(run.gain_tpot.ratio),
        interval=interval(run.gain_tpot),
        tone=run.outcome.tone,
    )
