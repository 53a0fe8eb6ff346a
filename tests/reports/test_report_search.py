"""Where a policy came from, in words, on the page, in the terminal and in the documents."""

from __future__ import annotations

import io
from dataclasses import replace
from types import ModuleType

from rich.console import Console

from reports.html.render import render_page
from reports.info.origin import origin_sentence, search_words
from reports.info.run import run_info
from reports.markdown import markdown_page
from reports.pages.run import run_page
from reports.report import Report
from reports.terminal import run_summary, search_summary
from store.documents import run_document
from store.records import PolicyOrigin, PolicyPoint, PolicySearch, RunRecord

RISES = ((0.7, 0.002), (0.4, 0.03), (0.5, 0.012), (0.6, 0.006))
SEARCH = PolicySearch(
    knob="theta",
    max_quality_drop=0.01,
    nll_baseline=1.4,
    sequences=24,
    tokens=2280,
    points=tuple(
        PolicyPoint(
            value=value,
            nll=1.4 * (1 + rise),
            loss_rise=rise,
            loss_rise_ci95=(rise - 0.003, rise + 0.003),
            removed_importance=0.1 * (1 - value),
            max_device_misses_per_step=30 * value,
            within_limit=rise + 0.003 <= 0.01,
        )
        for value, rise in RISES
    ),
    chosen=0.6,
)
CREATED = "2026-03-14T09:26:53+00:00"
ORIGIN = PolicyOrigin(policy_id="policy-<1>", created_at=CREATED, searched_here=True, search=SEARCH)


def searched(build: ModuleType, *, loss_rise: float = 0.004) -> RunRecord:
    run: RunRecord = build.make_run(theta=0.6, loss_rise=loss_rise)
    return replace(run, max_quality_drop=0.01, policy_origin=ORIGIN)


def shown(renderables: list[object]) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    for renderable in renderables:
        console.print(renderable)
    return stream.getvalue()


def test_the_words_name_setting_tries_and_limit(build: ModuleType) -> None:
    assert search_words(SEARCH) == (
        "θ = 0.6 is the most aggressive of 4 settings tried that keeps the upper end of the rise of held-out loss "
        "within 1.0 %"
    )
    sentence = origin_sentence(searched(build))
    assert sentence is not None
    assert sentence.startswith("The policy was searched for in this run and is stored as policy-<1>: θ = 0.6")
    assert sentence.endswith("the loss changed by +0.40 %, within the 1.0 % allowed.")
    beyond = origin_sentence(searched(build, loss_rise=0.013))
    assert beyond is not None
    assert "+1.3 %, above the 1.0 % allowed" in beyond


def test_a_stored_policy_and_a_limit_alone(build: ModuleType) -> None:
    run: RunRecord = build.make_run()
    assert origin_sentence(run) is None
    stored = origin_sentence(replace(run, policy_origin=replace(ORIGIN, searched_here=False)))
    assert stored is not None
    assert stored.startswith("The policy is the stored policy-<1>, found on 2026-03-14: ")
    only_checked = origin_sentence(replace(run, max_quality_drop=0.02))
    assert only_checked is not None
    assert only_checked == "Held-out loss changed by +0.40 %, within the 2.0 % allowed."


def test_every_setting_tried_is_on_the_page(build: ModuleType) -> None:
    run = searched(build)
    info = run_info(run)
    page = run_page(info)
    (card,) = (card for card in page.cards if card.key == "policy-search")
    assert [row[0] for row in card.table.rows] == [0.7, 0.6, 0.5, 0.4], "from the mildest on"
    assert [row[-1] for row in card.table.rows] == ["yes", "yes, chosen", "no", "no"]
    assert [row[1] for row in card.table.rows] == sorted(rise for _, rise in RISES)
    assert origin_sentence(run) in page.sentences
    assert "policy-&lt;1&gt;" in render_page(page)
    assert "yes, chosen" in markdown_page(page)
    document = Report(page=page, runs=(info,)).document()["runs"][0]
    assert document["policy_origin"]["search"]["chosen"] == 0.6
    assert run_document(run)["policy_origin"]["policy_id"] == "policy-<1>"
    assert not [card for card in run_page(run_info(build.make_run())).cards if card.key == "policy-search"]


def test_the_terminal_tells_of_it(build: ModuleType) -> None:
    assert "The policy was searched for in this run" in shown(run_summary(searched(build)))
    text = shown(search_summary(replace(SEARCH, chosen=None)))
    assert "Of 4 settings of θ tried, none keeps the upper end of the rise of held-out loss within 1.0 %." in text
    for value, _ in RISES:
        assert f"{value:g}" in text
    assert "+0.90 % to +1.5 %" in text
