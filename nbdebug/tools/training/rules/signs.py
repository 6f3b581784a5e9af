"""Signs: what the course of a run shows by itself, before anything is tried.

A sign alone accuses nobody. It says which experiment is worth its time; the rule then reads both. Every threshold is
looser than what a fault shows and tighter than what healthy runs of different kinds showed (tests/training/healthy.py).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from nbdebug import verdict
from nbdebug.tools.training.facts import (
    BatchEvaluation,
    Experiment,
    LayerFact,
    ModuleMode,
    RegularizerTrial,
    TimeGradient,
    TrainingFacts,
    TrainingRunFacts,
)
from nbdebug.tools.training.static_facts import Parameter, StaticFacts, UnitsFact

ADAPTIVE = ("Ada", "NAdam", "RAdam", "RMSprop", "Rprop", "LBFGS", "Lion", "Sophia", "Muon", "LAMB", "Lamb")
"""In the names of optimizers whose steps don't grow with the loss (AdamW and Adafactor among the first)."""

LEARNS_NOTHING = 0.9
"""A run that keeps this share of its first loss has learned next to nothing (TheDeepChecker: less than 5% in 5 checks;
AutoTrainer: less than 0.01 of accuracy)."""
LEARNS_LITTLE = 0.5
"""A run that keeps this share of its first loss has room left, so that an experiment may show what is missing."""
OF_A_HEAD = 0.2
"""The same, where the layer that makes the output is not trained: it can be little (the experiment has to halve it)."""
DIVERGES = 2.0
"""A loss this many times the first one is not the noise of batches (fastai's and Lightning's learning rate finders stop
at 4 times the best)."""
SMALL_UPDATE = 1e-4
"""Update over weight. Healthy runs: 1e-4 to 3e-2 (TheDeepChecker: log10 in [-4, -1])."""
LARGE_UPDATE = 0.3
"""An update of a third of the weights themselves (TheDeepChecker's upper limit: 0.1; SageMaker Debugger's: 10)."""
DEAD = 0.9
"""Share of a layer's units that are zero for every sample (torch-audit: over 90% zeros; DLCheck: 95%)."""
SATURATED = 0.5
"""Share of values on the flat ends (TheDeepChecker: over 50%)."""
VANISHES = 1e-2
"""Gradient of the weakest layer over that of the strongest one behind it. Sigmoids lose a factor of four each."""
VANISHES_SOMEWHAT = 0.1
"""The same, where an experiment has to confirm it."""
VANISHES_IN_TIME = 1e-3
"""Gradient at the first time step of a sequence over that at the last. Tasks that need only the last steps show it
too."""
STRONG = 10.0
"""Norm of the gradient over norm of the weights at the start. Healthy runs: 0.05 to 3, with large targets 10."""
GROWTH = 20.0
"""Growth of gradients or activations from one end of the network, or of the sequence, to the other."""
JUMP = 10.0
"""A gradient norm over the rolling median (TrainProof: 10)."""
OUTLIER = 5.0
"""The suspected batch's loss over the largest of its neighbours', under the same weights."""
ROSE = 1.25
"""The validation loss at the end over its lowest (TrainProof: 1.2, after at least four evaluations)."""
OF_START = 0.02
"""… and by that share of the first validation loss at least: from nothing to next to nothing is a large multiple."""
SURE = 2.0
"""Standard errors between the lowest validation loss and the last ones. The batches are the same ones each time, so the
spread between them overstates the doubt."""
CLEARLY = 1.1
"""A validation loss over its lowest that a person would see as a rise."""
AHEAD = 0.85
"""Validation over training loss below which wrong training labels are considered."""
NO_GAIN = 0.7
"""Share of its first loss that validation keeps where it has learned next to nothing."""
BEHIND = 3.0
"""Validation over training loss at the end from which a difference in their preparation is taken for the cause."""
FRESH, AGAIN = 0.97, 0.9
"""Without validation data: the last third of a first pass over its first third, where new samples are not predicted any
better; and the last pass over that."""
UNFAIR = 3.0
"""Variance between batch means over a fair shuffle's. Over four batches and more, a fair one stays below 2.6 in 99 of
100 (chi-square with three degrees of freedom, divided by three: 3.8 at its 99th percentile for one column, less for
several)."""
STALE = 0.5
"""Share of the optimizer's steps that used gradients with older ones in them. Accumulation clears them in each."""
BETTER = 0.7
"""An experiment helps when it ends at this share of the loss as it was, or below: far more than two seeds differ."""
MUCH_BETTER = 0.5
FROZEN_EVALUATED, HEAD_UNFROZEN = "frozen part evaluated", "output layer unfrozen"
OTHER_ORDER = "the batches in another order"
"""A trial that regularizes nothing: what it changes is noise."""
AMONG_TEN = 3.0
"""Standard errors of a gain: the best of ten trials is two of them ahead by chance."""
WORTH = 0.02
"""Share of the validation loss that a regularizer has to save."""
AT_LAST = 0.95
"""The same, of a higher rate where nothing at all has been learned: any loss that falls then tells the cause."""
SURELY = 0.4
"""A higher rate has to end at this share of the loss where the updates are no smaller than usual."""


