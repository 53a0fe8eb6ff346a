"""A real run, measured here on a tiny model: the page shows the figures of ``caee run --json``, to the last digit."""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from caee_cli.main import run_app
from probes.devices import find_devices
from runtime.options import RunOptions
from runtime.parallel import Ranks
from runtime.policy.spec import parse_policy
from runtime.summary import run_record
from runtime.worker import RankSession
from store.documents import run_document
from store.records import RunRecord
from store.session import open_store

SCALES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "%": 1e-2, "": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """``run``: what ``caee run --json`` prints; ``report``: ``caee report --json``; ``cards``: the data of the page."""

    run: dict[str, Any]
    report: dict[str, Any]
    page: str
    cards: dict[str, Any]

    def rows(self, card: str) -> list[list[Any]]:
        rows: list[list[Any]] = self.cards[card]["rows"]
        return rows

    def traces(self, card: str, panel: str) -> list[dict[str, Any]]:
        traces: list[dict[str, Any]] = self.cards[card]["panels"][panel]["data"]
        return traces


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """The engine takes all cores; under the load of other tests its threads would wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture(scope="module")
def measured(build: ModuleType, one_core: None, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The record of a live run of one device, with what its calibration predicts."""
    model = tmp_path_factory.mktemp("model")
    checkpoints = _module(Path(__file__).parents[1] / "engine" / "checkpoints.py")
    checkpoints.save_checkpoint(model, checkpoints.tiny_config("qwen3_moe"))
    options = RunOptions(
        model=model,
        devices=find_devices("cpu:1"),
        tier="disk",
        policy=parse_policy("caee:theta=0.5"),
        cache="lfu",
        prompts=("Hello there", "And he said"),
        held_out="In the beginning was the word, and the word was with us. " * 8,
        calibration=build.make_calibration(devices=1),
        dtype="float32",
        pairs=3,
        max_new_tokens=6,
        batch_size=2,
        quality_sequences=3,
        quality_tokens=8,
    )
    session = RankSession(options, Ranks(rank=0, world=1))
    try:
        report = session.run()
    finally:
        session.close()
    record: RunRecord = run_record(options, report, build.make_fingerprint(), "tiny")
    return record


