"""The drawing of a stepper and its panel without a browser."""

from __future__ import annotations

import base64
import gc
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from torch import nn

from nbdebug.report import Plot, Report
from nbdebug.tools.stepper.step_through import step_through
from nbdebug.views import text
from nbdebug.views.plots import stepper
from nbdebug.views.plots.marks import svg
from tests.stepper.models import Dividing, batch, model, threads
from tests.views.test_panel import WIDGET, Shell


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell()
    monkeypatch.setattr(text, "running_shell", lambda: shell)
    return shell


def layers(count: int, **changed: Any) -> list[dict[str, Any]]:
    """The model, blocks in it, three layers in each."""
    names = [""] + [name for i in range(count) for name in (f"b{i}", f"b{i}.x", f"b{i}.y", f"b{i}.z")]
    return [
        {
            "name": n,
            "type": "Kind",
            "depth": n.count(".") + bool(n),
            "calls": 1,
            "low": -1.0,
            "high": 2.0,
            "finite": True,
            "gradient": None,
            **changed,
        }
        for n in names
    ]


def data(count: int = 3, at: str | None = "b1.y", **histogram: Any) -> dict[str, Any]:
    shape = {"name": "output", "low": -1.0, "high": 1.0, "counts": [1, 4, 9], "NaN": 0, "inf": 0, **histogram}
    return {
        "state": "waits",
        "at": None if at is None else {"name": at},
        "layers": layers(count),
        "histograms": [shape],
    }


def test_the_layers_around_it_are_shown_and_it_is_said_how_many_are_not() -> None:
    for at, wanted in [
        ("b9.y", {"the model", "b9", "x", "y", "z", "b8", "b10"}),
        ("b9", {"x", "y", "z", "b8", "b10"}),
        ("", {"the model", "b0", "b1"}),
        (None, {"the model"}),
        ("loss", {"the model"}),
    ]:
        drawn = stepper.read(data(20, at))
        shown = [row for row in drawn.rows if not row.more]
        assert wanted <= {row.name for row in shown} and len(shown) == stepper.MOST
        assert sum(row.more for row in drawn.rows) + len(shown) == 81
        assert [row.name for row in shown if row.here] == (
            [at.rpartition(".")[2] or "the model"] if at not in (None, "loss") else []
        )


def test_what_is_drawn_is_well_formed_small_and_safe() -> None:
    given = data(40, "b3.x", NaN=3, name="<b>out</b>")
    given["layers"][1]["type"] = "<script>"
    report = Report("step_through(model, batch)", plots=(Plot("stepper", given),))
    html = report._repr_mimebundle_()["text/html"]
    assert "<script>" not in html and "<b>out" not in html and len(html) < 30_000
    drawn = base64.b64decode(re.search(r"svg\+xml;base64,([^\"]+)", html)[1])
    ElementTree.fromstring(drawn)
    assert b"3 NaN" in drawn and "alt=" in html and "from -1 to 1, 3 NaN" in html
    assert "▶" in html and "▶ x" in str(report)


@pytest.mark.parametrize("given", [{}, {"layers": "x"}, {"layers": []}])
def test_nothing_to_draw(given: dict[str, Any]) -> None:
    assert stepper.read(given) is None and "Nothing was found" in str(Report("q", plots=(Plot("stepper", given),)))


@pytest.mark.parametrize(
    "histogram, said",
    [
        ({"low": None, "high": None, "counts": [], "inf": 2}, "no finite value"),
        ({"low": 0.0, "high": 0.0, "counts": []}, "all 0"),
        ({"low": 0.0, "high": 3.0, "counts": [0, 0]}, "3"),
    ],
)
def test_histograms_of_odd_tensors(histogram: dict[str, Any], said: str) -> None:
    drawn = svg(stepper.read(data(1, None, **histogram)).drawing())
    ElementTree.fromstring(drawn)
    assert said in drawn


class Opened:
    """A panel in a notebook."""

    def __init__(self, shell: Shell, *middle: nn.Module) -> None:
        self.shell, self.stepper = shell, step_through(model(*middle), batch(), nn.MSELoss())
        self.stepper._ipython_display_()
        self.panel = self.stepper._panel

    def click(self, name: str) -> str:
        """The headline then."""
        self.panel.buttons[name].click()
        text: str = self.shell.published[-1].data["text/plain"]
        return text.splitlines()[0]


@pytest.fixture
def opened(shell: Shell) -> Any:
    opened = Opened(shell)
    yield opened
    opened.stepper.abandon()


def test_each_button_does_what_it_says(shell: Shell, opened: Opened) -> None:
    controls, picture = shell.published
    assert WIDGET in controls.data and WIDGET not in picture.data and not picture.update
    assert [c.description for c in opened.panel.box.children[:-1]] == [
        "Next",
        "Into",
        "Out",
        "",
        "Run to",
        "To first non-finite",
        "Finish",
        "Abandon",
    ]
    assert opened.click("Into") == "Before `0` (Linear): all finite."
    assert shell.published[-1].update and shell.published[-1].place == picture.place
    assert opened.click("Next") == "After `0` (Linear): all finite."
    opened.panel.pattern.value = "1.1.*"
    assert opened.click("Run to") == "Before `1.1.norm` (BatchNorm1d): all finite."
    assert opened.click("Out") == "After `1.1` (Block): all finite."
    opened.panel.pattern.value = "nothing"
    opened.click("Run to")
    assert "'nothing'" in opened.panel.status_label.value and opened.stepper.at.name == "1.1"
    assert opened.click("To first non-finite").startswith("The step is over")
    assert opened.panel.status_label.value == "The step is over."
    assert all(button.disabled for button in opened.panel.buttons.values())


def test_abandon_and_finish(shell: Shell) -> None:
    opened = Opened(shell, Dividing())
    assert "2 inf" in opened.click("To first non-finite") or "NaN" in opened.click("Into")
    assert opened.click("Abandon").startswith("The step was abandoned") and threads() == []
    assert Opened(shell).click("Finish").startswith("The step is over")


def test_a_method_called_in_a_cell_moves_the_panel_too_and_a_second_stepper_ends_it(shell: Shell, opened) -> None:
    opened.stepper.run_to("2")
    assert "Before `2` (Linear)" in shell.published[-1].data["text/plain"]
    other = step_through(model(), batch())
    assert "abandoned" in shell.published[-1].data["text/plain"] and opened.panel.buttons["Next"].disabled
    other.abandon()


def test_the_panel_does_not_keep_a_stepper_that_nobody_has(shell: Shell) -> None:
    opened = Opened(shell)
    panel, opened.stepper = opened.panel, None
    gc.collect()
    assert threads() == []
    panel.buttons["Next"].click()
    assert panel.status_label.value == "The step is over."


@pytest.mark.parametrize("where", ["a script", "a terminal"])
def test_without_a_notebook_it_is_the_report(shell: Shell, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    del shell.kernel
    if where == "a script":
        monkeypatch.setattr(text, "running_shell", lambda: None)
    opened = Opened(shell)
    assert len(shell.published) == (where == "a terminal") and "Before the model" in repr(opened.stepper)
    opened.stepper.abandon()
