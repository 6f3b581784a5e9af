"""The rules: from the facts of one fault to its one name.

They are asked in order, and the first that recognises the fault names it: first what was bad from outside, then what
the run around the fault tells (an earlier step, a learning rate, labels), then what the backward or the op tells.
"""

from __future__ import annotations

from nbdebug.registry import Rule, rules
from nbdebug.report import Finding
from nbdebug.tools.nan.facts import CompiledFacts, NanFacts, UnlocatedStep
from nbdebug.tools.nan.rules import arithmetic, run

DECLARED = (run, arithmetic)
"""The modules that declare the rules, by being imported."""
FIRST = (
    "uninitialized-memory",
    "parameter-nonfinite",
    "input-nonfinite",
    "running-stats-nonfinite",
    "optimizer-eps-underflow",
    "lr-divergence",
    "compiled-differs",
    "all-labels-ignored",
    "ctc-infeasible",
    "label-out-of-range",
)
"""Asked before the rules of the op, in this order."""


def name_it(facts: NanFacts | CompiledFacts | UnlocatedStep) -> Finding:
    """The finding for these facts. Some rule always recognises them: the last one takes what is left."""
    if isinstance(facts, (CompiledFacts, UnlocatedStep)):
        finding = run.compiled_differs(facts) if isinstance(facts, CompiledFacts) else run.not_located(facts)
        assert finding is not None, "each recognises all of its facts"
        return finding
    return next(f for r in sorted(rules("nan"), key=_rank) if (f := r.check(facts)) is not None)


def _rank(rule: Rule) -> int:
    slug = rule.code.partition("/")[2]
    if slug in FIRST:
        return FIRST.index(slug)
    return len(FIRST) + (rule.check.__module__ == run.__name__)  # what is left of these takes what is left
