"""The verdict on a run: what of it is not well, told from what was observed. Computed here for every tool; no torch.

    of_losses(losses)                the loss of each step: finite, without jumps, lower at the end than at the start
    of_evaluations(evaluations)      the same batches again and again: learnt, and validation with them
    blind(what, why)                 what could not be watched
    carried_scale(steps, …)          the optimizer has stepped by itself on gradients of a scaled loss
    verdicts([(step, loss), …])      the patterns of one record: spike, plateau, divergence, …, each with its number

The first three give Symptoms, the worst first, and none for a run that was seen to be well. A symptom accuses nobody: a
rule that knows the cause does. So it must hold of no healthy run; the thresholds are looser than what 98 healthy
trainings of different kinds showed (tests/training/healthy.py and tests/test_verdict.py, which print the numbers).

A pattern needs a record that is long enough, and that the record's own noise can't explain: a noisy loss that falls,
heavy tails, warm-up, restarts and decays of the learning rate are no faults.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Symptom, Where
from nbdebug.robust_stats import (
    blocks,
    correlation,
    detrended,
    noise,
    rank_correlation,
    slope,
    spread,
    tail,
)
from nbdebug.text import count, figures

FEW = 6
"""Losses from which on their own noise is known well enough to tell a rise from it."""
SURE = 4.0
"""Standard errors by which a rise, a gap, or the end over the start has to stand out: by chance in 3 of 100,000, where
the noise is known."""
UNSURE = 13
"""Of a record of n losses it is known the less, the shorter: a rise takes SURE * (1 + (UNSURE / n)²) standard errors,
by chance in 1 record of 1,000 (simulated: log-normal noise of 10 and 60%, 6 to 50 losses)."""
STEADILY = 6.0
"""… or SURE alone where the ranks climb as steadily as this t of their correlation tells: 6 losses, each above the last
one; 12 with a correlation of 0.89."""
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
RISES = 2.0
"""Standard errors by which the last third of the rewards has to be above the first."""
EVALUATIONS = 4
"""Validation losses from which on a rise or a gap is judged (TrainProof)."""
VALIDATION_ROSE = 1.25
"""The validation loss at the end over its lowest (TrainProof: 1.2)."""
OF_START = 0.05
"""… and by that share of the first one: from nothing to next to nothing is a large multiple."""
FELL = 0.8
"""The training loss at the end over that at the lowest validation loss."""
NO_GAIN, HALF = 0.9, 0.5
"""Validation keeps this share of its loss, training less than that of its own."""
AT_FLOOR = 0.1
"""Of the way from the loss of guessing down to the lowest possible one, what is left to a run that has come down."""

AGREES = 0.2
"""From this agreement of outputs and targets on, at the end, nothing is asked of the start …"""
AT_CHANCE = 1.5
"""… and up to this many standard errors, one over the root of the samples, it is that of an answer that does not look
at the input."""
TOLD_BY, LEARNT = 100, 0.3
"""Samples from which on that is said, and the agreement in training of a run whose validation is judged."""

FINITE = "`%nan_trace` on such a step, or `%guard on` before the run, names the op that makes the first such value."
CURVE = "`%diagnose` on the loop tries what may be behind it; look at the learning rate and at the batches there."
DATA = "`%preflight` checks data, output and loss; print some outputs beside their targets."
VALIDATION = "Look at how validation data are made and read; `%diagnose` with val_loader compares them."


def smoothed_entropy(share: float, classes: int) -> float:
    """What labels that are smoothed by this share, over so many classes, leave of a cross entropy at best, in nats."""
    own, other = 1 - share + share / classes, share / classes
    return -sum(times * p * math.log(p) for times, p in ((1, own), (classes - 1, other)) if p > 0)


def entropy_of(counts: Iterable[int]) -> float:
    """Of labels of which each comes so often, in nats."""
    known = [n for n in counts if n]
    return -sum(n / sum(known) * math.log(n / sum(known)) for n in known)


def floor_of(entropy: float, guess: float) -> tuple[float, float]:
    """(the lowest loss that labels of this entropy leave, the loss below which a run has come down to it). guess: the
    loss of an answer that does not look at the input."""
    return entropy, entropy + AT_FLOOR * max(0.0, guess - entropy)


def floor_note(floor: float, share: float, classes: int, came_down_to: float = 0.0) -> str:
    """That the loss has a floor, and, where the run has come down to it, where it ended."""
    end = f" The run has come down to it, at {figures(came_down_to)}: that is no plateau." if came_down_to else ""
    return (
        f"The loss can't fall below {figures(floor)}: labels are smoothed by {figures(share)} over "
        f"{count(classes, 'class', 'classes')}, and that much is left when every answer is right.{end}"
    )


def blind(what: str, why: str) -> Symptom:
    """Something of ours could not look: nothing may be said of the rest. what: the part; why: in a phrase."""
    return Symptom(f"{what} could not be watched: {why}.", "Nothing is known of it; look at the loss yourself.")


def carried_scale(steps: int, norm: float, scale: float) -> Finding:
    """precision/unscale-order, a rule of the precision tool, as a run shows it. norm, scale: of the first such step."""
    text = f"The optimizer steps by itself in {count(steps, 'step')}, on gradients that still carry GradScaler's scale "
    text += f"{figures(scale)}: at first it gets a norm of {figures(norm)}, and should get {figures(norm / scale)}"
    code = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    fix = Fix("Let the scaler step the optimizer: it takes the scale out.", code)
    evidence = {"where": ["scaler", "optimizer"], "norm": norm, "scale": scale, "steps": steps}
    return Finding("precision/unscale-order", text, Where(phase="optimizer"), evidence, (fix,))


def of_losses(
    losses: Iterable[Any],
    *,
    rates: Mapping[int, float] | Iterable[float] | None = None,
    several: bool = False,
    resumed: bool = False,
    at_floor: float = 0.0,
) -> list[Symptom]:
    """What the losses of a run show, step by step. losses: numbers, or (step, loss) or (step, loss, validation loss) in
    order. rates: as in `verdicts`. several: losses of several optimizers that may pull at each other (a
    generator and its critic): they need not fall. resumed: the run had begun before, and may have converged. at_floor:
    a loss below it has come down to the lowest that can be."""
    rows = [row if isinstance(row, (tuple, list)) else (step, row) for step, row in enumerate(losses)]
    if any(b[0] <= a[0] for a, b in itertools.pairwise(rows)):  # counted anew in each pass
        rows = [(step, *row[1:]) for step, row in enumerate(rows)]
    record = LossRecord.of(rows, rates)
    found = [*_not_finite(record), *_leaps(record)]
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
    from_start = level is not None and level.evidence["from the start"] and level.evidence["level"] >= at_floor
    if level is not None and from_start and min(record.values) >= 0 and not found and not resumed:
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


def _leaps(record: LossRecord) -> list[Symptom]:
    """Far above all before it, or far beyond its noise and most of what was learnt."""
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
    part, total = max(2, len(values) // 10), len(values)
    start, end = ends_of(values)
    error = 1.253 * noise(values) * math.sqrt(2 / part)
    ranks = rank_correlation(values)
    steady = ranks > STEADILY / math.sqrt(total - 2 + STEADILY**2)
    errors = SURE if steady else SURE * (1 + (UNSURE / total) ** 2)
    if end - start <= max(errors * error, least * abs(start)):
        return []
    return [Symptom(f"The loss rose from {figures(start)} at the start to {figures(end)} at the end.", CURVE)]


def ends_of(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and the last tenth."""
    part = max(2, len(values) // 10)
    return statistics.median(values[:part]), statistics.median(values[-part:])


def of_rewards(name: str, values: Sequence[float]) -> list[Symptom]:
    """What the rewards of a run show, whose loss is no measure: a rise that their noise can't explain is well. name:
    the variable, "" where there is none."""
    look = "Print the mean reward of an episode along the run; it is what a policy is judged by."
    if not name or len(values) < FEW:
        return [Symptom("The loss is no measure of a policy, and no reward was found among your variables.", look)]
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt(sum(statistics.variance(part) / third for part in (first, last))) if third > 1 else math.inf
    if gain > RISES * error:
        return []
    went = " to ".join(figures(value) for value in ends_of(values))
    return [Symptom(f"`{name}`, the reward, went from {went}: no rise that stands out from its noise.", look)]


def of_evaluations(
    evaluations: Sequence[tuple[float, float | None, float]],
    *,
    guess: float | None = None,
    several: bool = False,
    floor: tuple[float, float] = (0.0, 0.0),
    constant: float | None = None,
) -> list[Symptom]:
    """What the losses on the same batches show, in the order of the run: (training loss, validation loss or None, its
    standard error). guess: the training loss of an answer that does not look at the input, where it is known. several:
    as in `of_losses`. floor: the lowest loss that can be, and the loss below which a run has come down to it. constant:
    the loss of the best constant answer, where it is known: validation may not be above it once training is below."""
    if len(evaluations) < 2:
        return []
    train, val = [t for t, _, _ in evaluations], [v for _, v, _ in evaluations if v is not None]
    if not all(map(math.isfinite, (*train, *val))):
        return [Symptom("The loss on fixed batches was not finite.", FINITE)]
    first, last, found = train[0], train[-1], []
    above, above_first, guess_above = last - floor[0], first - floor[0], (guess or 0.0) - floor[0]
    went = f"from {figures(first)} to {figures(last)}"
    if last > (1 + PULLED if several else WORSE) * first > 0:
        found.append(Symptom(f"On the same training batches the loss rose {went}.", CURVE))
    elif last == first == 0:
        found.append(Symptom("On the same training batches the loss is exactly 0 from the start.", DATA))
    elif several:
        return []
    elif last >= floor[1] and above > LEVEL * above_first > 0 and (guess is None or above > LEVEL * guess_above):
        found.append(Symptom(f"On the same training batches the loss stayed level: {went}.", DATA))
    elif guess is not None and NEAR * guess > first > 0 and last >= floor[1] and above >= NO_BETTER * guess_above:
        said = f"On the same training batches the loss went {went}; a constant answer has {figures(guess)}."
        found.append(Symptom(said, DATA))
    if len(val) == len(train) and not found:
        found += _validation(train, val, [error for _, _, error in evaluations])
        beyond = max(SURE * evaluations[-1][2], OF_START * (constant or 0.0))
        if not found and constant and last < constant and statistics.median(val[1:][-3:]) > constant + beyond:
            ends = f"Validation ends at {figures(val[-1])}, training at {figures(last)}"
            found.append(
                Symptom(f"{ends}; an answer that does not look at the input has {figures(constant)}.", VALIDATION)
            )
    return found


def of_agreement(start: float, end: float, val: float, samples: tuple[int, int]) -> list[Symptom]:
    """What outputs have of their targets at the end of a run: from -1 (the opposite) over 0 (an answer that does not
    look at the input) to 1. start, val: nan where unknown; val of other samples than those of training."""
    if not math.isfinite(end):
        return []
    of, total = f"of {count(samples[0], 'training sample')}", sum(samples)
    both = end if not math.isfinite(val) else (end * samples[0] + val * samples[1]) / total
    if turns_away(start, end, samples[0]):
        went = f"from {figures(start)} to {figures(end)} (1 is full agreement, 0 an answer that ignores the input)"
        return [Symptom(f"Outputs and targets {of} agree less and less: {went}.", DATA)]
    if samples[0] >= TOLD_BY and max(start, end) <= AGREES and both <= AT_CHANCE / math.sqrt(total):
        said = f"Outputs agree with the targets {of} no better than an answer that ignores the input"
        return [Symptom(f"{said}: {figures(end)}, where 1 is full agreement and 0 none.", DATA)]
    if samples[1] >= TOLD_BY and end > LEARNT and val <= AT_CHANCE / math.sqrt(samples[1]):
        said = f"Outputs agree with targets in training ({figures(end)} of 1), and in validation ({figures(val)} of "
        return [Symptom(f"{said}{count(samples[1], 'sample')}) as by chance.", VALIDATION)]
    return []


def turns_away(start: float, end: float, samples: int) -> bool:
    """Whether outputs have come to be the opposite of their targets, which no chance explains."""
    return end < -max(AGREES, SURE / math.sqrt(max(samples, 1))) and end < start - AGREES / 2


def _validation(train: list[float], val: list[float], errors: list[float]) -> list[Symptom]:
    """Validation that does not follow training: it rises for good while training falls, gains next to nothing, or is
    never below its start."""
    best, end = min(range(len(val)), key=val.__getitem__), statistics.median(val[-3:])
    rises = end - val[best] > max(SURE * errors[best], OF_START * abs(val[0])) and end > VALIDATION_ROSE * val[best]
    if rises and min(val + train) > 0 and train[-1] < FELL * train[best] and len(val) > EVALUATIONS:
        said = f"The validation loss rose from {figures(val[best])} to {figures(end)}, while training fell to "
    elif (
        val[0] > 0
        and (val[-1] > NO_GAIN * val[0] and train[-1] < HALF * train[0])
        or (len(val) > EVALUATIONS and min(val[1:]) > val[0] > 0 and train[-1] < NO_GAIN * train[0])
    ):
        said = f"The validation loss went from {figures(val[0])} to {figures(val[-1])}, while training fell to "
    else:
        return []
    return [Symptom(f"{said}{figures(train[-1])}.", VALIDATION)]


# -- patterns of one record --------------------------------------------------------------------------------------------


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
"""A loss is flat where the last third of the record has certainly brought under 2% of the progress so far; where there
was no progress, under 5% of its level (TrainProof's and TheDeepChecker's, who do not ask how sure it
is)."""
SWING = 0.2
"""Least size of a swing, as a share of the level."""
ALTERNATES, PERIODIC = -0.6, 0.6
"""Autocorrelations: at lag 1 a loss that alternates has -1, noise 0; at its period a saw tooth has nearly 1."""
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
SPIKE_OF_PROGRESS, OF_LEVEL = 0.5, 2.0
"""A spike undoes at least half of the progress, or triples a positive loss: a restart of the schedule does less."""
MOST = 5
"""More than these are no spikes but the nature of this loss."""
ZEROS = 5
"""This many losses of exactly zero at the end are no chance (TrainProof takes five points)."""
GAP = 0.1
"""A gap of a tenth of the training loss (SageMaker Debugger's rule), if noise can't explain it."""
KINDS = ("nan", "zero", "spike", "divergence", "plateau", "oscillation", "gap")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a record of losses shows. kind: one of KINDS; step: the user's step at which it began; said: a sentence with
    the number that shows it; evidence: the numbers."""

    kind: str
    step: int
    said: str
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def verdicts(
    losses: Iterable[Sequence[Any]], *, rates: Mapping[int, float] | Iterable[float] | None = None
) -> tuple[Verdict, ...]:
    """What the losses show, most urgent first; () where they show nothing.

    losses: (step, loss) or (step, loss, validation loss or None), in order. rates: learning rates, by step or one for
    each entry; with them, restarts and decays of a schedule are no spikes and plateaus. Raises ValueError for anything
    else.
    """
    record = LossRecord.of(losses, rates)
    results = [nan(record), zero(record)]
    if not record.values:
        return tuple(v for v in results if v)
    jumps = spikes(record)
    climbs = divergence(record)
    if climbs is not None:  # one event, one verdict
        jumps = [j for j in jumps if j.evidence["recovers"]]
    results += [*jumps, climbs]
    if results[1] is None and climbs is None:
        swings = oscillation(record)
        results += [swings or plateau(record)]
    return tuple(v for v in (*results, gap(record)) if v)


@dataclasses.dataclass(frozen=True)
class LossRecord:
    """steps and values: the finite training losses, in order; bad: those that are not finite; validation: (step, loss),
    finite; rates: the learning rate at each of steps, or empty where it is not known."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    bad: tuple[tuple[int, float], ...] = ()
    validation: tuple[tuple[int, float], ...] = ()
    rates: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, losses: Iterable[Sequence[Any]], rates: Mapping[int, float] | Iterable[float] | None = None
    ) -> LossRecord:
        """losses: (step, loss) or (step, loss, validation loss or None) in order; a loss may be None, where a step has
        a validation loss only. rates: by step, or one for each entry of losses. Raises ValueError for anything else."""
        rows = [_row(row) for row in losses]
        known_rates = _rates(rates, rows)
        known = [(step, value, rate) for (step, value, _), rate in zip(rows, known_rates) if value is not None]
        good = [row for row in known if math.isfinite(row[1])]
        whole = bool(good) and all(rate is not None for _, _, rate in good)
        return cls(
            tuple(s for s, _, _ in good),
            tuple(v for _, v, _ in good),
            tuple((s, v) for s, v, _ in known if not math.isfinite(v)),
            tuple((s, v) for s, _, v in rows if v is not None and math.isfinite(v)),
            tuple(rate for _, _, rate in good if rate is not None) if whole else (),
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def start(self) -> float:
        """The loss at the start: the median of the first few, of a twentieth of the record at most."""
        return statistics.median(self.values[: min(5, max(1, len(self) // 20))])

    @property
    def end(self) -> float:
        """The median of the last twentieth, of three at least."""
        return statistics.median(self.values[-max(3, len(self) // 20) :])

    @property
    def noise(self) -> float:
        """The standard deviation of one loss around its trend, over the last half."""
        return noise(self.values[len(self) // 2 :])

    def parts(self) -> list[float]:
        """Block medians of the whole record."""
        return blocks(self.values)

    def rate_moved(self, first: int, last: int, up: bool) -> bool:
        """Whether the learning rate rose (up: to 1.5 times, a restart) or fell (to a tenth of its largest, a decay)
        within these places; False where it is not known."""
        if not self.rates:
            return False
        window = self.rates[max(0, first) : last + 1]
        if up:
            return any(b > 1.5 * a for a, b in itertools.pairwise(window)) or window[-1] > 1.5 * window[0]
        return statistics.median(window) <= 0.1 * max(self.rates)


def _row(row: Sequence[Any]) -> tuple[int, float | None, float | None]:
    if not isinstance(row, (tuple, list)) or not 2 <= len(row) <= 3:
        raise ValueError(f"losses are (step, loss) or (step, loss, validation loss); got {str(row)[:80]}")
    step, value, validation = (*row, None)[:3]
    return int(step), None if value is None else float(value), None if validation is None else float(validation)


def _rates(rates: Mapping[int, float] | Iterable[float] | None, rows: list[Any]) -> list[float | None]:
    if rates is None:
        return [None] * len(rows)
    if isinstance(rates, Mapping):
        return [rates.get(step) for step, _, _ in rows]
    values = list(rates)
    if len(values) != len(rows):
        raise ValueError(f"rates are one for each loss ({len(rows)}), or a dict by step; got {len(values)}")
    return [float(rate) for rate in values]


def nan(record: LossRecord) -> Verdict | None:
    """A loss that is not finite."""
    if not record.bad:
        return None
    step, value = record.bad[0]
    before = [(s, v) for s, v in zip(record.steps, record.values) if s < step]
    last = f"; the last finite loss was {before[-1][1]:.4g}" if before else ""
    several = f" and in {count(len(record.bad) - 1, 'later step')}" if len(record.bad) > 1 else ""
    word = "NaN" if math.isnan(value) else "infinite"
    return Verdict(
        "nan",
        step,
        f"The loss is {word} at step {step}{several}{last}.",
        {"not finite": len(record.bad), "last finite": before[-1][1] if before else None},
    )


def zero(record: LossRecord) -> Verdict | None:
    """The loss is exactly zero and stays there."""
    zeros = len(list(itertools.takewhile(lambda value: value == 0.0, reversed(record.values))))
    if zeros < ZEROS:
        return None
    step = record.steps[-zeros]
    always = zeros == len(record)
    since = "from the first step on" if always else f"since step {step}"
    return Verdict(
        "zero",
        step,
        f"The loss is exactly 0 {since} ({count(zeros, 'step')}).",
        {"zeros": zeros, "from the start": always, "before": None if always else record.values[-zeros - 1]},
    )


def divergence(record: LossRecord) -> Verdict | None:
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
    text = (
        f"The loss fell from {parts[0]:.4g} to {parts[best]:.4g} until about step {record.steps[place]}, then "
        f"climbed to {last:.4g}"
        if gained > CLIMB * sigma
        else f"The loss climbs: from {parts[0]:.4g} at the start to {last:.4g} at the end"
    )
    return Verdict("divergence", record.steps[place], text + ".", {k: v for k, v in evidence.items() if v is not None})


def plateau(record: LossRecord) -> Verdict | None:
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
    since = _plateau_start(record, level, max(4 * sigma, most))
    text = (
        f"The loss has been flat at {level:.4g} since about step {record.steps[since]}"
        if moved
        else f"The loss has stayed at {level:.4g} for {count(len(record), 'step')}"
    )
    evidence = {
        "level": level,
        "start": record.start,
        "change over the last third": -fall,
        "give or take": unsure,
        "noise": noise(tail),
        "from the start": not moved,
    }
    text += f" (change {-fall:+.2g} ± {unsure:.2g} over the last {count(len(tail), 'step')})."
    return Verdict("plateau", record.steps[since if moved else 0], text, evidence)


def _plateau_start(record: LossRecord, level: float, near: float) -> int:
    """Where the loss came to its last level: the first block of which all later ones are near it."""
    parts = record.parts()
    far = [i for i, part in enumerate(parts) if abs(part - level) > near]
    return min(len(record) - 1, (far[-1] + 1 if far else 0) * len(record) // len(parts))


def oscillation(record: LossRecord) -> Verdict | None:
    """The loss swings, between two values or in a period, and does not fall while it does."""
    values = list(record.values[len(record) // 2 :])[-400:]
    if len(values) < ENOUGH or any(a != record.rates[-1] for a in record.rates[-len(values) :]):
        return None
    rest = detrended(values)
    size, level = spread(rest), abs(statistics.median(values))
    parts = blocks(values)
    falls = -slope(parts) * len(parts) > size
    learnt = max(values) < STILL * record.start  # what is left then need not be even: of a sequence read in order
    if falls or learnt or size < SWING * level or size <= 0:
        return None
    period = 2 if correlation(rest, 1) < ALTERNATES else _period(rest)
    if period is None:
        return None
    low, high = sorted(values)[len(values) // 10], sorted(values)[-len(values) // 10]
    text = (
        f"The loss alternates between about {low:.4g} and {high:.4g}"
        if period == 2
        else f"The loss swings between about {low:.4g} and {high:.4g} with a period of {period} steps"
    )
    return Verdict(
        "oscillation",
        record.steps[-len(values)],
        text + ", and does not fall.",
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
    return period if turns and _repeats(rest, period) else None


def _repeats(rest: list[float], period: int) -> bool:
    """Whether what comes every period is the same: in a slow walk it is so once by chance, not over and over."""
    times = len(rest) // period - 1
    each = [correlation(rest, n * period) * len(rest) / (len(rest) - n * period) for n in range(1, min(times, 5) + 1)]
    return times >= 3 and min(each) > PERIODIC - 0.2


def spikes(record: LossRecord) -> list[Verdict]:
    """The spikes, in order of their steps."""
    jumps = sorted(_jumps(record.values), key=lambda j: -j.sigmas)
    return [
        _spike(record, j)
        for j in sorted(_beyond_the_tail(jumps), key=lambda j: j.first)
        if _is_spike(record, j) and not record.rate_moved(j.first - WINDOW, j.peak, up=True)
    ]


@dataclasses.dataclass(frozen=True)
class Jump:
    """Places in the record: where it began and was highest, where the loss was calm again (None: not yet); the level
    before; how many deviations it was high."""

    first: int
    peak: int
    back: int | None
    level: float
    sigmas: float


def _jumps(values: tuple[float, ...]) -> list[Jump]:
    """Every stretch above its calm past by more than 1.5 deviations."""
    calm: collections.deque[float] = collections.deque(values[:WARM_UP], maxlen=WINDOW)
    jumps: list[Jump] = []
    first, peak, level, sigma = -1, -1, 0.0, 0.0
    for place in range(len(calm), len(values)):
        value = values[place]
        if first < 0:
            level, sigma = _baseline(calm)
        high = (value - level) / sigma
        if high > 1.5 and first < 0:
            first = peak = place
        if first >= 0 and high > (values[peak] - level) / sigma:
            peak = place
        settled = first >= 0 and place - first >= 4 * WINDOW
        if first >= 0 and (high <= 1.5 or settled):
            jumps.append(Jump(first, peak, None if settled else place, level, (values[peak] - level) / sigma))
            if settled or jumps[-1].sigmas < 5:  # that is the level now, or was noise
                calm.extend(values[max(first, place - WINDOW) : place])
            first = -1
        if first < 0:
            calm.append(value)
    if first >= 0:
        jumps.append(Jump(first, peak, None, level, (values[peak] - level) / sigma))
    return jumps


def _baseline(calm: collections.deque[float]) -> tuple[float, float]:
    """Level and deviation of the calm steps. Each way of measuring is blind to one kind of noise (slow waves; steps
    that alternate), so the larger counts; never less than 0.2% of the level, for losses without noise."""
    values, half = list(calm), len(calm) // 2
    early, late = statistics.median(values[:half]), statistics.median(values[-half:])
    per = (late - early) / max(1, len(values) - half)
    level = late if per < 0 else statistics.median(values)
    rest = [v - per * i for i, v in enumerate(values)]
    return level, max(noise(values), spread(rest), 0.002 * abs(level), 1e-12)


def _beyond_the_tail(jumps: list[Jump]) -> list[Jump]:
    """The largest few, where the next one is further below them than the tail of all others explains."""
    peaks = [j.sigmas for j in jumps]
    best: list[Jump] = []
    for number in range(1, min(MOST, len(peaks)) + 1):
        least, others = peaks[number - 1], peaks[number:]
        if least < AT_LEAST:
            break
        if len(others) < 6:
            odd = least > UNKNOWN_TAIL and least > UNKNOWN_GAP * max(others, default=1.5)
        else:
            odd = -number * tail(others) * math.log(least / others[0]) < math.log(CHANCE / MOST)
        if odd:
            best = jumps[:number]
    return best


def _is_spike(record: LossRecord, jump: Jump) -> bool:
    """A jump that undoes much, and that is one: within three steps it is half up."""
    rise = record.values[jump.peak] - jump.level
    gained = record.start - jump.level
    sudden = max(record.values[jump.first : jump.first + 3]) - jump.level >= 0.5 * rise
    return sudden and (rise >= SPIKE_OF_PROGRESS * max(gained, 0.0) or 0 < OF_LEVEL * jump.level <= rise)


def _spike(record: LossRecord, jump: Jump) -> Verdict:
    high, low, step = record.values[jump.peak], jump.level, record.steps[jump.first]
    recovery = None if jump.back is None else record.steps[jump.back] - step
    rate = record.rates[jump.peak] if record.rates else None
    text = f"The loss jumped from {low:.4g} to {high:.4g} at step {step} ({jump.sigmas:.0f} times its noise), and " + (
        f"was back after {count(recovery, 'step')}" if recovery is not None else "has not come back"
    )
    evidence = {
        "before": low,
        "peak": high,
        "times its noise": jump.sigmas,
        "peak step": record.steps[jump.peak],
        "steps until back": recovery,
        "recovers": recovery is not None,
        "learning rate": rate,
    }
    return Verdict("spike", step, text + ".", {k: v for k, v in evidence.items() if v is not None})


def gap(record: LossRecord) -> Verdict | None:
    """The validation loss is above the training loss by more than the noise of both."""
    if len(record.validation) < EVALUATIONS or not record.values:
        return None
    around = [_training_level(record, step) for step, _ in record.validation]
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
    text = f"The validation loss is {last:.4g}, the training loss {level:.4g} (gap {now:.2g} ± {sigma:.1g})"
    text += (
        f"; validation was best at step {step} with {values[best]:.4g} and has risen since"
        + " while training fell" * falls
        if rises
        else ""
    )
    return Verdict(
        "gap",
        step if rises else record.validation[-1][0],
        text + ".",
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


def _training_level(record: LossRecord, step: int) -> tuple[float, float]:
    """The training loss around a step, as the median of the ten before it at most, and the error of that."""
    near = [v for s, v in zip(record.steps, record.values) if s <= step][-10:] or list(record.values[:10])
    return statistics.median(near), 1.253 * noise(near) / math.sqrt(len(near))
