"""Statistics that a few wild values do not move: medians, and noise separated from trend by differences.

Plain Python over lists of floats; every value given must be finite.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

GAUSS = 1.4826
"""From the median absolute deviation of a normal distribution to its standard deviation."""


def spread(values: Sequence[float]) -> float:
    """The standard deviation by the median absolute deviation; 0.0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return GAUSS * statistics.median(abs(v - middle) for v in values)


def noise(values: Sequence[float]) -> float:
    """The standard deviation of a single value around the trend, from the differences of neighbours: a smooth trend
    moves all of these alike, and their median takes it out. 0.0 of fewer than three values."""
    steps = [b - a for a, b in itertools.pairwise(values)]
    return spread(steps) / math.sqrt(2)


def blocks(values: Sequence[float], most: int = 20, least: int = 5) -> list[float]:
    """Medians of at most `most` equal parts, of at least `least` values each, in order."""
    count = max(1, min(most, len(values) // least))
    edges = [len(values) * i // count for i in range(count + 1)]
    return [statistics.median(values[a:b]) for a, b in itertools.pairwise(edges) if b > a]


def longer(before: Sequence[float], after: Sequence[float]) -> float:
    """How many times longer some times are. Their median and their fastest quarter must both have changed, and the
    smaller change counts: what else a machine does makes some of them longer, those that are long anyway more often."""
    fast = [statistics.median(sorted(times)[: max(len(times) // 4, 1)]) for times in (before, after)]
    return statistics.median((statistics.median(after) / statistics.median(before), fast[1] / fast[0], 1.0))


def slope(values: Sequence[float]) -> float:
    """The Theil-Sen slope: the median over all pairs, per place in the list. Meant for a few dozen values."""
    pairs = [(values[j] - values[i]) / (j - i) for i in range(len(values)) for j in range(i + 1, len(values))]
    return statistics.median(pairs) if pairs else 0.0


def detrended(values: Sequence[float]) -> list[float]:
    """What is left beside a straight line, which is found on block medians."""
    parts = blocks(values)
    per = slope(parts) * len(parts) / max(1, len(values))
    middle = statistics.median(v - per * i for i, v in enumerate(values))
    return [v - per * i - middle for i, v in enumerate(values)]


def correlation(values: Sequence[float], lag: int) -> float:
    """The autocorrelation at a lag, of values around zero (their median). They are cut at three spreads, or where one
    in twenty is beyond: so that a few wild values do not decide, and regular peaks do."""
    sizes = sorted(map(abs, values))
    most = max(3 * spread(values), sizes[-min(len(sizes), max(3, len(sizes) // 20))]) if sizes else 0.0
    cut = [min(max(v, -most), most) for v in values] if most > 0 else list(values)
    middle = sum(cut) / len(cut) if cut else 0.0
    cut = [v - middle for v in cut]
    below = sum(v * v for v in cut)
    return sum(a * b for a, b in zip(cut, cut[lag:])) / below if below > 0 else 0.0


def tail(peaks: Sequence[float]) -> float:
    """How light the tail of positive values is: the Hill estimate of the exponent with which large ones become rare,
    at its lower end (about nine in ten estimates are above the truth's). peaks: in falling order, at least six."""
    count = max(5, min(len(peaks) // 2, 50))
    count = min(count, len(peaks) - 1)
    below = sum(math.log(p / peaks[count]) for p in peaks[:count])
    return count / below * max(0.4, 1 - 1.3 / math.sqrt(count)) if below > 0 else 50.0


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's, of values with their places: 1 where each is above the one before."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = {place: rank for rank, place in enumerate(order)}
    middle = (len(values) - 1) / 2
    below = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (ranks[i] - middle) for i in range(len(values))) / below if below else 0.0
