"""The panel of %nbdebug: what is on and what was found, with switches and buttons. It saves as its picture.

The controls are made by `panel`; what they do is the board's (`magics/board.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

from nbdebug.finding import Report
from nbdebug.live import Live
from nbdebug.views.panel import Panel, View, button, field, switch

SWITCHES = (
    ("guard", "Guard", "shield", "Stop the first step that is not finite before it reaches the weights"),
    ("grad_watch", "Gradients", "area-chart", "Follow gradient norms, update sizes and the loss"),
)


class Board(Protocol):
    """What the panel asks of the board. words: what the last button has to say."""

    words: str
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


class Dashboard(Panel):
    """The panel; see the module's docstring."""

    def __init__(self, board: Board):
        self.board, self._settling = board, False
        self._followed: Any = None
        self.switches = {name: switch(word, icon, tip) for name, word, icon, tip in SWITCHES}
        self.layers = field("Layers", "name, or block.*")
        deeds = (
            ("Trace next step", "search", "Look at the next training step, layer by layer", board.trace),
            ("Stop", "stop", "Stop the running cell after a whole step", board.stop),
            ("Free", "trash", "Let go of the last traceback and the allocators' cache", board.free),
            ("All off", "power-off", "End the guard, the watches and the breakpoints", board.off),
            ("Refresh", "refresh", "Draw things as they stand", self._refreshed),
        )
        self.buttons = [button(word, icon, tip, functools.partial(self._did, deed)) for word, icon, tip, deed in deeds]
        super().__init__((*self.switches.values(), *self.buttons, self.layers), self._picture)
        for name, control in self.switches.items():
            control.observe(functools.partial(self._switched, name), names="value")
        self.layers.observe(self.redraw, names="value")
        board.changed = self._changed
        self._say()

    def viewed(self) -> View:
        self._followed = watch = self.board.gradients
        return Live(self.draw, self.put) if watch is None else watch.drawn(self.draw, self.put)

    def standing(self) -> str:
        self._settling = True  # the switches follow what is so: nobody has clicked
        try:
            for name, control in self.switches.items():
                control.value = self.board.is_on(name)
        finally:
            self._settling = False
        self.layers.disabled = self.board.gradients is None
        return self.board.words

    def _picture(self) -> Report:
        report = self.board.report(self.layers.value)
        if "watch" in report.facts:
            return dataclasses.replace(report, facts={**report.facts, "watch": {**report.facts["watch"], "log": True}})
        return report

    def _switched(self, name: str, change: Any) -> None:
        if not self._settling:
            self.board.switch(name, bool(change["new"]))

    def _did(self, deed: Any, clicked: Any = None) -> None:
        try:
            deed()
        except Exception as fault:  # a button's fault must not end the cell that runs
            self.board.words = f"{type(fault).__name__}: {fault}"
        self._changed()

    def _refreshed(self) -> None:
        self.board.words = ""

    def _changed(self) -> None:
        """Things stand otherwise: draw, under a view that follows the watch that runs by now."""
        if self.view is None:
            self._say()
            return
        if self.board.gradients is not self._followed or self.view.ended:
            self.view = self.viewed()
        self.redraw()


def board(board: Board) -> Dashboard:
    """The panel over a board."""
    return Dashboard(board)
