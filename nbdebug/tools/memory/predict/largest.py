"""The largest batch, sequence or image that fits, searched on predictions.

Every piece of memory of a step is a straight line in the number of rows, as long as the step stays the same sequence of
allocations. So two predictions give the sizes of all pieces for any number of rows, and the allocator's model is asked
for each; the answer is then predicted once more in full, and searched again from there where it was wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nbdebug.tools.memory.predict import allocator
from nbdebug.tools.memory.predict.job import FitRequest, Prediction, rows_of, tensors_of
from nbdebug.tools.memory.predict.job import resized_argument as resized
from nbdebug.tools.memory.predict.predict import predict

MOST = 1 << 22
CHECKS = 3


@dataclasses.dataclass(frozen=True)
class Largest:
    """what: "rows", "length" or "side"; now: as it is given; most: that fits (0: not even one); peak: bytes allocated
    there; needs: what has to be there (None where nothing fits)."""

    what: str
    now: int
    most: int
    peak: int | None = None
    needs: int | None = None


def within(job: FitRequest, prediction: Prediction, limit: int | None) -> tuple[bool | None, int]:
    """(whether a predicted step runs through within a limit of bytes, what it needs there). On a card that is what the
    allocator reserves; near the limit it gives segments back, and so may do with less than it would take."""
    if limit is None or not job.cuda:
        return None if limit is None else prediction.peak <= limit, prediction.needs
    held = allocator.replay(prediction.trace.events, [b.size for b in prediction.trace.blocks], limit)
    return held.failed is None, prediction.needs if held.failed is not None else held.reserved


def fits(job: FitRequest, prediction: Prediction, limit: int) -> bool:
    """Whether a predicted step runs through within a limit of bytes."""
    return bool(within(job, prediction, limit)[0])


def with_rows(job: FitRequest, rows: int) -> FitRequest:
    """The same job with another number of samples. Raises ValueError where the batch's tensors do not share their first
    dimension."""
    now = rows_of(job.batch)
    if now is None:
        raise ValueError(
            "the tensors of the batch do not share their first dimension, so that the number of samples is not known"
        )
    return dataclasses.replace(job, batch=resized(job.batch, lambda s: (rows, *s[1:]) if s else s))


def largest_batch(job: FitRequest, limit: int, known: dict[int, Prediction], checks: int = CHECKS) -> Largest | None:
    """The most rows that fit. known: predictions by rows, extended here; checks: how often an answer by lines is
    predicted in full (0: it is taken as it is). None where the batch can't be changed."""
    now = rows_of(job.batch)
    if now is None or now < 1:
        return None

    def at(rows: int) -> Prediction:
        if rows not in known:
            known[rows] = predict(with_rows(job, rows))
        return known[rows]

    at(now), at(2 * now)
    best, floor, ceiling = 0, 0, MOST
    if not checks:
        best = by_lines(job, known, limit, floor, ceiling)
    for _ in range(checks):
        guess = by_lines(job, known, limit, floor, ceiling)
        if guess <= floor:
            break
        if not fits(job, at(guess), limit):
            ceiling = guess - 1
            continue
        best = floor = guess
        further = guess + max(1, guess // 25)  # fragmentation is no straight line: is there room for a little more?
        if further > ceiling or not fits(job, at(further), limit):
            break
        best = floor = further
    result = known.get(best)
    return Largest(
        "rows", now, best, result.peak if result else None, within(job, result, limit)[1] if result else None
    )


def by_lines(job: FitRequest, known: dict[int, Prediction], limit: int, floor: int, ceiling: int) -> int:
    """The most rows between floor and ceiling that fit if sizes are straight lines through the two predictions that are
    nearest to where the limit lies."""
    order = sorted(known, key=lambda rows: abs((known[rows].reserved or known[rows].peak) - limit))
    pair = next(
        ((a, b) for n, a in enumerate(order) for b in order[n + 1 :] if same_sequence(known[a], known[b])), None
    )
    if pair is None:
        return _by_peak(known, limit, floor, ceiling)
    first, second = (known[rows] for rows in pair)
    lines = [(a.size, (b.size - a.size) / (pair[1] - pair[0])) for a, b in zip(first.trace.blocks, second.trace.blocks)]
    events = first.trace.events

    def good(rows: int) -> bool:
        sizes = [max(0, round(size + slope * (rows - pair[0]))) for size, slope in lines]
        if not job.cuda:
            return first.trace.replay(sizes).bytes <= limit
        return allocator.replay(events, sizes, limit).failed is None

    return most(good, floor, ceiling)


def same_sequence(first: Prediction, second: Prediction) -> bool:
    """Whether two predictions are the same sequence of allocations; some frees may change places."""
    return [b.op for b in first.trace.blocks] == [b.op for b in second.trace.blocks]


def _by_peak(known: dict[int, Prediction], limit: int, floor: int, ceiling: int) -> int:
    """Where the sequences differ: a straight line through the two largest totals."""
    (low, a), (high, b) = sorted((rows, p.reserved or p.peak) for rows, p in known.items())[-2:]
    slope = (b - a) / (high - low)
    return ceiling if slope <= 0 else max(floor, min(ceiling, int(low + (limit - a) / slope)))


def most(good: Callable[[int], bool], floor: int, ceiling: int) -> int:
    """The largest whole number that is good, if all smaller ones are too. floor is taken to be good."""
    low, high = floor, max(floor, 1)
    while high < ceiling and good(high):
        low, high = high, high * 2
    high = min(high, ceiling + 1)
    if high > ceiling and good(ceiling):
        return ceiling
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def dimensions(batch: Any) -> list[tuple[str, int]]:
    """What else of a batch has a size of its own: ("length", 1024) of token ids, ("side", 224) of images."""
    sizes: list[tuple[str, int]] = []
    for tensor in tensors_of(batch):
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] > 8:
            sizes.append(("length", tensor.shape[1]))
        if tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3] and tensor.shape[2] > 8:
            sizes.append(("side", tensor.shape[3]))
    return list(dict.fromkeys(sizes))[:1]


def with_size(job: FitRequest, now: int, size: int) -> FitRequest:
    """The same job with a sequence or an image of another size: every dimension behind the first that has it."""
    return dataclasses.replace(
        job, batch=resized(job.batch, lambda s: (*s[:1], *(size if n == now else n for n in s[1:])))
    )


def largest_size(job: FitRequest, limit: int, what: str, now: int, here: Prediction) -> Largest | None:
    """The longest sequence or largest image that fits, by a few predictions; to within 3%. None where the model does
    not take another size."""
    known: dict[int, Prediction | None] = {now: here}
    step = 32 if what == "side" else 1

    def at(size: int) -> Prediction | None:
        if size not in known:
            try:
                known[size] = predict(with_size(job, now, size))
            except Exception:  # a model that takes one size alone refuses: then this is no remedy
                known[size] = None
        return known[size]

    def good(size: int) -> bool:
        result = at(size)
        return result is not None and fits(job, result, limit)

    low, high = (now, 4 * now) if good(now) else (0, now)
    if low and not good(low + step):
        high = low + step
    while high - low > max(step, low // 32):
        middle = (low + high) // 2 // step * step
        if middle <= low:
            break
        if good(middle):
            low = middle
        else:
            high = middle
    if not low and not any(p for size, p in known.items() if size != now):
        return None
    result = known.get(low)
    return Largest(what, now, low, result.peak if result else None, within(job, result, limit)[1] if result else None)
