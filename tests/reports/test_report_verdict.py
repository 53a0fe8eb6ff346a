"""The verdict: what is said, of known figures, and never more than the interval allows."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from reports.html.render import render_page
from reports.info.advice import step_limit
from reports.info.comparison import comparison_info
from reports.info.run import run_info
from reports.info.verdict import Outcome, outcome_of, verdict_info
from reports.markdown import markdown_page
from reports.pages.comparison import comparison_page
from reports.pages.run import run_page
from store.records import FEWEST_PAIRS, PassStatistics, PolicyChoice, Ratio, RunRecord, StepTimes


def text_of(run: RunRecord) -> str:
    verdict = verdict_info(run)
    return " ".join([verdict.headline, *verdict.sentences, *verdict.next_steps])


@pytest.mark.parametrize(
    ("ratio", "interval", "outcome"),
    [
        (0.9, (0.85, 0.95), Outcome.FASTER),
        (0.9, (0.79, 1.01), Outcome.NO_GAIN),
        (0.9, (0.8, 1.0), Outcome.NO_GAIN),
        (1.1, (0.99, 1.2), Outcome.NO_GAIN),
        (1.1, (1.05, 1.2), Outcome.SLOWER),
        (0.9, (0.9, 0.9), Outcome.NOT_SHOWN),
        (0.9, None, Outcome.NOT_SHOWN),
    ],
)
def test_only_an_interval_without_one_is_a_gain_or_a_loss(
    ratio: float, interval: tuple[float, float] | None, outcome: Outcome
) -> None:
    assert outcome_of(Ratio(ratio=ratio, ci95=interval)) is outcome


def test_a_gain_says_how_much_and_how_sure(build: ModuleType) -> None:
    run = replace(build.make_run(), gain_tpot=Ratio(ratio=0.86, ci95=(0.84, 0.88)))
    verdict = verdict_info(run)
    assert verdict.headline == "14.0 % less time per output token."
    assert "−14.0 % (95 % interval −16.0 % to −12.0 %), outside the noise" in text_of(run)
    assert "faster, outside the noise" in verdict.one_sentence


def test_no_gain_is_said_plainly(build: ModuleType) -> None:
    run = replace(build.make_run(), gain_tpot=Ratio(ratio=0.97, ci95=(0.93, 1.01)))
    verdict = verdict_info(run)
    assert verdict.headline == (
        "No gain beyond the noise: time per output token changed by −3.0 %, 95 % interval −7.0 % to +1.0 %."
    )
    assert "no gain, inside the noise" in verdict.one_sentence
    assert any("pairs" in step for step in verdict.next_steps)
    assert verdict.key_figures[0].tone == "neutral"


def test_a_single_pair_shows_nothing(build: ModuleType) -> None:
    run = replace(build.make_run(pairs=1), gain_tpot=Ratio(ratio=0.8, ci95=None))
    info = run_info(run)
    assert info.verdict.headline == (
        "Nothing is shown: time per output token changed by −20.0 %, no interval: too few pairs."
    )
    assert info.verdict.outcome == "not shown"
    assert info.verdict.one_sentence.count("nothing is shown") == 1
    assert info.verdict.key_figures[0].interval == "no interval: too few pairs"
    assert "Fewer than 3 pairs give no interval of times." in info.verdict.sentences
    assert run_page(info).badge == "Not sure"
    assert any("pairs" in step for step in info.verdict.next_steps)


def test_slower_is_said_plainly(build: ModuleType) -> None:
    run = replace(build.make_run(), gain_tpot=Ratio(ratio=1.06, ci95=(1.04, 1.08)))
    assert verdict_info(run).headline.startswith("Slower: 6.0 % more time per output token")
    assert verdict_info(run).key_figures[0].tone == "bad"


def test_a_noticeable_loss_of_quality_stands_in_the_headline(build: ModuleType) -> None:
    assert "held-out loss rises by 2.0 %" in verdict_info(build.make_run(loss_rise=0.02)).headline
    assert "loss" not in verdict_info(build.make_run(loss_rise=0.004)).headline


def test_what_the_busiest_device_pays_is_fetches_and_calibrated_time(build: ModuleType) -> None:
    run = build.make_run()
    run = replace(
        run,
        baseline=replace(run.baseline, max_device_misses_per_step=40.0),
        with_policy=replace(run.with_policy, max_device_misses_per_step=30.0),
        predicted=replace(run.predicted, seconds_per_expert=(100e-6, 200e-6)),
    )
    assert (
        "fetches 30.0 experts per step instead of 40.0 (−25.0 %): at the calibrated 200 µs per expert, a "
        "predicted 6.00 ms of transfers in each step instead of 8.00 ms" in text_of(run)
    )


def test_without_calibration_no_time_is_claimed_for_fetches(build: ModuleType) -> None:
    assert "calibrated" not in " ".join(verdict_info(replace(build.make_run(), predicted=None)).sentences)


def test_unmeasured_quality_is_said(build: ModuleType) -> None:
    verdict = verdict_info(replace(build.make_run(), quality=None))
    assert "Quality was not measured in this run." in verdict.sentences
    assert len(verdict.key_figures) == 3


def test_a_baseline_without_fetches_divides_nothing_by_zero(build: ModuleType) -> None:
    run = build.make_run()
    run = replace(run, baseline=replace(run.baseline, max_device_misses_per_step=0.0))
    assert verdict_info(run).key_figures[2].change == "–"


@pytest.mark.parametrize("part", ["fetch_wait", "experts", "exchange", "decide", "other"])
def test_the_largest_part_of_a_step_is_what_limits_it(build: ModuleType, part: str) -> None:
    parts = {"fetch_wait": 1e-3, "experts": 1e-3, "exchange": 1e-3, "decide": 1e-3, "other": 1e-3} | {part: 6e-3}
    times = StepTimes(total=10e-3, **parts)
    limit = step_limit(times)
    assert (limit.part, limit.share, limit.seconds) == (part, pytest.approx(0.6), 6e-3)
    assert limit.floor_seconds == pytest.approx(10e-3 - parts["fetch_wait"])
    run = build.make_run()
    verdict = verdict_info(replace(run, with_policy=replace(run.with_policy, step_times=times)))
    assert f"What limits it now: {limit.name}, 60.0 %" in verdict.sentences[-1]
    assert verdict.next_steps


def test_advice_follows_from_quality_and_theta(build: ModuleType) -> None:
    roomy = verdict_info(build.make_run(theta=0.8, loss_rise=0.001)).next_steps
    assert any("--theta 0.7" in step for step in roomy)
    costly = verdict_info(build.make_run(theta=0.8, loss_rise=0.03)).next_steps
    assert not any("--theta" in step for step in costly)
    assert any("higher θ than 0.8" in step for step in costly)


def test_one_device_has_nothing_to_balance(build: ModuleType) -> None:
    assert any("nothing to balance" in step for step in verdict_info(build.make_run(devices=1)).next_steps)


def test_few_pairs_are_said_to_be_few(build: ModuleType) -> None:
    assert "With only 3 pairs these intervals are rough." in verdict_info(build.make_run(pairs=3)).sentences
    assert not any("are rough" in sentence for sentence in verdict_info(build.make_run(pairs=12)).sentences)


def test_reads_of_device_memory_are_not_called_fetches(build: ModuleType) -> None:
    verdict = verdict_info(replace(build.make_run(), tier="device"))
    assert "reads" in verdict.sentences[1]
    assert "cached" not in verdict.sentences[0]


@pytest.mark.parametrize("pairs", [1, 2])
def test_every_page_of_a_run_without_intervals_can_be_made(build: ModuleType, pairs: int) -> None:
    run = without_intervals(build.make_run(pairs=pairs))
    other = without_intervals(build.make_run(run_id="run-0002", theta=0.6, pairs=pairs))
    for page in (run_page(run_info(run)), comparison_page(comparison_info([run, other]), (run_info(run),) * 2)):
        html, markdown = render_page(page), markdown_page(page)
        assert "nan" not in markdown.lower().split()
        assert "None" not in markdown
        assert "outside the noise" not in markdown
        assert "no interval" in html
    assert f"Fewer than {FEWEST_PAIRS} pairs give no interval of times." in verdict_info(run).sentences


def without_intervals(run: RunRecord) -> RunRecord:
    def passes(of: PassStatistics) -> PassStatistics:
        assert of.ttft_seconds is not None
        return replace(
            of, ttft_seconds=replace(of.ttft_seconds, ci95=None), tpot_seconds=replace(of.tpot_seconds, ci95=None)
        )

    assert run.gain_ttft is not None
    return replace(
        run,
        gain_ttft=replace(run.gain_ttft, ci95=None),
        gain_tpot=replace(run.gain_tpot, ci95=None),
        baseline=passes(run.baseline),
        with_policy=passes(run.with_policy),
    )


@pytest.mark.parametrize(("limit", "said"), [(None, "1.0 %"), (0.02, "2.0 %"), (0.05, None)])
@pytest.mark.parametrize("policy", ["caee", "budget"])
def test_advice_on_loss_knows_what_the_user_allows(
    build: ModuleType, policy: str, limit: float | None, said: str | None
) -> None:
    run = replace(build.make_run(theta=0.8, loss_rise=0.03), max_quality_drop=limit)
    if policy == "budget":
        run = replace(run, policy=PolicyChoice(name="budget", parameters={"epsilon": 0.02}))
    advice = [step for step in verdict_info(run).next_steps if "Loss rises" in step]
    assert [step.split(":")[0] for step in advice] == ([f"Loss rises by more than {said}"] if said else [])
    roomy = replace(build.make_run(theta=0.8, loss_rise=0.001), max_quality_drop=limit)
    assert any("--theta 0.7" in step for step in verdict_info(roomy).next_steps)


@pytest.mark.parametrize("ratio", [Ratio(ratio=0.9, ci95=(0.85, 0.95)), Ratio(ratio=1.0, ci95=(0.9, 1.1))])
@pytest.mark.parametrize("part", ["fetch_wait", "experts", "exchange", "decide", "other"])
@pytest.mark.parametrize("devices", [1, 4])
def test_the_router_against_itself_is_an_a_a_comparison(
    build: ModuleType, ratio: Ratio, part: str, devices: int
) -> None:
    parts = {"fetch_wait": 1e-3, "experts": 1e-3, "exchange": 1e-3, "decide": 1e-3, "other": 1e-3} | {part: 6e-3}
    run = build.make_run(devices=devices, loss_rise=0.03)
    run = replace(
        run,
        policy=PolicyChoice(name="router", parameters={}),
        gain_tpot=ratio,
        with_policy=replace(run.with_policy, step_times=StepTimes(total=10e-3, **parts)),
    )
    verdict = verdict_info(run)
    assert verdict.headline.startswith("An A/A comparison: ")
    assert "against itself (A/A: what differs is noise)" in verdict.sentences[0]
    assert ["quieter machine" in step for step in verdict.next_steps] == ([True] if ratio.outside_noise else [])
