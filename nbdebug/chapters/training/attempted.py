"""From fixes that were tried before training to what a finding says of them, and to curves for the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from nbdebug.chapters.training.facts_attempt import Attempt
from nbdebug.chapters.training.facts_before import Before
from nbdebug.chapters.training.rules import slug
from nbdebug.finding import Finding, Fix

POINTS = 100
"""Points of a curve that go into a report."""
CURVES_OF = "loss of one batch, learnt by heart"


def attempted(findings: Sequence[Finding], before: Before | None) -> list[Finding]:
    """The findings, each with the first of its fixes that no run has tried told as it was tried on one batch."""
    tried = {} if before is None else before.attempts
    return [_with(finding, tried[slug(finding)]) if slug(finding) in tried else finding for finding in findings]


def _with(finding: Finding, attempt: Attempt) -> Finding:
    first, *others = finding.fixes or (None,)
    if first is None or first.verified is not None:
        return finding
    return dataclasses.replace(finding, fixes=(_told(first, attempt), *others))


def _told(fix: Fix, attempt: Attempt) -> Fix:
    if not attempt.as_is and not attempt.fixed:
        return dataclasses.replace(fix, after={"why not": attempt.why})
    steps = len(attempt.as_is) - 1, len(attempt.fixed) - 1
    after: dict[str, Any] = {
        "undecided": attempt.why or None,
        "one batch": attempt.how,
        "loss as it is": _end(attempt.as_is),
        "loss with the fix": _end(attempt.fixed),
        "steps": max(steps),
        "steps with the fix": steps[1] if 0 < steps[1] < steps[0] else None,
        "optimizer": attempt.optimizer,
    }
    return dataclasses.replace(fix, verified=attempt.verified, after={k: v for k, v in after.items() if v is not None})


def _end(losses: Sequence[float]) -> float | str:
    if not losses:
        return "none: it raises"
    return losses[-1] if math.isfinite(losses[-1]) else "not finite"


def drawn(findings: Sequence[Finding], before: Before) -> dict[str, Any]:
    """Curves of the first finding whose fix was tried; nothing where none was."""
    found = next((a for f in findings if (a := before.attempts.get(slug(f))) is not None and a.fixed), None)
    if found is None:
        return {}
    pairs = {"as it is": points(found.as_is), "with the fix": points(found.fixed)}
    return {"curves": {name: curve for name, curve in pairs.items() if curve}, "curves of": CURVES_OF}


def points(losses: Sequence[float], end: float = 0.0) -> list[list[Any]]:
    """A curve for a report: [step, loss] of at most a hundred steps and of the extremes, None for a loss that is not
    finite. end: the loss afterwards; where it is not finite and all of these are, one more step is."""
    values = [*losses, *[math.nan] * (not math.isfinite(end) and all(map(math.isfinite, losses)))]
    finite = [i for i, v in enumerate(values) if math.isfinite(v)]
    broke = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
    kept = {*range(0, len(values), max(1, -(-len(values) // POINTS))), *range(len(values))[-1:]}
    kept |= {max(finite, key=values.__getitem__), min(finite, key=values.__getitem__)} if finite else set()
    kept |= set() if broke is None else {broke}
    return [[i, float(f"{values[i]:.6g}") if math.isfinite(values[i]) else None] for i in sorted(kept)]
