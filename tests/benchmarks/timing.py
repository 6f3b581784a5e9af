"""Ratios of step times. Each step under a tool has a bare step right before it, and the tools take turns, so that
whatever slows the machine for a while slows both. The median of the ratios counts; their middle half shows how sure
it is.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.tools import Tool
from tests.benchmarks.training import Training

WARM_UP = 3


@dataclasses.dataclass
class Row:
    """What one tool cost, in bare steps; what it named; first: seconds of its first call, all included."""

    tool: Tool
    skipped: str = ""
    first: float | None = None
    ratios: list[float] = dataclasses.field(default_factory=list)
    named: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def middle_half(self) -> tuple[float, float]:
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0]
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    def to_dict(self) -> dict[str, Any]:
        plain = {
            "tool": self.tool.name,
            "timed_on": self.tool.fault or "healthy",
            "skipped": self.skipped,
            "first_call_s": self.first,
            "ratios": self.ratios,
            "named": self.named,
        }
        return plain | ({"ratio": self.ratio, "middle_half": self.middle_half} if self.ratios else {})


def measure(
    training: Training, tools: tuple[Tool, ...], repeats: int, tell: Callable[[str], None] = lambda line: None
) -> tuple[list[Row], list[float]]:
    """A row for each tool, and the seconds of every bare step."""
    rows = [Row(tool, tool.missing()) for tool in tools]
    clock = clock_for(training)
    for _ in range(WARM_UP):
        training.step()
    for row in rows:
        if not row.skipped:
            _get_to_know(training, row)
    steps = []
    for n in range(repeats):
        tell(f"round {n + 1} of {repeats}")
        for row in rows:
            if not row.skipped:
                steps.append(_pair(training, row, clock))
    return rows, steps


def clock_for(training: Training) -> Callable[[], float]:
    """On a CPU the time that this process used (others disturb it little); on a card the time that passed."""
    return time.process_time if training.device.type == "cpu" else time.perf_counter


def _get_to_know(training: Training, row: Row) -> None:
    """The first calls: what the tool names, how long its first call takes. A tool that breaks is skipped afterwards."""
    try:
        row.first = _timed(training, row.tool, time.perf_counter)[0]
        for fault in (row.tool.fault,) if row.tool.fault else ("forward", "backward"):
            row.named[fault] = _timed(training, row.tool._replace(fault=fault), time.perf_counter)[1]
    except Exception as error:  # another tool's failure is a result, not the end of the benchmark
        if row.tool.name.startswith("nbdebug"):
            raise
        message = next(iter(str(error).splitlines()), "")
        row.skipped = f"failed: {type(error).__name__}: {message[:100]}"


def _pair(training: Training, row: Row, clock: Callable[[], float]) -> float:
    step = _timed(training, None, clock)[0]
    row.ratios.append(_timed(training, row.tool, clock)[0] / step)
    return step


def _timed(training: Training, tool: Tool | None, clock: Callable[[], float]) -> tuple[float, str]:
    """Seconds of one step, from an idle device to an idle device, and what was named."""
    training.plant(tool.fault if tool else None)
    training.rewind()
    gc.collect()  # the rubbish of the one before is not this one's
    if tool is None:
        return _seconds(training, training.step, clock)[0], ""
    with tool.watch(training) as run:
        return _seconds(training, run, clock)


def _seconds(training: Training, run: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, Any]:
    training.wait()
    began = clock()
    result = run()
    training.wait()
    return clock() - began, result
