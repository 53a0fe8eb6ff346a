"""Take the screenshots of a report that stand in the documentation.

    python tools/report_screenshots.py build/demo-report.html

Writes docs/report-light.png and docs/report-dark.png. Needs playwright and a Chromium on the path.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
SIZE = {"width": 1200, "height": 1900}


def main(report: Path) -> None:
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
            tab.goto(report.resolve().as_uri())
            tab.wait_for_selector('html[data-ready="true"]', state="attached")
            tab.screenshot(path=DOCS / f"report-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
