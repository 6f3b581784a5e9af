"""The fix as a text: the user's own line rewritten, tried as it is printed.

`try_fixes` takes the cures of the cause (`cures.py`), each a rewriting of expressions in the user's source, in order. A
cure is tried on the tape of the failing step, where its template is evaluated on the operands of the op, and, where the
step can run again, by the user's own functions with the edited text in them, for two more steps as well. The first that
is cured becomes the fix. Where none can be tried, the edit, or the rule's own words, are a suggestion.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from nbdebug.observe.edits import edit_of
from nbdebug.observe.recorder import Op
from nbdebug.report import Edit, Finding, Fix
from nbdebug.tools.nan.cures import Cure, Fault, cures
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.origins import Origin
from nbdebug.tools.nan.probe import Detection, Probe
from nbdebug.tools.nan.trials import FixTrial, StepTrial

SPAN = "tried on"
MOST = 16
"""Cures that are tried at most; each takes a few runs of the step."""


def try_fixes(
    finding: Finding,
    facts: NanFacts,
    probe: Probe,
    detection: Detection,
    culprit: Origin,
    op: Op | None,
    again: StepTrial | None = None,
) -> tuple[Finding, FixTrial]:
    """The finding with its first fix as an edit of the user's line, tried. op: the forward op at fault, on the tape.
    again: the step by the user's own code, where that can run again."""
    trial = FixTrial(probe, detection, op)
    fixes = list(finding.fixes)
    if fixes and finding.code != "nan/not-located":
        fault = Fault(finding.code.split("/")[1], facts, probe, detection, culprit, op, trial)
        try:
            own = _tried(fixes[0], fault, trial, again)
        except Exception as error:  # of ours: the finding itself stands
            own = dataclasses.replace(fixes[0], after={"why not": f"nbdebug failed ({type(error).__name__}: {error})"})
        fixes[0] = own
    return dataclasses.replace(finding, fixes=tuple(fixes)), trial


def _tried(fix: Fix, fault: Fault, trial: FixTrial, again: StepTrial | None) -> Fix:
    """The first cure that works; else the first one, with what came of it; else the fix as it stands, a suggestion."""
    first: Fix | None = None
    with contextlib.nullcontext() if again is None else again():
        for number, (cure, edit) in enumerate(_edits(fault)):
            if number == MOST:
                break
            title = cure.title or fix.title
            works, after = _attempt(cure, edit, trial, again)
            if works:
                return Fix.of(title, edit, True, after)
            if first is None or (first.verified is None) < (works is None):
                first = Fix.of(title, edit, works, after)
    if first is not None:
        return first
    return fix if fix.after else dataclasses.replace(fix, after={"why not": "no line of yours was found for it"})


def _edits(fault: Fault) -> Iterator[tuple[Cure, Edit]]:
    """The cures that can be written into the user's source, each text once."""
    known = set()
    for cure in cures(fault):
        edit = edit_of(cure.file or fault.file, cure.changes) if cure.changes else None
        if edit is not None and (edit.line, edit.new) not in known:
            known.add((edit.line, edit.new))
            yield cure, edit


def _attempt(cure: Cure, edit: Edit, trial: FixTrial, again: StepTrial | None) -> tuple[bool | None, dict[str, Any]]:
    """Whether a cure works (None: it can't be tried), and what was seen."""
    on_tape: tuple[bool, dict[str, Any]] | None = None
    if cure.change is not None and not trial.why_not:
        on_tape = trial.attempt(cure.change)
        if not on_tape[0]:
            return False, {SPAN: "the recorded step", **on_tape[1]}
    numbers = {**(on_tape[1] if on_tape else {}), **({"note": cure.note} if cure.note else {})}
    if again is not None and not again.why_not:
        outcome = again.run(edit, cure)
        if outcome.ran:
            seen = {"loss": outcome.loss} if outcome.loss is not None else {}
            why = {"why not": outcome.why_not} if outcome.why_not else {}
            return outcome.cured, {SPAN: outcome.span, **numbers, **seen, **why}
    if on_tape is not None and cure.exact:
        return True, {SPAN: "the recorded step", **numbers}
    reason = trial.why_not or (again.why_not if again is not None else "") or "the step can't run again with it"
    return None, {"why not": reason}
