"""The page of one run."""

from __future__ import annotations

from reports.figures.balance import gap_card, heat_card, importance_card, layer_card
from reports.figures.card import Card, Section
from reports.figures.costmodels import cost_models_card, cost_table_card
from reports.figures.timing import phases_card, predicted_card, series_card, step_card
from reports.info.run import RunInfo
from reports.info.table import table
from reports.info.verdict import Outcome, movement_noun
from reports.pages.page import Page
from store.records import Quality

BADGES = {
    Outcome.FASTER: "Faster, outside the noise",
    Outcome.SLOWER: "Slower, outside the noise",
    Outcome.NO_GAIN: "No gain, inside the noise",
}


def run_page(info: RunInfo) -> Page:
    """Verdict, devices, time, quality, calibration, conditions."""
    return Page(
        title="What cost-aware expert execution did",
        facts=(
            ("Model", info.model),
            ("Policy", info.policy),
            ("Devices", ", ".join(info.devices)),
            ("Run", info.run_id),
            ("Measured", info.created_at),
        ),
        badge=BADGES[info.verdict.outcome],
        tone=info.verdict.outcome.tone,
        headline=info.verdict.headline,
        sentences=info.verdict.sentences,
        next_steps=info.verdict.next_steps,
        key_figures=info.verdict.key_figures,
        warnings=info.warnings,
        sections=_sections(info),
    )


def _sections(info: RunInfo) -> tuple[Section, ...]:
    noun = movement_noun(info.tier)
    balance = [layer_card(info.balance, noun), heat_card(info.balance, noun)] if info.balance.layers else []
    importance = [importance_card(info.importance)] if info.importance else []
    sections = [
        Section(key="devices", title="Devices", cards=(*balance, gap_card(info.gaps, noun), *importance)),
        Section(key="time", title="Time", cards=_time_cards(info, noun)),
        Section(key="quality", title="Quality", cards=_quality_cards(info)),
        Section(key="calibration", title="Calibration", cards=_calibration_cards(info)),
        Section(key="conditions", title="Conditions", cards=_condition_cards(info)),
    ]
    return tuple(section for section in sections if section.cards)


def _time_cards(info: RunInfo, noun: str) -> tuple[Card, ...]:
    predicted = [predicted_card(info.predicted)] if info.predicted else []
    steps = [series_card(info.series, noun)] if info.series.steps else []
    return (phases_card(info.phases), step_card(info.step_parts), *predicted, *steps, _totals_card(info, noun))


def _totals_card(info: RunInfo, noun: str) -> Card:
    pairs = (
        ("busiest device per step", "max_device_movements_per_step", noun),
        ("cache hit rate", "hit_rate", ""),
        ("removed importance per token and layer", "removed_importance", ""),
        ("re-routed slots", "rerouted_slots", ""),
        ("generated tokens per pass", "tokens", ""),
        ("decode steps per pass", "steps", ""),
    )
    rows: list[tuple[str, str, float | None, float | None]] = [
        (name, unit, getattr(info.baseline, field), getattr(info.with_policy, field)) for name, field, unit in pairs
    ]
    for device, before, after in zip(
        info.devices, info.baseline.movements_per_device, info.with_policy.movements_per_device, strict=True
    ):
        rows.append((f"{device}, in all", noun, before, after))
    return Card(
        key="totals",
        title="Totals",
        lede="Both kinds of pass, over all pairs.",
        table=table(
            ("figure", "figure"), ("unit", "unit"), ("baseline", "baseline"), ("with_policy", "with policy"), rows=rows
        ),
    )


def _quality_cards(info: RunInfo) -> tuple[Card, ...]:
    cards = [_quality_card(info.quality)] if info.quality else []
    if info.samples:
        cards.append(
            Card(
                key="samples",
                title="Sample texts",
                lede="What the model wrote after a prompt, without and with the policy.",
                table=table(
                    ("prompt", "prompt"),
                    ("baseline", "baseline"),
                    ("with_policy", "with policy"),
                    rows=((sample.prompt, sample.baseline, sample.with_policy) for sample in info.samples),
                ),
            )
        )
    return tuple(cards)


def _quality_card(quality: Quality) -> Card:
    low, high = quality.nll_difference_ci95
    return Card(
        key="quality",
        title="Quality on held-out text",
        lede=(
            f"Decode-shaped: {quality.sequences:,} sequences teacher-forced in lockstep, one token each per step, on "
            "the policy's own evolving caches. Intervals are a paired bootstrap over sequences."
        ),
        table=table(
            ("figure", "figure"),
            ("unit", "unit"),
            ("value", "value"),
            ("low", "95 % low"),
            ("high", "95 % high"),
            rows=(
                ("loss, baseline", "nats per token", quality.nll_baseline, None, None),
                ("loss, with policy", "nats per token", quality.nll_policy, None, None),
                ("difference in loss", "nats per token", quality.nll_policy - quality.nll_baseline, low, high),
                ("perplexity, with policy ÷ baseline", "", quality.perplexity_ratio, None, None),
                ("KL(baseline ‖ policy)", "nats per token", quality.mean_kl, None, None),
                ("same most likely token", "share", quality.top1_agreement, None, None),
                ("tokens", "", quality.tokens, None, None),
            ),
        ),
    )


def _calibration_cards(info: RunInfo) -> tuple[Card, ...]:
    if not info.cost_models:
        return ()
    return cost_models_card(info.cost_models), cost_table_card(info.cost_models)


def _condition_cards(info: RunInfo) -> tuple[Card, ...]:
    columns = (("group", "group"), ("name", "name"), ("value", "value"))
    return (
        Card(
            key="parameters",
            title="Policy and workload",
            lede="Everything that was chosen, defaults included.",
            table=table(*columns, rows=((fact.group, fact.name, fact.value) for fact in info.parameters)),
        ),
        Card(
            key="fingerprint",
            title="Fingerprint of the machine",
            lede="Identity: a change voids the cost models. State: what may differ from run to run.",
            table=table(
                *columns,
                ("reason", "why unknown"),
                rows=((fact.group, fact.name, fact.value, fact.reason) for fact in info.fingerprint),
            ),
        ),
    )
