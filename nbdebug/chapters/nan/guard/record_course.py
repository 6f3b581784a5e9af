"""The course of a run as plain numbers for the figures: losses and gradient norms over steps, and what was marked.

A run has more steps than a picture has columns. So of each stretch of steps the smallest and the largest value are
kept: a single spike stays in sight however long the run was.
"""

from __future__ import annotations

from typing import Any

import numpy as np

STRETCHES = 400
"""Two points each: more than a picture of 640 columns can show."""
MARKS, RUNS = 300, 50
"""How many marks of a kind, and how many beginnings of runs, are drawn; the others are counted."""


def course_of(frame: Any) -> dict[str, Any]:
    """Facts to draw: {"losses": [[step, value], …], "norms": …, "marks": {outcome: [step, …]}, "counts": {outcome: how
    many}, "runs": [step, …], "steps": how many, "joined": whether steps were counted on from one run to the next}.
    {} where there is no step.

    frame: of one process, one row a step, with the columns run, step, loss, norm, outcome. A run that begins before the
    one before it has ended (a guard counts from 0) is drawn after it.
    """
    if not len(frame):
        return {}
    places, starts, joined = _placed(frame["run"].to_numpy(), frame["step"].to_numpy().astype(float))
    counts = frame["outcome"].value_counts()
    marks = {
        str(name): places[(frame["outcome"] == name).to_numpy()]
        for name, count in counts.items()
        if count and name != "ok"
    }
    return {
        "losses": thinned(places, frame["loss"].to_numpy()),
        "norms": thinned(places, frame["norm"].to_numpy()),
        "marks": {name: found[:MARKS].tolist() for name, found in marks.items()},
        "counts": {name: len(found) for name, found in marks.items()},
        "runs": starts[1:RUNS],
        "steps": len(frame),
        "joined": joined,
    }


def thinned(places: Any, values: Any) -> list[list[float]]:
    """The finite points; of many, the first, the last, and the lowest and the highest of each stretch, in order."""
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) > 2 * STRETCHES:
        stretches = np.array_split(finite, STRETCHES)
        low, high = ([part[pick(values[part])] for part in stretches] for pick in (np.argmin, np.argmax))
        finite = np.unique([finite[0], *low, *high, finite[-1]])
    return [[float(x), float(y)] for x, y in zip(places[finite], values[finite])]


def _placed(runs: Any, steps: Any) -> tuple[Any, list[float], bool]:
    """Where each step is drawn, from left to right; where each run begins; whether these are not the steps' numbers."""
    first = np.flatnonzero(np.diff(runs, prepend=-1))
    places, joined = steps.copy(), False
    for start, end in zip(first, [*first[1:], len(steps)]):
        after = places[start - 1] + 1 if start else 0.0
        shift = max(0.0, after - steps[start])
        joined = joined or bool(shift > 0)
        places[start:end] += shift
    return places, places[first].tolist(), joined
