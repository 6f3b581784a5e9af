"""The rules: from what is held, what a step needed and what it left behind to the causes, most likely first."""

from __future__ import annotations

from nbdebug.chapters.memory.facts import MemoryFacts
from nbdebug.finding import Finding


def name_all(facts: MemoryFacts) -> list[Finding]:
    """The findings, most likely first."""
    from nbdebug.catalogue import rules

    return [found for rule in rules("memory") if (found := rule.check(facts)) is not None]
