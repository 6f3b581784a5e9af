"""What is held at this moment, without a step: the same causes, seen in what lies there.

These checks find causes that are declared in `left_behind.py`, where a step has shown them at work.
"""

from __future__ import annotations

from collections.abc import Callable

from nbdebug.chapters.memory.facts import Kept, MemoryFacts
from nbdebug.chapters.memory.rules.words import finding
from nbdebug.finding import Finding, Fix, Where
from nbdebug.sizes import size

MATTERS = 32 << 20
"""Bytes; what a notebook keeps of less than this is a convenience, and no fault."""
SHARE = 0.02
"""Of all that is held: 32 MiB beside 10 GiB are not worth a word."""
CODES = {
    "output": "cell-output-held",
    "displayed": "cell-output-held",
    "traceback": "traceback-held",
    "exception": "traceback-held",
    "hook": "hook-held",
    "loss": "graph-retained",
}
TITLES = {
    "cell-output-held": "The notebook keeps {bytes} that cells have shown",
    "traceback-held": "The last exception keeps {bytes}: the variables of the calls that failed",
    "hook-held": "Hooks that are registered more than once keep {bytes}",
    "graph-retained": "Tensors that are kept hold {bytes} with their graphs",
}


def _of(slug: str) -> Callable[[MemoryFacts], Finding | None]:
    def check(facts: MemoryFacts) -> Finding | None:
        there = [k for k in facts.notebook if CODES.get(k.how) == slug]
        count = sum(k.bytes for k in there)
        held = sum(h.bytes for h in facts.now.holdings) if facts.now is not None else 0
        if count < MATTERS or count < SHARE * held:
            return None
        largest = max(there, key=lambda k: k.bytes)
        title = TITLES[slug].format(bytes=size(count)) + f": `{largest.name}`"
        title += f" and {len(there) - 1} more" if len(there) > 1 else ""
        return finding(
            slug,
            title,
            largest.where or Where(),
            [k.name for k in there],
            [_free(there, count)],
            {"bytes": count, "kept": len(there)},
        )

    return check


def _free(there: list[Kept], count: int) -> Fix:
    words = " ".join(dict.fromkeys(k.release for k in there if k.release)) or "outputs"
    return Fix("Let go of it.", f"%free {words}", None, {"would come back": size(count)})


CHECKS = tuple(_of(slug) for slug in TITLES)
