"""Cards that are tables: totals, quality, sample texts, conditions."""

from __future__ import annotations

from collections.abc import Sequence

from reports.figures.card import Card
from reports.info.machine import Fact
from reports.info.run import PassFigures, RunInfo
from reports.info.table import Cell, table
from reports.info.tasks import SHAPES, metric_name
from reports.info.words import minute, plural
from store.records import BrakeStatistics, Quality, SampleText, TaskResult

CONDITIONS = (
    ("policy", "Policy", "Every parameter, defaults included; “How this was decided”, above, says what they mean."),
    ("state", "Machine: state", "What may differ from run to run."),
    ("workload", "Workload", "What was run, on what."),
    ("identity", "Machine: identity", "A change in any of these voids the cost models."),
)


def totals_cards(info: RunInfo, noun: str) -> list[Card]:
    """What both kinds of pass did in all, and by device."""
    by_device = zip(
        info.devices, info.baseline.movements_per_device, info.with_policy.movements_per_device, strict=True
    )
    return [
        Card(
            key="totals",
            title="Totals",
            lede="Both kinds of pass, over all pairs.",
            table=table(
                ("figure", "figure"),
                ("baseline", "baseline"),
                ("with_policy", "with policy"),
                rows=(
                    (name, before, after)
                    for (name, before), (_, after) in zip(
                        _totals(info.baseline, noun), _totals(info.with_policy, noun), strict=True
                    )
                ),
            ),
            wide=False,
        ),
        Card(
            key="device-totals",
            title=f"All {noun}, by device",
            lede="Over all decode steps and pairs.",
            table=table(("device", "device"), ("baseline", "baseline"), ("with_policy", "with policy"), rows=by_device),
            wide=False,
        ),
    ]


def quality_card(quality: Quality) -> Card:
    """Loss, divergence and agreement."""
    low, high = quality.nll_difference_ci95
    return Card(
        key="quality",
        title="Quality on held-out text",
        lede=(
            f"{plural(quality.sequences, 'sequence')} of given text, read token by token with and without the policy: "
            "how likely is the token that comes next? Each way keeps caches of its own. The interval is a paired "
            "bootstrap over sequences."
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
                ("perplexity, with policy ÷ baseline", "ratio", quality.perplexity_ratio, None, None),
                ("KL(baseline ‖ policy)", "nats per token", quality.mean_kl, None, None),
                ("same most likely token", "share of tokens", quality.top1_agreement, None, None),
                ("measured on", "tokens", quality.tokens, None, None),
            ),
        ),
    )


def tasks_card(tasks: Sequence[TaskResult]) -> Card:
    """Every metric of every evaluation task."""
    shapes = "; ".join(f"{shape}: {SHAPES[shape]}" for shape in dict.fromkeys(task.shape for task in tasks))
    return Card(
        key="tasks",
        title="Evaluation tasks",
        lede=(
            f"lm-evaluation-harness on local files, both from the same cache state. {shapes}. Intervals are paired "
            "bootstraps over documents; better and worse count documents whose own value the policy changed."
        ),
        table=table(
            ("task", "task"),
            ("shape", "shape"),
            ("metric", "metric"),
            ("baseline", "baseline"),
            ("with_policy", "with policy"),
            ("difference", "difference"),
            ("low", "95 % low"),
            ("high", "95 % high"),
            ("documents", "documents"),
            ("better", "better"),
            ("worse", "worse"),
            ("chance", "guessing scores"),
            ("removed_importance", "removed importance", "share"),
            rows=(
                (
                    task.task,
                    task.shape,
                    metric_name(metric),
                    metric.baseline,
                    metric.with_policy,
                    metric.difference,
                    *(metric.difference_ci95 or (None, None)),
                    metric.documents,
                    metric.documents_better,
                    metric.documents_worse,
                    metric.chance,
                    task.removed_importance,
                )
                for task in tasks
                for metric in task.metrics
            ),
        ),
    )


def brake_card(brake: BrakeStatistics) -> Card:
    """What the brake saw and did."""
    return Card(
        key="brake",
        title="The brake",
        lede=(
            "A shadow sample computes a layer as the router itself would, too; its error is ‖policy − router‖ ÷ "
            "‖router‖ of the output. What samples take is in no other figure."
        ),
        table=table(
            ("figure", "figure"),
            ("unit", "unit"),
            ("value", "value"),
            rows=(
                ("budget of the mean error", "ratio", brake.budget),
                ("samples", "decode layer-steps", brake.samples),
                ("mean error", "ratio", brake.mean_error),
                ("highest error", "ratio", brake.highest_error),
                ("times that it acted", "times", brake.trips),
                ("router's own choice in force", "layer-steps", brake.braked_layer_steps),
                ("watched", "layer-steps", brake.layer_steps),
                ("time of the samples", "seconds", brake.shadow_seconds),
                ("fetches of the samples", "experts", brake.shadow_fetches),
                ("times that it acted, measuring quality", "times", brake.quality_trips),
                ("router's own choice in force, measuring quality", "layer-steps", brake.quality_braked_layer_steps),
                ("watched, measuring quality", "layer-steps", brake.quality_layer_steps),
            ),
        ),
    )


def samples_card(samples: tuple[SampleText, ...]) -> Card:
    """For the eye: does the text still read well?"""
    return Card(
        key="samples",
        title="Sample texts",
        lede="What the model wrote after a prompt, without and with the policy.",
        table=table(
            ("prompt", "prompt"),
            ("baseline", "baseline"),
            ("with_policy", "with policy"),
            rows=((sample.prompt, sample.baseline, sample.with_policy) for sample in samples),
        ),
    )


def verdicts_card(runs: tuple[RunInfo, ...]) -> Card:
    """Each run's verdict in one sentence."""
    return Card(
        key="verdicts",
        title="Each run in one sentence",
        lede="Every run against its own baseline.",
        table=table(
            ("run", "run"),
            ("measured_at", "measured"),
            ("verdict", "verdict"),
            rows=((run.run_id, minute(run.created_at), run.verdict.one_sentence) for run in runs),
        ),
    )


def condition_cards(info: RunInfo) -> list[Card]:
    """Policy, workload and fingerprint, each fact a value or the reason why it is unknown."""
    facts = [*info.parameters, *info.fingerprint]
    cards = [
        fact_card(group, title, lede, [fact for fact in facts if fact.group == group])
        for group, title, lede in CONDITIONS
    ]
    return [card for card in cards if card.table.rows]


def fact_card(key: str, title: str, lede: str, facts: Sequence[Fact]) -> Card:
    """Names and values; an unknown value is its reason."""
    rows = ((fact.name, _known(fact)) for fact in facts)
    return Card(
        key=key, title=title, lede=lede, table=table(("name", "name"), ("value", "value"), rows=rows), wide=False
    )


def _totals(figures: PassFigures, noun: str) -> list[tuple[str, float | None]]:
    return [
        (f"{noun} of the busiest device, per step", figures.max_device_movements_per_step),
        ("cache hit rate", figures.hit_rate),
        ("removed importance, per token and layer", figures.removed_importance),
        ("re-routed slots", figures.rerouted_slots),
        ("generated tokens, per pass", figures.tokens),
        ("decode steps", figures.steps),
    ]


def _known(fact: Fact) -> Cell:
    return f"unknown: {fact.reason}" if fact.value is None and fact.reason else fact.value
