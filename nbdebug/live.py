"""Live displays: a progress bar, and a small picture that is redrawn while training runs, at most five times a second
and for at most 1% of the time. At the end it shows the whole run.

    a step has ended ──▶ step_ended ─┐ if enough time has passed, and no other thread draws
    a click, maybe in another thread ──▶ now ──▶ draw, show
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

DELAY = 2.0
"""Seconds after which a progress bar is shown."""
FASTEST = 0.2
"""Seconds between two pictures, at least."""
SHARE = 0.01
"""Of the time that drawing may take."""


@contextlib.contextmanager
def progress_bar(
    desc: str, unit: str, total: int | None = None, *, wanted: bool = True, **options: Any
) -> Iterator[Any]:
    """A bar of tqdm's, shown after DELAY and taken away at the end. unit: in the plural, "steps".

    In a notebook tqdm colours a bar red, and leaves it there, that is closed before its total, as if the work had
    failed. Work that ends early has not failed, and an error says so itself: the bar is always closed as complete."""
    if wanted:
        from tqdm.auto import tqdm  # here, because it looks for a notebook when it is imported
    else:
        from tqdm import tqdm
    bar = tqdm(desc=desc, unit=f" {unit}", total=total, delay=DELAY, leave=False, disable=not wanted, **options)
    try:
        yield bar
    finally:
        bar.total = bar.n
        bar.close()


def progress_range(numbers: range, desc: str, unit: str, *, wanted: bool = True) -> Iterator[int]:
    """These numbers, with a bar over them; a loop over them may end early."""
    with progress_bar(desc, unit, len(numbers), wanted=wanted) as bar:
        for number in numbers:
            yield number
            bar.update()


class Live:
    """draw: returns the picture as HTML; show: replaces the picture before by it. paused: steps draw nothing; ended:
    the run is over, or another view has replaced this one; fault: why it no longer draws, or ""."""

    def __init__(
        self, draw: Callable[[], str], show: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ):
        self.draw, self.show, self.clock = draw, show, clock
        self.fault, self.pictures, self._next, self.paused, self.ended = "", 0, 0.0, False, False
        self._lock = threading.Lock()

    def step_ended(self) -> None:
        """Draw, if enough time has passed. Training does not wait for another thread that draws."""
        if not self.paused and not self.fault and self.clock() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._draw()
            finally:
                self._lock.release()

    def now(self) -> None:
        """Draw at once, also after a fault. An error in `draw` or `show` ends the view, not the training."""
        with self._lock:
            self._draw()

    def end(self) -> None:
        """Draw the last picture."""
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
