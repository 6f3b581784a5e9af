"""What became of a fix that was tried before training, on one batch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A fix that was tried: one batch learnt by heart as it is and with the fix, from the same start, with the same
    optimizer. how: what was done; optimizer: with its rate; as_is, fixed: losses before the first step and behind each
    (empty: none could be computed); verified: True (it helps), False (it does not), None (not tried, or undecided);
    why: the reason for None."""

    how: str = ""
    optimizer: str = ""
    as_is: tuple[float, ...] = ()
    fixed: tuple[float, ...] = ()
    verified: bool | None = None
    why: str = ""
