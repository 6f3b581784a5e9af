"""What the course of a loss as a whole shows: it climbs back, has stopped moving, or swings. Plain Python."""

from __future__ import annotations

import math
import statistics

from nbdebug.chapters.training.watch.record import Record, Verdict
from nbdebug.chapters.training.watch.robust import (
    blocks,
    correlation,
    detrended,
    noise,
    rank_correlation,
    slope,
    spread,
)

ENOUGH = 30
"""Losses before the course as a whole is judged; of fewer, any shape may be chance."""
CLIMB = 8.0
"""Deviations of a block median, by which the loss has to have fallen and to have climbed back: a random walk of 20
blocks does both by chance in fewer than one record in a thousand (simulated)."""
OF_PROGRESS = 0.5
"""A loss that has lost half of what it had gained climbs; a validation of the schedule's end loses less."""
BEYOND = 0.5
"""A loss that ends at its highest, by half above its start, runs away."""
STEADY = 0.9
"""Rank correlation of a climb that is no walk."""
STILL, UNMOVED = 0.02, 0.05
"""A loss stands still where it is sure that the last third of the record has brought under 2% of what was gained so
far; where nothing was gained, under 5% of its level (TrainProof's and TheDeepChecker's, who do not ask how sure it
is)."""
SWING = 0.2
"""A swing is told from a fifth of the level on."""
ALTERNATES, PERIODIC = -0.6, 0.6
"""Autocorrelations: at lag 1 a loss that jumps to and fro has -1, noise 0; at its period a saw tooth has nearly 1."""


def divergence(record: Record) -> Verdict | None:
    """The loss has climbed, and stays up: it ends above everything before, or has lost half of what it had gained."""
    parts = record.parts()
    if len(record) < ENOUGH or len(parts) < 6:
        return None
    bends = [a - 2 * b + c for a, b, c in zip(parts, parts[1:], parts[2:])]  # a trend, up or down, has few
    sigma = max(
        spread(bends) / math.sqrt(2),
        noise(record.values) / math.sqrt(len(record) / len(parts)),
        1e-3 * abs(statistics.median(parts)),
    )
    before, last = parts[:-1], min(parts[-2:])
    best = min(range(len(before)), key=before.__getitem__)
    gained, climbed = parts[0] - parts[best], last - parts[best]
    sigma *= 1 if len(parts) >= 10 else 2  # of few parts the noise itself is not well known
    beyond = last - parts[0]
    steady = len(parts) - best >= 8 and rank_correlation(parts[best:]) > STEADY and climbed > CLIMB * sigma
    away = last >= max(parts[:-2]) and beyond > BEYOND * abs(parts[0]) and (steady or beyond > 1.5 * CLIMB * sigma)
    back = min(gained, climbed) > CLIMB * sigma and climbed > OF_PROGRESS * gained
    place = min(len(record) - 1, (best + 1) * len(record) // len(parts))
    if not (away or back) or record.rate_moved(place, len(record) - 1, up=True) and not away:
        return None
    evidence = {
        "start": parts[0],
        "lowest": parts[best],
        "end": last,
        "lowest at step": record.steps[place],
        "learning rate": record.rates[place] if record.rates else None,
    }
    said = (
        f"The loss fell from {parts[0]:.4g} to {parts[best]:.4g} until about step {record.steps[place]}, then "
        f"climbed to {last:.4g}"
        if gained > CLIMB * sigma
        else f"The loss climbs: from {parts[0]:.4g} at the start to {last:.4g} at the end"
    )
    return Verdict("divergence", record.steps[place], said + ".", {k: v for k, v in evidence.items() if v is not None})


def plateau(record: Record) -> Verdict | None:
    """The last third neither falls nor rises, and it is sure of that; not where the learning rate has decayed."""
    first = len(record) - max(20, len(record) // 3)
    tail = record.values[max(0, first) :]
    if len(record) < ENOUGH or len(tail) < 20 or record.rate_moved(first, len(record) - 1, up=False):
        return None
    parts = blocks(tail, most=12, least=2)
    fall = -slope(parts) * len(parts)
    sigma = max(1.253 * noise(tail) / math.sqrt(len(tail) / len(parts)), spread(detrended(parts)))
    unsure = 2 * sigma * math.sqrt(12 / len(parts))
    level = statistics.median(tail)
    gained = record.start - level
    moved = gained > 4 * max(noise(tail), unsure)
    most = STILL * gained if moved else UNMOVED * abs(level)
    if abs(fall) > unsure or abs(fall) + unsure > most:
        return None
    since = _since(record, level, max(4 * sigma, most))
    said = (
        f"The loss stands still at {level:.4g} since about step {record.steps[since]}"
        if moved
        else f"The loss has not moved from {level:.4g} in {len(record)} steps"
    )
    evidence = {
        "level": level,
        "start": record.start,
        "change over the last third": -fall,
        "give or take": unsure,
        "noise": noise(tail),
        "from the start": not moved,
    }
    said += f" (change {-fall:+.2g} ± {unsure:.2g} over the last {len(tail)})."
    return Verdict("plateau", record.steps[since if moved else 0], said, evidence)


def _since(record: Record, level: float, near: float) -> int:
    """Where the loss came to its last level: the first block of which all later ones are near it."""
    parts = record.parts()
    far = [i for i, part in enumerate(parts) if abs(part - level) > near]
    return min(len(record) - 1, (far[-1] + 1 if far else 0) * len(record) // len(parts))


def oscillation(record: Record) -> Verdict | None:
    """The loss swings, between two values or in a period, and does not fall while it does."""
    values = list(record.values[len(record) // 2 :])[-400:]
    if len(values) < ENOUGH or any(a != record.rates[-1] for a in record.rates[-len(values) :]):
        return None
    rest = detrended(values)
    size, level = spread(rest), abs(statistics.median(values))
    parts = blocks(values)
    falls = -slope(parts) * len(parts) > size
    if falls or size < SWING * level or size <= 0:
        return None
    period = 2 if correlation(rest, 1) < ALTERNATES else _period(rest)
    if period is None:
        return None
    low, high = sorted(values)[len(values) // 10], sorted(values)[-len(values) // 10]
    said = (
        f"The loss jumps to and fro between about {low:.4g} and {high:.4g}"
        if period == 2
        else f"The loss swings between about {low:.4g} and {high:.4g} with a period of {period} steps"
    )
    return Verdict(
        "oscillation",
        record.steps[-len(values)],
        said + ", and does not fall.",
        {"low": low, "high": high, "period": period, "autocorrelation": correlation(rest, 1)},
    )


def _period(rest: list[float]) -> int | None:
    """The lag of at least 3, of which four fit in, at which the values repeat most, if they do."""
    lags = range(3, len(rest) // 4 + 1)
    near = {lag: correlation(rest, lag) * len(rest) / (len(rest) - lag) for lag in lags}
    if not near or min(near.values()) > 0.2:  # a slow wave that never turns is no period
        return None
    best = max(near, key=near.__getitem__)
    if near[best] <= PERIODIC:
        return None
    period = next(lag for lag in lags if near[lag] > 0.9 * near[best])
    turns = min(near[lag] for lag in lags if lag <= period) < near[best] - 0.6  # down and up again within one period
    return period if turns and _again(rest, period) else None


def _again(rest: list[float], period: int) -> bool:
    """Whether what comes every period is the same: in a slow walk it is so once by chance, not over and over."""
    times = len(rest) // period - 1
    each = [correlation(rest, n * period) * len(rest) / (len(rest) - n * period) for n in range(1, min(times, 5) + 1)]
    return times >= 3 and min(each) > PERIODIC - 0.2