@pytest.fixture(scope="module")
def shown(build: ModuleType, measured: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    folder = tmp_path_factory.mktemp("report")
    with open_store(str(folder / "caee.db")) as store:
        store.save_probe(build.make_probe(devices=1))
        store.save_calibration(build.make_calibration(devices=1))
        store.save_run(measured)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        assert run_app(["report", "--json", "--store", str(folder / "caee.db"), "-o", str(folder / "page.html")]) == 0
    page = (folder / "page.html").read_text(encoding="utf-8")
    island = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert island is not None
    return Shown(
        run=json.loads(json.dumps(run_document(measured))),
        report=json.loads(output.getvalue())["runs"][0],
        page=page,
        cards=json.loads(island[1])["cards"],
    )


def _module(location: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(location.stem, location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_shows(text: str, value: float) -> None:
    """``text`` is ``value``, rounded at its last digit."""
    plain = text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-").replace(",", "")
    match = re.fullmatch(r"([+-]?\d+(?:\.(\d+))?) ?(\D*)", plain)
    assert match is not None, text
    last_digit = 10.0 ** -len(match[2] or "") * SCALES[match[3]]
    assert abs(float(match[1]) * SCALES[match[3]] - value) <= last_digit * 0.5000001, (text, value)


def key_figures(page: str) -> list[dict[str, str]]:
    (keys,) = re.findall(r'<ul class="keys">(.*?)</ul>', page, re.DOTALL)
    return [
        {
            name.partition(" ")[0]: html.unescape(text)
            for name, text in re.findall(r'<(?:p|span) class="([^"]+)">([^<]*)</', item)
        }
        for item in re.findall(r"<li>(.*?)</li>", keys, re.DOTALL)
    ]


def seven_digits(values: list[float]) -> Any:
    return pytest.approx(values, rel=5.1e-7)


def test_the_key_figures_are_those_of_the_run(shown: Shown) -> None:
    run, keys = shown.run, key_figures(shown.page)
    assert len(keys) == 4
    for key, phase in zip(keys, ("tpot", "ttft"), strict=False):
        assert_shows(key["before"], run["baseline"][f"{phase}_seconds"]["median"])
        assert_shows(key["after"], run["with_policy"][f"{phase}_seconds"]["median"])
        assert_shows(key["change"], run["gain"][phase]["ratio"] - 1)
        bounds = re.findall(r"[+−]?[\d.,]+\s%(?! interval)", key["interval"])
        for bound, value in zip(bounds, run["gain"][phase]["ci95"], strict=True):
            assert_shows(bound, value - 1)
    assert_shows(keys[2]["before"], run["baseline"]["max_device_misses_per_step"])
    assert_shows(keys[2]["after"], run["with_policy"]["max_device_misses_per_step"])
    assert_shows(keys[3]["before"], run["quality"]["nll_baseline"])
    assert_shows(keys[3]["after"], run["quality"]["nll_policy"])
    assert_shows(keys[3]["change"], run["quality"]["nll_policy"] / run["quality"]["nll_baseline"] - 1)


def test_times_are_those_of_the_run(shown: Shown) -> None:
    run = shown.run
    passes = {"baseline": run["baseline"], "with policy": run["with_policy"]}
    expected = [
        [phase, name, at, seconds]
        for phase, key in (("TPOT", "tpot_seconds"), ("TTFT", "ttft_seconds"))
        for name, each in passes.items()
        for at, seconds in enumerate(each[key]["samples"], start=1)
    ]
    assert shown.rows("phases") == expected
    policy, median, *_ = shown.traces("phases", "phase-tpot")
    estimate = run["with_policy"]["tpot_seconds"]
    assert policy["x"] == seven_digits([seconds * 1e3 for seconds in estimate["samples"]])
    assert median["x"] == seven_digits([estimate["median"] * 1e3])
    assert median["error_x"]["array"] == pytest.approx([(estimate["ci95"][1] - estimate["median"]) * 1e3], rel=1e-6)
    parts = [[row[1], row[2]] for row in shown.rows("step-time")]
    names = ("fetch_wait", "experts", "exchange", "decide", "other")
    assert parts == [[each["step_times"][name] for each in passes.values()] for name in names]
    assert [row[1:3] for row in shown.rows("predicted")] == [
        [run["predicted"]["baseline_tpot_seconds"], run["baseline"]["tpot_seconds"]["median"]],
        [run["predicted"]["tpot_seconds"], run["with_policy"]["tpot_seconds"]["median"]],
    ]
    assert shown.traces("steps", "steps-movements")[1]["y"] == run["series"]["policy_max_misses"]
    assert shown.traces("steps", "steps-hits")[0]["y"] == seven_digits(run["series"]["baseline_hit_rate"])


def test_devices_and_layers_are_those_of_the_run(shown: Shown) -> None:
    layers = shown.run["layers"]
    assert [row[2:] for row in shown.rows("layer-devices")] == [
        list(cells)
        for layer in layers
        for cells in zip(
            layer["device_misses_before"],
            layer["device_misses_after"],
            layer["device_cost_before"],
            layer["device_cost_after"],
            strict=True,
        )
    ]
    variants = shown.cards["layer-devices"]["panels"]["layer-devices"]["variants"]
    for at, layer in enumerate(layers):
        before, after = variants[2 * at]["data"]
        assert before["y"] == seven_digits(layer["device_misses_before"])
        assert after["y"] == seven_digits(layer["device_misses_after"])
        milliseconds = [seconds * 1e3 for seconds in layer["device_cost_after"]]
        assert variants[2 * at + 1]["data"][1]["y"] == seven_digits(milliseconds)
    heat = shown.traces("layer-heat", "heat-after")[0]["z"]
    assert [value for row in heat for value in row] == seven_digits(
        [value for layer in layers for value in layer["device_misses_after"]]
    )
    counts = [row[2] for row in shown.rows("gap")]
    assert sum(counts) == sum(sum(layer["gap_histogram_after"]) for layer in layers)
    assert [row[1:] for row in shown.rows("importance")] == [
        [layer["importance_highest"], layer["importance_lowest"]] for layer in layers
    ]
    assert [row[1:] for row in shown.rows("device-totals")] == [
        list(cells)
        for cells in zip(
            shown.run["baseline"]["misses_per_device"], shown.run["with_policy"]["misses_per_device"], strict=True
        )
    ]


def test_quality_totals_and_roofline_are_those_of_the_run(shown: Shown) -> None:
    quality, roofline = shown.run["quality"], shown.run["roofline"]
    values = {row[0]: row[2:] for row in shown.rows("quality")}
    assert values["loss, with policy"][0] == quality["nll_policy"]
    assert values["difference in loss"][1:] == quality["nll_difference_ci95"]
    assert values["KL(baseline ‖ policy)"][0] == quality["mean_kl"]
    assert values["same most likely token"][0] == quality["top1_agreement"]
    totals = {row[0]: row[1:] for row in shown.rows("totals")}
    for name, key in (("cache hit rate", "hit_rate"), ("re-routed slots", "rerouted_slots"), ("decode steps", "steps")):
        assert totals[name] == [shown.run["baseline"][key], shown.run["with_policy"][key]]
    rows = shown.rows("roofline")
    assert [[row[0], row[1], row[3]] for row in rows] == [
        [each["tokens"], each["flops"], each["seconds"]] for each in roofline["points"]
    ]
    resident = next(trace for trace in shown.traces("roofline", "roofline") if trace["name"] == "resident, measured")
    assert resident["y"] == seven_digits([each["flops"] / each["seconds"] for each in roofline["points"]])


def test_the_report_s_json_has_the_same_figures(shown: Shown) -> None:
    run, report = shown.run, shown.report
    assert report["phases"][0]["baseline"] == run["baseline"]["tpot_seconds"]
    assert report["phases"][1]["gain"] == {key: run["gain"]["ttft"][key] for key in ("ratio", "ci95")}
    assert report["quality"] == run["quality"]
    assert report["series"]["hit_rate_policy"] == run["series"]["policy_hit_rate"]
    assert [layer["seconds_after"] for layer in report["balance"]["layers"]] == [
        layer["device_cost_after"] for layer in run["layers"]
    ]
    assert [key["after"] for key in report["verdict"]["key_figures"]] == [
        key["after"].replace("\N{NO-BREAK SPACE}", " ") for key in key_figures(shown.page)
    ]
    # Where a table stands open on the page, its cells are the JSON's, rounded.
    rows = re.findall(r"<td>cache hit rate</td>\s*<td[^>]*>([^<]*)</td>\s*<td[^>]*>([^<]*)</td>", shown.page)
    for cell, kind in zip(rows[0], ("baseline", "with_policy"), strict=True):
        assert_shows(cell, run[kind]["hit_rate"])
