"""What may have become of a gradient, and how the answers for parts make one for the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbdebug.chapters.error.facts_autograd import Cut
from nbdebug.chapters.error.scene import is_tensor

GRAD, PLAIN, OPEN = "has a gradient", "never had one", "not known"
Verdict = Cut | str


def joined(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what is computed together: one gradient is enough; else the surest place at which one was lost."""
    found = list(verdicts)
    cuts = sorted((v for v in found if isinstance(v, Cut)), key=lambda c: not c.sure)
    if GRAD in found:
        return GRAD
    return cuts[0] if cuts else OPEN if OPEN in found else PLAIN


def either(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what may have run, one or the other: a lost gradient explains best why there is none."""
    found = list(verdicts)
    cuts = sorted((v for v in found if isinstance(v, Cut)), key=lambda c: not c.sure)
    return cuts[0] if cuts else next((v for v in (GRAD, OPEN) if v in found), PLAIN)


def has_gradient(lies: Any) -> bool:
    """Whether a value is a tensor that wants a gradient, or an exact container that holds one."""
    if is_tensor(lies):
        return bool(lies.requires_grad)
    if type(lies) in (list, tuple, dict):
        inside = list(lies.values() if type(lies) is dict else lies)[:100]
        return any(is_tensor(one) and one.requires_grad for one in inside)
    return False
