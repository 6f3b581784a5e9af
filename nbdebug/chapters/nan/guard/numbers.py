"""What a look at a step found, as plain numbers, and what they mean."""

from __future__ import annotations

import math

from nbdebug.chapters.nan.guard.ranks import OtherProcess, Ranks

FIRST = 7
"""How many numbers of a look come before those of the ranks: for each, whether its loss is not finite, whether it is
NaN, and whether its guard has left."""


class Numbers:
    """The numbers of a look, read."""

    def __init__(self, values: list[float], ranks: Ranks | None, scaling: bool):
        self.norm, found, self.buffers, self.loss, bad, nan, used_up = values[:FIRST]
        self.scaler_skips, self.scale_used_up = bool(found), bool(used_up)
        self.loss_bad = bool(nan if scaling else bad)  # an infinite loss may come from the scale
        rows = (len(values) - FIRST) // 3
        members = ranks.members_of(rows) if ranks is not None else ()
        losses, nans, left = (values[FIRST + i * rows : FIRST + (i + 1) * rows] for i in range(3))
        self.bad_ranks = tuple(r for r, flag in zip(members, nans if scaling else losses, strict=True) if flag)
        self.left = tuple(r for r, flag in zip(members, left, strict=True) if flag)

    def check(self) -> None:
        """Raises OtherProcess where another process's guard has left: nothing is decided any more."""
        if self.left:
            raise OtherProcess(f"the guard of process {self.left[0]} has stopped; see what that process says")

    def reason(self) -> str:
        """What is not finite; "" where all is well."""
        if self.loss_bad:
            return "loss"
        if self.scaler_skips:
            return "gradient" if self.scale_used_up else ""
        return "" if math.isfinite(self.norm) else "gradient"
