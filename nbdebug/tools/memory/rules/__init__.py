"""The rules: from what is held, what a step needed and what it left behind to the causes, most likely first.

One fault gives one finding. What every step leaves behind is a leak whatever the step needs, and it swells the peak: so
where one is found, the peak is not reported.
"""

from __future__ import annotations

from nbdebug.registry import rules
from nbdebug.report import Finding
from nbdebug.tools.memory.facts import MemoryFacts
from nbdebug.tools.memory.rules import out_of_memory, usage

DECLARED = (usage, out_of_memory)
"""Where the rules stand: to import these modules is to declare them."""
AT_PEAK = frozenset({"memory/activations-dominate", "memory/optimizer-state-dominates"})


def name_all(facts: MemoryFacts) -> list[Finding]:
    """The findings, most likely first."""
    findings = [f for rule in rules("memory") if (f := rule.check(facts)) is not None]
    findings += [
        f for check in usage.CHECKS if (f := check(facts)) is not None and f.code not in {g.code for g in findings}
    ]
    held = [f for f in findings if f.code not in AT_PEAK]
    return held or findings
