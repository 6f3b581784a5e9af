"""The verdict on a run: what of it is not well, told from what was observed. Computed here for every tool; no torch.

    of_losses(losses)                the loss of each step: finite, without jumps, lower at the end than at the start
    of_evaluations(evaluations)      the same batches again and again: learnt, and validation with them
    blind(what, why)                 what could not be watched

Each gives Symptoms, the worst first, and none for a run that was seen to be well. A symptom accuses nobody: a rule that
knows the cause does. So it must hold of no healthy run; the thresholds are looser than what 98 healthy trainings of
different kinds showed (tests/training/healthy.py and tests/test_verdict.py, which print the numbers).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdebug.loss_analysis import LossRecord, divergence, gap, oscillation, plateau, spikes, zero
from nbdebug.report import Symptom
from nbdebug.robust_stats import noise
from nbdebug.text import count, figures

FEW = 6
"""Losses from which on their own noise is known well enough to tell a rise from it."""
SURE = 4.0
"""Standard errors by which the end has to stand above the start: by chance in 3 of 100,000."""
ROSE = 0.1
"""… and that share of the loss at the start."""
JUMP = 10.0
"""A loss this many times the largest one before it has jumped (healthy runs: under 3)."""
LEVEL = 0.95
"""A run that keeps this share of its loss on the same batches has stayed level (TheDeepChecker: less than 5%)."""
WORSE = 1.1
"""A loss on the same batches this many times the first one has risen."""
NO_BETTER, NEAR = 0.98, 3.0
"""Of the loss of an answer that does not look at the input. A run that starts at many times that has further terms."""
PULLED = 2.0
"""The rise of a loss that another optimizer pulls at, over its start (healthy pairs: under 0.3)."""
EVALUATIONS = 4
"""Validation losses from which on a rise is judged (TrainProof)."""
VALIDATION_ROSE = 1.25
"""The validation loss at the end over its lowest (TrainProof: 1.2)."""
OF_START = 0.05
"""… and by that share of the first one: from nothing to next to nothing is a large multiple."""
FELL = 0.8
"""The training loss at the end over that at the lowest validation loss."""
NO_GAIN, HALF = 0.9, 0.5
"""Validation keeps this share of its loss, training less than that of its own."""

FINITE = "`%nan_trace` on such a step, or `%guard on` before the run, names the op that makes the first such value."
CURVE = "`%diagnose` on the loop tries what may be behind it; look at the learning rate and at the batches there."
DATA = "`%preflight` checks data, output and loss; print some outputs beside their targets."
VALIDATION = "Look at how validation data are made and read; `%diagnose` with val_loader compares them."


def blind(what: str, why: str) -> Symptom:
    """Something of ours could not look: nothing may be said of the rest. what: the part; why: in a phrase."""
    return Symptom(f"{what} could not be watched: {why}.", "Nothing is known of it; look at the loss yourself.")


def of_losses(
    losses: Iterable[Any],
    *,
    rates: Mapping[int, float] | Iterable[float] | None = None,
    several: bool = False,
    resumed: bool = False,
) -> list[Symptom]:
    """What the losses of a run show, step by step. losses: numbers, or (step, loss) or (step, loss, validation loss) in
    order. rates: as in `loss_analysis.verdicts`. several: losses of several optimizers that may pull at each other (a
    generator and its critic): they need not fall. resumed: the run had begun before, and may have converged."""
    rows = [row if isinstance(row, (tuple, list)) else (step, row) for step, row in enumerate(losses)]
    if any(b[0] <= a[0] for a, b in itertools.pairwise(rows)):  # counted anew in each pass
        rows = [(step, *row[1:]) for step, row in enumerate(rows)]
    record = LossRecord.of(rows, rates)
    found = [*_not_finite(record), *_jumps(record)]
    if not record.values:
        return found
    if several:
        return [*found, *_rise(record, PULLED)]
    if (apart := gap(record)) is not None and apart.evidence["rises"]:
        found.append(Symptom(apart.said, VALIDATION))
    if (nothing := zero(record)) is not None and nothing.evidence["from the start"]:
        return [*found, Symptom(nothing.said, DATA)]
    if (climbs := divergence(record)) is not None:
        return [*found, Symptom(climbs.said, CURVE)]
    found += _rise(record)
    if (swings := oscillation(record)) is not None:
        return [*found, Symptom(swings.said, CURVE)]
    level = plateau(record)
    if level is not None and level.evidence["from the start"] and min(record.values) >= 0 and not found and not resumed:
        found.append(Symptom(level.said, DATA))
    return found


def _not_finite(record: LossRecord) -> list[Symptom]:
    if not record.bad:
        return []
    (first, value), (_, last), total = record.bad[0], record.bad[-1], len(record) + len(record.bad)
    before = [v for step, v in zip(record.steps, record.values) if step < first]
    if not record.values and total == 1:
        said = f"The loss is {value}"
    elif not record.values:
        course = f"is {value}" if str(value) == str(last) else f"went from {value} to {last}: it is not finite"
        said = f"The loss {course} in each of {total:,} steps"
    elif before and len(before) == len(record):
        said = f"The loss is {value} from step {first:,} on; it was {figures(before[-1])} before"
    else:
        said = f"The loss is {value} in step {first:,}, and not finite in {len(record.bad):,} of {count(total, 'step')}"
    return [Symptom(f"{said}.", FINITE)]


def _jumps(record: LossRecord) -> list[Symptom]:
    """Far above all before it, or (loss_analysis) far beyond its noise and most of what was learnt."""
    values, top = record.values, 0.0
    for place, value in enumerate(values):
        if place >= FEW // 2 and value > JUMP * top and value > JUMP * max(map(abs, values[:place])):
            back = ", and came back" if values[-1] <= top else ""
            said = f"The loss jumped from {figures(values[place - 1])} to {figures(max(values[place:]))} after step "
            return [Symptom(f"{said}{record.steps[place - 1]:,}{back}.", CURVE)]
        top = max(top, value)
    return [Symptom(spike.said, CURVE) for spike in spikes(record)[:1]]


def _rise(record: LossRecord, least: float = ROSE) -> list[Symptom]:
    """It ends higher than it began by that share of it, and its noise does not explain it."""
    values = record.values
    if len(values) < FEW:
        return []
    part = max(2, len(values) // 10)
    start, end = statistics.median(values[:part]), statistics.median(values[-part:])
    error = 1.253 * noise(values) * math.sqrt(2 / part)
    if end - start <= max(SURE * error, least * abs(start)):
        return []
    return [Symptom(f"The loss rose from {figures(start)} at the start to {figures(end)} at the end.", CURVE)]


def of_evaluations(
    evaluations: Sequence[tuple[float, float | None, float]], *, guess: float | None = None, several: bool = False
) -> list[Symptom]:
    """What the losses on the same batches show, in the order of the run: (training loss, validation loss or None, its
    standard error). guess: the training loss of an answer that does not look at the input, where it is known. several:
    as in `of_losses`."""
    if len(evaluations) < 2:
        return []
    train, val = [t for t, _, _ in evaluations], [v for _, v, _ in evaluations if v is not None]
    if not all(map(math.isfinite, (*train, *val))):
        return [Symptom("The loss on fixed batches was not finite.", FINITE)]
    first, last, found = train[0], train[-1], []
    went = f"from {figures(first)} to {figures(last)}"
    if last > (1 + PULLED if several else WORSE) * first > 0:
        found.append(Symptom(f"On the same training batches the loss rose {went}.", CURVE))
    elif last == first == 0:
        found.append(Symptom("On the same training batches the loss is exactly 0 from the start.", DATA))
    elif several:
        return []
    elif last > LEVEL * first > 0 and (guess is None or last > LEVEL * guess):
        found.append(Symptom(f"On the same training batches the loss stayed level: {went}.", DATA))
    elif guess is not None and NEAR * guess > first > 0 and last >= NO_BETTER * guess:
        said = f"On the same training batches the loss went {went}; a constant answer has {figures(guess)}."
        found.append(Symptom(said, DATA))
    if len(val) == len(train) and not found:
        found += _validation(train, val, [error for _, _, error in evaluations])
    return found


def _validation(train: list[float], val: list[float], errors: list[float]) -> list[Symptom]:
    """Validation that does not follow training: it rises for good while training falls, or gains next to nothing."""
    best, end = min(range(len(val)), key=val.__getitem__), statistics.median(val[-3:])
    rises = end - val[best] > max(SURE * errors[best], OF_START * abs(val[0])) and end > VALIDATION_ROSE * val[best]
    if rises and min(val + train) > 0 and train[-1] < FELL * train[best] and len(val) > EVALUATIONS:
        said = f"The validation loss rose from {figures(val[best])} to {figures(end)}, while training fell to "
    elif val[-1] > NO_GAIN * val[0] > 0 and train[-1] < HALF * train[0]:
        said = f"The validation loss went from {figures(val[0])} to {figures(val[-1])}, while training fell to "
    else:
        return []
    return [Symptom(f"{said}{figures(train[-1])}.", VALIDATION)]
