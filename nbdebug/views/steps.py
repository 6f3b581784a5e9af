"""The last steps that a guard saw, as a table: loss, gradient norm, and what was done about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdebug.views.course import OUTCOMES
from nbdebug.views.words import Table, number, say

HEAD = ("Step", "Loss", "Gradient norm", "What was done")


def table(facts: Mapping[str, Any], most: int) -> Table | None:
    """The table of `facts["guard"]`, the last `most` of its steps; None when there are none."""
    given = facts.get("guard")
    lines = [line for line in given if isinstance(line, Mapping)] if isinstance(given, (list, tuple)) else []
    if not lines:
        return None
    body = tuple(tuple(_row(line)) for line in lines[-most:])
    caption = "The last step" if len(lines) == 1 else f"The last {number(len(lines))} steps"
    return Table(caption, HEAD, body, max(0, len(lines) - most))


def _row(line: Mapping[str, Any]) -> list[str]:
    done = ["clipped"] if line.get("clipped") is True else []
    done += [OUTCOMES[outcome][0]] if (outcome := str(line.get("outcome"))) in OUTCOMES else []
    return [say(line.get(key)) for key in ("step", "loss", "norm")] + ["; ".join(done) or "updated"]
