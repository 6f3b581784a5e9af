"""The panel and the live view of %grad_watch in a real JupyterLab: each control clicked while a training runs and
afterwards, in both themes; what a saved notebook keeps, trusted or not.

Screenshots are kept where NBDEBUG_SHOTS names a folder.
"""

from __future__ import annotations

import base64
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import Book, Lab, until

SETUP = """
%load_ext nbdebug
import pathlib, time, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(6)], nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
x = torch.randn(64, 8)
y = x.square().sum(1, keepdim=True)""".strip()
LOOP = """
while not pathlib.Path("NAME.stop").exists():
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 20.0)
    opt.step()
    time.sleep(0.02)""".strip()
CELLS = [
    SETUP,
    "%grad_watch on --live",
    LOOP.replace("NAME", "live"),
    "%grad_watch --off;",
    "%grad_watch on --panel",
    LOOP.replace("NAME", "panel"),
    "%grad_watch --off;",
]
LIVE, PANEL = 1, 4  # the cells of the pictures


@pytest.fixture(scope="module")
def live(lab: Lab) -> Iterator[Book]:
    """A notebook whose training runs, under the live view."""
    book = lab.open(CELLS, "grad_watch")
    book.run_all(wait=False)
    yield book
    book.close()


@pytest.fixture(scope="module")
def panel(lab: Lab, live: Book) -> Book:
    """The same a training later, which runs under a panel."""
    (lab.files / "live.stop").touch()
    live.output(PANEL).get_by_role("button", name="Pause").wait_for(timeout=60_000)
    return live


@pytest.fixture(scope="module")
def ended(lab: Lab, panel: Book) -> Book:
    """The same when that has ended."""
    (lab.files / "panel.stop").touch()
    panel.wait_idle()
    until(lambda: stands(panel).startswith("Ended"), 20, "the panel has not ended")
    return panel


def picture(book: Book, place: int = PANEL) -> Any:
    return book.output(place).get_by_role("img").last


def told(book: Book, place: int = PANEL) -> str:
    """What the picture says to those who do not see it."""
    return str(picture(book, place).get_attribute("alt", timeout=60_000))


def drawn(book: Book, place: int = PANEL) -> str:
    """The picture's SVG."""
    return base64.b64decode(str(picture(book, place).get_attribute("src")).partition("base64,")[2]).decode()


def steps(book: Book, place: int = PANEL) -> int:
    found = re.search(r"over ([\d,]+) steps", told(book, place))
    return int(found[1].replace(",", "")) if found else 0


def rows(book: Book) -> list[str]:
    """The layers of the table."""
    table = book.output(PANEL).locator("table", has_text="Norm now")
    return [str(text) for text in table.locator("tbody th").all_inner_texts()]


def stands(book: Book) -> str:
    """The word beside the controls."""
    return str(book.output(PANEL).locator(".widget-label").last.inner_text(timeout=60_000))


def click(book: Book, name: str) -> None:
    book.output(PANEL).get_by_role("button", name=name).click()


def changes(book: Book, place: int = PANEL, seconds: float = 1) -> bool:
    """Whether the picture changes by itself. A hundredth of the time for drawing: seconds apart on a busy machine."""
    before, left = drawn(book, place), 10 * seconds
    while drawn(book, place) == before and left > 0:
        book.page.wait_for_timeout(100)
        left -= 1
    return left > 0


def shot(book: Book, name: str, place: int = PANEL) -> None:
    if folder := os.environ.get("NBDEBUG_SHOTS"):
        book.output(place).screenshot(path=str(pathlib.Path(folder) / f"{name}.png"))


def test_the_live_view_changes_while_training_runs(live: Book) -> None:
    until(lambda: live.output(LIVE).get_by_role("img").count() > 0 and steps(live, LIVE) > 30, 60, "nothing is drawn")
    assert changes(live, LIVE, 20)
    shot(live, "live-running-light", LIVE)


