"""The page of a simulation."""

from __future__ import annotations

from probes.units import format_seconds
from reports.figures.card import Card, Section, paired
from reports.figures.facts import fact_card
from reports.figures.heat import heat_card
from reports.figures.simulation import busiest_layers_card, front_card, gaps_card, passes_card
from reports.info.keyfigures import KeyFigure, movement_noun
from reports.info.plain import TIERS
from reports.info.policies import explained
from reports.info.simulation import SimulatedPass, SimulationInfo
from reports.info.words import minute, number, percent, plural
from reports.pages.page import Page

MOST_KEY_FIGURES = 4
MOST_FRONT = 5


def simulation_content(info: SimulationInfo) -> Page:
    """Which policies are worth it on this machine and trace; every time is predicted, none is measured."""
    noun = movement_noun(info.passes[0].tier)
    best = info.passes[info.best]
    gain = best.cut is not None and best.cut > 0
    return Page(
        title="What policies would do, by simulation",
        facts=(
            ("Simulation", info.simulation_id),
            ("Simulated", minute(info.created_at)),
            ("Passes", str(len(info.passes))),
            ("Devices", str(info.devices)),
            ("Experts from", info.tier),
        ),
        badge="Predicted, not measured",
        tone="neutral",
        headline=_headline(best, gain=gain),
        sentences=(
            f"Recorded traffic was replayed on a described machine of {plural(info.devices, 'device')}, with experts "
            f"{' or '.join(TIERS.get(tier, tier) for tier in info.tier.split(' and '))}. No model ran: every time is "
            "predicted.",
            "A policy skips some of the experts that the router chose. That saves time, and removes what they would "
            "have added: importance is the share of the router's weights that they carry.",
            *_front_sentences(info),
        ),
        details=(
            "A step is the sum of its layers, and a layer takes as long as its busiest device: what it moves, at the "
            "machine's cost of an expert, and what it computes. Counts of movements and removed importance are exact "
            "for this traffic.",
            *explained([each.policy for each in info.passes]),
            *_cache_lines(info),
        ),
        next_steps=(f"Measure it on this machine: caee run --policy {best.policy}",) if gain else (),
        key_figures=tuple(_key_figure(each, router, noun) for each, router in _shown(info)),
        warnings=tuple(f"{note[:1].upper()}{note[1:]}" for note in info.notes),
        sections=_sections(info, noun),
    )


def _sections(info: SimulationInfo, noun: str) -> tuple[Section, ...]:
    balances = [(each.label, each.balance) for each in info.passes if each.balance.layers]
    devices: list[Card] = [gaps_card(info, noun)]
    if balances:
        devices += [busiest_layers_card(info, noun), heat_card(balances, noun, selected=info.best)]
    conditions = [
        fact_card("trace", "Trace", "What was replayed.", info.trace),
        fact_card("machine", "Machine", "What it was replayed on.", info.machine),
    ]
    return (
        Section(key="policies", title="Policies", cards=(front_card(info), passes_card(info, noun))),
        Section(key="devices", title="Devices", cards=paired(devices)),
        Section(key="conditions", title="Conditions", cards=paired(conditions)),
    )


def _headline(best: SimulatedPass, *, gain: bool) -> str:
    if not gain or best.cut is None:
        return "No simulated policy is faster than the router's own choice."
    return (
        f"{percent(best.cut)} less time per step with {best.label}, at {percent(best.removed_importance)} of "
        "importance removed."
    )


def _front_sentences(info: SimulationInfo) -> list[str]:
    """The passes worth choosing from; of many the fastest."""
    front = info.front
    found = [f"Nothing simulated is both faster and removes less than {'this' if len(front) == 1 else 'any of these'}:"]
    found += map(_on_front, front[-MOST_FRONT:])
    if len(front) > MOST_FRONT:
        found.append(f"{len(front) - MOST_FRONT} more, which remove less and take longer, stand in the first figure.")
    return found


def _on_front(each: SimulatedPass) -> str:
    cut = f", {percent(each.cut)} less than the router's own choice" if each.cut else ""
    removed = percent(each.removed_importance)
    return f"{each.label}: {format_seconds(each.mean_seconds)} per step{cut}; {removed} of importance removed."


def _cache_lines(info: SimulationInfo) -> list[str]:
    """What a name such as ``lfu 96`` says, where there are caches."""
    cached = next((each for each in info.passes if each.cache), None)
    if cached is None:
        return []
    return [
        f"{cached.cache} {cached.cache_experts}: each device caches {number(cached.cache_experts)} experts, over all "
        f"layers, and {cached.cache} is how the cache chooses which to give up."
    ]


def _shown(info: SimulationInfo) -> list[tuple[SimulatedPass, SimulatedPass]]:
    """Passes beside their router's: what is on the front first, then the fastest."""
    pairs = [
        (each, info.passes[each.router]) for each in info.passes if each.router is not None and each.name != "router"
    ]
    return sorted(pairs, key=lambda pair: (not pair[0].on_front, pair[0].mean_seconds))[:MOST_KEY_FIGURES]


def _key_figure(each: SimulatedPass, router: SimulatedPass, noun: str) -> KeyFigure:
    cut = each.cut or 0.0
    return KeyFigure(
        label=each.label,
        before=format_seconds(router.mean_seconds),
        after=format_seconds(each.mean_seconds),
        change=percent(-cut, signed=True),
        interval=f"{percent(each.removed_importance)} removed; busiest device "
        f"{number(each.max_device_movements_per_step)} {noun}",
        tone="good" if cut > 0 else "bad" if cut < 0 else "neutral",
    )
