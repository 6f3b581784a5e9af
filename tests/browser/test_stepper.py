"""The panel of a stepper in a real JupyterLab: each control clicked, in both themes, while other cells can be run; what
a saved notebook keeps, trusted or not.

Screenshots are kept where NBDEBUG_SHOTS names a folder.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import Book, Lab, until

SETUP = """
%load_ext nbdebug
import threading, torch
from torch import nn
from nbdebug import step_through

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Ratio(nn.Module):
    def forward(self, x):
        return x / (x[:, :1] - x[:, :1].round(decimals=1)).clamp(min=0)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(4)], Ratio(), nn.Linear(16, 1))
batch = torch.randn(64, 8), torch.randn(64, 1)
before = [p.clone() for p in net.parameters()]""".strip()
OTHER = "print('alive at', step.at, tuple(step.inputs[0].shape))"
AFTER = (
    "print('left', [t.name for t in threading.enumerate() if 'step' in t.name],\n"
    "      sum(len(m._forward_hooks) for m in net.modules()),\n"
    "      all(torch.equal(a, b) and b.grad is None for a, b in zip(before, net.parameters())))"
)
CELLS = [SETUP, "step = step_through(net, batch, nn.MSELoss())\nstep", OTHER, AFTER, "%step_through --forward"]
PANEL, BESIDE, LEFT, AGAIN = 1, 2, 3, 4


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Book]:
    """The model and the batch."""
    book = lab.open(CELLS, "stepper")
    run(book, 0)
    yield book
    book.close()


@pytest.fixture
def book(notebook: Book) -> Book:
    """A new step that waits before the model, on a light page."""
    notebook.theme("light")
    run(notebook, PANEL)
    until(lambda: headline(notebook).startswith("Before the model (Sequential)"), 60, "no step waits")
    return notebook


def run(book: Book, place: int) -> None:
    """One cell, by the keyboard."""
    book.cell(place).locator(".cm-content").click()
    book.page.keyboard.press("Control+Enter")
    book.page.wait_for_timeout(300)
    book.wait_idle()


def headline(book: Book, place: int = PANEL) -> str:
    """The sentence above the picture: in bold, a verdict may stand above it."""
    title = book.output(place).locator(".jp-RenderedHTMLCommon p[style*='600']").first
    return str(title.inner_text(timeout=60_000))


def click(book: Book, name: str, then: str, place: int = PANEL) -> None:
    """A button, and what the picture has to say after it."""
    book.output(place).get_by_role("button", name=name).click()
    until(lambda: headline(book, place).startswith(then), 20, f"{name} does not lead to {then!r}")


def here(book: Book, place: int = PANEL) -> list[str]:
    """The row of the layer that is marked."""
    row = book.output(place).locator("tr", has_text="▶")
    return [str(text).strip("▶\xa0 ") for text in row.locator("th, td").all_inner_texts()]


def tensors(book: Book) -> list[str]:
    """The names of the tensors in the table, and of the histograms."""
    table = book.output(PANEL).locator("table", has_text="dtype")
    return [str(text) for text in table.locator("tbody tr td:nth-child(2)").all_inner_texts()]


def told(book: Book, place: int = PANEL) -> str:
    return str(book.output(place).get_by_role("img").last.get_attribute("alt", timeout=60_000))


def shot(book: Book, name: str, place: int = PANEL) -> None:
    if folder := os.environ.get("NBDEBUG_SHOTS"):
        book.output(place).screenshot(path=str(pathlib.Path(folder) / f"stepper-{name}.png"))


def test_each_control_moves_the_step_as_it_says(book: Book) -> None:
    assert tensors(book) == ["input"]
    click(book, "Into", "Before 0 (Linear)")
    click(book, "Next", "After 0 (Linear): all finite")
    assert here(book)[:2] == ["0", "Linear"] and "…" in here(book)[2] and tensors(book) == ["input", "output"]
    assert "input: from" in told(book) and "output: from" in told(book)
    click(book, "Next", "After 1 (Block)")
    shot(book, "next-light")
    book.output(PANEL).get_by_role("textbox").fill("*.up")
    click(book, "Run to", "Before 2.up (Linear)")
    assert here(book)[0] == "up"
    click(book, "Out", "After 2 (Block)")
    assert book.alarms == []


def test_the_notebook_is_alive_meanwhile(book: Book) -> None:
    click(book, "Into", "Before 0 (Linear)")
    run(book, BESIDE)
    assert "alive at before `0` (Linear) (64, 8)" in book.output(BESIDE).inner_text()


def test_a_wrong_name_is_told_beside_the_controls(book: Book) -> None:
    book.output(PANEL).get_by_role("textbox").fill("nothing")
    book.output(PANEL).get_by_role("button", name="Run to").click()
    word = book.output(PANEL).locator(".widget-label").last
    until(lambda: "'nothing'" in word.inner_text(), 10, "it is not said")
    assert headline(book).startswith("Before the model (Sequential)")


def test_the_first_non_finite_in_the_dark_and_the_end(book: Book) -> None:
    book.theme("dark")
    click(book, "To first non-finite", "After 5 (Ratio)")
    assert ", from finite inputs" in headline(book) and here(book)[2] == "not finite"
    assert "inf" in told(book)
    for control in book.output(PANEL).locator("button, input").all():
        assert control.evaluate(_CLIPPED) == 0
    shot(book, "non-finite-dark")
    click(book, "Finish", "The step is over")
    for name in ("Next", "Abandon"):
        assert book.output(PANEL).get_by_role("button", name=name).is_disabled()
    shot(book, "finished-dark")
    run(book, LEFT)
    assert "left [] 0 True" in book.output(LEFT).inner_text()


def test_abandon_leaves_nothing_behind(book: Book) -> None:
    run(book, AGAIN)
    click(book, "Into", "Before 0 (Linear)", AGAIN)
    click(book, "Abandon", "The step was abandoned", AGAIN)
    run(book, LEFT)
    assert "left [] 0 True" in book.output(LEFT).inner_text()
    shot(book, "abandoned-light", AGAIN)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_saved_notebook_keeps_where_it_stood(lab: Lab, book: Book, trusted: bool) -> None:
    click(book, "To first non-finite", "After 5 (Ratio)")
    saved = book.save().cells[PANEL].outputs
    assert "<img" in "".join(output.get("data", {}).get("text/html", "") for output in saved)
    again = lab.copy(book, trusted)
    try:
        assert headline(again) == headline(book) and told(again) == told(book) and here(again) == here(book)
        picture: Any = again.output(PANEL).get_by_role("img").last
        picture.scroll_into_view_if_needed()
        assert picture.evaluate("i => i.complete && i.naturalWidth") == 640
        assert ("The controls of this picture" in again.output(PANEL).inner_text()) is not trusted
        shot(again, f"reopened-{'trusted' if trusted else 'untrusted'}")
    finally:
        again.close()


_CLIPPED = "e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== 'visible' ? 1 : 0"
