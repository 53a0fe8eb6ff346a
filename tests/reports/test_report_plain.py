"""What a reader meets first on a page: words that need no paper, true to the figures; the internals are folded away."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest

from reports.html.render import render_page
from reports.info.comparison import comparison_info
from reports.info.policies import PARAMETERS, explained, policy_words, shortened
from reports.info.policies import POLICIES as WORDS
from reports.info.run import run_info
from reports.info.simulation import simulation_info
from reports.info.verdict import verdict_info
from reports.info.words import minute
from reports.markdown import markdown_page
from reports.pages.comparison import comparison_page
from reports.pages.page import Page
from reports.pages.run import run_page
from reports.pages.simulation import simulation_content
from runtime.policy.spec import POLICIES, SHARED_KEYS
from store.records import BrakeStatistics, PassStatistics, PolicyChoice, Ratio, Replay, RunRecord, StepTimes

INTERNALS = ("renormalize", "reselect", "compensation", "routed_scaling_factor")
JARGON = ("interleaved", "teacher-forced", "nats", "Roofline", "roof ", "TPOT", "TTFT", "Pareto", "bootstrap", "slots")


def plain_of(run: RunRecord) -> str:
    return " ".join(verdict_info(run).plain)


def with_internals(run: RunRecord) -> RunRecord:
    shared = {
        "compensation": "active",
        "reselect": "affected",
        "renormalize": "survivors",
        "routed_scaling_factor": 1.0,
    }
    return replace(run, policy=replace(run.policy, parameters={**run.policy.parameters, **shared}))


@pytest.fixture
def pages(build: ModuleType) -> dict[str, Page]:
    runs = [with_internals(build.make_run(run_id=f"run-{theta}", theta=theta)) for theta in (0.8, 0.7)]
    infos = tuple(map(run_info, runs))
    return {
        "run": run_page(infos[0]),
        "comparison": comparison_page(comparison_info(runs), infos),
        "simulation": simulation_content(simulation_info(build.make_simulation())),
    }


def test_every_policy_and_parameter_is_explained() -> None:
    assert set(WORDS) == set(POLICIES)
    assert set(PARAMETERS) == {key for about in POLICIES.values() for key in about.keys} | set(SHARED_KEYS)
    for name, about in POLICIES.items():
        keys = (*about.keys, *SHARED_KEYS)
        written = f"{name}:{','.join(f'{key}=1' for key in keys)}"
        lines = explained([written])
        assert lines[0] == f"{name} {WORDS[name]}. As written: {written}."
        assert tuple(line.partition(":")[0] for line in lines[1:]) == keys
    assert explained(["lynx:beta=10"])[1] != explained(["skip:beta=0.1"])[1]
    assert explained(["new:knob=1"]) == (f"new {policy_words('new')}. As written: new:knob=1.",)
    several = explained(["caee:theta=0.8", "router", "caee:theta=0.7", "caee:theta=0.8"])
    assert several[0].endswith("As written: caee:theta=0.8; caee:theta=0.7.")
    assert [line.partition(":")[0] for line in several[2:]] == ["theta"]


@pytest.mark.parametrize("name", ["run", "comparison", "simulation"])
def test_internals_are_in_the_details_and_jargon_is_not_in_the_sentences(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    first = " ".join([page.headline, *page.sentences, *(value for _, value in page.facts)])
    assert not [word for word in (*INTERNALS, *JARGON) if word in first]
    details = " ".join(page.details)
    if name != "simulation":
        assert all(word in details for word in INTERNALS)
    markup = render_page(page)
    folded = re.search(r"<details>\s*<summary>How this was decided</summary>(.*?)</details>", markup, re.DOTALL)
    assert folded is not None
    assert folded[1].count("<li>") == len(page.details) > 1
    assert "**How this was decided**" in markdown_page(page)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [((0.8, 0.9), "more than chance"), ((0.8, 1.05), "which may be chance"), (None, "cannot be said of so few pairs")],
)
def test_times_are_said_with_what_may_be_chance(
    build: ModuleType, bounds: tuple[float, float] | None, says: str
) -> None:
    run = replace(build.make_run(), gain_tpot=Ratio(ratio=0.86, ci95=bounds))
    sentence = re.search(r"Each further token takes .*?, −14\.0 %.*?\.(?= The first)", plain_of(run))
    assert sentence is not None
    assert says in sentence[0]


def test_what_moved_names_the_tier_the_cache_and_the_busiest_device(build: ModuleType) -> None:
    run = build.make_run()
    run = replace(
        run,
        baseline=replace(run.baseline, max_device_misses_per_step=40.0),
        with_policy=replace(run.with_policy, max_device_misses_per_step=30.0),
    )
    work = run.workload
    text = plain_of(replace(run, tier="host"))
    assert f"in host memory; each device keeps {work.cache_experts} of its {work.experts_per_device} in a cache" in text
    assert "fetches 30.0 experts instead of 40.0 (−25.0 %); the others wait for it." in text
    text = plain_of(replace(run, tier="device", devices=run.devices[:1]))
    assert "All experts are in device memory." in text
    assert "reads 30.0 experts instead of 40.0 (−25.0 %)." in text
    assert "wait for it" not in text
    assert "cache and fetches" not in text


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_first_sentence_says_what_the_policy_does(build: ModuleType, name: str) -> None:
    run = replace(build.make_run(), policy=PolicyChoice(name=name, parameters={}))
    first = verdict_info(run).plain[0]
    assert ("what differs is noise" if name == "router" else f"the policy {name}, which {WORDS[name]}.") in first


def test_quality_is_explained_or_said_to_be_missing(build: ModuleType) -> None:
    run = build.make_run(loss_rise=0.03)
    assert run.quality is not None
    assert "+3.0 %" in plain_of(run)
    assert "lower is better" in plain_of(run)
    assert "Quality was not measured in this run." in plain_of(replace(run, quality=None))


def test_a_replayed_trace_is_no_model(build: ModuleType) -> None:
    run = build.make_run()
    replay = Replay(
        trace="t.parquet",
        model_layers=8,
        warmup_steps=4,
        steps=20,
        recorded=False,
        storage="bfloat16",
        multiplies="bfloat16",
        distinct_experts=8,
        checked_experts=2,
        expert_compute_seconds=1e-4,
        rest_seconds=1e-3,
    )
    verdict = verdict_info(replace(run, replay=replay, quality=None, gain_tpot=Ratio(ratio=0.86, ci95=(0.84, 0.88))))
    text = " ".join(verdict.plain)
    assert verdict.headline == "14.0 % less time per output token, MoE layers alone."
    assert text.startswith(f"A trace for {run.model} was replayed on 4 CPU devices")
    assert "routed the same 20 steps of the trace" in text
    assert "The MoE layers of a step take" in text
    assert "nothing is known of the output's quality" in text
    assert "generated" not in text


@pytest.mark.parametrize("part", ["fetch_wait", "experts", "exchange", "decide", "other"])
def test_the_largest_part_of_a_step_comes_last(build: ModuleType, part: str) -> None:
    parts = {"fetch_wait": 1e-3, "experts": 1e-3, "exchange": 1e-3, "decide": 1e-3, "other": 1e-3} | {part: 6e-3}
    run = build.make_run()
    times = StepTimes(total=10e-3, **parts)
    last = verdict_info(replace(run, with_policy=replace(run.with_policy, step_times=times))).plain[-1]
    assert last.startswith("A step with the policy takes 10.0 ms. The largest part, 60.0 %, is ")
    assert ("4.00 ms" in last) == (part == "fetch_wait")
    assert ("10.0 % is waiting for experts to arrive" in last) == (part != "fetch_wait")


@pytest.mark.parametrize(("steps", "says"), [(0, "never acted"), (1024, "for 25.0 % of the layers' steps")])
def test_a_brake_is_said_in_plain_words(build: ModuleType, steps: int, says: str) -> None:
    brake = BrakeStatistics(
        budget=0.1,
        sample_every=64,
        layer_steps=4096,
        braked_layer_steps=steps,
        samples=9,
        mean_error=0.03,
        highest_error=0.06,
        trips=bool(steps),
        shadow_seconds=0.01,
        shadow_fetches=140,
        quality_layer_steps=0,
        quality_braked_layer_steps=0,
        quality_trips=0,
    )
    text = plain_of(replace(build.make_run(), brake=brake))
    assert says in text
    assert "more than 10.0 % off" in text


def slower_machine(run: RunRecord, factor: float) -> RunRecord:
    """The same passes on a machine that takes ``factor`` times as long for everything."""

    def scaled(passes: PassStatistics) -> PassStatistics:
        tpot = passes.tpot_seconds
        samples = tuple(sample * factor for sample in tpot.samples)
        return replace(passes, tpot_seconds=replace(tpot, median=tpot.median * factor, samples=samples))

    return replace(run, baseline=scaled(run.baseline), with_policy=scaled(run.with_policy))


@pytest.mark.parametrize("settings", ["policies", "more than policies"])
@pytest.mark.parametrize("factor", [1.0, 0.6, 1.5])
def test_a_machine_that_became_faster_makes_no_run_the_fastest(build: ModuleType, factor: float, settings: str) -> None:
    first = build.make_run(run_id="run-0001", theta=0.8, ratio=0.9)
    later = slower_machine(build.make_run(run_id="run-0002", theta=0.7, ratio=0.8), factor)
    if settings != "policies":
        later = replace(later, workload=replace(later.workload, cache_experts=24))
    info = comparison_info([first, later])
    page = comparison_page(info, (run_info(first), run_info(later)))
    drifted = factor != 1 and settings == "policies"
    assert [run.run_id for run in info.unsteady] == (["run-0002"] if drifted else [])
    assert any("was not equally fast" in warning for warning in page.warnings) == drifted
    if drifted and factor < 1:
        assert page.badge == "Not sure"
        assert page.headline.startswith("It is not shown which run is fastest")
    else:
        assert "not shown" not in page.headline


def test_policies_side_by_side_are_named_by_what_differs() -> None:
    usual = "compensation=active,renormalize=survivors"
    assert shortened([f"caee:theta=0.8,{usual}", f"caee:theta=0.8,{usual}"]) == ("caee:theta=0.8",) * 2
    assert shortened([f"caee:{usual}", "caee:compensation=none,renormalize=survivors"]) == (
        "caee:compensation=active",
        "caee:compensation=none",
    )
    assert shortened(["router", f"caee:{usual}"]) == ("router", f"caee:{usual}")
    assert shortened([f"router:{usual}"] * 2) == ("router",) * 2


def test_the_conditions_of_a_simulation_have_names_not_keys(build: ModuleType) -> None:
    document = build.make_simulation()
    info = simulation_info(document)
    for facts, part in ((info.trace, document["trace"]), (info.machine, document["machine"])):
        named = {fact.name: fact.value for fact in facts}
        scalars = [value for value in part.values() if not isinstance(value, (list, dict))]
        assert list(named.values()) == scalars
        assert not [name for name in named if "_" in name or "seconds" in name]


@pytest.mark.parametrize(
    ("moment", "shown"),
    [
        ("2026-03-14T09:26:53Z", "2026-03-14 09:26 UTC"),
        ("2026-03-14T09:26:53+00:00", "2026-03-14 09:26 UTC"),
        ("2026-03-14T09:26:53+02:00", "2026-03-14T09:26:53+02:00"),
        ("long ago", "long ago"),
    ],
)
def test_a_moment_is_shown_to_the_minute(moment: str, shown: str) -> None:
    assert minute(moment) == shown
