"""A large run's report: how long it takes to make, how large it is, and how soon a browser answers.

    python benchmarks/report_page.py [--layers 58] [--devices 16] [--steps 2000]

The run is made up (the builders of the report's tests), stored, and reported by ``caee report`` in a process of its
own; then Chromium opens the page, and the first change of the layer picker is timed from the start of the navigation
to the redrawn bars. Exit code 1 where the file reaches 7 MB, the command 5 s or 500 MB, or the browser 3 s.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

from store.session import open_store

MOST_BYTES, MOST_SECONDS, MOST_MEMORY, SOON = 7e6, 5.0, 500e6, 3.0
ROUNDS = 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PICK = """() => {
  const pick = document.getElementById('pick-layer-devices-0');
  pick.selectedIndex = (pick.selectedIndex + 7) % pick.options.length;
  pick.dispatchEvent(new Event('change', {bubbles: true}));
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))));
}"""


def builders() -> ModuleType:
    """``tests/reports/records.py``."""
    file = Path(__file__).parent.parent / "tests" / "reports" / "records.py"
    spec = importlib.util.spec_from_file_location("report_records", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(store: Path, page: Path) -> tuple[float, int]:
    """Seconds and peak bytes of ``caee report``."""
    program = str(Path(sys.executable).parent / "caee")
    command = [program, "report", "--store", str(store), "-o", str(page), "--force"]
    start = time.perf_counter()
    process = os.posix_spawn(program, command, os.environ)
    _, status, used = os.wait4(process, 0)
    seconds = time.perf_counter() - start
    if status != 0:
        sys.exit("caee report failed")
    return seconds, used.ru_maxrss * 1024


def opened(page: Path) -> list[tuple[float, float]] | None:
    """Seconds from the navigation's start until the page is drawn and until the picker answered; None: no browser."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None or importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    taken = []
    with sync_playwright() as driver:
        for _ in range(ROUNDS):
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            tab.goto(page.as_uri(), wait_until="commit")
            tab.wait_for_selector("#pick-layer-devices-0", state="attached")
            tab.wait_for_function("() => document.getElementById('plot-layer-devices')?.data")
            answered = tab.evaluate(PICK) / 1e3
            tab.wait_for_selector('html[data-ready="true"]', state="attached")
            taken.append((tab.evaluate("performance.now()") / 1e3, answered))
            browser.close()
    return taken


def main() -> int:
    """Print the figures and whether they are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    build = builders()
    with tempfile.TemporaryDirectory() as folder:
        path, page = Path(folder) / "caee.db", Path(folder) / "page.html"
        with open_store(str(path)) as store:
            store.save_probe(build.make_probe(devices=given.devices))
            store.save_calibration(build.make_calibration(devices=given.devices))
            store.save_run(build.make_run(layers=given.layers, devices=given.devices, steps=given.steps))
        made = [report(path, page) for _ in range(ROUNDS)]
        size = page.stat().st_size
        times = opened(page)
    seconds, memory = statistics.median(taken for taken, _ in made), max(peak for _, peak in made)
    print(f"{given.layers} layers × {given.devices} devices × {given.steps:,} steps: {size / 1e6:.2f} MB")
    print(f"caee report: median {seconds:.2f} s of {[round(taken, 2) for taken, _ in made]}, {memory / 1e6:.0f} MB")
    good = size < MOST_BYTES and seconds < MOST_SECONDS and memory < MOST_MEMORY
    if times is None:
        print("no browser here: how soon it answers was not measured")
        return int(not good)
    answers = sorted(answered for _, answered in times)
    print(f"the layer picker answers after {statistics.median(answers):.2f} s ({answers[0]:.2f} to {answers[-1]:.2f})")
    print(f"every figure is drawn: median {statistics.median(drawn for drawn, _ in times):.2f} s")
    return int(not (good and statistics.median(answers) < SOON))


if __name__ == "__main__":
    sys.exit(main())
