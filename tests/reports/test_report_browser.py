"""The page in a real Chromium: drawn in full, silent, reachable by keyboard, readable at any width and in the dark."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reports.figures import theme
from reports.html import render
from reports.html.bundle import Script
from reports.html.render import render_page
from reports.info.comparison import comparison_info
from reports.info.run import run_info
from reports.info.simulation import simulation_info
from reports.pages.comparison import comparison_page
from reports.pages.page import Page
from reports.pages.run import run_page
from reports.pages.simulation import simulation_content

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NASTY = "<script>alert(1)</script> \"q\" 'a' & 模型 🦊"

# Elements that stick out of their box, save those that are meant to scroll within it.
OVERFLOWING = """() => [...document.querySelectorAll('main *, header *')]
  .filter((e) => !e.closest('svg, .scroll, nav, .plot, option') && e.scrollWidth > e.clientWidth + 1
    && e.clientWidth > 0 && getComputedStyle(e).display !== 'inline')
  .map((e) => `${e.tagName}.${e.className}: ${e.scrollWidth} > ${e.clientWidth}`)"""

# Cards, plots and key figures that lie over one another; text of a plot that lies outside it.
OVERLAPPING = """() => {
  const found = [];
  for (const kind of ['.card', '.plot', '.keys li', '.verdict > *', '.card > *', '.actions button', '.picker > *']) {
    const boxes = [...document.querySelectorAll(kind)].map((e) => [e, e.getBoundingClientRect()]);
    for (const [i, [a, p]] of boxes.entries())
      for (const [b, q] of boxes.slice(i + 1))
        if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
          found.push(`${kind}: ${a.className || a.id} over ${b.className || b.id}`);
  }
  for (const plot of document.querySelectorAll('.plot')) {
    const box = plot.getBoundingClientRect();
    for (const text of plot.querySelectorAll('svg text')) {
      const t = text.getBoundingClientRect();
      const across = t.left >= box.left - 2 && t.right <= box.right + 2;
      const down = t.top >= box.top - 2 && t.bottom <= box.bottom + 2;
      if (t.width && !(across && down))
        found.push(`${plot.id}: ${text.textContent} outside`);
    }
  }
  return found;
}"""

MARKS = """(plot) => ({
  bars: plot.querySelectorAll('.barlayer .point').length,
  markers: plot.querySelectorAll('.scatterlayer .points path').length,
  lines: plot.querySelectorAll('.scatterlayer path.js-line').length,
  cells: [...plot.querySelectorAll('.heatmaplayer image')].length,
})"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here (looked for {', '.join(BROWSERS)})")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Page]]:
    """The three kinds of page, written to files; the run has the nastiest names."""
    run = replace(build.make_run(model=NASTY), warnings=(NASTY,))
    calibration, probe = build.make_calibration(), build.make_probe()
    earlier = replace(calibration, calibration_id="earlier", created_at="2026-02-01T00:00:00Z")
    others = [
        run,
        *(build.make_run(run_id=f"run-{theta}", theta=theta, ratio=theta, model=NASTY) for theta in (0.7, 0.9)),
        replace(run, run_id="run-<b>", policy=replace(run.policy, name="budget", parameters={"epsilon": 0.01})),
    ]
    made = {
        "run": run_page(run_info(run, calibration, probe, [calibration, earlier])),
        "comparison": comparison_page(comparison_info(others), tuple(run_info(each) for each in others)),
        "simulation": simulation_content(simulation_info(build.make_simulation())),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, page in made.items():
        (folder / f"{name}.html").write_text(render_page(page), encoding="utf-8")
    return {name: (folder / f"{name}.html", page) for name, page in made.items()}


class Opened:
    """A page in the browser, and whatever it said or asked for."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.tab = self.context.new_page()
        self.heard: list[str] = []
        self.tab.on("console", lambda message: self.heard.append(message.text))
        self.tab.on("pageerror", lambda error: self.heard.append(str(error)))
        self.tab.on("request", self._request)
        self.tab.goto(file.as_uri())
        self.wait()

    def wait(self) -> None:
        self.tab.wait_for_selector('html[data-ready="true"]', state="attached")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.heard.append(f"asked for {request.url}")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("name", ["run", "comparison", "simulation"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_is_silent_complete_and_fits(
    chromium: Any, pages: dict[str, tuple[Path, Page]], name: str, width: int, scheme: str
) -> None:
    file, content = pages[name]
    with Opened(chromium, file, width=width, scheme=scheme) as opened:
        assert opened.heard == []
        assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.tab.evaluate(OVERFLOWING) == []
        assert opened.tab.evaluate(OVERLAPPING) == []
        for card in content.cards:
            for panel in card.panels:
                marks = opened.tab.locator(f"#plot-{panel.key}").evaluate(MARKS)
                assert marks == expected_marks(panel.data), panel.key
        opened.tab.locator(".plain summary").click()
        assert opened.tab.locator(".plain li").last.is_visible()
        assert opened.tab.evaluate(OVERFLOWING) == []
        assert opened.tab.evaluate(OVERLAPPING) == []
        assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width


def expected_marks(data: list[Any]) -> dict[str, int]:
    """How many marks the data of a figure asks for."""
    scatters = [trace for trace in data if trace["type"] == "scatter"]
    return {
        "bars": sum(len(trace["x"]) for trace in data if trace["type"] == "bar"),
        "markers": sum(len(trace["x"]) for trace in scatters if "markers" in trace["mode"]),
        "lines": sum(1 for trace in scatters if "lines" in trace["mode"]),
        "cells": sum(1 for trace in data if trace["type"] == "heatmap"),
    }


@pytest.fixture(scope="module")
def run_tab(chromium: Any, pages: dict[str, tuple[Path, Page]]) -> Iterator[Any]:
    """The run's page, opened once for the tests that leave it as it was."""
    with Opened(chromium, pages["run"][0]) as opened:
        yield opened.tab
        assert opened.heard == []


def bars_of(tab: Any) -> list[float]:
    heights: list[float] = tab.evaluate("document.getElementById('plot-layer-devices').data[1].y")
    return heights


def test_the_layer_is_picked_by_keyboard(run_tab: Any, pages: dict[str, tuple[Path, Page]]) -> None:
    card = next(card for card in pages["run"][1].cards if card.key == "layer-devices")
    variants, start = card.panels[0].variants, card.pickers[0].selected
    plot = run_tab.locator("#plot-layer-devices")
    run_tab.locator("#card-layer-devices .step").first.focus()
    run_tab.keyboard.press("Tab")
    assert run_tab.evaluate("document.activeElement.id") == "pick-layer-devices-0"
    run_tab.keyboard.press("ArrowDown")
    assert bars_of(run_tab) == variants[2 * (start + 1)].data[1]["y"]
    assert plot.get_attribute("aria-label") == variants[2 * (start + 1)].alt
    run_tab.keyboard.press("ArrowUp")
    run_tab.keyboard.press("Tab")
    run_tab.keyboard.press("Enter")
    assert bars_of(run_tab) == variants[2 * (start + 1)].data[1]["y"]
    run_tab.keyboard.press("Tab")
    run_tab.keyboard.press("ArrowDown")
    assert bars_of(run_tab) == variants[2 * (start + 1) + 1].data[1]["y"]
    assert "ms" in run_tab.locator("#plot-layer-devices .ytitle").text_content()


def test_values_appear_on_hover(run_tab: Any, pages: dict[str, tuple[Path, Page]]) -> None:
    run_tab.locator("#card-gap").scroll_into_view_if_needed()
    box = run_tab.locator("#plot-gap .barlayer .trace").nth(1).locator(".point path").nth(2).bounding_box()
    run_tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = run_tab.locator("#plot-gap .hovertext")
    hover.wait_for(state="visible")
    card = next(card for card in pages["run"][1].cards if card.key == "gap")
    assert hover.text_content() == f"2, after: {card.panels[0].data[1]['y'][2]:.1%}"


def test_hostile_names_are_seen_as_text(run_tab: Any) -> None:
    assert NASTY in run_tab.locator(".standfirst").text_content().replace("\N{NO-BREAK SPACE}", " ")
    assert NASTY in run_tab.locator(".warnings").text_content()


def test_cards_download_their_tables(run_tab: Any, pages: dict[str, tuple[Path, Page]]) -> None:
    # Not all of them: Chromium holds back the eleventh download in a row.
    chosen = ("layer-heat", "phases", "quality", "samples", "cost-models", "workload")
    for card in (card for card in pages["run"][1].cards if card.key in chosen):
        with run_tab.expect_download() as download:
            run_tab.locator(f"#card-{card.key} .csv").click()
        assert download.value.suggested_filename == f"{card.key}.csv"
        text = Path(download.value.path()).read_text(encoding="utf-8")
        assert cells(text) == cells(card.table.csv()), card.key


def cells(text: str) -> list[list[str | float]]:
    """CSV as values: two programs may write one number in two ways."""

    def value(cell: str) -> str | float:
        try:
            return float(cell)
        except ValueError:
            return {"True": "true", "False": "false"}.get(cell, cell)

    return [[value(cell) for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]


def test_a_figure_s_table_opens(run_tab: Any, pages: dict[str, tuple[Path, Page]]) -> None:
    card = next(card for card in pages["run"][1].cards if card.key == "layer-heat")
    run_tab.locator("#card-layer-heat summary").click()
    run_tab.locator("#card-layer-heat tbody tr").first.wait_for()  # filled when it opens, a moment after the click
    assert run_tab.locator("#card-layer-heat tbody tr").count() == len(card.table.rows)
    assert (
        run_tab.locator("#card-layer-heat tbody tr").nth(5).locator("td").nth(1).text_content() == card.table.rows[5][1]
    )
    run_tab.locator("#card-layer-heat summary").click()


def test_dark_follows_the_system_and_the_button(chromium: Any, pages: dict[str, tuple[Path, Page]]) -> None:
    def colours(tab: Any) -> tuple[str, str]:
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        bar = tab.locator("#plot-gap .barlayer .trace").nth(1).locator("path").first
        return ground, bar.evaluate("(path) => getComputedStyle(path).fill")

    with Opened(chromium, pages["run"][0], scheme="dark") as opened:
        assert colours(opened.tab) == ("rgb(15, 19, 23)", "rgb(60, 184, 170)")
        opened.tab.locator("#theme").press("Enter")
        opened.wait()
        assert colours(opened.tab) == ("rgb(244, 246, 248)", "rgb(15, 118, 110)")
        opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert opened.tab.evaluate("document.documentElement.dataset.theme") == "light"
        opened.tab.emulate_media(media="print")
        assert not opened.tab.locator(".top").is_visible()
        assert not opened.tab.locator(".actions").first.is_visible()
        assert opened.heard == []


# Notes each figure that a page's script draws, and calls ``window.hurry`` after the first.
WATCH = """
window.drawn = [];
let plotly;
Object.defineProperty(window, 'Plotly', { configurable: true, get: () => plotly, set: (given) => {
  plotly = given;
  const react = given.react;
  given.react = (plot, ...rest) => {
    drawn.push(plot.id);
    const done = react(plot, ...rest);
    if (drawn.length === 1 && window.hurry) hurry();
    return done;
  };
}});
"""


def opened_with(browser: Any, url: str, script: str) -> Any:
    """A tab in which ``script`` ran before the page's own, once everything is drawn."""
    tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    tab.add_init_script(WATCH + script)
    tab.goto(url)
    tab.wait_for_selector('html[data-ready="true"]', state="attached")
    return tab


def test_figures_nearest_to_the_screen_are_drawn_first(chromium: Any, pages: dict[str, tuple[Path, Page]]) -> None:
    file, content = pages["run"]
    plots = [f"plot-{panel.key}" for card in content.cards for panel in card.panels]
    tab = opened_with(chromium, f"{file.as_uri()}#{content.sections[-1].key}", "")
    drawn = tab.evaluate("drawn")
    assert sorted(drawn) == sorted(plots)
    # The first is drawn before the page has scrolled.
    assert drawn[0] == "plot-layer-devices"
    assert max(drawn.index("plot-cost-fit"), drawn.index("plot-drift")) < drawn.index("plot-heat-before")
    tab.context.close()


def test_another_theme_while_figures_are_drawn(chromium: Any, pages: dict[str, tuple[Path, Page]]) -> None:
    tab = opened_with(
        chromium, pages["simulation"][0].as_uri(), "window.hurry = () => document.getElementById('theme').click();"
    )
    colours = tab.evaluate(
        "[...document.querySelectorAll('.plot')].map((plot) => plot.layout.template.layout.font.color)"
    )
    assert set(colours) == {theme.DARK[theme.INK]}
    assert len(colours) == len(set(tab.evaluate("drawn")))
    tab.context.close()


def test_paper_has_every_figure_however_early_it_is_asked_for(
    chromium: Any, pages: dict[str, tuple[Path, Page]]
) -> None:
    early = """window.hurry = () => setTimeout(() => {
      dispatchEvent(new Event('beforeprint'));
      window.inTime = drawn.length;
    });"""
    tab = opened_with(chromium, pages["simulation"][0].as_uri(), early)
    plots = tab.locator(".plot").count()
    assert tab.evaluate("inTime") == plots + 1  # the first was drawn twice
    assert (
        tab.evaluate(
            "[...document.querySelectorAll('.plot')].filter((plot) => plot.querySelector('.plot-container svg')).length"
        )
        == plots
    )
    tab.context.close()


def test_a_layer_picked_before_plotly_has_started_is_the_one_drawn(
    chromium: Any, pages: dict[str, tuple[Path, Page]]
) -> None:
    card = next(card for card in pages["run"][1].cards if card.key == "layer-devices")
    chosen = (card.pickers[0].selected + 1) % len(card.pickers[0].options)
    script = f"""document.addEventListener('readystatechange', () => {{
      if (document.readyState !== 'interactive') return;
      window.early = typeof Plotly;
      const pick = document.getElementById('pick-layer-devices-0');
      pick.selectedIndex = {chosen};
      pick.dispatchEvent(new Event('change', {{ bubbles: true }}));
    }});"""
    tab = opened_with(chromium, pages["run"][0].as_uri(), script)
    assert tab.evaluate("early") == "undefined"
    assert bars_of(tab) == card.panels[0].variants[2 * chosen].data[1]["y"]
    tab.context.close()


def test_a_bundle_of_unknown_form_works_as_it_is(
    chromium: Any, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "as_script", lambda bundle: Script(text=bundle, module=False))
    (tmp_path / "page.html").write_text(render_page(simulation_content(simulation_info(build.make_simulation()))))
    with Opened(chromium, tmp_path / "page.html") as opened:
        assert opened.heard == []
        assert opened.tab.locator(".plot svg").count() > 0


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, an accessibility checker, from npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which brings axe-core, is not installed")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "axe-core@4"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch axe-core in time")
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if done.returncode != 0 or not script.is_file():
        pytest.skip("npm could not fetch axe-core")
    return script.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("run", 1280, "light"), ("comparison", 400, "dark"), ("simulation", 1280, "dark")],
)
def test_axe_finds_no_serious_violation(
    chromium: Any, pages: dict[str, tuple[Path, Page]], axe: str, name: str, width: int, scheme: str
) -> None:
    with Opened(chromium, pages[name][0], width=width, scheme=scheme) as opened:
        opened.tab.locator(".plain summary").click()
        opened.tab.add_script_tag(content=axe)
        found = opened.tab.evaluate("axe.run({ exclude: ['.plot svg'] }, { resultTypes: ['violations'] })")
        serious = [
            (violation["id"], [node["html"][:160] for node in violation["nodes"]][:3])
            for violation in found["violations"]
            if violation["impact"] in ("serious", "critical")
        ]
        assert serious == []
        assert len(found["passes"]) > 20
