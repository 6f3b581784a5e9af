"""Signs: what the course of a run shows by itself, before anything is tried.

A sign alone accuses nobody. It says which experiment is worth its time; the rule then reads both. Every threshold is
looser than what a fault shows and tighter than what healthy runs of different kinds showed (tests/training/healthy.py).
"""

from __future__ import annotations

import math
import statistics

from nbdebug.tools.training.facts import Experiment, LayerFact, Through, TrainingRunFacts, UnitsFact

LEARNS_NOTHING = 0.9
"""A run that keeps this share of its first loss has learnt next to nothing (TheDeepChecker: less than 5% in 5 checks;
AutoTrainer: less than 0.01 of accuracy)."""
LEARNS_LITTLE = 0.5
"""A run that keeps this share of its first loss has room left, so that an experiment may show what is missing."""
SPREADS = 2.0
"""A loss this many times the first one is no noise of batches (fastai's and Lightning's learning rate finders stop at
4 times the best)."""
SMALL_UPDATE = 1e-4
"""Update over weight. Healthy runs: 1e-4 to 3e-2 (TheDeepChecker: log10 in [-4, -1])."""
LARGE_UPDATE = 0.3
"""An update of a third of the weights themselves (TheDeepChecker's upper limit: 0.1; SageMaker Debugger's: 10)."""
DEAD = 0.9
"""Share of a layer's units that are zero for every sample (torch-audit: over 90% zeros; DLCheck: 95%)."""
SATURATED = 0.5
"""Share of values on the flat ends (TheDeepChecker: over 50%)."""
FADES = 1e-2
"""Gradient of the weakest layer over that of the strongest one behind it. Sigmoids lose a factor of four each."""
FADES_SOMEWHAT = 0.1
"""The same, where an experiment has to confirm it."""
FADES_IN_TIME = 1e-3
"""Gradient at the first moment of a sequence over that at the last. Tasks that need the last ones only show it too."""
BETTER = 0.7
"""An experiment helps when it ends at this share of the loss as it was, or below: far more than two seeds differ."""
MUCH_BETTER = 0.5


