"""The panel of %nbdebug in a real JupyterLab: each control clicked, while a training runs and afterwards, in both
themes; and what a saved notebook keeps, trusted or not.

Screenshots are kept where NBDEBUG_SHOTS names a folder.
"""

from __future__ import annotations

import base64
import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.browser.lab import Book, Lab, until

SETUP = """
%load_ext nbdebug
import pathlib, time, torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
x = torch.randn(64, 8)
y = x.square().sum(1, keepdim=True)

def step(x=x):
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    time.sleep(0.02)
    return loss""".strip()
LOOP = "while not pathlib.Path('dashboard.stop').exists():\n    step()"
CELLS = [SETUP, "%nan_trace net(x).log().mean().backward()", "%nbdebug", LOOP, "step().item()"]
PANEL, RUNNING = 2, 3


@pytest.fixture(scope="module")
def book(lab: Lab) -> Iterator[Book]:
    """A notebook with a panel, whose training runs."""
    book = lab.open(CELLS, "dashboard")
    book.run_all(wait=False)
    book.output(PANEL).get_by_role("button", name="Trace next step").wait_for(timeout=60_000)
    yield book
    book.close()


def click(book: Book, name: str) -> None:
    book.output(PANEL).get_by_role("button", name=name).click()


def says(book: Book, words: str, seconds: float = 20) -> None:
    until(lambda: words in book.output(PANEL).inner_text(), seconds, f"the panel does not say {words!r}")


def pictures(book: Book) -> list[str]:
    """The SVGs of the panel."""
    sources = [str(image.get_attribute("src")) for image in book.output(PANEL).get_by_role("img").all()]
    return [base64.b64decode(source.partition("base64,")[2]).decode() for source in sources]


def shot(book: Book, name: str) -> None:
    if folder := os.environ.get("NBDEBUG_SHOTS"):
        book.output(PANEL).screenshot(path=str(pathlib.Path(folder) / f"{name}.png"))


def test_it_opens_with_what_was_found(book: Book) -> None:
    says(book, "1 finding so far")
    assert "nan/log-of-nonpositive" in book.output(PANEL).inner_text()
    shot(book, "nbdebug-opened-light")


def test_each_control_does_what_it_says_while_training_runs(book: Book) -> None:
    click(book, "Trace next step")
    says(book, "Traced a step: the outputs of 4 layers are finite.")
    click(book, "Gradients")
    says(book, "The gradient watch is on, watching model `net`")
    until(lambda: book.output(PANEL).get_by_role("img").count() >= 2, 20, "the gradients are not drawn")
    click(book, "Guard")
    says(book, "The guard is on, watching model `net`")
    click(book, "Refresh")
    says(book, "2 on, 1 finding so far")
    book.output(PANEL).get_by_role("textbox", name="Layers").fill("2")
    until(lambda: any("1 of 2 layers" in drawn for drawn in pictures(book)), 20, "the filter does nothing")
    shot(book, "nbdebug-running-light")
    click(book, "Free")
    says(book, "Freed the last traceback")
    click(book, "All off")
    says(book, "Everything is off.")
    says(book, "nothing on")
    click(book, "Stop")
    until(lambda: "Stopped" in book.output(RUNNING).inner_text(), 30, "the cell is not stopped")
    book.wait_idle()
    assert book.alarms == []


def test_it_works_while_nothing_runs_and_in_the_dark(book: Book) -> None:
    book.theme("dark")
    click(book, "Stop")
    says(book, "No cell is running.")
    click(book, "Refresh")
    shot(book, "nbdebug-ended-dark")
    book.theme("light")


@pytest.mark.parametrize("trusted", [True, False])
def test_a_saved_notebook_keeps_what_stood_in_it(lab: Lab, book: Book, trusted: bool) -> None:
    saved = book.save().cells[PANEL].outputs
    assert "nan/log-of-nonpositive" in "".join(o.get("data", {}).get("text/html", "") for o in saved)
    again = lab.copy(book, trusted)
    try:
        again.output(PANEL).scroll_into_view_if_needed()
        says(again, "nan/log-of-nonpositive")
        shot(again, f"nbdebug-reopened-{'trusted' if trusted else 'untrusted'}")
    finally:
        again.close()


CLICKED_FIRST = [SETUP, "%nbdebug", "for _ in range(5):\n    last = step()", "%guard status"]


def test_two_clicks_while_nothing_runs_watch_the_loop_from_its_first_step(lab: Lab) -> None:
    book = lab.open(CLICKED_FIRST[:2], "clicked")
    try:
        book.run_all()
        panel = book.output(1)
        panel.get_by_role("button", name="Guard").wait_for(timeout=60_000)
        for name, words in (
            ("Guard", "The guard is on, watching model `net`"),
            ("Gradients", "The gradient watch is on, watching model `net`"),
            ("Trace next step", "Waiting for the next step"),
        ):
            panel.get_by_role("button", name=name).click()
            until(lambda words=words: words in panel.inner_text(), 20, f"the panel does not say {words!r}")
        for place, cell in enumerate(CLICKED_FIRST[2:], 2):
            book.append(cell)
            until(lambda place=place: book.output(place).count() == 1, 20, "the cell is not there")
            book.wait_idle()
        until(lambda: "5 steps watched" in book.output(3).inner_text(), 20, "not every step was watched")
        assert "RuntimeError" not in book.output(2).inner_text() and book.alarms == []
        until(lambda: "Traced a step: the outputs of 4 layers are finite." in panel.inner_text(), 20, "no trace")
    finally:
        book.close()
