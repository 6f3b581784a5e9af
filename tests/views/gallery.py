"""Pictures of reports, for looking at: `python -m tests.views.gallery FOLDER`.

For each report of `reports.py`: the HTML page in light and in dark as PNG (with its details open as well), the figure
on light and on dark as PNG, and the text view as .txt.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from nbdebug.report import Report
from nbdebug.views import html, text
from nbdebug.views.plots import figure
from tests.views import reports

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
GROUNDS = {"light": "#ffffff", "dark": "#212121"}


def main(folder: str) -> None:
    from playwright.sync_api import sync_playwright

    into = pathlib.Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for name, make in reports.ALL.items():
            report = make()
            (into / f"{name}.txt").write_text(text.render(report), encoding="utf-8")
            shoot(browser, report, into / name)
            draw(report, into / name)
        browser.close()


def shoot(browser: Any, report: Report, start: pathlib.Path) -> None:
    for scheme in GROUNDS:
        tab = browser.new_page(viewport={"width": 1000, "height": 400}, color_scheme=scheme, device_scale_factor=1.5)
        tab.set_content(html.page(report))
        tab.screenshot(path=f"{start}-{scheme}.png", full_page=True)
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        tab.screenshot(path=f"{start}-{scheme}-open.png", full_page=True)
        tab.close()


def draw(report: Report, start: pathlib.Path) -> None:
    try:
        drawn = figure.draw(report)
    except ValueError:  # a report may have nothing to draw
        return
    for scheme, ground in GROUNDS.items():
        drawn.savefig(f"{start}-figure-{scheme}.png", dpi=110, facecolor=ground)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.views.gallery FOLDER")
    main(sys.argv[1])
