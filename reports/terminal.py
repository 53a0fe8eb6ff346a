"""Verdicts as rich renderables for the terminal. Text from outside is never read as rich markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probes.text import printable
from reports.info.brake import brake_sentence
from reports.info.keyfigures import KeyFigure
from reports.info.origin import KNOBS, origin_sentence, search_words
from reports.info.tasks import difference_tone, difference_words, metric_name, metric_words, shape_words
from reports.info.verdict import verdict_info
from reports.info.words import number, percent
from reports.pages.page import Page
from reports.tables import Sheet
from store.records import PolicySearch, RunRecord, TaskResult

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

COLOURS = {"good": "green", "bad": "red", "neutral": "yellow"}


def run_summary(run: RunRecord) -> list[RenderableType]:
    """The verdict of a run that has just ended."""
    verdict = verdict_info(run)
    shown = _summary(verdict.outcome.tone, verdict.headline, verdict.sentences, verdict.key_figures, verdict.next_steps)
    origin = origin_sentence(run)
    shown += [_text(origin)] if origin else []
    shown += [_text(brake_sentence(run.brake))] if run.brake else []
    return [*shown, *(part for task in run.tasks for part in _task(task))]


def _task(task: TaskResult) -> list[RenderableType]:
    """One evaluation task: how it was measured, and its metrics before and after."""
    numbers = ("before", "after", "change")
    table = Sheet(None, ("", *numbers, ""), right=numbers, ruled=False)
    for metric in task.metrics:
        change = _text(difference_words(metric), COLOURS[difference_tone(metric)])
        before, after = (_text(number(value)) for value in (metric.baseline, metric.with_policy))
        table.add_row(_text(metric_name(metric)), before, after, change, _text(metric_words(metric), "dim"))
    return [_text(""), _text(f"Task {task.task}, {shape_words(task)}."), table]


def search_summary(search: PolicySearch) -> list[RenderableType]:
    """A search for a policy that found none: all it tried."""
    words = search_words(search)
    headings = (KNOBS.get(search.knob, search.knob), "rise of loss", "95 % interval")
    table = Sheet(None, headings, right=headings, ruled=False)
    for point in search.points:
        low, high = (percent(bound, signed=True) for bound in point.loss_rise_ci95)
        table.add_row(f"{point.value:g}", percent(point.loss_rise, signed=True), f"{low} to {high}")
    return [_text(f"{words[0].upper()}{words[1:]}.", "bold yellow"), _text(""), table]


def page_summary(page: Page) -> list[RenderableType]:
    """The verdict of a page, for someone who has not opened it yet."""
    return _summary(page.tone, page.headline, page.sentences, page.key_figures, page.next_steps)


def _summary(
    tone: str,
    headline: str,
    sentences: Sequence[str],
    figures: Sequence[KeyFigure],
    next_steps: Sequence[str],
) -> list[RenderableType]:
    shown: list[RenderableType] = [_text(headline, f"bold {COLOURS[tone]}"), _text(sentences[0], "dim")]
    if figures:
        shown += [_text(""), _figures(figures), _text("")]
    if len(sentences) > 1:
        shown.append(_text(sentences[-1]))
    return [*shown, *(_text(f"Try next: {step}") for step in next_steps)]


def _figures(figures: Sequence[KeyFigure]) -> Sheet:
    numbers = ("before", "after", "change")
    table = Sheet(None, ("", *numbers, ""), right=numbers, ruled=False)
    for figure in figures:
        change, interval = _text(figure.change, COLOURS[figure.tone]), _text(figure.interval, "dim")
        table.add_row(_text(figure.label), _text(figure.before), _text(figure.after), change, interval)
    return table


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)
