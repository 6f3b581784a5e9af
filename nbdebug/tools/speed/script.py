"""A training script as it is, timed from outside (`python -m nbdebug bottleneck train.py`), and two reports compared.

The script runs as `__main__` until so many steps have ended, whatever trains in it: a loop, or a library's trainer.
"""

from __future__ import annotations

import json
import pathlib
import runpy
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.report import Report
from nbdebug.text import figures, percent
from nbdebug.tools.speed.bottleneck import time_training
from nbdebug.tools.speed.driver import Training
from nbdebug.tools.speed.rules import milliseconds


def bottleneck_of_script(
    path: str, arguments: Sequence[str] = (), steps: int = 20, goal: float | None = None, try_cures: bool = True
) -> Report:
    """The report on a script, which is ended after `steps` steps. Raises FileNotFoundError; what the script raises
    passes."""
    script = pathlib.Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"no such script: {path}")
    names: dict[str, Any] = {}

    def call() -> None:
        names.update(runpy.run_path(str(script), run_name="__main__"))

    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        training = Training(call, {}, {}, None, True, names)
        return time_training(training, f"nbdebug bottleneck {script.name}", "", steps, goal, try_cures)
    finally:
        sys.argv, sys.path[:] = before


def share_of(text: str) -> float:
    """ "5%" or "0.05" as a share. Raises ValueError for what is none."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 100:
        raise ValueError(text)
    return value


def slower(now: Mapping[str, Any], earlier: Mapping[str, Any], limit: float) -> tuple[bool, str]:
    """Whether a step takes longer by more than this share than in an earlier report (`--json`), and a sentence.

    Both the median and the fastest quarter of the steps must have grown: what else a machine does slows some steps."""
    totals = [sorted(sum(step.values()) for step in one["steps"]) for one in (earlier, now)]
    if not all(totals):
        raise ValueError("a report without steps can't be compared")
    before, after = (statistics.median(values) for values in totals)
    fast = [statistics.median(values[: max(len(values) // 4, 1)]) for values in totals]
    grown = min(after / before, fast[1] / fast[0]) - 1
    parts = {name: after_s - before_s for name, before_s, after_s in _parts(earlier, now)}
    most = max(parts, key=lambda name: parts[name], default="")
    change = f"{figures(after / before)} times the earlier step: {milliseconds(before)}, now {milliseconds(after)}"
    where = f"; most of it in {most}" if grown > limit and most else ""
    return grown > limit, f"{change} (limit {percent(limit)} longer){where}."


def _parts(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    names = {name for one in (earlier, now) for step in one["steps"] for name in step}
    return [
        (name, *(statistics.median(step.get(name, 0.0) for step in one["steps"]) for one in (earlier, now)))
        for name in sorted(names)
    ]


def load_times(path: str) -> Mapping[str, Any]:
    """The times in a file that `--json` wrote. Raises ValueError where it holds none."""
    held = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    times = held.get("facts", {}).get("speed") if isinstance(held, dict) else None
    if not isinstance(times, dict) or not isinstance(times.get("steps"), list):
        raise ValueError(f"{path} is no report of `nbdebug bottleneck --json`")
    return times
