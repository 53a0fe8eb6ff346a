"""What the brake did, in words, on the page, in the terminal and in the documents."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console

from reports.info.brake import brake_sentence
from reports.info.run import run_info
from reports.markdown import markdown_page
from reports.pages.run import run_page
from reports.report import Report
from reports.terminal import run_summary
from store.records import BrakeStatistics

CALM = BrakeStatistics(
    budget=0.1,
    sample_every=64,
    layer_steps=4096,
    braked_layer_steps=0,
    samples=60,
    mean_error=0.031,
    highest_error=0.064,
    trips=0,
    shadow_seconds=0.012,
    shadow_fetches=1,
    quality_layer_steps=760,
    quality_braked_layer_steps=0,
    quality_trips=0,
)
BUSY = replace(
    CALM,
    trips=2,
    braked_layer_steps=1024,
    samples=9,
    shadow_fetches=140,
    quality_braked_layer_steps=190,
    quality_trips=1,
)


def test_a_brake_that_never_acted() -> None:
    assert brake_sentence(CALM) == (
        "The brake, set to a mean relative error of 10.0 % in a layer's output, never acted; 60 samples, 3.1 % on "
        "average and 6.4 % at most, took 12.0 ms and 1 fetch, which no other figure includes."
    )


def test_a_brake_that_acted_says_what_the_figures_are_of() -> None:
    text = brake_sentence(BUSY)
    assert "acted 2 times: the router's own choice was in force in 25.0 % of 4,096 layer-steps" in text
    assert "times and fetches are those of the policy with its brake" in text
    assert "took 12.0 ms and 140 fetches" in text
    assert "in force in 25.0 % of the layer-steps, so the loss is that of the policy with its brake" in text


def test_samples_without_a_number_and_no_samples() -> None:
    assert "2 samples, took" in brake_sentence(replace(CALM, samples=2, mean_error=None, highest_error=None))
    none = replace(CALM, samples=0, mean_error=None, highest_error=None, quality_layer_steps=None)
    assert "it took no sample: they are 64 layer-steps apart" in brake_sentence(none)


def test_a_brake_is_on_the_page_in_the_terminal_and_in_the_documents(build: ModuleType) -> None:
    run = replace(build.make_run(), brake=BUSY)
    info = run_info(run)
    page = run_page(info)
    (card,) = (card for card in page.cards if card.key == "brake")
    values = {row[0]: row[2] for row in card.table.rows}
    assert values["times that it acted"] == 2
    assert values["router's own choice in force"] == 1024
    assert values["highest error"] == 0.064
    assert brake_sentence(BUSY) in page.details
    assert any("The brake brought" in sentence for sentence in page.sentences)
    assert "acted 2 times" in markdown_page(page)
    assert Report(page=page, runs=(info,)).document()["runs"][0]["brake"]["trips"] == 2
    console = Console(width=400, record=True)
    console.print(*run_summary(run), sep="\n")
    assert brake_sentence(BUSY) in " ".join(console.export_text().split())


@pytest.mark.parametrize("kept", ["page", "terminal"])
def test_without_a_brake_none_is_mentioned(build: ModuleType, kept: str) -> None:
    run = build.make_run()
    if kept == "page":
        text = markdown_page(run_page(run_info(run)))
    else:
        console = Console(width=400, record=True)
        console.print(*run_summary(run))
        text = console.export_text()
    assert "brake" not in text.lower()
