"""The live view: a small picture, drawn anew while training runs, at most five times a second and for at most a
hundredth of the time. It ends as the picture of the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FASTEST = 0.2
"""Seconds between two pictures, at least."""
SHARE = 0.01
"""Of the time that drawing may take."""


class Live:
    """draw: gives the picture as HTML; show: puts it in the place of the one before. fault: why it has ended, or ""."""

    def __init__(self, draw: Callable[[], str], show: Callable[[str], object],
                 clock: Callable[[], float] = time.monotonic):
        self.draw, self.show, self.clock = draw, show, clock
        self.fault, self.pictures, self._next, self.paused = "", 0, 0.0, False

    def told(self) -> None:
        """A step is over: draw, if it is time."""
        if not self.fault and not self.paused and self.clock() >= self._next:
            self.now()

    def now(self) -> None:
        """Draw at once. What drawing or showing raises ends the view, not the training."""
        began = self.clock()
        try:
            self.show(self.draw())
            self.pictures += 1
        except Exception as fault:
            self.fault = f"{type(fault).__name__}: {fault}"
        ended = self.clock()
        self._next = ended + max(FASTEST, (ended - began) / SHARE)

    def end(self) -> None:
        """The run is over: one last picture, which stays."""
        if not self.fault:
            self.now()
