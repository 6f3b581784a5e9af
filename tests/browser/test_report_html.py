"""A report in a real browser: what is seen without a click, in light and in dark; nothing runs or overflows."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.views import reports

GROUNDS = {"light": "rgb(253, 253, 252)", "dark": "rgb(33, 33, 33)"}


@pytest.fixture(scope="module", params=["light", "dark"])
def page(request: Any, browser: Any) -> Iterator[Any]:
    """A tab, in light and in dark, with what it complains about."""
    page = browser.new_page(color_scheme=request.param)
    page.scheme, page.alarms = request.param, []
    page.on("dialog", lambda dialog: (page.alarms.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: page.alarms.append(str(error)))
    yield page
    page.close()


@pytest.fixture
def tab(page: Any, tmp_path: pathlib.Path) -> Any:
    """`tab(report, width)` saves the report and opens the file."""

    def show(report: Any, width: int = 1000) -> Any:
        page.alarms.clear()
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(report.save(tmp_path / "report.html").as_uri())
        return page

    return show


def test_the_finding_is_seen_and_the_details_open_on_a_click(tab) -> None:
    page = tab(reports.forward_log())
    seen = page.inner_text("body")
    assert "Rows 2 and 5 take the logarithm of zero: head.ent (In [7], line 4)." in seen
    assert "Tried, it works: loss 0.3117" in seen and "How it came about" in seen
    assert not page.get_by_text("negative values").is_visible()
    page.get_by_text("The numbers").click()
    assert page.get_by_text("negative values").is_visible()
    picture = page.get_by_role("img", name="input of log (float32)")
    assert picture.is_visible() and picture.evaluate("i => i.complete && i.naturalWidth") == 640


def test_the_ground_follows_the_system_and_the_text_stands_out(tab) -> None:
    page = tab(reports.forward_log())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == GROUNDS[page.scheme]
    assert page.evaluate(_FAINTEST, "p, span, td, th, summary, li, pre, code") >= 4.5
    assert page.evaluate(_FAINTEST, "strong") >= 3.8  # bold, and one colour for both grounds: 4 is the most there is


@pytest.mark.parametrize("name", reports.ALL)
def test_nothing_overflows_and_nothing_runs(tab, name) -> None:
    page = tab(reports.ALL[name](), 420)
    for width in (420, 1000):
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(_OUTSIDE) == []
    assert page.alarms == [] and page.locator("script").count() == 0


_OUTSIDE = """() => [...document.querySelectorAll('p, h1, li, pre, img, summary')].filter(e => {
    const box = e.getBoundingClientRect(), scrolls = e.closest('div[style*="overflow-x"]');
    return !scrolls && (box.right > innerWidth || box.left < 0);
}).map(e => e.outerHTML.slice(0, 80))"""

_FAINTEST = """(chosen) => {
    const parse = c => c.match(/[\\d.]+/g).map(Number);
    const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(
        v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
    const ground = parse(getComputedStyle(document.body).backgroundColor);
    let least = 99;
    for (const e of document.querySelectorAll(chosen)) {
        let opacity = 1;
        for (let up = e; up; up = up.parentElement) opacity *= Number(getComputedStyle(up).opacity);
        const ink = parse(getComputedStyle(e).color).slice(0, 3).map((v, i) => v * opacity + ground[i] * (1 - opacity));
        const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
        least = Math.min(least, (a + .05) / (b + .05));
    }
    return least;
}"""
