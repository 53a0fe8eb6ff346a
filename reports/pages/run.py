"""The page of one run."""

from __future__ import annotations

from probes.records import LinkKind
from reports.figures.balance import gap_card, importance_card, layer_card
from reports.figures.card import Card, Section, paired
from reports.figures.costmodels import cost_models_card, cost_table_card
from reports.figures.drift import drift_card
from reports.figures.facts import brake_card, condition_cards, quality_card, samples_card, tasks_card, totals_cards
from reports.figures.heat import heat_card
from reports.figures.roofline import roofline_card
from reports.figures.search import search_card
from reports.figures.steps import series_card, step_card
from reports.figures.timing import phases_card, predicted_card
from reports.info.keyfigures import movement_noun
from reports.info.policies import explained
from reports.info.run import RunInfo
from reports.info.verdict import Outcome
from reports.info.words import certainty, minute
from reports.pages.page import Page
from store.records import Ratio

# The links that experts take, by where they are kept: shown first.
TIER_LINKS = {"disk": LinkKind.DISK_TO_HOST, "host": LinkKind.HOST_TO_DEVICE, "device": LinkKind.DEVICE_MEMORY}


def run_page(info: RunInfo) -> Page:
    """Verdict, devices, time, quality, calibration, conditions."""
    return Page(
        title="What cost-aware expert execution did",
        facts=(
            ("Model", info.model),
            ("Run", info.run_id),
            ("Measured", minute(info.created_at)),
            ("Devices", ", ".join(info.devices)),
            ("Policy", info.policy.partition(":")[0]),
        ),
        badge=_badge(info.verdict.outcome, info.phases[0].gain),
        tone=info.verdict.outcome.tone,
        headline=info.verdict.headline,
        sentences=info.verdict.plain,
        details=(*info.verdict.sentences, *explained([info.policy])),
        next_steps=info.verdict.next_steps,
        key_figures=info.verdict.key_figures,
        warnings=info.warnings,
        sections=_sections(info),
    )


def _badge(outcome: Outcome, gain: Ratio) -> str:
    sure = certainty(gain)
    return sure.capitalize() if outcome in (Outcome.NO_GAIN, Outcome.NOT_SHOWN) else f"{outcome.capitalize()}, {sure}"


def _sections(info: RunInfo) -> tuple[Section, ...]:
    noun = movement_noun(info.tier)
    sections = [
        Section(key="devices", title="Devices", cards=paired(_device_cards(info, noun))),
        Section(key="time", title="Time", cards=paired(_time_cards(info, noun))),
        Section(key="quality", title="Quality", cards=_quality_cards(info, noun)),
        Section(key="calibration", title="Calibration", cards=_calibration_cards(info)),
        Section(key="conditions", title="Conditions", cards=paired(condition_cards(info))),
    ]
    return tuple(section for section in sections if section.cards)


def _device_cards(info: RunInfo, noun: str) -> list[Card]:
    balance = [layer_card(info.balance, noun), heat_card([("", info.balance)], noun)] if info.balance.layers else []
    return [*balance, gap_card(info.gaps, noun), *([importance_card(info.importance)] if info.importance else [])]


def _time_cards(info: RunInfo, noun: str) -> list[Card]:
    predicted = [predicted_card(info.predicted)] if info.predicted else []
    steps = [series_card(info.series, noun)] if info.series.steps else []
    return [
        phases_card(info.phases),
        step_card(info.step_parts),
        *predicted,
        roofline_card(info.roofline),
        *steps,
        *totals_cards(info, noun),
    ]


def _quality_cards(info: RunInfo, noun: str) -> tuple[Card, ...]:
    quality = [quality_card(info.quality)] if info.quality else []
    brake = [brake_card(info.brake)] if info.brake else []
    search = [search_card(info.policy_origin.search, noun)] if info.policy_origin else []
    tasks = [tasks_card(info.tasks)] if info.tasks else []
    return (*quality, *tasks, *search, *brake, *([samples_card(info.samples)] if info.samples else []))


def _calibration_cards(info: RunInfo) -> tuple[Card, ...]:
    if not info.cost_models:
        return ()
    used = [at for at, model in enumerate(info.cost_models) if model.kind == TIER_LINKS.get(info.tier)]
    together = [at for at in used if info.cost_models[at].concurrency == "all"]
    selected = next(iter([*together, *used]), 0)
    drift = [drift_card(info.drift)] if info.drift else []
    return cost_models_card(info.cost_models, selected=selected), cost_table_card(info.cost_models), *drift
