"""The roofline of the expert matmuls: known answers, what is said of them, and the card."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from reports.figures.roofline import roofline_card
from reports.info.roofline import RooflineInfo, roofline_info, roofline_sentence
from reports.info.run import run_info
from reports.pages.run import run_page
from store.records import Roofline, RooflinePoint, RunRecord


def run_with(build: ModuleType, *, tokens: int = 8, tier: str = "disk", **changes: object) -> RunRecord:
    """Peak 100 FLOP/s, memory 10 B/s, an expert of 20 B and 40 FLOP per token: the ridge is at 10 FLOP/B, 5 tokens."""
    roofline = Roofline(
        device="cpu",
        dtype="int8",
        peak_flops_per_s=100.0,
        memory_bytes_per_s=10.0,
        expert_bytes=20,
        fetch_seconds=40.0,
        points=(
            RooflinePoint(tokens=1, flops=40.0, seconds=2.5),
            RooflinePoint(tokens=8, flops=320.0, seconds=4.0),
            RooflinePoint(tokens=16, flops=640.0, seconds=8.0),
        ),
    )
    run = build.make_run()
    roofline = replace(roofline, **changes)  # type: ignore[arg-type]  # the caller names fields
    chosen = run.workload.batch_size * run.workload.top_k * run.workload.moe_layers * run.with_policy.steps
    passes = replace(run.with_policy, dispatches=chosen // tokens)
    return replace(run, tier=tier, with_policy=passes, roofline=roofline)


def info_of(run: RunRecord) -> RooflineInfo:
    info = roofline_info(run)
    assert info is not None
    return info


def test_roofs_and_samples_of_known_figures(build: ModuleType) -> None:
    info = info_of(run_with(build))
    assert info.memory is not None
    assert info.fetch is not None
    assert (info.memory.ridge, info.fetch.bytes_per_s, info.fetch.ridge) == (10.0, 0.5, 200.0)
    assert [info.memory.flops_per_s(each.intensity) for each in info.samples] == [20.0, 100.0, 100.0]
    assert [each.intensity for each in info.samples] == [2.0, 16.0, 32.0]
    assert [each.flops_per_s for each in info.samples] == [16.0, 80.0, 80.0]
    assert [each.fetched_seconds for each in info.samples] == [42.5, 44.0, 48.0]
    assert info.samples[2].fetched_flops_per_s == pytest.approx(640 / 48)
    assert info.above_memory_roof == 0


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (
            1,
            "1 token per expert in a decode step: matmuls of resident experts are memory-bound, at 80.0 % of that roof",
        ),
        (8, "8 tokens per expert in a decode step: matmuls of resident experts are compute-bound, at 80.0 % of that"),
        (15, "8 tokens per expert in a decode step"),
    ],
)
def test_what_limits_a_step_follows_from_its_tokens(build: ModuleType, tokens: int, says: str) -> None:
    sentence = roofline_sentence(info_of(run_with(build, tokens=tokens)))
    assert sentence is not None
    assert says in sentence


def test_the_fetch_is_compared_with_the_matmuls(build: ModuleType) -> None:
    sentence = roofline_sentence(info_of(run_with(build)))
    assert sentence is not None
    assert sentence.endswith("fetching an expert from disk takes 10.0 times as long as its matmuls.")


def test_far_below_the_roof_nothing_is_called_memory_bound(build: ModuleType) -> None:
    slow = (RooflinePoint(tokens=1, flops=40.0, seconds=25.0),)
    sentence = roofline_sentence(info_of(run_with(build, points=slow)))
    assert sentence is not None
    assert "reach 8.0 % of their roof (memory), so overhead is what limits them" in sentence
    assert "bound" not in sentence


def test_experts_in_device_memory_are_not_fetched(build: ModuleType) -> None:
    info = info_of(run_with(build, tier="device"))
    assert info.fetch is None
    assert {each.fetched_seconds for each in info.samples} == {None}
    card = roofline_card(info)
    assert [trace["name"] for trace in card.panels[0].data] == [
        "roof of memory, 10.0 B/s",
        "peak, 100 FLOP/s",
        "resident, measured",
    ]


def test_a_sample_faster_than_memory_is_explained(build: ModuleType) -> None:
    cached = (RooflinePoint(tokens=1, flops=40.0, seconds=1.0),)
    info = info_of(run_with(build, points=cached))
    assert info.above_memory_roof == 1
    assert "caches" in roofline_card(info).lede


def test_an_unknown_bandwidth_leaves_the_peak_alone(build: ModuleType) -> None:
    info = info_of(run_with(build, memory_bytes_per_s=None, fetch_seconds=None))
    assert roofline_sentence(info) is None
    card = roofline_card(info)
    assert "caee calibrate" in card.lede
    assert [trace["name"] for trace in card.panels[0].data] == ["peak, 100 FLOP/s", "resident, measured"]
    assert {row[5] for row in card.table.rows} == {None}


def test_the_card_draws_samples_roofs_and_the_ridge(build: ModuleType) -> None:
    info = info_of(run_with(build))
    memory, fetch, peak, resident, fetched = roofline_card(info).panels[0].data
    assert memory["x"][1] == 10.0
    assert memory["y"][1:] == [100.0, 100.0]
    assert len(fetch["x"]) == 2
    assert set(peak["y"]) == {100.0}
    assert (resident["x"], resident["y"]) == ([2.0, 16.0, 32.0], [16.0, 80.0, 80.0])
    assert fetched["y"] == pytest.approx([40 / 42.5, 320 / 44, 640 / 48], rel=1e-6)


def test_without_a_roofline_the_card_says_why(build: ModuleType) -> None:
    run = replace(build.make_run(), roofline=None)
    assert roofline_info(run) is None
    page = run_page(run_info(run))
    (card,) = (card for card in page.cards if card.key == "roofline")
    assert card.panels == ()
    assert "not measured" in str(card.table.rows[0][1])
    assert not any("Roofline" in sentence for sentence in page.details)


def test_the_verdict_says_what_limits_the_matmuls(build: ModuleType) -> None:
    sentences = run_page(run_info(run_with(build))).details
    assert sum("Roofline" in sentence for sentence in sentences) == 1
