"""The rules: from the facts of one fault to its one name.

They are asked in order, and the first that recognises the fault names it: first what came bad from outside, then what
the run around the fault tells (an earlier step, a learning rate, labels), then what the backward or the op tells.
"""

from nbdebug.catalogue import rules
from nbdebug.chapters.nan.facts import CompiledFacts, LostStep, NanFacts
from nbdebug.chapters.nan.rules import backward, forward, labels, lost, outside, run
from nbdebug.finding import Finding

_ORDER = (outside, run, labels, backward, forward, lost)


def name_it(facts: NanFacts | CompiledFacts | LostStep) -> Finding:
    """The finding for these facts. Some rule always recognises them: the last one takes what is left."""
    if isinstance(facts, (CompiledFacts, LostStep)):
        found = run.compiled_differs(facts) if isinstance(facts, CompiledFacts) else lost.not_located(facts)
        assert found is not None, "each recognises all of its facts"
        return found
    modules = [m.__name__ for m in _ORDER]
    asked = sorted(rules("nan"), key=lambda r: modules.index(r.check.__module__))
    return next(f for r in asked if (f := r.check(facts)) is not None)
