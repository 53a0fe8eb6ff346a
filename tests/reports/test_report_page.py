"""The page as a file: self-contained, deterministic, escaped, and with the very numbers of the JSON."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from reports.figures import theme
from reports.figures.card import plain, rounded
from reports.figures.costmodels import cost_models_card
from reports.html import render
from reports.html.bundle import Script, as_script
from reports.html.render import render_page
from reports.info.comparison import comparison_info
from reports.info.costmodels import cost_models_info
from reports.info.run import run_info
from reports.markdown import markdown_page
from reports.pages.comparison import comparison_page
from reports.pages.page import Page
from reports.pages.run import run_page
from reports.simulation import simulation_page
from store.records import RunRecord, SampleText

NASTY = "<script>alert('x')</script> \"q\" & {{ 7*7 }} %{x} 模型 🦊 </SCRIPT> <!-- é"


class Reader(HTMLParser):
    """Text, tags and attributes of a page; scripts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        (self.scripts if self._in_script else self.text).append(data)


def read(page: str) -> tuple[Reader, dict[str, Any]]:
    reader = Reader()
    reader.feed(page)
    island = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert island is not None
    return reader, json.loads(island[1])


def page_of(build: ModuleType, run: RunRecord | None = None) -> Page:
    calibration = build.make_calibration()
    earlier = replace(calibration, calibration_id="earlier", created_at="2026-02-01T00:00:00Z")
    return run_page(run_info(run or build.make_run(), calibration, build.make_probe(), [calibration, earlier]))


@pytest.fixture(scope="module")
def page(build: ModuleType) -> str:
    return render_page(page_of(build))


def nasty_run(build: ModuleType) -> RunRecord:
    run = build.make_run(run_id=f"run {NASTY}", model=NASTY)
    return replace(
        run,
        model_family=NASTY,
        samples=(SampleText(prompt=NASTY, baseline=f"{NASTY}\n{NASTY}", with_policy=NASTY),),
        warnings=(NASTY,),
        policy=replace(run.policy, parameters={**run.policy.parameters, "note": NASTY}),
    )


