"""The live view: a small picture, drawn anew while training runs, at most five times a second and for at most a
hundredth of the time. It ends as the picture of the whole run.

    a step is over ──▶ told ─┐ if it is time, and nobody else draws
    a click, maybe in another thread ──▶ now ──▶ draw, show
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FASTEST = 0.2
"""Seconds between two pictures, at least."""
SHARE = 0.01
"""Of the time that drawing may take."""


class Live:
    """draw: gives the picture as HTML; show: puts it in the place of the one before. paused: steps draw nothing; ended:
    the run is over, or another view has taken its place; fault: why it no longer draws, or ""."""

    def __init__(
        self, draw: Callable[[], str], show: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ):
        self.draw, self.show, self.clock = draw, show, clock
        self.fault, self.pictures, self._next, self.paused, self.ended = "", 0, 0.0, False, False
        self._turn = threading.Lock()

    def told(self) -> None:
        """A step is over: draw, if it is time. Training waits for nobody who draws just now."""
        if not self.paused and not self.fault and self.clock() >= self._next and self._turn.acquire(blocking=False):
            try:
                self._draw()
            finally:
                self._turn.release()

    def now(self) -> None:
        """Draw at once, also after a fault. What drawing or showing raises ends the view, not the training."""
        with self._turn:
            self._draw()

    def end(self) -> None:
        """The run is over: one last picture, which stays."""
        self.ended = True
        if not self.fault:
            self.now()

    def _draw(self) -> None:
        began = self.clock()
        try:
            self.show(self.draw())
            self.pictures, self.fault = self.pictures + 1, ""
        except Exception as fault:
            self.fault = f"{type(fault).__name__}: {fault}"
        ended = self.clock()
        self._next = ended + max(FASTEST, (ended - began) / SHARE)