def test_each_control_does_what_it_says_while_training_runs(panel: Book) -> None:
    ended = told(panel, LIVE)
    until(lambda: steps(panel) > 30, 60, "the picture does not follow the training")
    shot(panel, "panel-live-light")
    click(panel, "Pause")
    until(lambda: stands(panel).startswith("Paused at"), 10, "a click is not heard while the cell runs")
    paused = steps(panel)
    assert not changes(panel)
    click(panel, "Refresh")
    until(lambda: steps(panel) > paused, 10, "Refresh draws nothing")
    assert len(rows(panel)) == 12 and "2 more" in panel.output(PANEL).inner_text()
    panel.output(PANEL).get_by_role("textbox", name="Layers").fill("down")
    until(lambda: rows(panel) == [f"{n}.down" for n in range(1, 7)], 10, "the filter does nothing")
    assert "6 of 14 layers" in drawn(panel) and ">1.up<" not in drawn(panel)
    box = panel.output(PANEL).get_by_role("checkbox", name="Log scale")
    assert box.is_checked() and "linear" not in drawn(panel)
    box.click()
    until(lambda: "linear colours" in drawn(panel), 10, "the scale stays logarithmic")
    assert "(logarithmic)" not in drawn(panel)
    shot(panel, "panel-paused-linear-light")
    click(panel, "Resume")
    until(lambda: stands(panel) == "Live.", 10, "Resume is not heard")
    assert told(panel, LIVE) == ended  # the live view of the training before has come to rest
    assert changes(panel, seconds=20) and panel.alarms == []


def test_it_ends_as_the_whole_report_and_still_works_in_the_dark(ended: Book) -> None:
    ended.theme("dark")
    field = ended.output(PANEL).get_by_role("textbox", name="Layers")
    field.fill("[1-2].*")
    until(lambda: rows(ended) == ["1.up", "1.down", "2.up", "2.down"], 10, "the filter takes no pattern")
    shot(ended, "panel-ended-filtered-dark")
    field.fill("nothing")
    until(lambda: "none of 14 layers matches" in drawn(ended), 10, "it is not said that nothing matches")
    assert rows(ended) == []
    field.fill("")
    until(lambda: len(rows(ended)) == 12, 10, "the filter cannot be taken off")
    box = ended.output(PANEL).get_by_role("checkbox", name="Log scale")
    was = "linear colours" in drawn(ended)
    box.click()
    until(lambda: ("linear colours" in drawn(ended)) != was, 10, "the scale cannot be changed any more")
    click(ended, "Refresh")
    assert ended.output(PANEL).get_by_role("button", name="Pause").is_disabled()
    assert "gradients finite in every layer." in ended.output(PANEL).inner_text()
    shot(ended, "panel-ended-dark")
    for control in ended.output(PANEL).locator("button, input, label").all():
        assert control.evaluate(_CLIPPED) == 0
    ended.theme("light")
    shot(ended, "panel-ended-light")


@pytest.mark.parametrize("trusted", [True, False])
def test_a_saved_notebook_keeps_both_pictures(lab: Lab, ended: Book, trusted: bool) -> None:
    saved = ended.save().cells[PANEL].outputs
    assert "<img" in "".join(output.get("data", {}).get("text/html", "") for output in saved)
    again = lab.copy(ended, trusted)
    try:
        for place in (LIVE, PANEL):
            picture(again, place).scroll_into_view_if_needed()
            assert told(again, place) == told(ended, place)
            assert picture(again, place).evaluate("i => i.complete && i.naturalWidth") == 640
            shot(again, f"reopened-{place}-{'trusted' if trusted else 'untrusted'}", place)
        assert rows(again) == rows(ended)
        assert ("The controls of this picture" in again.output(PANEL).inner_text()) is not trusted
    finally:
        again.close()


_CLIPPED = "e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== 'visible' ? 1 : 0"
