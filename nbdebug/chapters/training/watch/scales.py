"""A GradScaler over time: its scale, the steps that it left out and whose gradient was not finite in them, and whether
gradients were changed while they carried the scale. Plain numbers, no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from nbdebug.chapters.training.watch.thinned import Thinned

SHRUNK = 0.99
"""A norm that falls below this share of what backward left was changed on purpose, not by rounding."""
SAME = 0.02
"""Divided by one constant (accumulation), the norms of all parameters and steps keep their ratio to this; clipping
brings them to one size instead."""
EARLY, FEW = 0.1, 3
"""Share of the scaler's steps, and how many at least, in which gradients were clipped too early: as in `diagnose`."""


class Scales:
    """course: (step, scale, left out) of the attempts that were kept; attempts, skipped, most, least, last: exact;
    settled: attempts since the first that was not left out; first: for each
    parameter, in how many of the steps left out it was the first in backward's order whose gradient was not finite;
    nan: how many of these it was NaN; growth: the scaler's growth interval, in steps, or None."""

    def __init__(self, keep: int):
        self.course: Thinned[tuple[int, float, bool]] = Thinned(keep)
        self.attempts = self.skipped = self.settled = 0
        self.begun = self.most = self.last = 0.0
        self.least = math.inf
        self.first: Counter[int] = Counter()
        self.nan: Counter[int] = Counter()
        self.growth: int | None = None
        self.looked = 0  # attempts in which it was looked whether something had written into scaled gradients
        self.early: list[tuple[float, float]] = []  # norms behind backward and before the scale is taken out
        self.early_steps = 0
        self._ratios: list[float] = []

    def add(self, step: int, scale: float, skipped: bool, norms: Mapping[int, float]) -> None:
        """An attempt. norms: of gradients by the parameters' numbers, which follow the order of the forward pass."""
        self.course.append((step, scale, skipped))
        self.begun = self.begun or scale
        self.attempts += 1
        self.most, self.least, self.last = max(self.most, scale), min(self.least, scale), scale
        if self.settled or not skipped:
            self.settled += 1
        if skipped:
            self.skipped += 1
            bad = [number for number, norm in norms.items() if not math.isfinite(norm)]
            if bad:
                self.first[max(bad)] += 1
                self.nan[max(bad)] += math.isnan(norms[max(bad)])

    def written(self, before: Mapping[int, float], after: Mapping[int, float]) -> None:
        """Norms by parameter behind backward, and of those that were written into before the scale was taken out."""
        self.looked += 1
        pairs = [(before[n], v) for n, v in after.items() if math.isfinite(v) and 0 < before.get(n, 0.0) < math.inf]
        if not pairs:
            return
        ratios = [now / was for was, now in pairs]
        shrunk = math.hypot(*(now for _, now in pairs)) < SHRUNK * math.hypot(*(was for was, _ in pairs))
        if shrunk:
            self.early_steps += 1
            self._ratios = _ends([*self._ratios, *ratios])
            self.early.append((math.hypot(*before.values()), math.hypot(*{**before, **after}.values())))
            del self.early[:-100]

    def clipped_early(self) -> bool:
        """Whether gradients are clipped while they carry the scale: made smaller, and not by one constant."""
        if self.early_steps < FEW or self.early_steps <= EARLY * self.looked or not self._ratios:
            return False
        return max(self._ratios) - min(self._ratios) > SAME * max(self._ratios)


def _ends(values: Iterable[float]) -> list[float]:
    known = list(values)
    return [min(known), max(known)]
