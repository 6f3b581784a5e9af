"""The panel of a gradient watch without a browser: what each control changes, what is shown where nothing can show
controls, and that nothing of it reaches the training."""

from __future__ import annotations

import base64
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.views import text
from nbdebug.views.plots.gradients import GradientMap, read
from nbdebug.views.widgets import WITHOUT, Dashboard

WIDGET = "application/vnd.jupyter.widget-view+json"


class Shell:
    """A notebook's shell as far as a panel knows it: what it has published, with the pictures' places."""

    def __init__(self) -> None:
        self.display_pub, self.kernel = self, object()
        self.published: list[SimpleNamespace] = []

    def publish(self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False) -> None:
        self.published.append(SimpleNamespace(data=data, place=(transient or {}).get("display_id"), update=update))

    @property
    def html(self) -> str:
        """The picture as it stands."""
        return str(self.published[-1].data["text/html"])

    @property
    def svg(self) -> str:
        return base64.b64decode(re.findall(r"svg\+xml;base64,([^\"]+)", self.html)[0]).decode()

    @property
    def rows(self) -> list[str]:
        """The layers of the table."""
        table = self.html.partition("Norm now")[2].partition("</table>")[0]
        return re.findall(r'<th scope="row"[^>]*>([^<]*)</th>', table)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell()
    monkeypatch.setattr(text, "running_shell", lambda: shell)
    return shell


