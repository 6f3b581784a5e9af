"""How a rule over a run puts its finding together: names to blame, proofs by experiment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.chapters.training.facts_run import RunFacts, Trial
from nbdebug.chapters.training.rules.run_signs import BETTER, helps
from nbdebug.finding import Finding, Fix, Link, Where

POINTS = 60
"""Points of a curve that go into a report."""


def finding(
    run: RunFacts,
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


def tried(title: str, code: str, trial: Trial | None, why_not: str = "", by: float = BETTER) -> Fix:
    """A fix with the proof of its trial, where there was one."""
    if trial is None:
        return Fix(title, code, None, {"why not": why_not or "the run could not be repeated with this change"})
    after: dict[str, Any] = {"loss as it is": trial.end_as_is, "loss with the fix": trial.end_changed}
    after |= {"steps": len(trial.changed)} if trial.changed else {}
    if trial.val_as_is is not None and trial.val_changed is not None:
        after |= {"validation as it is": trial.val_as_is, "validation with the fix": trial.val_changed}
    return Fix(title, code, helps(trial, by), {k: v for k, v in after.items() if math.isfinite(v)} | _broke(trial))


def _broke(trial: Trial) -> dict[str, str]:
    ends = (("as it is", trial.end_as_is), ("with the fix", trial.end_changed))
    return {f"loss {word}": "not finite" for word, end in ends if not math.isfinite(end)}


def short(value: float) -> str:
    """A number for a sentence: three digits, in full up to a million."""
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def thinned(curve: Iterable[float]) -> list[float | None]:
    """A curve for a report: at most 60 points, what is not finite left open."""
    values = list(curve)
    step = max(1, len(values) // POINTS)
    return [round(v, 6) if math.isfinite(v) else None for v in values[::step]]