def finite(values: tuple[float, ...]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def first(run: TrainingRunFacts) -> float:
    """The loss at the start: on fixed batches before the first step, or the median of the first three losses."""
    if run.checkups:
        return run.checkups[0].train
    return statistics.median(finite(run.losses)[:3] or [math.nan])


def last(run: TrainingRunFacts) -> float:
    """The loss at the end: on the same batches, or the median of the last tenth; infinite where the run blew up."""
    if blew_up(run):
        return math.inf
    if run.checkups:
        return run.checkups[-1].train
    values = finite(run.losses)
    return statistics.median(values[-max(1, len(values) // 10) :] or [math.nan])


def blew_up(run: TrainingRunFacts) -> bool:
    return any(not math.isfinite(v) for v in run.losses)


def kept(run: TrainingRunFacts) -> float:
    """What is left of the first loss; meant for losses that are not negative. 1 where that cannot be said."""
    start, end = first(run), last(run)
    if not math.isfinite(start) or start <= 0 or end < 0:
        return 1.0 if end >= start else 0.0
    return end / start


def learns_nothing(run: TrainingRunFacts) -> bool:
    return kept(run) > LEARNS_NOTHING


def has_room(run: TrainingRunFacts, more_than: float = LEARNS_LITTLE) -> bool:
    return kept(run) > more_than


def held_by_flat(run: TrainingRunFacts) -> bool:
    """Units that are dead or saturated may be what holds the loss up: at the start they are suspect sooner than at the
    end, where a network may have learnt to use the flat ends."""
    early = dead(run.start_units) or saturated(run.start_units)
    return bool(flat(run)) and has_room(run, 0.2 if early else LEARNS_LITTLE)


def spreads(run: TrainingRunFacts) -> bool:
    """The loss has been at a multiple of the first one, for more than a moment, or is not finite any more."""
    start = max(abs(first(run)), abs(finite(run.losses)[0]) if finite(run.losses) else 0.0)
    high = sum(v > SPREADS * start for v in finite(run.losses)[1:])
    return blew_up(run) or (high >= max(2, 0.02 * len(run.losses)) and kept(run) > LEARNS_LITTLE)


def swings(run: TrainingRunFacts) -> bool:
    """Much of each layer is overwritten in each step, and the loss has not come down."""
    updates = [layer.update for layer in run.layers if math.isfinite(layer.update)]
    return bool(updates) and statistics.median(updates) > LARGE_UPDATE and has_room(run)


def leaps(run: TrainingRunFacts) -> bool:
    """Some layer was thrown by more than half of its size in one of the first steps, and little was learnt."""
    return has_room(run) and any(math.isfinite(la.leap) and la.leap > 0.5 for la in run.layers)


def died(run: TrainingRunFacts) -> bool:
    """Units that lived at the start are dead at the end."""
    return bool(dead(run.end_units)) and not dead(run.start_units)


def rate_in_doubt(run: TrainingRunFacts) -> bool:
    return spreads(run) or swings(run) or leaps(run) or (died(run) and has_room(run))


def slow(run: TrainingRunFacts) -> bool:
    """The loss has hardly come down, and no layer moves by more than a thousandth of itself in a step."""
    updates = [layer.update for layer in run.layers if math.isfinite(layer.update)]
    return bool(updates) and max(updates) < 1e-3 and kept(run) > 0.8


def crawls(run: TrainingRunFacts) -> bool:
    """No layer moves by more than a ten-thousandth of itself in a step, and the loss stays."""
    updates = [layer.update for layer in run.layers if math.isfinite(layer.update)]
    return bool(updates) and max(updates) < SMALL_UPDATE and learns_nothing(run)


def rate_fell(run: TrainingRunFacts) -> int | None:
    """The step from which the learning rate is below a tenth of its largest, for good and for at least the second half
    of the run; None where it is not."""
    if len(run.rates) < 8:
        return None
    top = max(run.rates)
    above = [i for i, rate in enumerate(run.rates) if rate > 0.1 * top]
    if not above or above[-1] + 1 > 0.5 * len(run.rates):
        return None
    return above[-1] + 1


def dead(places: tuple[UnitsFact, ...]) -> list[UnitsFact]:
    return [p for p in places if p.dead is not None and p.dead >= DEAD and p.units >= 4]


def saturated(places: tuple[UnitsFact, ...]) -> list[UnitsFact]:
    return [p for p in places if p.saturated is not None and p.hidden and p.saturated >= SATURATED]


def flat(run: TrainingRunFacts) -> list[UnitsFact]:
    """Places where units are dead or saturated, at the start or at the end."""
    return dead(run.start_units) or saturated(run.start_units) or dead(run.end_units) or saturated(run.end_units)


def amplifies(run: TrainingRunFacts) -> tuple[float, str]:
    """By how much the gradient is larger at the call of a layer where it is largest than at the last layer's own call,
    and that layer's name; or, through a recurrent module, at the first moment of its input than at the last.
    (1, "") where that can't be said."""
    found = [(t.first / t.last, t.module) for t in run.through if t.last > 0 and math.isfinite(t.first)]
    hidden = run.flow[:-1] if len(run.flow) >= 3 else ()  # the last one is the output
    if hidden and hidden[-1].gradient > 0:
        largest = max(hidden, key=lambda p: p.gradient)
        found.append((largest.gradient / hidden[-1].gradient, largest.module))
    return max(found, default=(1.0, ""))


def grows(run: TrainingRunFacts) -> tuple[float, str]:
    """The same for the sizes of the outputs, on the way forward, over the first layer's."""
    if len(run.flow) < 3 or run.flow[0].size <= 0:
        return 1.0, ""
    largest = max(run.flow, key=lambda p: p.size)
    return largest.size / run.flow[0].size, largest.module


def explodes(run: TrainingRunFacts) -> bool:
    """The gradient at the start is a multiple of the weights, and it or the activations grow along the way; or it
    jumps later on, and the loss with it."""
    return explodes_at_start(run) or (jumps(run) and spreads(run))


def explodes_at_start(run: TrainingRunFacts) -> bool:
    """Before any step was made, so that no learning rate is to blame."""
    much = run.start_gradient > STRONG * max(run.weight_norm, 1e-12)
    return much and (amplifies(run)[0] > GROWS or grows(run)[0] > GROWS)


def jumps(run: TrainingRunFacts) -> bool:
    """Some gradient norms are far above those before them, though those of the first steps were of an ordinary size."""
    norms = [n for n in run.gradient_norms if math.isfinite(n)]
    if len(norms) < 20:
        return False
    high = [n for i, n in enumerate(norms[10:], 10) if n > JUMP * statistics.median(norms[max(0, i - 50) : i])]
    return len(high) >= 2


STRONG = 10.0
"""Norm of the gradient over norm of the weights at the start. Healthy runs: 0.05 to 3, with large targets 10."""
GROWS = 20.0
"""Growth of gradients or activations from one end of the network, or of the sequence, to the other."""
JUMP = 10.0
"""A gradient norm over the rolling median (TrainProof: 10)."""


def outweighs(run: TrainingRunFacts) -> bool:
    """More of the loss at the start or at the end is paid for the weights than for the errors."""
    return run.penalty > 0.5 * abs(first(run)) or run.penalty_end > 0.5 * abs(last(run))


def rate_stays_low(run: TrainingRunFacts) -> bool:
    """A schedule that is meant for more steps than it got: the rate never left the foot of its rise."""
    schedule = run.schedule
    return schedule is not None and len(run.rates) >= 8 and max(run.rates) < 0.2 * schedule.peak


def settled(run: TrainingRunFacts) -> bool:
    """The loss has not come down by a twentieth in the second half of the run."""
    half = [c for c in run.checkups if c.step >= 0.5 * run.checkups[-1].step]
    return len(half) >= 3 and last(run) > 0.95 * half[0].train


def fading(run: TrainingRunFacts, by: float = FADES) -> list[LayerFact]:
    """The layers whose gradient is a hundredth or less of that of a layer behind them, where it fades step by step."""
    layers = [layer for layer in run.layers if layer.first > 0]
    if len(layers) < 3:
        return []
    strongest = max(range(len(layers)), key=lambda i: layers[i].first)
    before = layers[:strongest]
    weak = [layer for layer in before if layer.first < by * layers[strongest].first]
    steps = [a.first <= 2 * b.first for a, b in zip(before, layers[1 : strongest + 1])]
    return weak if weak and len(before) >= 2 and sum(steps) >= 0.75 * len(steps) else []


def helps(trial: Experiment | None, by: float = BETTER) -> bool:
    """Whether a change brought the loss on fixed batches down to `by` of what it was."""
    return trial is not None and math.isfinite(trial.end_changed) and trial.end_changed < by * trial.end_as_is


def lower_rate_cures(run: TrainingRunFacts) -> bool:
    """With a lower learning rate the same steps end far lower: the rest follows from the rate."""
    return any(helps(t, MUCH_BETTER) for name, t in run.trials.items() if name.startswith("lr/"))


def fades_in_time(run: TrainingRunFacts) -> Through | None:
    """The recurrent module through which next to nothing of the gradient comes back to the first moment."""
    return next((t for t in run.through if t.last > 0 and t.first < FADES_IN_TIME * t.last), None)


def cured(run: TrainingRunFacts) -> Experiment | None:
    """The trial in which layers' outputs were brought to a size of one, where it helped; else the last such one."""
    found = [t for name in ("rescaled", "normalised") if (t := run.trials.get(name)) is not None]
    return next((t for t in found if helps(t)), found[-1] if found else None)


OUTLIER = 5.0
"""The suspected batch's loss over the largest of its neighbours', under the same weights."""


def odd_batch(run: TrainingRunFacts) -> str:
    """Whether the batch at which the loss jumps is unlike its neighbours: "start" or "end", by the weights with which
    it is seen; "" where it is not."""
    spike = run.spike or {}
    own, others = spike.get("its loss at the start"), spike.get("its neighbours' largest")
    if own is not None and others is not None and (not math.isfinite(own) or own > OUTLIER * max(others, 1e-8)):
        return "start"
    own, others = spike.get("its loss at the end"), spike.get("its neighbours' largest at the end")
    return (
        "end"
        if own is not None and others is not None and (own > OUTLIER * max(others, 0.2 * spike["before"], 1e-8))
        else ""
    )


def order_in_doubt(run: TrainingRunFacts) -> bool:
    """The samples come in the order of the dataset, and that may be an order that shows in nothing that is counted."""
    return run.order.sequential and has_room(run, 0.05)


def order_harms(run: TrainingRunFacts) -> bool:
    """Dealt out afresh, the same samples teach far more, on validation data too."""
    trial = run.trials.get("shuffled")
    if trial is None or not order_in_doubt(run) or odd_batch(run) or not helps(trial, MUCH_BETTER):
        return False
    return trial.val_as_is is None or trial.val_changed is None or trial.val_changed < MUCH_BETTER * trial.val_as_is


def overfits(run: TrainingRunFacts) -> tuple[int, float, float] | None:
    """(step of the lowest validation loss, that loss, the last one) where the validation loss rose for good while the
    training loss kept falling."""
    seen = [c for c in run.checkups if c.val is not None and math.isfinite(c.val)]
    if len(seen) < 6:
        return None
    values = [c.val or 0.0 for c in seen]
    best = min(range(len(seen)), key=values.__getitem__)
    end = statistics.median(values[-3:])
    by_heart = seen[-1].train < 0.02 * seen[0].train and end > 0.5 * values[0] and len(seen) >= 10
    matters = end - values[best] > OF_START * abs(values[0])
    sure = min(values[-3:]) > values[best] + SURE * seen[best].spread
    rose = by_heart or matters and sure and end > ROSE * values[best]
    fell = by_heart or seen[-1].train < 0.8 * seen[best].train and seen[-1].train < 0.5 * end
    early = by_heart or seen[best].step <= 0.6 * seen[-1].step
    return (seen[best].step, values[best], values[-1]) if rose and fell and early else None


ROSE = 1.25
"""The validation loss at the end over its lowest (TrainProof: 1.2, after at least four evaluations)."""
OF_START = 0.02
"""… and by that share of the first validation loss at least: from nothing to next to nothing is a large multiple."""
SURE = 2.0
"""Standard errors between the lowest validation loss and the last ones. The batches are the same ones each time, so the
spread between them overstates the doubt."""


AHEAD = 0.85
"""Validation over training loss from which on wrong training labels are thought of."""


def ahead_on_val(run: TrainingRunFacts) -> bool:
    """The validation set is predicted far better than what was trained on, both in eval mode."""
    if not run.checkups or run.checkups[-1].val is None:
        return False
    end = run.checkups[-1]
    return end.val is not None and end.val < AHEAD * end.train and 0.25 * first(run) < end.train < first(run)