class Training:
    """A small training under a watch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = {"inp": nn.Linear(4, 8), "mid": nn.Linear(8, 8), "act": nn.Tanh(), "out": nn.Linear(8, 1)}
        self.model = nn.Sequential()
        for name, layer in layers.items():
            self.model.add_module(name, layer)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.x = torch.randn(16, 4)
        self.watch = nbdebug.grad_watch(self.model, self.optimizer)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.watch._live is not None:
                self.watch._live._next = 0.0  # as if it were time for the next picture
            self.optimizer.zero_grad()
            (self.model(self.x) - self.x.sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()

    def shown(self) -> Any:
        panel = self.watch.panel()
        panel._ipython_display_()
        return panel


@pytest.fixture
def training() -> Any:
    training = Training()
    yield training
    training.watch.close()


def test_controls_and_the_picture_are_outputs_of_their_own(shell, training) -> None:
    training.run(3)
    panel = training.shown()
    controls, picture = shell.published
    assert WIDGET in controls.data and controls.data["text/plain"] == WITHOUT
    assert WIDGET not in picture.data and "<img" in picture.data["text/html"] and not picture.update
    assert "3 steps watched so far." in picture.data["text/plain"]
    assert [c.description for c in panel.box.children[:-1]] == ["Layers", "Log scale", "Pause", "Refresh"]
    training.run(1)
    assert shell.published[-1].update and shell.published[-1].place == picture.place and "4 steps" in shell.html


@pytest.mark.parametrize("ended", [False, True])
def test_the_filter_takes_parts_and_patterns(shell, training, ended) -> None:
    training.run(12)
    panel = training.shown()
    if ended:
        training.watch.close()
    assert shell.rows == ["inp", "mid", "out"]
    for wanted, rows in [
        ("i", ["inp", "mid"]),
        ("*t", ["out"]),
        ("OUT", ["out"]),
        ("[im]*", ["inp", "mid"]),
        ("", ["inp", "mid", "out"]),
    ]:
        panel.layers.value = wanted
        assert shell.rows == rows and all(f">{name}<" in shell.svg for name in rows), wanted
        assert (f"the {len(rows)} of 3 layers that match “{wanted}”" in shell.svg) is bool(wanted)
    panel.layers.value = "nothing <b>"
    assert shell.rows == [] and "none of 3 layers matches “nothing &lt;b&gt;”" in shell.svg and "<b>" not in shell.html


def test_scales_are_logarithmic_or_linear(shell, training) -> None:
    training.run(12)
    panel = training.shown()
    assert shell.svg.count("(logarithmic)") == 2 and "linear" not in shell.svg
    panel.log.value = False
    assert "(logarithmic)" not in shell.svg and "linear colours" in shell.svg


def test_logarithms_only_of_what_has_one() -> None:
    seen = GradientMap((), (), (), (), 0, log=True)
    assert not seen.scale([-1.0, 2.0]).log and not seen.scale([0.0, 0.0]).log
    assert seen.scale([0.0, 1e-3, 5.0]).log and seen.scale([0.0, 1e-3, 5.0]).at(0.0) == 0.0
    for values in ([2.0, 2.1], [2.0, 9.0], [1e-8, 1.0]):
        marks = [value for value, _ in seen.scale(values).ticks(3)]
        assert len(marks) > 1 and all(min(values) / 1.2 <= v <= max(values) * 1.2 for v in marks)
    linear = GradientMap((), (("a", (0.0, -3.0)),), (), (), 0, log=False)
    assert not linear.scale([1e-8, 1.0]).log and linear.colour(0.0) != linear.colour(-0.3) != linear.colour(-3.0)


def test_a_paused_view_costs_nothing(shell, training, monkeypatch) -> None:
    training.run(2)
    panel = training.shown()
    panel.pause.click()
    assert panel.pause.description == "Resume" and panel.status_label.value == "Paused at 2 steps."
    published, asked = len(shell.published), []
    real = training.watch.glance
    monkeypatch.setattr(training.watch, "glance", lambda layers="": asked.append(layers) or real(layers))
    training.run(3)
    assert not asked and len(shell.published) == published
    panel.refresh.click()
    assert "5 steps watched so far." in shell.html and panel.status_label.value == "Paused at 5 steps."
    panel.pause.click()
    training.run(1)
    assert "6 steps" in shell.html and panel.status_label.value == "Live." and panel.pause.description == "Pause"


def test_it_ends_as_the_report_that_a_saved_notebook_keeps(shell, training) -> None:
    training.run(12)
    panel = training.shown()
    panel.pause.click()  # and is never resumed
    training.run(3)
    training.watch.close()
    assert "15 steps watched: gradients finite in every layer." in shell.html and "Ruled out" in shell.html
    assert panel.status_label.value == "Ended after 15 steps." and panel.pause.disabled
    assert read(panel.picture().plot("gradients")).total == 15 and len(shell.html) < 100_000


def test_it_opens_over_a_run_that_is_over(shell, training) -> None:
    training.run(12)
    training.watch.close()
    panel = training.shown()
    assert "12 steps watched: gradients finite" in shell.html and panel.status_label.value == "Ended after 12 steps."
    panel.layers.value = "mid"
    assert shell.rows == ["mid"]


def test_a_fault_of_the_picture_is_told_beside_the_controls_and_nowhere_else(shell, training, monkeypatch) -> None:
    twin = Training()
    twin.run(6)
    panel = training.shown()
    monkeypatch.setattr(training.watch, "glance", lambda layers="": 1 / 0)
    training.run(6)
    assert all(torch.equal(a, b) for a, b in zip(training.model.parameters(), twin.model.parameters()))
    panel.log.value = False
    assert "could not be drawn (ZeroDivisionError" in panel.status_label.value and training.watch.active
    monkeypatch.undo()
    monkeypatch.setattr(text, "running_shell", lambda: shell)
    panel.refresh.click()
    assert panel.status_label.value == "Live." and "6 steps" in shell.html
    twin.watch.close()


def test_clicks_in_another_thread_while_training_runs(shell, training) -> None:
    panel, done = training.shown(), threading.Event()

    def clicks() -> None:
        for i in range(40):
            panel.layers.value, panel.log.value = "i" * (i % 2), bool(i % 3)
            panel.refresh.click()
        done.set()

    clicker = threading.Thread(target=clicks)
    clicker.start()
    while not done.is_set():
        training.run(1)
    clicker.join()
    assert not panel.view.fault and not training.watch.fault and training.watch.active
    assert training.watch.steps == len(training.watch.history.totals.items)


def test_another_panel_takes_over(shell, training) -> None:
    training.run(1)
    first = training.shown()
    second = training.shown()
    first.refresh.click()
    assert first.status_label.value.startswith("Another view") and second.status_label.value == "Live."
    published = len(shell.published)
    training.run(1)
    assert len(shell.published) == published + 1


@pytest.mark.parametrize("where", ["a script", "a terminal"])
def test_without_a_notebook_it_is_the_report(shell, training, monkeypatch, where) -> None:
    del shell.kernel
    if where == "a script":
        monkeypatch.setattr(text, "running_shell", lambda: None)
    training.run(2)
    panel = training.shown()
    assert len(shell.published) == (where == "a terminal") and "2 steps watched" in repr(panel)
    assert not [p for p in shell.published if WIDGET in p.data]


class State:
    """What a dashboard asks of its state. slow: what the thread called "click" reads slowly."""

    def __init__(self) -> None:
        self.slow, self.reading, self.go_on = "", threading.Event(), threading.Event()
        self.on, self.switched, self._message = False, [], ""
        self.gradients = None
        self.trace = self.stop = self.free = self.off = self.changed = lambda: None

    @property
    def message(self) -> str:
        message = self._message
        self._pause("message")
        return message

    @message.setter
    def message(self, message: str) -> None:
        self._message = message

    def _pause(self, reading: str) -> None:
        if threading.current_thread().name == "click" and reading == self.slow:
            self.reading.set()
            self.go_on.wait(1)

    def is_on(self, name: str) -> bool:
        on = self.on
        self._pause("is_on")
        return on

    def switch(self, name: str, on: bool) -> None:
        self.switched.append((name, on))

    def report(self, layers: str = "") -> Any:
        return nbdebug.report.Report("%nbdebug")


@pytest.fixture
def dashboard() -> Any:
    state = State()
    drawn = Dashboard(state)
    yield drawn
    state.go_on.set()


def test_an_older_state_never_replaces_a_newer_one(dashboard: Dashboard) -> None:
    """A click's thread has read the message when the training's thread changes it."""
    state = dashboard.state
    state.message, state.slow = "Ending everything after this step …", "message"
    click = threading.Thread(target=state.changed, name="click")
    click.start()
    assert state.reading.wait(5)
    training = threading.Thread(target=lambda: (setattr(state, "message", "Everything is off."), state.changed()))
    training.start()
    training.join(0.2)
    state.go_on.set()
    click.join(), training.join()
    assert dashboard.status_label.value == "Everything is off."


def test_switches_that_follow_the_state_switch_nothing(dashboard: Dashboard) -> None:
    """Also where two threads show the state at once; a click of a third one counts."""
    state = dashboard.state
    state.on, state.slow = True, "is_on"
    click = threading.Thread(target=state.changed, name="click")
    click.start()
    assert state.reading.wait(5)
    training = threading.Thread(target=state.changed)
    training.start()
    dashboard.switches["grad_watch"].value = True  # somebody clicks, here
    state.go_on.set()
    click.join(), training.join()
    assert state.switched == [("grad_watch", True)]
    assert all(control.value for control in dashboard.switches.values())
