"""Info functions on hand-made data with known answers."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import InputError
from probes.records import Field
from reports.figures.balance import layer_card
from reports.figures.frontier import frontier_card
from reports.figures.sweep import sweep_cards
from reports.info.balance import balance_info, gap_info, imbalance, importance_info, sum_histograms
from reports.info.comparison import comparison_info, median_ratio
from reports.info.costmodels import cost_models_info, link_name
from reports.info.drift import drift_info
from reports.info.keyfigures import movement_noun
from reports.info.machine import fingerprint_info, parameters_info
from reports.info.naming import run_names
from reports.info.pareto import pareto_front
from reports.info.run import run_info
from reports.info.simulation import simulation_info
from reports.info.timing import phases_info, predicted_info, running_mean, series_info, step_parts_info
from store.records import LayerCost, RunRecord


def layer(number: int, before: tuple[float, ...], after: tuple[float, ...], **changes: object) -> LayerCost:
    made = LayerCost(
        layer=number,
        device_cost_before=tuple(value * 1e-3 for value in before),
        device_cost_after=tuple(value * 1e-3 for value in after),
        device_misses_before=before,
        device_misses_after=after,
        gap_histogram_before=(0, 2, 1),
        gap_histogram_after=(3,),
        importance_highest=1.5,
        importance_lowest=0.5,
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # the caller names fields


def test_balance_of_known_layers(build: ModuleType) -> None:
    run = replace(
        build.make_run(devices=2), layers=(layer(7, (2.0, 2.0), (1.0, 2.0)), layer(3, (9.0, 3.0), (3.0, 3.0)))
    )
    info = balance_info(run)
    assert [each.layer for each in info.layers] == [3, 7]
    assert info.layers[0].imbalance_before == pytest.approx(1.5)
    assert info.layers[0].imbalance_after == pytest.approx(1.0)
    assert info.layers[0].seconds_before == pytest.approx((9e-3, 3e-3))
    assert info.most_relieved is info.layers[0]
    assert info.devices == ("cpu:0", "cpu:1")


def test_without_a_calibration_movements_have_no_price(build: ModuleType) -> None:
    run = replace(build.make_run(devices=2), predicted=None, layers=(layer(0, (2.0, 1.0), (1.0, 1.0)),))
    info = balance_info(run)
    assert info.layers[0].seconds_before == (None, None)
    assert not info.priced
    card = layer_card(info, "expert fetches")
    assert card.pickers[1].options == ("expert fetches per step",)
    assert len(card.panels[0].variants) == 1
    assert [row[4:] for row in card.table.rows] == [(None, None), (None, None)]


def test_imbalance_of_idle_devices_is_unknown() -> None:
    assert imbalance((0.0, 0.0)) is None
    assert imbalance(()) is None


def test_gaps_add_up_over_layers_of_unequal_length(build: ModuleType) -> None:
    run = replace(
        build.make_run(),
        layers=(
            layer(0, (1.0,), (1.0,), gap_histogram_before=(1, 2), gap_histogram_after=(3,)),
            layer(1, (1.0,), (1.0,), gap_histogram_before=(0, 0, 1), gap_histogram_after=(1,)),
        ),
    )
    info = gap_info(run)
    assert info.gaps == (0, 1, 2)
    assert info.count_before == (1, 2, 1)
    assert info.count_after == (4, 0, 0)
    assert info.share_before == (0.25, 0.5, 0.25)
    assert (info.mean_before, info.mean_after) == (1.0, 0.0)


def test_no_layers_no_gaps_no_importance(build: ModuleType) -> None:
    run = replace(build.make_run(), layers=())
    assert gap_info(run).mean_before is None
    assert importance_info(run) is None
    assert balance_info(run).most_relieved is None


def test_importance_keeps_only_layers_that_recorded_it(build: ModuleType) -> None:
    run = replace(
        build.make_run(), layers=(layer(1, (1.0,), (1.0,)), layer(0, (1.0,), (1.0,), importance_highest=None))
    )
    info = importance_info(run)
    assert info is not None
    assert (info.layers, info.highest, info.lowest) == ((1,), (1.5,), (0.5,))


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6))
def test_histograms_lose_no_count(histograms: list[list[int]]) -> None:
    assert sum(sum_histograms(histograms)) == sum(sum(histogram) for histogram in histograms)


def test_phases_steps_and_prediction_are_the_record_s(build: ModuleType) -> None:
    run = build.make_run()
    tpot, ttft = phases_info(run)
    assert (tpot.baseline, tpot.with_policy, tpot.gain) == (
        run.baseline.tpot_seconds,
        run.with_policy.tpot_seconds,
        run.gain_tpot,
    )
    assert ttft.with_policy is run.with_policy.ttft_seconds
    parts = {part.short_name: part for part in step_parts_info(run)}
    assert parts["fetch wait"].baseline == run.baseline.step_times.fetch_wait
    assert parts["dense, other"].with_policy == run.with_policy.step_times.other
    assert series_info(run).steps == tuple(range(1, 65))
    assert [row.relative_error for row in predicted_info(run)] == [-0.029, -0.042]
    assert predicted_info(replace(run, predicted=None)) == ()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 10))
def test_running_mean_agrees_with_a_plain_one(values: list[float], reach: int) -> None:
    plain = []
    for at in range(len(values)):
        near = min(reach, at, len(values) - 1 - at)
        plain.append(float(np.mean(values[at - near : at + near + 1])))
    assert running_mean(values, 2 * reach + 1) == pytest.approx(plain, abs=1e-6)


def test_cost_models_stand_beside_their_samples(build: ModuleType) -> None:
    calibration, probe = build.make_calibration(devices=1), build.make_probe(devices=1)
    alone, together = cost_models_info(calibration, probe)
    assert alone.name == "disk → cpu:0, direct"
    assert together.name == "disk → cpu:0, direct, all at once"
    assert len(alone.samples) == 35
    sample, model = alone.samples[0], calibration.models[0]
    assert sample.fitted_seconds == pytest.approx(52e-6 + 4096 / 1.9e9)
    assert sample.residual == pytest.approx(sample.seconds / sample.fitted_seconds - 1)
    assert alone.effective_bandwidth_bytes_per_s == pytest.approx(1.9e9)
    assert alone.curve[0] == (pytest.approx(4096), pytest.approx(model.seconds(4096)))
    assert alone.curve[-1][0] == pytest.approx(4096 * 4**6)


@pytest.mark.parametrize(
    ("kind", "ends", "mode", "concurrency", "name"),
    [
        ("disk_to_host", ("disk", "host"), "buffered", "solo", "disk → host, buffered"),
        ("device_memory", ("cuda:0", "cuda:0"), None, "all", "cuda:0, all at once"),
        ("device_to_device", ("cuda:0", "cuda:1"), None, "both_ways", "cuda:0 → cuda:1, both ways at once"),
    ],
)
def test_links_have_readable_names(
    build: ModuleType, kind: str, ends: tuple[str, str], mode: str | None, concurrency: str, name: str
) -> None:
    link = replace(build.make_calibration().models[0], kind=kind, source=ends[0], destination=ends[1])
    assert link_name(replace(link, mode=mode, concurrency=concurrency)) == name


@pytest.mark.parametrize(
    ("tier", "noun"), [("device", "expert reads"), ("host", "expert fetches"), ("disk", "expert fetches")]
)
def test_a_movement_is_a_read_or_a_fetch(tier: str, noun: str) -> None:
    assert movement_noun(tier) == noun


def test_a_model_without_its_probe_keeps_its_curve(build: ModuleType) -> None:
    (alone, _) = cost_models_info(build.make_calibration(devices=1), None)
    assert alone.samples == ()
    assert len(alone.curve) == 33
    assert cost_models_info(None, None) == ()


def test_drift_is_of_links_fitted_twice_on_the_same_machine(build: ModuleType) -> None:
    calibration = build.make_calibration(devices=1)
    slower = tuple(replace(model, alpha=model.alpha * 2) for model in calibration.models[:1])
    later = replace(calibration, calibration_id="b", created_at="2026-04-01T00:00:00Z", models=slower)
    other = replace(calibration, calibration_id="c", fingerprint=build.make_fingerprint(kernel="5.4"))
    (link,) = drift_info([later, other, calibration], calibration)
    assert link.name == "disk → cpu:0, direct"
    assert [point.calibration_id for point in link.points] == ["calibration-0001", "b"]
    assert [point.bandwidth_bytes_per_s for point in link.points] == pytest.approx([1.9e9, 0.95e9])
    assert drift_info([calibration], calibration) == ()
    assert drift_info([later, calibration], None) == ()


def test_facts_are_a_value_or_a_reason(build: ModuleType) -> None:
    facts = {(fact.group, fact.name): fact for fact in fingerprint_info(build.make_fingerprint())}
    assert facts["identity", "gpu"].value is None
    assert facts["identity", "gpu"].reason == "no NVIDIA driver is loaded"
    assert facts["state", "load_average"].value == 0.42
    parameters = {(fact.group, fact.name): fact.value for fact in parameters_info(build.make_run())}
    assert parameters["policy", "theta"] == 0.8
    assert parameters["workload", "cached experts per device"] == 16


def test_a_run_without_calibration_warns(build: ModuleType) -> None:
    run = build.make_run()
    assert any("caee calibrate" in warning for warning in run_info(replace(run, predicted=None)).warnings)
    assert any("no longer in the store" in warning for warning in run_info(run).warnings)
    kept = run_info(run, build.make_calibration(), build.make_probe())
    assert kept.warnings == run.warnings


def test_a_machine_that_changed_since_its_calibration_is_named(build: ModuleType) -> None:
    calibration = replace(build.make_calibration(), fingerprint=build.make_fingerprint(kernel="5.4"))
    assert any("(kernel)" in warning for warning in run_info(build.make_run(), calibration).warnings)


def test_unlike_hosts_are_refused_naming_the_fields(build: ModuleType) -> None:
    other = replace(build.make_run(run_id="b"), fingerprint=build.make_fingerprint(cpu="EPYC 9654", torch="2.8.0"))
    with pytest.raises(InputError, match=r"cpu \(Intel Xeon Platinum 8481C against EPYC 9654\); torch") as caught:
        comparison_info([build.make_run(), other])
    assert "--allow-unlike-hosts" in str(caught.value.hint)
    assert comparison_info([build.make_run(), other], allow_unlike_hosts=True).unlike_hosts == ("cpu", "torch")


def test_state_may_differ_between_hosts(build: ModuleType) -> None:
    first = build.make_run()
    fingerprint = replace(first.fingerprint, state={"load_average": Field(value=9.0)})
    assert comparison_info([first, replace(first, run_id="b", fingerprint=fingerprint)]).unlike_hosts == ()


def test_comparison_of_known_runs(build: ModuleType) -> None:
    first, second = build.make_run(ratio=0.9), build.make_run(run_id="run-0002", theta=0.6, ratio=0.72, loss_rise=0.01)
    info = comparison_info([first, second])
    assert info.runs[0].tpot_against_first is None
    against = info.runs[1].tpot_against_first
    assert against is not None
    assert against.ratio == pytest.approx(
        second.with_policy.tpot_seconds.median / first.with_policy.tpot_seconds.median
    )
    assert against.outside_noise
    rise = info.runs[1].loss_rise
    assert rise is not None
    assert rise.value == pytest.approx(0.01)
    assert rise.ci95[0] < rise.value < rise.ci95[1]
    assert info.differing == ("policy",)
    (sweep,) = info.sweeps
    assert (sweep.knob, sweep.series) == ("θ", "caee")
    assert [run.knob_value for run in sweep.runs] == [0.6, 0.8]
    assert [run.label for run in info.runs] == ["caee θ=0.8", "caee θ=0.6"]


def test_no_sweep_where_more_than_theta_differs(build: ModuleType) -> None:
    first, second = build.make_run(), build.make_run(run_id="b", theta=0.6)
    second = replace(second, workload=replace(second.workload, batch_size=1))
    info = comparison_info([first, second])
    assert info.differing == ("policy", "batch size")
    assert info.sweeps == ()
    assert [run.series for run in info.runs] == ["caee · batch size 8", "caee · batch size 1"]
    assert info.front_by_importance == ()


def test_each_batch_size_is_a_sweep_of_its_own(build: ModuleType) -> None:
    runs = []
    for batch in (1, 8):
        for theta in (0.9, 0.7):
            run = build.make_run(run_id=f"{batch}-{theta}", theta=theta)
            runs.append(replace(run, workload=replace(run.workload, batch_size=batch)))
    info = comparison_info(runs)
    assert [(sweep.series, [run.run_id for run in sweep.runs]) for sweep in info.sweeps] == [
        ("caee · batch size 1", ["1-0.7", "1-0.9"]),
        ("caee · batch size 8", ["8-0.7", "8-0.9"]),
    ]
    assert [run.label for run in info.runs] == [
        f"caee θ={theta} · batch size {batch}" for batch in (1, 8) for theta in (0.9, 0.7)
    ]


def test_an_ablation_is_named_by_what_it_changes(build: ModuleType) -> None:
    run = build.make_run()
    bare = replace(run, run_id="b", policy=replace(run.policy, parameters={**run.policy.parameters, "rule": "score"}))
    other = replace(run, run_id="c", policy=replace(run.policy, name="budget", parameters={"epsilon": 0.01}))
    router = replace(run, run_id="d", policy=replace(run.policy, name="router", parameters={}))
    names = run_names([run, bare, other, router])
    assert [name.label for name in names] == ["caee θ=0.8", "caee θ=0.8, rule score", "budget ε=0.01", "router"]
    assert [name.series for name in names] == ["caee", "caee, rule score", "budget", "router"]
    assert [(name.knob, name.value) for name in names] == [("θ", 0.8), ("θ", 0.8), ("ε", 0.01), (None, None)]


def test_the_frontier_is_what_no_run_beats_in_both(build: ModuleType) -> None:
    def run(name: str, ratio: float, removed: float, loss: float) -> RunRecord:
        made = build.make_run(run_id=name, ratio=ratio, loss_rise=loss)
        return replace(made, with_policy=replace(made.with_policy, removed_importance=removed))

    info = comparison_info(
        [
            run("far", 0.7, 0.04, 0.02),
            run("beaten", 0.9, 0.03, -0.01),
            run("near", 0.8, 0.02, 0.01),
            run("worse than the router", 1.1, 0.01, 0.03),
        ]
    )
    assert [each.run_id for each in info.front_by_importance] == ["near", "far"]
    assert [each.run_id for each in info.front_by_loss] == ["beaten", "near", "far"]
    front = frontier_card(info).panels[1].data[0]
    assert front["x"] == pytest.approx([0, -0.01, 0.01, 0.02])
    assert front["y"] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_unmeasured_quality_has_no_place_on_the_frontier_of_loss(build: ModuleType) -> None:
    runs = [replace(build.make_run(run_id=name, theta=theta), quality=None) for name, theta in (("a", 0.8), ("b", 0.6))]
    info = comparison_info(runs)
    assert info.front_by_loss == ()
    assert [panel.key for panel in frontier_card(info).panels] == ["frontier-importance"]
    (card,) = sweep_cards(info)
    assert [panel.key for panel in card.panels] == ["sweep-0-tpot", "sweep-0-ttft"]


def test_a_sweep_draws_each_change_with_its_interval(build: ModuleType) -> None:
    info = comparison_info([build.make_run(run_id=str(theta), theta=theta, ratio=theta) for theta in (0.9, 0.7)])
    (card,) = sweep_cards(info)
    assert card.title == "Sweep of θ"
    (line,) = card.panels[0].data
    assert (line["x"], line["y"]) == ([0.7, 0.9], pytest.approx([-0.3, -0.1]))
    assert line["error_y"]["array"] == pytest.approx([0.02, 0.02])
    assert [row[1] for row in card.table.rows] == [0.7, 0.9]


def test_runs_of_one_policy_are_told_apart_by_their_ids(build: ModuleType) -> None:
    labels = [run.label for run in comparison_info([build.make_run(), build.make_run(run_id="b")]).runs]
    assert labels == ["caee θ=0.8 · run-0001", "caee θ=0.8 · b"]


def test_the_unpaired_interval_covers_the_true_ratio_and_is_the_same_every_time() -> None:
    draw = np.random.default_rng(5)
    reference, samples = draw.normal(1.0, 0.05, 40), draw.normal(0.8, 0.05, 40)
    found = median_ratio(list(samples), list(reference))
    assert found.ci95[0] < 0.8 < found.ci95[1]
    assert found.ci95[1] - found.ci95[0] < 0.15
    assert found == median_ratio(list(samples), list(reference))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_the_front_is_what_nothing_dominates(points: list[tuple[float, float]]) -> None:
    front = pareto_front(points)
    assert any(front)
    for point, on_front in zip(points, front, strict=True):
        worse = [other for other in points if other[0] <= point[0] and other[1] <= point[1] and sum(other) < sum(point)]
        assert on_front == (not worse)


def test_simulated_passes_are_the_document_s(build: ModuleType) -> None:
    document = build.make_simulation()
    info = simulation_info(document)
    assert len(info.passes) == 8
    router, second = info.passes[4], info.passes[5]
    assert router.cut == 0
    assert second.router == 4
    assert second.cut == pytest.approx(1 - second.mean_seconds / router.mean_seconds)
    assert second.label == "caee:rule=cir,theta=0.8 · lru 32"
    first_layer = document["policies"][5]["layers"][0]
    assert second.balance.layers[0].movements_after[2] == first_layer["device_misses_after"][2] / 200
    assert [each.policy for each in info.front] == ["router", "caee:rule=cir,theta=0.8", "caee:rule=cir,theta=0.6"]


def test_the_best_simulated_pass_is_the_fastest_that_gains(build: ModuleType) -> None:
    document = build.make_simulation()
    assert simulation_info(document).best == 2
    for each in document["policies"]:
        each["cut_against_router"] = -0.1
    document["policies"][6]["cut_against_router"] = 0.05
    assert simulation_info(document).best == 6


def test_each_tier_has_its_own_costs_and_labels(build: ModuleType) -> None:
    document = build.make_simulation(devices=2)
    (machine,) = document["machines"]
    slow = [{"device": device, "seconds_per_expert": 7.0} for device in range(2)]
    document["machines"] = [machine, machine | {"tier": "disk", "cost": slow}]
    document["policies"][1] |= {"tier": "disk", "cache": None, "cache_experts": None}
    info = simulation_info(document)
    there = info.passes[1]
    layer = there.balance.layers[0]
    assert layer.seconds_before == tuple(7.0 * count for count in layer.movements_before)
    assert there.label == "caee:rule=cir,theta=0.8 · no cache, disk"
    assert there.router is None
    assert info.passes[0].label == "router · lfu 32, host"
    assert info.tier == "host and disk"


@pytest.mark.parametrize("missing", ["policies", "machine", "machines", "trace", "pareto"])
def test_a_document_that_is_no_simulation_is_refused(build: ModuleType, missing: str) -> None:
    document = build.make_simulation()
    del document[missing]
    with pytest.raises(InputError, match="no result of caee simulate"):
        simulation_info(document)
    with pytest.raises(InputError):
        simulation_info({**build.make_simulation(), "policies": []})