def test_plotly_is_there_once_and_nothing_is_fetched(page: str) -> None:
    reader, _ = read(page)
    assert page.count("plotly.js v") == 1
    for tag, attributes in reader.tags:
        assert "src" not in attributes, tag
        assert not (attributes.get("href") or "#").startswith(("http", "//")), tag
    policy = next(attributes["content"] for tag, attributes in reader.tags if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy


def test_the_same_data_gives_the_same_bytes(build: ModuleType, page: str) -> None:
    assert render_page(page_of(build)) == page
    assert render_page(page_of(build, build.make_run(theta=0.7))) != page


def test_text_from_outside_stays_text(build: ModuleType) -> None:
    made = render_page(page_of(build, nasty_run(build)))
    usual = render_page(page_of(build))
    reader, data = read(made)
    # No script more than usual, and none that the text closed early.
    assert len(re.findall(r"<script", made, re.IGNORECASE)) == len(re.findall(r"<script", usual, re.IGNORECASE))
    assert len(reader.scripts) == len(read(usual)[0].scripts)
    text = " ".join(reader.text)
    assert text.count(NASTY) >= 5
    assert "49" not in re.findall(r"x'\)</script> \"q\" & (\d+)", text)
    assert data["cards"]["samples"]["rows"] == [[NASTY, f"{NASTY}\n{NASTY}", NASTY]]


def test_plotly_is_unwrapped_into_a_module() -> None:
    bundle = get_plotlyjs()
    script = as_script(bundle)
    assert script.module
    assert script.text.startswith("/**\n* plotly.js v")
    # Nothing but the wrapping is gone: every line of it that holds code is still there, in order.
    kept = [line for line in bundle.splitlines() if len(line) > 200][1:-1]
    assert len(kept) > 20
    at = 0
    for line in kept:
        at = script.text.index(line, at) + len(line)
    assert script.text.count("License") == bundle.count("License")  # the notices of what is bundled
    assert len(bundle) - len(script.text) < 400


@pytest.mark.parametrize(
    "bundle", ["", "window.Plotly = {};", "(function(root, factory) { root.Plotly = factory(); })"]
)
def test_a_bundle_of_another_form_is_left_alone(bundle: str) -> None:
    assert as_script(bundle) == Script(text=bundle, module=False)


def test_the_wrapping_is_told_from_code_that_resembles_it() -> None:
    wrapped = (
        "/** notice */\n(\n function(root, factory) {\n  root.moduleName = factory();\n} "
        '(typeof self !== "undefined" ? self : this, () => {\n"use strict";var Plotly=(()=>{BODY})();\n'
        "window.Plotly = Plotly;\nreturn Plotly;\n}));"
    )
    body = "var a=()=>{return b()};return a();"
    module = as_script(wrapped.replace("BODY", body))
    assert module.text == "/** notice */\nvar a=()=>{return b()};window.startPlotly=a;\n"
    assert not as_script(wrapped.replace("BODY", "var a=1;")).module
    assert not as_script(wrapped.replace("BODY", body) + "more()").module


def test_labels_in_figures_are_escaped_for_plotly(build: ModuleType) -> None:
    records = [
        build.make_run(run_id=str(at), model=model) for at, model in enumerate(("<b>a</b>", "<a href='x'>b</a>"))
    ]
    made = comparison_page(comparison_info(records), tuple(run_info(record) for record in records))
    _, data = read(render_page(made))
    names = [trace["name"] for trace in data["cards"]["frontier"]["panels"]["frontier-loss"]["data"]]
    assert names == [
        "caee · model &lt;b&gt;a&lt;/b&gt; by θ",
        "caee · model &lt;a href='x'&gt;b&lt;/a&gt; by θ",
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(st.text() | st.floats() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_any_data_survives_its_script_element(value: Any) -> None:
    text = render._script_json({"value": value})
    assert not re.search(r"[<>&\u2028\u2029]", text)

    def finite(inner: Any) -> Any:
        if isinstance(inner, float):
            return inner if abs(inner) != float("inf") and inner == inner else None
        if isinstance(inner, list):
            return [finite(each) for each in inner]
        return {key: finite(each) for key, each in inner.items()} if isinstance(inner, dict) else inner

    assert json.loads(text)["value"] == finite(value)


def test_the_page_shows_the_numbers_of_the_json(build: ModuleType, page: str) -> None:
    run = build.make_run()
    _, data = read(page)
    cards = data["cards"]
    heat = cards["layer-heat"]["panels"]
    assert heat["heat-before"]["data"][0]["z"] == rounded([list(layer.device_misses_before) for layer in run.layers])
    assert heat["heat-after"]["data"][0]["z"] == rounded([list(layer.device_misses_after) for layer in run.layers])
    dots = cards["phases"]["panels"]["phase-tpot"]["data"][0]
    assert dots["x"] == rounded([seconds * 1e3 for seconds in run.with_policy.tpot_seconds.samples])
    rows = cards["phases"]["rows"]
    assert [row[3] for row in rows if row[:2] == ["TPOT", "baseline"]] == list(run.baseline.tpot_seconds.samples)
    steps = cards["steps"]["panels"]["steps-movements"]["data"]
    assert steps[0]["y"] == list(run.series.baseline_max_misses)
    assert steps[1]["y"] == list(run.series.policy_max_misses)
    assert len(cards["layer-devices"]["panels"]["layer-devices"]["variants"]) == 2 * len(run.layers)


def test_every_panel_has_an_alternative_and_every_card_a_table(build: ModuleType) -> None:
    made = page_of(build)
    assert len(made.cards) >= 15
    for card in made.cards:
        assert card.table.rows, card.key
        assert all(len(row) == len(card.table.columns) for row in card.table.rows), card.key
        assert card.lede.endswith((".", ")")), card.key
        for panel in card.panels:
            assert panel.alt.endswith("."), panel.key
            assert "height" in panel.layout, panel.key
            expected = 1
            for picker in card.pickers:
                expected *= len(picker.options)
            assert len(panel.variants) == (expected if card.pickers else 0), panel.key
    panels = [panel.key for card in made.cards for panel in card.panels]
    assert len({card.key for card in made.cards}) == len(made.cards)
    assert len(set(panels)) == len(panels)


def test_every_colour_has_a_dark_counterpart(page: str) -> None:
    _, data = read(page)
    used = set(re.findall(r"#[0-9a-fA-F]{6}\b", json.dumps([data["cards"], data["template"]])))
    assert used <= set(data["dark"])
    assert not set(theme.DARK.values()) & set(theme.DARK)


def test_stray_timings_do_not_flatten_the_residuals(build: ModuleType) -> None:
    probe = build.make_probe(devices=1)
    link = probe.links[0]
    stray = replace(link.samples[0], seconds=(*link.samples[0].seconds, 1.0))
    probe = replace(probe, links=(replace(link, samples=(stray, *link.samples[1:])), *probe.links[1:]))
    card = cost_models_card(cost_models_info(build.make_calibration(devices=1), probe))
    panel = card.panels[1]
    (trace,) = panel.data
    assert len(trace["x"]) == 36
    low, high = panel.layout["yaxis"]["range"]
    assert -0.2 < low < high < 0.2
    assert all(low < value < high for value in trace["y"])
    assert trace["marker"]["symbol"].count("triangle-up") >= 1
    assert max(trace["customdata"]) > 1000
    assert "beyond the axis" in panel.alt


def test_without_calibration_quality_or_steps_the_page_still_stands(build: ModuleType) -> None:
    run = build.make_run()
    series = replace(run.series, baseline_max_misses=(), policy_max_misses=(), baseline_hit_rate=(), policy_hit_rate=())
    bare = replace(run, predicted=None, quality=None, layers=(), series=series, samples=())
    made = run_page(run_info(bare))
    assert [section.key for section in made.sections] == ["devices", "time", "conditions"]
    assert "caee calibrate" in render_page(made)


def test_a_simulation_has_a_page(build: ModuleType) -> None:
    reader, data = read(simulation_page(build.make_simulation()))
    assert "Predicted, not measured" in reader.text
    assert len(data["cards"]["passes"]["rows"]) == 8
    assert data["cards"]["layer-heat"]["counts"] == [8]
    points = data["cards"]["pareto"]["panels"]["pareto"]["data"]
    assert sum(len(trace["x"]) for trace in points if "markers" in trace["mode"]) == 8


def test_markdown_shows_text_as_text_and_every_card(build: ModuleType) -> None:
    text = markdown_page(page_of(build, nasty_run(build)))
    assert "<script" not in text.lower()
    assert html.escape("<script>", quote=False) in text
    for card in page_of(build).cards:
        assert f"### {card.title}" in text
    table_lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) >= 3 for line in table_lines)
    assert "240 more rows" in text


def test_plotly_labels_keep_their_text() -> None:
    assert html.unescape(plain(NASTY)) == NASTY


def test_a_large_run_stays_small(build: ModuleType) -> None:
    run = build.make_run(layers=58, devices=16, steps=2000)
    made = run_page(run_info(run, build.make_calibration(devices=16), build.make_probe(devices=16)))
    assert len(render_page(made).encode()) < 7_000_000
