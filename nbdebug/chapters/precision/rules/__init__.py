"""The rules: from the modules that have to stay in float32, and from lost gradients, to the causes."""

from __future__ import annotations

from nbdebug.catalogue import rules
from nbdebug.chapters.precision.facts import PrecisionFacts
from nbdebug.chapters.precision.rules import around, modules
from nbdebug.finding import Finding

DECLARED = (modules, around)
"""Where the rules stand: to import these modules is to declare them."""


def name_all(facts: PrecisionFacts) -> list[Finding]:
    """The findings, most likely first: a cause for each kind of fault among the kept modules, then what is around."""
    return [found for rule in rules("precision") if (found := rule.check(facts)) is not None]
