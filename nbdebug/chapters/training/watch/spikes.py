"""Spikes of a loss: jumps that the noise of the same record can't explain. Plain Python.

A jump is measured against the calm steps before it. Whether it is a spike is asked of the record itself: all jumps,
large and small, are put in order, and their tail says how far the largest may stand above the next. Noise with heavy
tails has large jumps often, and is given more room than noise without.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics

from nbdebug.chapters.training.watch.record import Record, Verdict
from nbdebug.chapters.training.watch.robust import noise, spread, tail

WINDOW = 25
"""Calm steps that a jump is measured against."""
WARM_UP = 10
"""Steps at the start in which nothing is a spike: the first updates of Adam and of a high rate often go up."""
AT_LEAST = 8.0
"""Standard deviations; in normal noise one step in 10^15 is above."""
CHANCE = 1e-4
"""How rarely the tail may give such a jump by itself, in the whole record."""
UNKNOWN_TAIL, UNKNOWN_GAP = 30.0, 6.0
"""In place of CHANCE where a record has too few jumps to show a tail: this many deviations, and this many times the
next one."""
OF_PROGRESS, OF_LEVEL = 0.5, 2.0
"""A spike undoes at least half of what was learnt, or triples a positive loss: a restart of the schedule does less."""
MOST = 5
"""More than these are no spikes but the way this loss is."""


@dataclasses.dataclass(frozen=True)
class Jump:
    """Places in the record: where it began and was highest, where the loss was calm again (None: not yet); the level
    before; how many deviations it was high."""

    first: int
    peak: int
    back: int | None
    level: float
    sigmas: float


def spikes(record: Record) -> list[Verdict]:
    """The spikes, in order of their steps."""
    jumps = sorted(_jumps(record.values), key=lambda j: -j.sigmas)
    return [
        _told(record, j)
        for j in sorted(_beyond_the_tail(jumps), key=lambda j: j.first)
        if _matters(record, j) and not record.rate_moved(j.first - WINDOW, j.peak, up=True)
    ]


def _jumps(values: tuple[float, ...]) -> list[Jump]:
    """Every stretch above its calm past by more than 1.5 deviations."""
    calm: collections.deque[float] = collections.deque(values[:WARM_UP], maxlen=WINDOW)
    found: list[Jump] = []
    first, peak, level, sigma = -1, -1, 0.0, 0.0
    for place in range(len(calm), len(values)):
        value = values[place]
        if first < 0:
            level, sigma = _calm(calm)
        high = (value - level) / sigma
        if high > 1.5 and first < 0:
            first = peak = place
        if first >= 0 and high > (values[peak] - level) / sigma:
            peak = place
        settled = first >= 0 and place - first >= 4 * WINDOW
        if first >= 0 and (high <= 1.5 or settled):
            found.append(Jump(first, peak, None if settled else place, level, (values[peak] - level) / sigma))
            if settled or found[-1].sigmas < 5:  # that is the level now, or was noise
                calm.extend(values[max(first, place - WINDOW) : place])
            first = -1
        if first < 0:
            calm.append(value)
    if first >= 0:
        found.append(Jump(first, peak, None, level, (values[peak] - level) / sigma))
    return found


def _calm(calm: collections.deque[float]) -> tuple[float, float]:
    """Level and deviation of the calm steps. Each way of measuring is blind to one kind of noise (slow waves; steps
    that alternate), so the larger counts; never less than 0.2% of the level, for losses without noise."""
    values, half = list(calm), len(calm) // 2
    early, late = statistics.median(values[:half]), statistics.median(values[-half:])
    per = (late - early) / max(1, len(values) - half)
    level = late if per < 0 else statistics.median(values)
    rest = [v - per * i for i, v in enumerate(values)]
    return level, max(noise(values), spread(rest), 0.002 * abs(level), 1e-12)


def _beyond_the_tail(jumps: list[Jump]) -> list[Jump]:
    """The largest few, where the next stands further below them than the tail of all others explains."""
    peaks = [j.sigmas for j in jumps]
    best: list[Jump] = []
    for count in range(1, min(MOST, len(peaks)) + 1):
        least, others = peaks[count - 1], peaks[count:]
        if least < AT_LEAST:
            break
        if len(others) < 6:
            odd = least > UNKNOWN_TAIL and least > UNKNOWN_GAP * max(others, default=1.5)
        else:
            odd = -count * tail(others) * math.log(least / others[0]) < math.log(CHANCE / MOST)
        if odd:
            best = jumps[:count]
    return best


def _matters(record: Record, jump: Jump) -> bool:
    """A jump that undoes much, and that is one: within three steps it is half up."""
    rise = record.values[jump.peak] - jump.level
    learnt = record.start - jump.level
    sudden = max(record.values[jump.first : jump.first + 3]) - jump.level >= 0.5 * rise
    return sudden and (rise >= OF_PROGRESS * max(learnt, 0.0) or 0 < OF_LEVEL * jump.level <= rise)


def _told(record: Record, jump: Jump) -> Verdict:
    high, low, step = record.values[jump.peak], jump.level, record.steps[jump.first]
    back = None if jump.back is None else record.steps[jump.back] - step
    rate = record.rates[jump.peak] if record.rates else None
    said = f"The loss jumped from {low:.4g} to {high:.4g} at step {step} ({jump.sigmas:.0f} times its noise), and " + (
        f"was back after {back} step{'s' * (back != 1)}" if back is not None else "has not come back"
    )
    evidence = {
        "before": low,
        "peak": high,
        "times its noise": jump.sigmas,
        "peak step": record.steps[jump.peak],
        "steps until back": back,
        "recovers": back is not None,
        "learning rate": rate,
    }
    return Verdict("spike", step, said + ".", {k: v for k, v in evidence.items() if v is not None})
