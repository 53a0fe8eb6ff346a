"""Evaluation tasks in words, on the page, in the terminal and in the documents."""

from __future__ import annotations

import io
from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console

from reports.html.render import render_page
from reports.info.run import run_info
from reports.info.tasks import difference_tone, difference_words, metric_words, shape_words
from reports.markdown import markdown_page
from reports.pages.run import run_page
from reports.report import Report
from reports.terminal import run_summary
from store.documents import run_document
from store.records import RunRecord, TaskMetric, TaskResult

ACCURACY = TaskMetric(
    metric="acc",
    filter="none",
    baseline=0.94,
    with_policy=0.91,
    difference=-0.03,
    difference_ci95=(-0.05, -0.01),
    higher_is_better=True,
    documents=100,
    documents_better=1,
    documents_worse=4,
    chance=0.5,
)
PERPLEXITY = replace(
    ACCURACY,
    metric="perplexity",
    filter="first",
    baseline=4.0,
    with_policy=None,
    difference=None,
    difference_ci95=None,
    higher_is_better=False,
    documents_better=None,
    documents_worse=None,
    chance=None,
)
TASK = TaskResult(
    task="end<ings>",
    shape="decode",
    requests=200,
    requests_cut=0,
    removed_importance=0.038,
    metrics=(ACCURACY, PERPLEXITY),
)


def run_with_tasks(build: ModuleType, *tasks: TaskResult) -> RunRecord:
    run: RunRecord = build.make_run()
    return replace(run, tasks=tasks)


def test_words_of_a_metric() -> None:
    assert metric_words(ACCURACY) == (
        "95 % interval −0.050 to −0.010; 100 documents, 1 better and 4 worse; guessing scores 0.500"
    )
    assert metric_words(PERPLEXITY) == "100 documents"
    within = replace(ACCURACY, difference_ci95=(-0.05, 0.01), documents=1, chance=None)
    assert metric_words(within) == "95 % interval −0.050 to +0.010: inside the noise; 1 document, 1 better and 4 worse"
    # No document changed: that shows nothing of an interval.
    assert metric_words(replace(ACCURACY, difference_ci95=(0.0, 0.0))).startswith("100 documents")
    assert (difference_words(ACCURACY), difference_words(PERPLEXITY)) == ("−0.030", "–")


@pytest.mark.parametrize(
    ("interval", "higher", "tone"),
    [
        ((-0.05, -0.01), True, "bad"),
        ((-0.05, -0.01), False, "good"),
        ((0.01, 0.05), True, "good"),
        ((0.01, 0.05), False, "bad"),
        ((-0.05, 0.01), True, "neutral"),
        ((0.0, 0.0), True, "neutral"),
        (None, True, "neutral"),
        ((0.01, 0.05), None, "neutral"),
    ],
)
def test_only_what_is_sure_is_good_or_bad(interval: tuple[float, float] | None, higher: bool | None, tone: str) -> None:
    assert difference_tone(replace(ACCURACY, difference_ci95=interval, higher_is_better=higher)) == tone


def test_the_shape_is_said() -> None:
    assert shape_words(TASK) == (
        "every token decoded in lockstep, contexts included; the policy removed 3.8 % of the importance"
    )
    assert shape_words(replace(TASK, shape="prefill")).startswith("prefill-shaped: ")


def test_tasks_are_on_the_page_and_in_the_terminal(build: ModuleType) -> None:
    run = run_with_tasks(build, TASK, replace(TASK, task="other", shape="prefill"))
    page = run_page(run_info(run))
    (card,) = (card for card in page.cards if card.key == "tasks")
    assert [row[:3] for row in card.table.rows] == [
        ("end<ings>", "decode", "acc"),
        ("end<ings>", "decode", "perplexity, first"),
        ("other", "prefill", "acc"),
        ("other", "prefill", "perplexity, first"),
    ]
    assert "nearly every expert is mandatory" in card.lede
    html = render_page(page)
    assert "end&lt;ings&gt;" in html
    assert "end<ings>" not in html
    assert "Evaluation tasks" in markdown_page(page)
    stream = io.StringIO()
    for part in run_summary(run):
        Console(file=stream, width=200).print(part)
    assert "Task end<ings>, every token decoded in lockstep" in stream.getvalue()
    assert "Task other, prefill-shaped" in stream.getvalue()
    (accuracy, _) = (line.split() for line in stream.getvalue().splitlines() if line.startswith("acc"))
    assert accuracy[:4] == ["acc", "0.940", "0.910", "−0.030"]


def test_a_run_without_tasks_says_nothing_of_them(build: ModuleType) -> None:
    assert "tasks" not in [card.key for card in run_page(run_info(run_with_tasks(build))).cards]


def test_every_figure_is_in_the_documents(build: ModuleType) -> None:
    run = run_with_tasks(build, TASK)
    info = run_info(run)
    for document in (run_document(run), Report(page=run_page(info), runs=(info,)).document()["runs"][0]):
        (task,) = document["tasks"]
        assert task["metrics"][0]["documents_worse"] == 4
        assert task["metrics"][1]["with_policy"] is None
