"""Controls over a picture that stays: ipywidgets make the controls and nothing else.

    controls   widgets: gone with the kernel, and never shown where a front end has none
    picture    a report as HTML, an output of its own that is replaced in place: it stays in the saved notebook

A click comes in another thread than the one that trains (JupyterLab 4.4 with ipykernel 7 hears widgets beside the
running cell), or only after the cell (older ones). So it sets what is wanted and asks the view for a picture; those who
draw take turns.
`Panel` is the frame that every panel shares, `gradients` opens that of a gradient watch.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ipywidgets

from nbdebug.live import Live
from nbdebug.report import Plot, Report
from nbdebug.views import html, text

WITHOUT = "(The controls of this picture are there while its kernel runs: run the cell to have them.)"
"""Shown instead of the controls where nothing can show them."""


class View(Protocol):
    """Who draws while something runs. paused: draws on request only; ended: it no longer draws by itself; fault: why
    the last picture failed, or ""."""

    paused: bool
    ended: bool
    fault: str

    def now(self) -> None:
        """Draw at once; raises nothing."""


class Watch(Protocol):
    """What a panel of gradients asks of a gradient watch. glance: the picture of the layers that match, at once; drawn:
    draws while the watch runs, at its pace."""

    active: bool
    steps: int

    def report(self) -> Report: ...

    def glance(self, layers: str = "") -> Report: ...

    def drawn(self, draw: Callable[[], str], show: Callable[[str], object]) -> Any: ...


class ControlPanel:
    """Controls in a row and the state in words, above a picture. Shown where it is the last expression of a cell.

    controls: widgets; picture: gives the report to draw; view: who draws it, made when it is first shown."""

    def __init__(self, controls: Sequence[ipywidgets.Widget], picture: Callable[[], Report]):
        self.picture, self.view = picture, None
        for control in controls:
            _use_subshell(control)
        self.status_label = ipywidgets.Label(layout={"margin": "2px 2px 2px 4px"})
        row = {"flex_flow": "row wrap", "align_items": "center", "overflow": "visible", "padding": "4px 0 4px 6px"}
        self.box = ipywidgets.HBox([*controls, self.status_label], layout=row)
        self._place, self._text = f"nbdebug-{uuid.uuid4().hex}", ""
        self._status_lock = threading.RLock()  # a click's thread and the one that trains both come here

    view: View | None

    def make_view(self) -> View:
        """A view that draws with `draw` and shows with `put`."""
        raise NotImplementedError

    def status(self) -> str:
        """The state, in a few words."""
        return ""

    def draw(self) -> str:
        report = self.picture()
        self._text = str(report)
        drawn = html.render(report)
        self._show_status()
        return drawn

    def put(self, drawn: str, update: bool = True) -> None:
        """Into the place of the picture before, wherever that is shown."""
        shell = text.running_shell()
        if shell is not None:
            shell.display_pub.publish(
                {"text/html": drawn, "text/plain": self._text}, transient={"display_id": self._place}, update=update
            )

    def redraw(self, change: Any = None) -> None:
        """Something was clicked or typed."""
        if self.view is not None:
            self.view.now()
            self._show_status()  # also what has gone wrong

    def _show_status(self) -> None:
        """One thread at a time, from reading to showing: else an older state may replace a newer one."""
        with self._status_lock:
            fault = self.view.fault if self.view is not None else ""
            self.status_label.value = (
                f"The picture could not be drawn ({fault}). Refresh tries again." if fault else self.status()
            )

    def _ipython_display_(self) -> None:
        if self.view is None or self.view.ended:
            self.view = self.make_view()
        shell = text.running_shell()
        if hasattr(shell, "kernel"):  # a terminal has no widgets
            shell.display_pub.publish({**self.box._repr_mimebundle_(), "text/plain": WITHOUT})
        self.put(self.draw(), update=False)

    def __repr__(self) -> str:
        return str(self.picture())


def button(word: str, icon: str, tip: str, clicked: Callable[[Any], object]) -> ipywidgets.Button:
    """A button with an icon, and a word on what it does. clicked: called with the button."""
    button = ipywidgets.Button(description=word, icon=icon, tooltip=tip, layout={"width": "auto"})
    button.on_click(clicked)
    return button


def switch(word: str, icon: str, tip: str) -> ipywidgets.ToggleButton:
    """What is on or off."""
    return ipywidgets.ToggleButton(description=word, icon=icon, tooltip=tip, layout={"width": "auto"})


def field(word: str, hint: str) -> ipywidgets.Text:
    """A line of text."""
    return ipywidgets.Text(
        description=word, placeholder=hint, style={"description_width": "initial"}, layout={"width": "15em"}
    )


class GradientPanel(ControlPanel):
    """A gradient watch: which layers, logarithmic or linear scales, pause, refresh."""

    def __init__(self, report: Report, watch: Watch):
        self.watch = watch
        self.layers = field("Layers", "name, or block.*")
        self.log = ipywidgets.Checkbox(
            True, description="Log scale", indent=False, layout={"width": "auto", "margin": "2px 8px"}
        )
        self.pause = ipywidgets.Button(
            description="Pause",
            icon="pause",
            layout={"width": "7.6em"},
            tooltip="Stop drawing; the watch itself goes on",
        )
        self.refresh = ipywidgets.Button(
            description="Refresh",
            icon="refresh",
            layout={"width": "7.6em"},
            tooltip="Draw the steps watched so far",
        )
        self._final: Report | None = None if watch.active else report
        self._steps = watch.steps
        super().__init__((self.layers, self.log, self.pause, self.refresh), self._picture)
        for control in (self.layers, self.log):
            control.observe(self.redraw, names="value")
        self.pause.on_click(self._paused)
        self.refresh.on_click(self._refreshed)
        self._show_status()

    def make_view(self) -> View:
        view: View = self.watch.drawn(self.draw, self.put)
        return view

    def status(self) -> str:
        running, paused = self.watch.active, self.view is not None and self.view.paused
        self.pause.disabled = not running
        self.pause.description, self.pause.icon = ("Resume", "play") if paused and running else ("Pause", "pause")
        steps = f"{self._steps:,} step{'s' * (self._steps != 1)}"
        if not running:
            return f"Ended after {steps}."
        if self.view is not None and self.view.ended:
            return "Another view of this watch is drawn now; Refresh draws this one."
        return f"Paused at {steps}." if paused else "Live."

    def _picture(self) -> Report:
        """While the watch runs the steps so far; afterwards its whole report."""
        current = self.watch.glance(self.layers.value)
        report = current if self.watch.active else self._ended()
        data = {**current.plot("gradients"), "log": self.log.value}
        self._steps = data["steps seen"]
        return dataclasses.replace(report, plots=(Plot("gradients", data),))

    def _ended(self) -> Report:
        if self._final is None:
            self._final = self.watch.report()
        return self._final

    def _paused(self, button: Any) -> None:
        if self.view is not None:
            self.view.paused = not self.view.paused
            self.redraw()

    def _refreshed(self, button: Any) -> None:
        self._final = None
        self.redraw()


def _use_subshell(control: ipywidgets.Widget) -> None:
    """Let the front end choose where the kernel hears a control. ipykernel 7.4 would hear it where it was made: in the
    thread that runs cells, which is busy while a training runs."""
    if hasattr(control.comm, "_reply_subshell_for"):
        control.comm._reply_subshell_for = lambda data, chosen: chosen


def gradients(report: Report, watch: Watch) -> GradientPanel:
    """The panel of a gradient watch; report: what it reports now."""
    return GradientPanel(report, watch)


class StepperActions(Protocol):
    """What a panel of steps asks of a stepper. done: the step is over; each other one runs on to where it says."""

    done: bool

    def report(self) -> Report: ...

    def next(self) -> Report: ...

    def into(self) -> Report: ...

    def out(self) -> Report: ...

    def run_to(self, pattern: str) -> Report: ...

    def run_to_nonfinite(self) -> Report: ...

    def finish(self) -> Report: ...

    def abandon(self) -> Report: ...


class StepPanel(ControlPanel):
    """A stepper: its methods as buttons. It does not hold the stepper: one that nobody has any more ends its step."""

    BUTTONS = (
        ("Next", "step-forward", "next", "To the end of this layer, over those inside it; then of the next one"),
        ("Into", "level-down", "into", "To the very next thing: the first layer inside, or the end of this one"),
        ("Out", "level-up", "out", "To the end of the layer around this one"),
        ("Run to", "arrow-right", "", "To the layer named beside: a name, a type, or a pattern such as block.*"),
        ("To first non-finite", "search", "run_to_nonfinite", "To what makes an inf or a NaN of finite values"),
        ("Finish", "fast-forward", "finish", "To the end of the step"),
        ("Abandon", "times", "abandon", "End the step here and put everything back"),
    )

    def __init__(self, report: Report, stepper: Callable[[], StepperActions | None]):
        self.stepper, self._last, self._word = stepper, report, ""
        self.pattern = field("", "layer, or block.*")
        self.buttons = {
            name: button(name, icon, tooltip, functools.partial(self._clicked, method))
            for name, icon, method, tooltip in self.BUTTONS
        }
        controls = list(self.buttons.values())
        controls.insert(3, self.pattern)
        super().__init__(controls, self._picture)
        self._show_status()

    def make_view(self) -> View:
        return Live(self.draw, self.put)

    def status(self) -> str:
        stepper = self.stepper()
        over = stepper is None or stepper.done
        for control in self.buttons.values():
            control.disabled = over
        return self._word or ("The step is over." if over else "")

    def _picture(self) -> Report:
        stepper = self.stepper()
        if stepper is not None:
            self._last = stepper.report()
        return self._last

    def _clicked(self, method: str, button: Any) -> None:
        stepper, self._word = self.stepper(), ""
        try:
            if stepper is not None:
                getattr(stepper, method)() if method else stepper.run_to(self.pattern.value)
        except (ValueError, RuntimeError) as refused:
            self._word = str(refused)
        self._show_status()


def steps(report: Report, stepper: Callable[[], StepperActions | None]) -> StepPanel:
    """The panel of a stepper. report: what it says now; stepper: gives it while there is one."""
    return StepPanel(report, stepper)


SWITCHES = (
    ("guard", "Guard", "shield", "Stop the first step that is not finite before it reaches the weights"),
    ("grad_watch", "Gradients", "area-chart", "Watch gradient norms, update sizes and the loss"),
)


class PanelActions(Protocol):
    """What the panel asks of its state. message: what the last button says."""

    message: str
    changed: Any

    @property
    def gradients(self) -> Any: ...

    def report(self, layers: str = "") -> Report: ...

    def is_on(self, name: str) -> bool: ...

    def switch(self, name: str, on: bool) -> None: ...

    def trace(self) -> None: ...

    def stop(self) -> None: ...

    def free(self) -> None: ...

    def off(self) -> None: ...


class Dashboard(ControlPanel):
    """The panel; see the module's docstring."""

    def __init__(self, state: PanelActions):
        self.state = state
        self._updating: int | None = None  # the thread that makes the switches follow what is so
        self._followed: Any = None
        self.switches = {name: switch(word, icon, tip) for name, word, icon, tip in SWITCHES}
        self.layers = field("Layers", "name, or block.*")
        actions = (
            ("Trace next step", "search", "Record the next training step, layer by layer", state.trace),
            ("Stop", "stop", "Stop the running cell after a whole step", state.stop),
            ("Free", "trash", "Free the last traceback and the cache of the allocators", state.free),
            ("All off", "power-off", "End the guard, the watches and the breakpoints", state.off),
            ("Refresh", "refresh", "Draw the present state", self._refreshed),
        )
        self.buttons = [
            button(word, icon, tip, functools.partial(self._act, action)) for word, icon, tip, action in actions
        ]
        super().__init__((*self.switches.values(), *self.buttons, self.layers), self._picture)
        for name, control in self.switches.items():
            control.observe(functools.partial(self._switched, name), names="value")
        self.layers.observe(self.redraw, names="value")
        state.changed = self._changed
        self._show_status()

    def make_view(self) -> View:
        self._followed = watch = self.state.gradients
        return Live(self.draw, self.put) if watch is None else watch.drawn(self.draw, self.put)

    def status(self) -> str:
        self._updating = threading.get_ident()  # nobody has clicked
        try:
            for name, control in self.switches.items():
                control.value = self.state.is_on(name)
        finally:
            self._updating = None
        self.layers.disabled = self.state.gradients is None
        return self.state.message

    def _picture(self) -> Report:
        report = self.state.report(self.layers.value)
        logarithmic = (Plot(p.kind, {**p.data, "log": True}) if p.kind == "gradients" else p for p in report.plots)
        return dataclasses.replace(report, plots=tuple(logarithmic))

    def _switched(self, name: str, change: Any) -> None:
        if self._updating != threading.get_ident():
            self.state.switch(name, bool(change["new"]))

    def _act(self, action: Any, clicked: Any = None) -> None:
        try:
            action()
        except Exception as fault:  # a button's fault must not end the cell that runs
            self.state.message = f"{type(fault).__name__}: {fault}"
        self._changed()

    def _refreshed(self) -> None:
        self.state.message = ""

    def _changed(self) -> None:
        """The state has changed: draw, under a view that follows the watch that runs now."""
        if self.view is None:
            self._show_status()
            return
        if self.state.gradients is not self._followed or self.view.ended:
            self.view = self.make_view()
        self.redraw()


def panel(state: PanelActions) -> Dashboard:
    """The panel over a state."""
    return Dashboard(state)
