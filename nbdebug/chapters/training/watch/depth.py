"""Where along the depth the gradient vanishes or explodes: layers against each other, and each against its own past.

Measured as the root mean square of a layer's gradient, so that size does not count; layers in the order in which the
model lists them, which is nearly always the order of the forward pass. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from nbdebug.chapters.training.watch.robust import rank_correlation

LAYERS = 4
"""Layers before anything is said of their order."""
DECADES = 4.0
"""Between the first and the last quarter of the layers: the gradient is 10,000 times smaller. Over all layers of the
healthy trainings in tests/training/healthy.py (residual, recurrent and adversarial ones, a deep stack of ReLUs) the
largest gradient is 40 times the smallest at most."""
FROM_MEDIAN = 1.5
"""Decades between the first quarter and the median layer."""
ORDERLY = 0.8
"""Rank correlation of level and depth: it is the depth that does it."""
FELL = 3.0
"""Decades by which a layer's gradient has fallen against its own past, with the median layer's own fall taken out."""
PAST, NOW = 20, 10
"""Steps that make a past, and a present."""


@dataclasses.dataclass(frozen=True)
class Depth:
    """kind: "vanishes" or "explodes", towards the first layer. first, last: typical level of the first and the last
    quarter; at: the pair of layers between which it changes most, from back to front; decades: by how many."""

    kind: str
    first: float
    last: float
    layer: str
    at: tuple[str, str]
    decades: float


def along(levels: Sequence[tuple[str, float]]) -> Depth | None:
    """What the levels of layers, from first to last, show."""
    known = [(name, math.log10(level)) for name, level in levels if level > 0 and math.isfinite(level)]
    if len(known) < LAYERS:
        return None
    logs = [level for _, level in known]
    quarter = max(1, len(logs) // 4)
    first, last = statistics.median(logs[:quarter]), statistics.median(logs[-quarter:])
    fall, middle = last - first, statistics.median(logs)
    orderly = rank_correlation(logs)
    kind = (
        "vanishes"
        if fall >= DECADES and middle - first >= FROM_MEDIAN and orderly >= ORDERLY
        else "explodes"
        if -fall >= DECADES and first - middle >= FROM_MEDIAN and orderly <= -ORDERLY
        else None
    )
    if kind is None:
        return None
    sign = 1 if kind == "vanishes" else -1
    steepest = max(range(1, len(known)), key=lambda i: sign * (logs[i] - logs[i - 1]))
    worst = min(range(len(known)), key=lambda i: sign * logs[i])
    return Depth(kind, 10**first, 10**last, known[worst][0], (known[steepest][0], known[steepest - 1][0]), abs(fall))


def against_itself(courses: Mapping[str, Sequence[float]]) -> list[tuple[str, float]]:
    """Layers whose gradient has fallen against their own past and the others': (layer, how many times smaller).

    courses: for each layer its levels, step by step, oldest first."""
    fell: dict[str, float] = {}
    for name, levels in courses.items():
        known = [math.log10(v) for v in levels if v > 0 and math.isfinite(v)]
        if len(known) >= PAST + NOW:
            fell[name] = statistics.median(known[:-NOW][-5 * PAST :]) - statistics.median(known[-NOW:])
    if len(fell) < 2:
        return []
    usual = statistics.median(fell.values())
    return [(name, 10 ** (by - usual)) for name, by in fell.items() if by - usual >= FELL]


def jumps(norms: Sequence[tuple[int, float]], times: float = 10.0) -> list[tuple[int, float]]:
    """Steps whose norm is over `times` the median of the 20 before (trainproof's rule, with a rolling median): (step,
    how many times)."""
    found, calm = [], []  # type: ignore[var-annotated]
    for step, norm in norms:
        if not math.isfinite(norm):
            continue
        usual = statistics.median(calm[-PAST:]) if len(calm) >= PAST // 2 else 0.0
        if usual > 0 and norm > times * usual:
            found.append((step, norm / usual))
        calm.append(norm)
    return found