# The loss


def finite(values: Iterable[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def first_loss(run: TrainingRunFacts) -> float:
    """The loss at the start: on fixed batches before the first step, or the median of the first three losses."""
    if run.evaluations:
        return run.evaluations[0].train
    return statistics.median(finite(run.losses)[:3] or [math.nan])


def last_loss(run: TrainingRunFacts) -> float:
    """The loss at the end: on the same batches, or the median of the last tenth; infinite where one was not finite."""
    if not_finite(run):
        return math.inf
    if run.evaluations:
        return run.evaluations[-1].train
    values = finite(run.losses)
    return statistics.median(values[-max(1, len(values) // 10) :] or [math.nan])


def not_finite(run: TrainingRunFacts) -> bool:
    return any(not math.isfinite(v) for v in run.losses)


def loss_left(run: TrainingRunFacts) -> float:
    """The last loss over the first, both above the lowest that it can be; 0 where it has come down to that. Meant for
    losses that are not negative. 1 where that cannot be said."""
    if at_floor(run):
        return 0.0
    start, end = first_loss(run) - run.floor, last_loss(run) - run.floor
    if not math.isfinite(start) or start <= 0 or end < 0:
        return 1.0 if end >= start else 0.0
    return end / start


def at_floor(run: TrainingRunFacts) -> bool:
    """The loss has come down to what smoothed labels leave of it."""
    return last_loss(run) < run.at_floor


def learns_nothing(run: TrainingRunFacts) -> bool:
    return loss_left(run) > LEARNS_NOTHING


def has_room(run: TrainingRunFacts, more_than: float = LEARNS_LITTLE) -> bool:
    return loss_left(run) > more_than


def settled(run: TrainingRunFacts) -> bool:
    """The loss has not come down by a twentieth in the second half of the run."""
    half = [e for e in run.evaluations if e.step >= 0.5 * run.evaluations[-1].step]
    return len(half) >= 3 and not crawls(run) and last_loss(run) > 0.95 * half[0].train


def crawls(run: TrainingRunFacts) -> bool:
    """The loss falls from each evaluation to the next, in the second half of the run as much as in the first."""
    losses = [e.train for e in run.evaluations]
    middle = next((e.train for e in run.evaluations if e.step >= 0.5 * run.evaluations[-1].step), math.nan)
    falls = len(losses) >= 6 and all(b < a for a, b in itertools.pairwise(losses))
    return falls and middle - losses[-1] >= losses[0] - middle


def turns_away(run: TrainingRunFacts) -> bool:
    """Outputs become the opposite of their targets, though the loss falls."""
    known = run.agreement
    return known is not None and verdict.turns_away(known.start, known.end, known.samples[0]) and not rises(run)


def agrees_by_chance(run: TrainingRunFacts) -> bool:
    """Outputs have nothing of their targets, or of those of validation."""
    known = run.agreement
    return known is not None and bool(verdict.of_agreement(known.start, known.end, known.val, known.samples))


def rises(run: TrainingRunFacts) -> bool:
    return not_finite(run) or last_loss(run) > first_loss(run)


def diverges(run: TrainingRunFacts) -> bool:
    """The loss has been at a multiple of the first one, for more than a moment, or is not finite any more."""
    losses = finite(run.losses)
    start = max(abs(first_loss(run)), abs(losses[0]) if losses else 0.0)
    high = sum(v > DIVERGES * start for v in losses[1:])
    return not_finite(run) or (high >= max(2, 0.02 * len(run.losses)) and has_room(run))


# The learning rate


def updates(run: TrainingRunFacts) -> list[float]:
    """Update over weight of each layer, where it is finite."""
    return finite(layer.update for layer in run.layers)


def updates_are_large(run: TrainingRunFacts) -> bool:
    """Much of each layer is overwritten in each step, and the loss has not come down."""
    return bool(updates(run)) and statistics.median(updates(run)) > LARGE_UPDATE and has_room(run)


def first_updates_are_large(run: TrainingRunFacts) -> bool:
    """One of the first steps changed some layer by more than half of its size, and little was learned."""
    return has_room(run) and any(update > 0.5 for update in finite(layer.first_update for layer in run.layers))


def rate_may_be_high(run: TrainingRunFacts) -> bool:
    dying = units_died(run) and has_room(run)
    return diverges(run) or updates_are_large(run) or first_updates_are_large(run) or dying


def updates_are_small(run: TrainingRunFacts) -> bool:
    """The loss has hardly come down, and no layer moves by more than a thousandth of itself in a step."""
    return bool(updates(run)) and max(updates(run)) < 1e-3 and loss_left(run) > 0.8


def least_gain(run: TrainingRunFacts) -> float:
    """The share of the loss at which, or below, a higher rate has to end to be called the cure."""
    return AT_LAST if stands_still(run) else MUCH_BETTER if updates_are_small(run) else SURELY


def stands_still(run: TrainingRunFacts) -> bool:
    """Nothing has been learned, and no layer moves by more than a ten-thousandth of itself in a step."""
    return bool(updates(run)) and max(updates(run)) < 1e-4 and loss_left(run) > 0.99


def rate_may_be_low(run: TrainingRunFacts) -> bool:
    """Long enough to tell, little of the loss is gone, and it is still falling by small steps."""
    if len(run.losses) < 60 or not updates(run) or settled(run) or not_finite(run):
        return False
    return loss_left(run) > 0.9 or loss_left(run) > 0.6 and max(updates(run)) < 3e-3


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


def rate_grows(run: TrainingRunFacts) -> bool:
    """The rate is multiplied step after step to the end, and ends at ten times the first: no warm-up, which comes to
    its top."""
    rates = run.rates
    if (
        len(rates) < 8
        or min(rates) <= 0
        or rates[-1] < 10 * rates[0]
        or any(a > b for a, b in itertools.pairwise(rates))
    ):
        return False
    middle, later = rates[len(rates) // 2], rates[-1 - len(rates) // 8]
    return middle > 2 * rates[0] and rates[-1] > 2 * middle and rates[-1] > 1.05 * later


def rate_swings(run: TrainingRunFacts) -> bool:
    """The rate rises through the middle of its range again and again."""
    middle = (min(run.rates) + max(run.rates)) / 2 if run.rates else 0.0
    return sum(a < middle <= b for a, b in itertools.pairwise(run.rates)) >= 2


def rate_passes_peak(run: TrainingRunFacts) -> bool:
    """The schedule ends at twice the largest rate that it was built to give."""
    return run.schedule is not None and bool(run.rates) and run.rates[-1] > 2 * run.schedule.peak > 0


def rate_stays_low(run: TrainingRunFacts) -> bool:
    """A schedule that is meant for more steps than it got: the rate never left the foot of its rise."""
    schedule = run.schedule
    return schedule is not None and len(run.rates) >= 8 and max(run.rates) < 0.2 * schedule.peak


def made_anew(run: TrainingRunFacts) -> bool:
    """Most steps, or every other one, are those of an optimizer without a state: it was made anew. Not where the
    weights are put back as well, as for each sample or task that a model adapts to."""
    _, renewals, steps = run.renewed
    return renewals >= 10 and renewals > 0.45 * steps and not run.set_back


# Classes


def weights_follow(weights: Sequence[float], counts: Mapping[str, int]) -> str:
    """Whether class weights grow with how often a class occurs, where they should fall: "exactly" as these do, "alike"
    (of three classes or more: two may differ in weight for any reason, such as what an error costs), or ""."""
    pairs = [(w, counts.get(str(k), 0)) for k, w in enumerate(weights)]
    logs = [(math.log(w), math.log(n), n) for w, n in pairs if w > 0 and n > 0]
    if len(logs) < 2 or sum(n for _, _, n in logs) < 50 * len(logs):
        return ""
    w, n = [row[0] for row in logs], [row[1] for row in logs]
    if max(w) - min(w) < math.log(1.3) or max(n) - min(n) < math.log(1.5):
        return ""
    if len(logs) == 2:
        alike = (w[0] - w[1]) * (n[0] - n[1]) > 0
    else:
        alike = statistics.correlation(w, n) > 0.95
    middle = statistics.fmean(a - b for a, b in zip(w, n))
    error = 0.1 + 2 / math.sqrt(min(count for _, _, count in logs)) * (len(logs) > 2)
    exact = all(abs(a - b - middle) < error for a, b in zip(w, n)) and max(n) - min(n) > math.log(2)
    return (
        "exactly" if alike and exact else "alike" if alike and len(logs) > 2 and max(n) - min(n) > math.log(2) else ""
    )


# Units


def dead(units: tuple[UnitsFact, ...]) -> list[UnitsFact]:
    return [u for u in units if u.dead is not None and u.dead >= DEAD and u.units >= 4]


def saturated(units: tuple[UnitsFact, ...]) -> list[UnitsFact]:
    return [u for u in units if u.saturated is not None and u.hidden and u.saturated >= SATURATED]


def flat(run: TrainingRunFacts) -> list[UnitsFact]:
    """Places where units are dead or saturated, at the start or at the end."""
    return dead(run.start_units) or saturated(run.start_units) or dead(run.end_units) or saturated(run.end_units)


def flat_units_matter(run: TrainingRunFacts) -> bool:
    """Units that are dead or saturated may be what keeps the loss up: at the start they are suspect sooner than at the
    end, where a network may have learned to use the flat ends."""
    early = dead(run.start_units) or saturated(run.start_units)
    return bool(flat(run)) and has_room(run, 0.2 if early else LEARNS_LITTLE)


def units_died(run: TrainingRunFacts) -> bool:
    """Units that were alive at the start are dead at the end."""
    return bool(dead(run.end_units)) and not dead(run.start_units)


# Gradients


def gradient_growth(run: TrainingRunFacts) -> tuple[float, str]:
    """By how much the gradient is larger at the call of a layer where it is largest than at the last layer's own call,
    and that layer's name; or, through a recurrent module, at the first time step than at the last. (1, "") where that
    can't be said."""
    growths = [(t.first / t.last, t.module) for t in run.time_gradients if t.last > 0 and math.isfinite(t.first)]
    hidden = run.layer_calls[:-1] if len(run.layer_calls) >= 3 else ()  # the last one is the output
    if hidden and hidden[-1].gradient > 0:
        largest = max(hidden, key=lambda call: call.gradient)
        growths.append((largest.gradient / hidden[-1].gradient, largest.module))
    return max(growths, default=(1.0, ""))


def activation_growth(run: TrainingRunFacts) -> tuple[float, str]:
    """The same for the sizes of the outputs, on the way forward, over the first layer's."""
    calls = run.layer_calls
    if len(calls) < 3 or calls[0].output_rms <= 0:
        return 1.0, ""
    largest = max(calls, key=lambda call: call.output_rms)
    return largest.output_rms / calls[0].output_rms, largest.module


def explodes(run: TrainingRunFacts) -> bool:
    """The gradient at the start is a multiple of the weights, and it or the activations grow along the way; or it
    jumps later on, and the loss with it."""
    return explodes_at_start(run) or (gradients_jump(run) and diverges(run))


def explodes_at_start(run: TrainingRunFacts) -> bool:
    """Before the first step, so that no learning rate is to blame."""
    large = run.start_gradient > STRONG * max(run.weight_norm, 1e-12)
    return large and (gradient_growth(run)[0] > GROWTH or activation_growth(run)[0] > GROWTH)


def gradients_jump(run: TrainingRunFacts) -> bool:
    """Some gradient norms are far above those before them, though those of the first steps were of an ordinary size."""
    norms = finite(run.gradient_norms)
    if len(norms) < 20:
        return False
    high = [n for i, n in enumerate(norms[10:], 10) if n > JUMP * statistics.median(norms[max(0, i - 50) : i])]
    return len(high) >= 2


def vanishing(run: TrainingRunFacts, by: float = VANISHES) -> list[LayerFact]:
    """The layers whose gradient is a hundredth or less of that of a layer behind them, where it fades step by step."""
    layers = [layer for layer in run.layers if layer.first_gradient > 0]
    if len(layers) < 3:
        return []
    strongest = max(range(len(layers)), key=lambda i: layers[i].first_gradient)
    front = layers[:strongest]
    weak = [layer for layer in front if layer.first_gradient < by * layers[strongest].first_gradient]
    steps = [a.first_gradient <= 2 * b.first_gradient for a, b in zip(front, layers[1 : strongest + 1])]
    return weak if weak and len(front) >= 2 and sum(steps) >= 0.75 * len(steps) else []


def vanishing_in_time(run: TrainingRunFacts) -> TimeGradient | None:
    """The recurrent module through which next to nothing of the gradient comes back to the first time step."""
    return next((t for t in run.time_gradients if t.last > 0 and t.first < VANISHES_IN_TIME * t.last), None)


# The penalty on the weights, the data


def penalty_dominates(run: TrainingRunFacts) -> bool:
    """More of the loss at the start or at the end is a penalty on the weights than error, of which some is left."""
    start, end = first_loss(run), last_loss(run)
    left = end - run.penalty_end > 0.05 * (start - run.penalty)
    return left and (run.penalty > 0.5 * abs(start) or run.penalty_end > 0.5 * abs(end))


def outlier_batch(run: TrainingRunFacts) -> str:
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


def order_may_matter(run: TrainingRunFacts) -> bool:
    """The samples come in the order of the dataset, which may matter although nothing that is counted shows it."""
    return run.order.sequential and has_room(run, 0.05)


def order_harms(run: TrainingRunFacts) -> bool:
    """Shuffled, the same samples teach far more, on validation data too."""
    shuffled = run.experiments.get("shuffled")
    if shuffled is None or not order_may_matter(run) or outlier_batch(run) or not helps(shuffled, MUCH_BETTER):
        return False
    return (
        shuffled.val_as_is is None
        or shuffled.val_changed is None
        or shuffled.val_changed < MUCH_BETTER * shuffled.val_as_is
    )


def overfits(run: TrainingRunFacts) -> tuple[int, float, float] | None:
    """(step of the lowest validation loss, that loss, the last one) where the validation loss rose for good while the
    training loss kept falling."""
    evaluations = [e for e in run.evaluations if e.val is not None and math.isfinite(e.val)]
    if len(evaluations) < 6:
        return None
    values = [e.val or 0.0 for e in evaluations]
    best = min(range(len(evaluations)), key=values.__getitem__)
    lowest, last, end = evaluations[best], evaluations[-1], statistics.median(values[-3:])
    memorized = last.train < 0.02 * evaluations[0].train and end > 0.5 * values[0] and len(evaluations) >= 10
    matters = end - values[best] > OF_START * abs(values[0])
    sure = min(values[-3:]) > values[best] + SURE * lowest.val_error
    rose = memorized or matters and sure and end > ROSE * values[best]
    fell = memorized or last.train < 0.8 * lowest.train and last.train < 0.5 * end
    early = memorized or lowest.step <= 0.6 * last.step
    return (lowest.step, values[best], values[-1]) if rose and fell and early else None


def rise_of_validation(run: TrainingRunFacts) -> tuple[int, int] | None:
    """(step of the lowest validation loss, the first one after it at which it is surely and clearly higher), of a run
    that overfits."""
    best, lowest, _ = overfits(run) or (0, math.inf, 0.0)
    error = max((e.val_error for e in run.evaluations if e.step == best), default=0.0)
    high = max(CLEARLY * lowest, lowest + SURE * error)
    rose = next((e.step for e in run.evaluations if e.step > best and (e.val or 0.0) > high), None)
    return None if rose is None else (best, rose)


def best_validation(run: TrainingRunFacts) -> BatchEvaluation | None:
    """The first evaluation whose validation loss is as low as the lowest, to its standard error."""
    rows = [e for e in run.evaluations if e.val is not None]
    lowest = min(rows, key=lambda e: e.val or 0.0, default=None)
    return next((e for e in rows if lowest and (e.val or 0.0) <= (lowest.val or 0.0) + lowest.val_error), None)


def gains(run: TrainingRunFacts) -> list[RegularizerTrial]:
    """The trials that lower the validation loss by more than its batches and the order of the batches explain, and by
    what is worth a change; the best first."""
    noise = max((abs(t.change) for t in run.regularizers if t.what == OTHER_ORDER), default=0.0)
    better = (
        t
        for t in run.regularizers
        if t.code and t.error is not None
        if -t.change > max(AMONG_TEN * t.error, SURE * noise, WORTH * abs(t.val - t.change))
    )
    return sorted(better, key=lambda t: t.val)


def validation_is_ahead(run: TrainingRunFacts) -> bool:
    """At its best, the validation set is predicted far better than the training set, both in eval mode."""
    best = best_validation(run)
    if best is None or best.val is None:
        return False
    return best.val < AHEAD * best.train and 0.25 * first_loss(run) < best.train < first_loss(run)


def validation_learns_nothing(run: TrainingRunFacts) -> bool:
    """The loss has fallen by half, and validation ends near its start or above; or by a fifth, and it ends above; or at
    all, and it has never been below its start."""
    ends = [e.val for e in (*run.evaluations[:1], *run.evaluations[-1:]) if e.val is not None]
    known = len(ends) == 2 and ends[0] > 0
    never = min((e.val for e in run.evaluations[1:] if e.val is not None), default=0.0) > max(ends[:1], default=0.0)
    limits = ((NO_GAIN, 0.5), (1, 0.8), *([(1, 0.95)] if never else []))
    return known and any(ends[1] > to * ends[0] and not has_room(run, left) for to, left in limits)


def far_behind(run: TrainingRunFacts) -> tuple[float, float] | None:
    """The losses at the end on training and on validation batches, where the latter is several times as high."""
    end = run.evaluations[-1] if run.evaluations else None
    if end is None or end.val is None or end.val < BEHIND * end.train:
        return None
    return (end.train, end.val) if end.val - end.train > (1 - BETTER) * first_loss(run) else None


def memorizes_pass_by_pass(run: TrainingRunFacts, guess: float = math.inf) -> bool:
    """Without validation data: the loss of samples that come for the first time stays as it was (or that of a guess),
    and falls only once they come again."""
    each, losses = run.batches_per_pass or 0, finite(run.losses)
    if each < 6 or len(losses) < 3 * each or len(losses) < len(run.losses) or best_validation(run) is not None:
        return False
    first, last = losses[:each], losses[-each:]
    late, early = (statistics.fmean(part) for part in (first[-(each // 3) :], first[: each // 3]))
    return late > FRESH * min(early, guess) and statistics.fmean(last) < AGAIN * late


# Experiments


def helps(experiment: Experiment | None, by: float = BETTER) -> bool:
    """Whether a change brought the loss on fixed batches down to `by` of what it was."""
    return (
        experiment is not None
        and math.isfinite(experiment.end_changed)
        and experiment.end_changed < by * experiment.end_as_is
    )


def frozen_head(facts: TrainingFacts) -> list[Parameter]:
    """The frozen layer that makes the output, where the loss compares that alone with targets of the batch, and much
    more is learned where this layer is trained too. A head that is fixed on purpose leaves little to be learned; one
    that makes the targets, too, is a judge of the outputs."""
    run, calls = facts.run, facts.static.loss_calls
    experiment = None if run is None else run.experiments.get(HEAD_UNFROZEN)
    if run is None or experiment is None or len(calls) != 1 or calls[0].target is None or calls[0].computed:
        return []
    if not helps(experiment, MUCH_BETTER) or not helps_validation(experiment, BETTER):
        return []
    made = {p.name for p in facts.static.parameters if p.last}
    return [f for f in run.frozen if f.last and f.name in made and not f.normal]


def helps_validation(experiment: Experiment, by: float = 1.0) -> bool:
    """Whether it does so on validation data as well; True where there is none."""
    as_is, changed = experiment.val_as_is, experiment.val_changed
    return as_is is None or changed is None or changed < by * as_is


def adapts(run: TrainingRunFacts) -> bool:
    """Whether the optimizer divides gradients by their size, so that a factor in the loss changes nothing."""
    return any(name in run.optimizer for name in ADAPTIVE)


def frozen_in_train_mode(run: TrainingRunFacts) -> list[ModuleMode]:
    """Layers of a part that is not trained, a teacher for instance, beside others that are."""
    own = [m for m in run.modes if m.frozen and 2 * m.train_steps > run.optimizer_steps > 0]
    return own if run.trained_elements else []


def lower_rate_helps(run: TrainingRunFacts) -> bool:
    """With a lower learning rate the same steps end far lower: the rest follows from the rate."""
    return any(helps(e, MUCH_BETTER) for name, e in run.experiments.items() if name.startswith("lr/"))


def rescaling(run: TrainingRunFacts) -> Experiment | None:
    """The experiment in which layers' outputs were brought to a size of one, where it helped; else the last of them."""
    done = [e for name in ("rescaled", "normalized") if (e := run.experiments.get(name)) is not None]
    return next((e for e in done if helps(e)), done[-1] if done else None)


BOTH_ZERO, HALF_DONE = 0.01, 0.5
"""Share of the first loss, on training and on validation batches, below which a run ends with nothing left to learn;
the share that is left where one answer for all is being learned."""
TARGETS = 32
"""Targets of which one value is no accident."""


def both_zero(run: TrainingRunFacts) -> bool:
    """The loss ends next to zero on validation batches as well: that is no overfitting."""
    if not run.evaluations or run.evaluations[-1].val is None or run.evaluations[0].val is None:
        return False
    first, end = run.evaluations[0], run.evaluations[-1]
    assert first.val is not None and end.val is not None
    return 0 <= end.train < BOTH_ZERO * first.train and 0 <= end.val < BOTH_ZERO * first.val


def one_label(static: StaticFacts) -> str:
    """The one label of all, in a sentence; "" where there are others, or a part of the loss is for the other one. Of
    pairs of scores the first may always be the better: no constant makes their difference large."""
    call, labels = static.only_call, static.labels
    if call is None or labels is None or (call.activation or "").strip("_r") == "sub" or not labels.one_label(TARGETS):
        return ""
    return f"all {labels.total:,} labels are {labels.one_label(TARGETS)}: there is one class"


def best_of(run: TrainingRunFacts, kind: str) -> tuple[str, Experiment] | None:
    """The experiment of this kind that ends lowest."""
    finite = [(n, e) for n, e in run.experiments.items() if n.startswith(kind) and math.isfinite(e.end_changed)]
    return min(finite, key=lambda pair: pair[1].end_changed) if finite else None
