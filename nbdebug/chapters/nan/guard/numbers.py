"""What a look at a step found, as plain numbers, and what they mean."""

from __future__ import annotations

import math

from nbdebug.chapters.nan.guard.ranks import Ranks

FIRST = 7
"""How many numbers of a look come before those of the ranks."""


class Numbers:
    """The numbers of a look, read."""

    def __init__(self, values: list[float], ranks: Ranks | None, scaling: bool):
        self.norm, found, self.buffers, self.loss, bad, nan, used_up = values[:FIRST]
        self.scaler_skips, self.scale_used_up = bool(found), bool(used_up)
        self.loss_bad = bool(nan if scaling else bad)  # an infinite loss may come from the scale
        world = ranks.world if ranks else 0
        self.bad_ranks = tuple(i for i in range(world) if values[FIRST + i])
        self.bad_norms = tuple(i for i in range(world) if values[FIRST + world + i])

    def reason(self) -> str:
        """What is not finite; "" where all is well."""
        if self.loss_bad:
            return "loss"
        if self.scaler_skips:
            return "gradient" if self.scale_used_up else ""
        return "" if math.isfinite(self.norm) and not self.bad_norms else "gradient"
