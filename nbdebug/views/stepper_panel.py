"""The controls of a stepper: its methods as buttons, above its report, which stays in the saved notebook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from nbdebug.finding import Report
from nbdebug.live import Live
from nbdebug.views.panel import Panel, View, button, field


class Walk(Protocol):
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


class StepPanel(Panel):
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

    def __init__(self, report: Report, stepper: Callable[[], Walk | None]):
        self.stepper, self._last, self._word = stepper, report, ""
        self.pattern = field("", "layer, or block.*")
        self.buttons = {
            name: button(name, icon, tooltip, functools.partial(self._clicked, method))
            for name, icon, method, tooltip in self.BUTTONS
        }
        controls = list(self.buttons.values())
        controls.insert(3, self.pattern)
        super().__init__(controls, self._picture)
        self._say()

    def viewed(self) -> View:
        return Live(self.draw, self.put)

    def standing(self) -> str:
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
        self._say()


def steps(report: Report, stepper: Callable[[], Walk | None]) -> StepPanel:
    """The panel of a stepper. report: what it says now; stepper: gives it while there is one."""
    return StepPanel(report, stepper)
