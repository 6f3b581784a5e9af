"""The loss watch: what a list of losses shows, with the number that shows it. Plain Python, no torch.

    verdicts([(step, loss), (step, loss, validation loss), …], rates=[…])

It speaks where the record is long enough and its own noise can't explain what is seen, and is silent otherwise: a noisy
loss that falls, heavy tails, warm-up, restarts and decays of the learning rate are no faults.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdebug.chapters.training.watch.record import KINDS, Record, Verdict
from nbdebug.chapters.training.watch.robust import noise
from nbdebug.chapters.training.watch.shapes import divergence, oscillation, plateau
from nbdebug.chapters.training.watch.spikes import spikes

__all__ = ["KINDS", "Record", "Verdict", "verdicts"]

ZEROS = 5
"""So many losses of exactly zero at the end are no luck (TrainProof takes five points)."""
EVALUATIONS = 4
"""Validation losses before a gap is judged (TrainProof)."""
GAP = 0.1
"""A gap of a tenth of the training loss (SageMaker Debugger's rule), if noise can't explain it."""
SURE = 4.0
"""Standard errors by which a gap, or a rise of the validation loss, has to stand out."""


def verdicts(
    losses: Iterable[Sequence[Any]], *, rates: Mapping[int, float] | Iterable[float] | None = None
) -> tuple[Verdict, ...]:
    """What the losses show, most urgent first; () where they show nothing.

    losses: (step, loss) or (step, loss, validation loss or None), in order. rates: learning rates, by step or one for
    each entry; with them, restarts and decays of a schedule are told from spikes and plateaus. Raises ValueError for
    anything else.
    """
    record = Record.of(losses, rates)
    found = [nan(record), zero(record)]
    if not record.values:
        return tuple(v for v in found if v)
    jumps = spikes(record)
    climbs = divergence(record)
    if climbs is not None:  # one thing is told once
        jumps = [j for j in jumps if j.evidence["recovers"]]
    found += [*jumps, climbs]
    if found[1] is None and climbs is None:
        swings = oscillation(record)
        found += [swings or plateau(record)]
    return tuple(v for v in (*found, gap(record)) if v)


def nan(record: Record) -> Verdict | None:
    """A loss that is not finite."""
    if not record.bad:
        return None
    step, value = record.bad[0]
    before = [(s, v) for s, v in zip(record.steps, record.values) if s < step]
    came = f"; before it stood at {before[-1][1]:.4g}" if before else ""
    several = f", and {len(record.bad) - 1} later ones" if len(record.bad) > 1 else ""
    word = "NaN" if math.isnan(value) else "infinite"
    return Verdict(
        "nan",
        step,
        f"The loss is {word} at step {step}{several}{came}.",
        {"not finite": len(record.bad), "last finite": before[-1][1] if before else None},
    )


def zero(record: Record) -> Verdict | None:
    """The loss is exactly zero and stays there."""
    count = 0
    for value in reversed(record.values):
        if value != 0.0:
            break
        count += 1
    if count < ZEROS:
        return None
    step = record.steps[-count]
    always = count == len(record)
    since = "from the first step on" if always else f"since step {step}"
    return Verdict(
        "zero",
        step,
        f"The loss is exactly 0 {since} ({count} steps).",
        {"zeros": count, "from the start": always, "before": None if always else record.values[-count - 1]},
    )


def gap(record: Record) -> Verdict | None:
    """The validation loss stands above the training loss, by more than the noise of both."""
    if len(record.validation) < EVALUATIONS or not record.values:
        return None
    around = [_training_at(record, step) for step, _ in record.validation]
    gaps = [value - level for (_, value), (level, _) in zip(record.validation, around)]
    values = [value for _, value in record.validation]
    shaky = noise(values)
    sigma = math.hypot(shaky, around[-1][1])
    now, level = statistics.median(gaps[-3:]), around[-1][0]
    if now <= SURE * sigma / math.sqrt(min(3, len(gaps))) or now <= GAP * abs(level):
        return None
    best = min(range(len(values)), key=values.__getitem__)
    last = statistics.median(values[-3:])
    rises = last - values[best] > SURE * shaky + GAP * abs(values[best]) and len(values) - best > 3
    falls = around[best][0] - level > SURE * around[-1][1]
    step = record.validation[best][0]
    said = f"The validation loss is {last:.4g}, the training loss {level:.4g} (gap {now:.2g} ± {sigma:.1g})"
    said += (
        f"; validation was best at step {step} with {values[best]:.4g} and has risen since"
        + " while training fell" * falls
        if rises
        else ""
    )
    return Verdict(
        "gap",
        step if rises else record.validation[-1][0],
        said + ".",
        {
            "training": level,
            "validation": last,
            "gap": now,
            "noise of the gap": sigma,
            "best validation": values[best],
            "best at step": step,
            "rises": rises,
            "training falls": falls,
            "gap at first": gaps[0],
        },
    )


def _training_at(record: Record, step: int) -> tuple[float, float]:
    """The training loss around a step, as the median of the ten before it at most, and the error of that."""
    near = [v for s, v in zip(record.steps, record.values) if s <= step][-10:] or list(record.values[:10])
    return statistics.median(near), 1.253 * noise(near) / math.sqrt(len(near))
