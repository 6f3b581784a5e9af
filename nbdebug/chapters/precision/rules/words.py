"""Words that the rules of this chapter share: numbers, distances, and the fix that was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nbdebug.chapters.precision.facts import PrecisionFacts
from nbdebug.finding import Fix


def short(value: float) -> str:
    """Three or four figures: 65504 → "65,504", 9000000 → "9.00e6", 1e-12 → "1e-12"."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    head, mark, power = f"{value:.3g}".partition("e")
    return head + (f"e{int(power)}" if mark else "")


def distance(off: float) -> str:
    """A relative distance of losses; "not finite" for inf."""
    return "not finite" if not math.isfinite(off) else f"{off:.1%}"


def named(module: str) -> str:
    """A module as a sentence names it."""
    return f"`{module}`" if module else "the model itself"


def listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(map(named, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def kept_fix(facts: PrecisionFacts) -> Fix:
    """Keep the modules that were found, tried on the whole step."""
    named = ", ".join(repr(name) for name in facts.kept)
    title = f"Keep {listed(facts.kept, 8)} in float32." if facts.kept != ("",) else "Keep the whole model in float32."
    code = f"nbdebug.keep_fp32(model, [{named}])"
    mixed = facts.mixed
    if mixed is None:
        return Fix(title, code)
    works = mixed.finite and mixed.off <= facts.tolerance
    return Fix(
        title,
        code,
        works,
        {"loss": mixed.loss, "in float32": facts.float32.loss, "gradients": "finite" if mixed.finite else "not finite"},
    )
