"""How a rule over what was seen before training puts its finding together."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.training.facts import Experiment, TrainingRunFacts
from nbdebug.tools.training.rules.signs import BETTER, helps


def finding(
    slug: str,
    title: str,
    where: Iterable[str],
    fixes: Iterable[Fix],
    *,
    place: Where | None = None,
    module: str | None = None,
    chain: Iterable[str] = (),
    **evidence: Any,
) -> Finding:
    """where: the modules, parameters, functions or arguments to blame, the most telling first. module: the one at which
    it is, where the place does not tell. `_` in the names of evidence stands for a space."""
    names = [name for name in dict.fromkeys(where) if name]
    place = place or Where()
    at = dataclasses.replace(place, module=place.module or module)
    shown: Mapping[str, Any] = {key.replace("_", " "): value for key, value in evidence.items() if value is not None}
    return Finding(
        f"training/{slug}", title, at, {"where": names, **shown}, tuple(fixes), tuple(Link(what) for what in chain)
    )


def listed(names: Iterable[str], most: int = 4) -> str:
    """ "`a`, `b` and 3 more"."""
    names = list(names)
    shown = [f"`{name}`" for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join(", ".join(shown).rsplit(", ", 1)) if len(shown) > 1 else "".join(shown)


def line(where: Where) -> str:
    """ " (train.py, line 31)", or "" where the line is not known."""
    return f" ({where.place})" if where.place else ""


def short(value: float) -> str:
    """A number for a sentence: three digits, in full up to a million."""
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def shape(size: Iterable[int]) -> str:
    """(64, 1) as "64×1", (64,) as "64"."""
    return "×".join(str(s) for s in size)


def without(text: str | None, op: str) -> str:
    """A line of the user's without one call: "x.softmax(1)" becomes "x", "F.softmax(x, dim=1)" becomes "x"; "" where
    that can't be told from the text."""
    found = re.search(rf"(?P<owner>[\w.\])]*?)\.?\b{re.escape(op)}(?P<open>\()?", text or "")
    if found is None or text is None:
        return ""
    if found["open"] is None:
        return text[: found.start()] + found["owner"] + text[found.end() :] if op == "data" else ""
    end = _closing(text, found.end() - 1)
    if end is None:
        return ""
    if found["owner"] in ("", "F", "torch", "nn.functional", "torch.nn.functional", "functional"):
        inner = text[found.end() : end]
        return text[: found.start()] + inner[: _first_comma(inner)].strip() + text[end + 1 :]
    if found["owner"].split(".")[0] == "self" and found["owner"].count(".") == 0:
        return ""  # a module of that name
    return text[: found.start()] + found["owner"] + text[end + 1 :]


def _closing(text: str, opening: int) -> int | None:
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return None


def _first_comma(inner: str) -> int:
    depth = 0
    for i, char in enumerate(inner):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            return i
    return len(inner)


POINTS = 60
"""Points of a curve that go into a report."""


def run_finding(
    run: TrainingRunFacts,
    slug: str,
    title: str,
    where: Iterable[str],
    fixes: Iterable[Fix],
    *,
    place: Where | None = None,
    phase: str | None = None,
    step: int | None = None,
    chain: Iterable[str] = (),
    evidence: Mapping[str, Any] | None = None,
) -> Finding:
    """where: the modules, parameters, functions or arguments to blame, the most telling first. The first that is a
    module (or has one as its owner) is the place's module."""
    names = [name for name in dict.fromkeys(where) if name]
    known = (
        {la.name for la in run.layers}
        | {m.module for m in run.modes}
        | {f.name for f in run.frozen}
        | {name for u in (*run.start_units, *run.end_units) for name in (u.feeds, u.module)}
        | {p.module for p in run.flow}
    )
    module = next((name for name in names if name in known), None)
    at = dataclasses.replace(place or Where(), step=step, module=module, phase=phase)
    return Finding(
        f"training/{slug}",
        title,
        at,
        {"where": names, **(evidence or {})},
        tuple(fixes),
        tuple(Link(what) for what in chain),
    )


def tried(title: str, code: str, trial: Experiment | None, why_not: str = "", by: float = BETTER) -> Fix:
    """A fix with the proof of its trial, where there was one."""
    if trial is None:
        return Fix(title, code, None, {"why not": why_not or "the run could not be repeated with this change"})
    after: dict[str, Any] = {"loss as it is": trial.end_as_is, "loss with the fix": trial.end_changed}
    after |= {"steps": len(trial.changed)} if trial.changed else {}
    if trial.val_as_is is not None and trial.val_changed is not None:
        after |= {"validation as it is": trial.val_as_is, "validation with the fix": trial.val_changed}
    return Fix(title, code, helps(trial, by), {k: v for k, v in after.items() if math.isfinite(v)} | _broke(trial))


def _broke(trial: Experiment) -> dict[str, str]:
    ends = (("as it is", trial.end_as_is), ("with the fix", trial.end_changed))
    return {f"loss {word}": "not finite" for word, end in ends if not math.isfinite(end)}


def short_number(value: float) -> str:
    """A number for a sentence: three digits, in full up to a million."""
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def thinned(curve: Iterable[float]) -> list[float | None]:
    """A curve for a report: at most 60 points, what is not finite left open."""
    values = list(curve)
    step = max(1, len(values) // POINTS)
    return [round(v, 6) if math.isfinite(v) else None for v in values[::step]]
