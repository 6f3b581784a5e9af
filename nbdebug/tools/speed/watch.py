"""%bottleneck --watch: the time of every step from now on, and a word when steps become slower than the run's own.

Between two updates of one optimizer lies a step: one reading of the clock each, and nothing else of torch is touched.
Two reports of one training, from one day and another, are compared here, too.
"""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbdebug.interrupts import uninterrupted
from nbdebug.observe.step_hooks import StepHook
from nbdebug.report import Plot, Report, Symptom
from nbdebug.text import count, figures, percent
from nbdebug.tools.speed.rules import middle_half, milliseconds

WARM, OWN, RECENT = 5, 40, 40
"""Steps that warm up, those that are the run's own measure, and the last ones that are compared with them."""
SLOWER = 1.5
"""Times that the last steps take, see `longer`."""
LONGEST = 10_000
"""Steps whose times are kept."""


class SpeedWatch:
    """told: called once with a sentence when steps have become slower. times: seconds of the last steps."""

    def __init__(self, told: Callable[[str], Any] = str) -> None:
        self.told, self.steps = told, 0
        self.times: collections.deque[float] = collections.deque(maxlen=LONGEST)
        self.own: list[float] = []
        self.slow_since: int | None = None
        self._last: float | None = None
        self._optimizer: int | None = None
        self._hook: StepHook | None = None

    @uninterrupted
    def attach(self) -> SpeedWatch:
        self._hook = StepHook(self._after_update, after=True)
        return self

    @uninterrupted
    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        now = time.perf_counter()
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        if self._last is not None:
            self.times.append(now - self._last)
            self.steps += 1
            if WARM < self.steps <= WARM + OWN:
                self.own.append(now - self._last)
            elif self.steps % RECENT == 0:
                self._compare()
        self._last = now

    def _compare(self) -> None:
        if len(self.own) == OWN and self.steps >= WARM + OWN + RECENT and self.ratio() >= SLOWER:
            if self.slow_since is None:
                self.slow_since = self.steps - RECENT
                self.told(self.sentence())
        else:
            self.slow_since = None

    def ratio(self) -> float:
        """How many times longer the last steps take than the run's own first ones: the smaller of two measures."""
        return longer(self.own, list(self.times)[-RECENT:]) if self.own else 1.0

    def sentence(self) -> str:
        recent = statistics.median(list(self.times)[-RECENT:])
        return (
            f"Steps have become slower since step {self.slow_since:,}: {milliseconds(recent)} each, "
            f"{figures(self.ratio())} times the first ones."
        )

    def report(self) -> Report:
        """The times so far, and whether the last steps are slower than the run's own."""
        times = list(self.times)
        if not times:
            return Report("%bottleneck --watch", headline="No step was seen yet.")
        middle, low, high = middle_half(times)
        slow = self.slow_since is not None
        headline = f"{count(self.steps, 'step')}, {milliseconds(middle)} each: {figures(1 / middle)} steps a second."
        last = [["a step", middle, low, high, 1.0]]
        return Report(
            "%bottleneck --watch",
            headline=headline,
            symptoms=(Symptom(self.sentence(), "%bottleneck step() now, beside a fresh run."),) if slow else (),
            steps=self.steps,
            plots=(Plot("times", {"title": f"A step takes {milliseconds(middle)}", "parts": last}),),
            facts={"times": times[-1000:]},
        )


# -- a report and an earlier one ---------------------------------------------------------------------------------------


def share_of(text: str) -> float:
    """ "5%" or "0.05" as a share. Raises ValueError for what is none."""
    with contextlib.suppress(ValueError):
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= value < 100:
            return value
    raise ValueError(f"a share is written as 5% or 0.05; got {text!r}")


def longer(before: Sequence[float], after: Sequence[float]) -> float:
    """How many times longer steps take. Their median and their fastest quarter must both have grown, and the smaller
    ratio counts: what else a machine does slows some steps alone."""
    fast = [statistics.median(sorted(times)[: max(len(times) // 4, 1)]) for times in (before, after)]
    return min(statistics.median(after) / statistics.median(before), fast[1] / fast[0])


def slower(now: Mapping[str, Any], earlier: Mapping[str, Any], limit: float) -> tuple[bool, str]:
    """Whether a step takes longer by more than this share than in an earlier report (`--json`), and a sentence. Raises
    ValueError for a report without steps."""
    before, after = ([sum(step.values()) for step in one["steps"]] for one in (earlier, now))
    if not before or not after:
        raise ValueError("a report without steps can't be compared")
    grown = longer(before, after) - 1 > limit
    names = sorted({name for one in (earlier, now) for step in one["steps"] for name in step})
    old, new = ({n: statistics.median(s.get(n, 0.0) for s in one["steps"]) for n in names} for one in (earlier, now))
    most = max(names, key=lambda name: new[name] - old[name], default="")
    was, now_is = statistics.median(before), statistics.median(after)
    change = f"{figures(now_is / was)} times the earlier step: {milliseconds(was)}, now {milliseconds(now_is)}"
    where = f"; most of it in {most}" if grown and most else ""
    return grown, f"{change} (limit {percent(limit)} longer){where}."


def load_times(path: str) -> Mapping[str, Any]:
    """The times in a file that `--json` wrote. Raises ValueError where it holds none."""
    held = None
    with contextlib.suppress(ValueError):  # of a file that is no JSON
        held = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    times = held.get("facts", {}).get("speed") if isinstance(held, dict) else None
    if not isinstance(times, dict) or not isinstance(times.get("steps"), list):
        raise ValueError(f"{path} is no report of `nbdebug bottleneck --json`")
    return times
