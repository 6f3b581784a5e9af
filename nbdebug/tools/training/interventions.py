"""Experiments for a run that is not well and of which no rule has named a cause; each changes one thing, for one cause.

Each is measured on the same batches, with the weights of the end. Thresholds: of 57 healthy runs with their batches in
another order, 95 of 100 ended between 0.72 and 1.52 of the loss, and those with room left above 0.87.

    severed_term        where a term of the loss is cut off from what it should train (no experiment is needed)
    outweighing_term    a term of the loss that keeps the others from using the inputs
    missed_classes      classes that are found once all classes weigh alike
    TermRecorder        takes a loss apart: back through sums, means and constant factors. It is linear in its terms, so
                        that the share of one is its value times the loss's gradient there
    interventions       these, samples that are held out (experiments.py), scores with a scale, standardized inputs, a
                        rate that does not fall, a higher one
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from nbdebug.observe.backward import graph_leaves, graph_nodes
from nbdebug.observe.locations import at_site, locate
from nbdebug.observe.tensors import output_tensors, tensors_in
from nbdebug.report import Where
from nbdebug.tools.training.evaluate import (
    LABEL_LOSSES,
    MOST,
    LossFn,
    LossInputs,
    OtherCalls,
    ProbeErrors,
    loss_root,
    mode,
    preserve_rng,
    targets_of,
    under,
    with_targets,
)
from nbdebug.tools.training.experiments import held_out, is_blurred, matched
from nbdebug.tools.training.facts import ClassWeighting, Experiment, IgnoredClass, TrainingRunFacts, UndecidedPair
from nbdebug.tools.training.one_step import DETACHES, VIEWS, Calls, OpCall, calls_for, detached_at, record
from nbdebug.tools.training.retrain import RetrainChange, Retrainer, RetrainResult
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import pos_weight
from nbdebug.tools.training.static_facts import DetachedAt, StaticFacts

UNUSED, HARDLY, TASK = 0.3, 0.4, 0.1
"""Inputs dealt to other samples raise what the other terms amount to by less than this share: they do not use them (up
to the second they hardly do). The term itself is a task where its own value rises by more than the third."""
USED, FALLS, FAR_BELOW = 0.4, 0.7, 0.5
"""… and with a hundredth of the term they use them, and fall to that share (to the last, where they hardly did)."""
GAINED = 4.0
"""A gain that grows so many times, and that many times its size a term that keeps it small."""
IDLE, TIMES = 0.8, 20.0
"""Of its share at the start, what a term keeps that learns little; how many times as large the other one is."""
COMMON, FOUND, MISSED, MOSTLY = 0.5, 0.9, 0.4, 0.5
"""Share of the commonest class, its recall, and the mean F1 of the others, from which they may be drowned; where it is
better, and single ones are missed: the share of their errors that is taken for the commonest."""
CURED, GAIN, APART, RAISED = 0.5, 0.25, 0.15, 0.05
"""With all classes alike the F1 of the others, and by how much it has to rise. (F1, never recall: recall rises for
hopeless classes too.) Then: the gain in accuracy among the others alone, and
in F1 where weights were upside down."""
RARELY, REFOUND, SURE, LEAST = 0.1, 0.6, 0.9, 5
"""Recall below which a class is missed, above which it is found again, with that area under the curve (what is rare
and hopeless is found as well, among much else); of so many labels at least."""
PAIR, UNDECIDED, KNOWN, BY_CHANCE = 15, 0.8, 0.85, 0.68
"""Of two labels that are not told apart: samples of each, their largest mean recall, the least of the others, and how
often a sample of one scores higher than one of the other (from below, from above)."""
MOST_LABELS = 200_000
SCALES, SMALL = (10, 100), 1.01
"""What scores are multiplied by, where none is above the second."""
FAR, WIDE, UNEVEN = 4.0, (0.2, 5.0), 50.0
"""Inputs that may be off: mean over deviation, deviations outside of these, largest over smallest."""
PROBABILITY_LOSSES = {**LABEL_LOSSES, "mse_loss": 0.5, "l1_loss": 0.5}


def interventions(
    run: TrainingRunFacts, retrainer: Retrainer, steps: int, static: StaticFacts, errors: ProbeErrors
) -> TrainingRunFacts:
    """The facts with the experiments that these signs allow, up to the first that helps."""
    ends = _Ends(retrainer, errors)
    ends.first = errors.run("The terms of the loss", ends.at_start, [])
    as_is = retrainer.train(RetrainChange(), steps, at_end=ends.measure)
    for name, attempt in _attempts(run, retrainer, steps, static, as_is, ends):
        if retrainer.time_is_up:
            why = "Experiments for a cause that no rule knows: there was no time for all of them"
            return dataclasses.replace(run, unchecked=(*run.unchecked, why))
        new = errors.run(f'The experiment "{name}"', attempt, None)
        if new is None:
            continue
        if "experiments" in new:
            new = {**new, "experiments": {**run.experiments, **new["experiments"]}}
        run = dataclasses.replace(run, **new)
        one, limit = new.get("experiments", {}).get(name), signs.SURELY if "lr" in name else signs.MUCH_BETTER
        if one is None or signs.helps(one, limit):
            return run
    return run


Found = Mapping[str, Any] | None
"""New fields of the facts."""


class _Ends:
    """What is measured with the weights of the end, as the run is. shares: of each term of the loss, then the same with
    the inputs of other samples; first: see `at_start`; table: of the classes; blurred: see `is_blurred`."""

    def __init__(self, retrainer: Retrainer, errors: ProbeErrors):
        self.retrainer, self.errors = retrainer, errors
        self.shares: list[float] = []
        self.first: list[tuple[float, float]] = []
        self.table: _ClassTable | None = None
        self.blurred = False

    def at_start(self) -> list[tuple[float, float]]:
        """The factor and the share of each term in a batch, before the first step."""
        with preserve_rng(self.retrainer.loss_fn), mode(self.retrainer.model, training=False):
            return weighted_terms(self.retrainer.model, self.retrainer.loss_fn, self.retrainer.on_train.batches[0])

    def held_down(self) -> list[int]:
        """The largest term, where it is learned, and one that is not is far smaller though no factor makes it so."""
        ends = list(zip(self.first, self.shares))
        if len(self.first) < 2 or len(self.shares) != 2 * len(self.first):
            return []
        large = max(range(len(ends)), key=lambda k: self.first[k][1])
        top = self.first[large][1] / TIMES
        idle = [j for j, ((w, s), end) in enumerate(ends) if w > 0.99 and s > 0 and end > IDLE * s]
        return [large] if large not in idle and any(self.first[j][1] < top for j in idle) else []

    def measure(self) -> list[float]:
        model, loss_fn = self.retrainer.model, self.retrainer.loss_fn
        self.shares = self.errors.run("The terms of the loss", lambda: _shares_and_dealt(self.retrainer), [])
        self.table = self.errors.run(
            "What is found of each class", lambda: _class_table(model, loss_fn, _judged(self.retrainer)), None
        )
        self.blurred = self.errors.run("Targets in any order", lambda: is_blurred(self.retrainer), False)
        return []


def _judged(retrainer: Retrainer) -> list[Any]:
    return retrainer.on_val.batches or retrainer.on_train.batches


def _attempts(
    run: TrainingRunFacts, retrainer: Retrainer, steps: int, static: StaticFacts, as_is: RetrainResult, ends: _Ends
) -> Iterator[tuple[str, Callable[[], Found]]]:
    def compare(name: str, change: RetrainChange) -> Callable[[], Found]:
        def run_it() -> Found:
            result = retrainer.train(change, steps).against(as_is, name)
            return {"experiments": {name: result}}

        return run_it

    kept = signs.loss_left(run)
    moments = _input_moments(retrainer) if kept > 0.3 else None
    scaled = [RetrainChange(prepare=_standardize(*moments))] if moments is not None else []
    tries = [("standardized", compare("standardized", change)) for change in scaled]
    first = len(tries) * signs.learns_nothing(run)  # all the more likely then, and it takes one run
    yield from tries[:first]
    for name, change in _other_losses(retrainer, static, kept):
        yield name, compare(name, change)
    if ends.blurred:
        yield "matched", compare("matched", RetrainChange(loss_fn=matched(retrainer.loss_fn), measured=True))
    if ends.held_down() or (kept > 0.05 or signs.last_loss(run) < 0) and len(ends.shares) > 2:
        yield "weaker term", lambda: outweighing_term(run, retrainer, steps, as_is, ends)
    if static.reduction in ("mean", "sum") and static.mixed is None:  # else samples do not stand for themselves
        alone = signs.memorizes_pass_by_pass(run, static.guess or math.inf)
        yield "held out", lambda: _unseen(run, retrainer, steps, alone)
    table = ends.table
    if table is not None:
        yield from _for_classes(retrainer, steps, static, table)
    yield from tries[first:]
    for name, change in _rates(run):
        yield name, compare(name, change)


def _for_classes(
    retrainer: Retrainer, steps: int, static: StaticFacts, table: _ClassTable
) -> Iterator[tuple[str, Callable[[], Found]]]:
    yield "no class ignored", lambda: ignored_class(retrainer, steps, table)
    weights = next((call.weights for call in static.loss_calls if call.weights), ())
    if weights and signs.weights_follow(weights, table.counts()):
        yield "inverse weights", lambda: inverse_weights(retrainer, steps, table, weights)
    if not any(call.weighted for call in static.loss_calls):
        yield "classes alike", lambda: missed_classes(retrainer, steps, table)


def _other_losses(retrainer: Retrainer, static: StaticFacts, kept: float) -> Iterator[tuple[str, RetrainChange]]:
    bounded = (c for c in static.loss_calls if c.bounded or c.activation == "cosine_similarity")
    small = [c for c in bounded if max(abs(c.low), abs(c.high)) < SMALL]
    if kept > 0.1 and any(c.op == "cross_entropy" for c in small):
        for scale in SCALES:  # the first that helps is the last
            yield f"scores*{scale}", RetrainChange(loss_fn=_with_scale(retrainer.loss_fn, scale), measured=True)
    labels = _pair_labels(retrainer.batches[0]) if kept > 0.02 else ()
    if labels:
        yield "exchanged labels", RetrainChange(loss_fn=_exchanged(retrainer.loss_fn, sum(labels)), measured=True)


def _rates(run: TrainingRunFacts) -> Iterator[tuple[str, RetrainChange]]:
    top = max([*run.rates, run.schedule.peak if run.schedule else 0.0], default=0.0)
    falls = top and statistics.median(run.rates) < 0.3 * top and "level rate" not in run.experiments
    if signs.loss_left(run) > 0.15 and falls:
        yield "level rate", RetrainChange(level=True, to=top if run.optimizers == 1 else None)
    for factor in (10.0, 100.0) if signs.rate_may_be_low(run) else ():
        yield f"lr*{factor:g}", RetrainChange(rate=factor)


def _unseen(run: TrainingRunFacts, retrainer: Retrainer, steps: int, alone: bool) -> Found:
    strange = signs.validation_learns_nothing(run) or signs.validation_is_ahead(run)
    known = held_out(run, retrainer, steps, alone) if strange or alone else None
    if known is None:
        return None
    facts, experiment = known
    return {"held_out": facts, **({} if experiment is None else {"experiments": {experiment.what: experiment}})}


# Labels of pairs, scores, inputs


def _pair_labels(batch: Any) -> tuple[float, ...]:
    """The two labels of pairs: 0 and 1, or -1 and 1, beside two inputs of the same shape; () where there are none."""
    target = targets_of(batch)
    labels = () if target is None or target.numel() > MOST_LABELS else tuple(target.unique().tolist())
    shapes = Counter(t.shape for t in tensors_in(batch) if t is not target)
    return labels if labels in ((0, 1), (-1, 1)) and max(shapes.values(), default=0) == 2 else ()


def _exchanged(loss_fn: LossFn, both: float) -> LossFn:
    def loss(model: nn.Module, batch: Any) -> Any:
        target = targets_of(batch)
        return loss_fn(model, batch if target is None else with_targets(batch, both - target))

    return loss


def _with_scale(loss_fn: LossFn, scale: int) -> LossFn:
    def scaled(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name != "cross_entropy":
            return None
        return (
            func(scale * args[0], *args[1:], **kwargs) if args else func(**{**kwargs, "input": scale * kwargs["input"]})
        )

    return under(loss_fn, lambda: OtherCalls(scaled))


def _input_moments(retrainer: Retrainer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and deviation, by channel or feature, of the model's first argument, where these are off."""
    rows: list[torch.Tensor] = []
    noting = retrainer.model.register_forward_pre_hook(lambda module, args: rows.extend(_inputs(args)))
    with noting, preserve_rng(retrainer.loss_fn), torch.no_grad(), mode(retrainer.model, training=False):
        for batch in retrainer.batches[:32]:
            retrainer.loss_fn(retrainer.model, batch)
    if not rows or any(r.shape[1:] != rows[0].shape[1:] for r in rows):
        return None
    x = torch.cat(rows).float()
    feature = 1 if x.dim() > 3 else x.dim() - 1
    others = [d for d in range(x.dim()) if d != feature]
    mean, std = x.mean(others, keepdim=True)[0], x.std(others, keepdim=True)[0]
    live = std[std > 0]
    if not live.numel():
        return None
    middle = float(live.median())
    off = (
        float((mean.abs() / std.clamp_min(1e-12))[std > 0].max()) > FAR
        or not WIDE[0] < middle < WIDE[1]
        or float(live.max() / live.min()) > UNEVEN
    )
    return (mean, torch.where(std > 0, std, torch.ones_like(std))) if off else None


def _inputs(args: Any) -> list[torch.Tensor]:
    return [t.detach() for t in args[:1] if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 1]


def _standardize(mean: torch.Tensor, std: torch.Tensor) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        def standardized(module: nn.Module, args: Any) -> Any:
            return ((args[0] - mean) / std, *args[1:]) if _inputs(args) else None

        model.register_forward_pre_hook(standardized)

    return change


# Terms of the loss


def outweighing_term(
    run: TrainingRunFacts, retrainer: Retrainer, steps: int, as_is: RetrainResult, measured: _Ends
) -> Found:
    """A term that keeps the rest of the loss from using the inputs, and does not use them itself; or is a task beside
    which another is not learned."""
    model, loss_fn, batch, ends = retrainer.model, retrainer.loss_fn, retrainer.batches[0], measured.shares
    count, held = len(ends) // 2, measured.held_down()
    before = _Shares(ends, count)
    suspects = [k for k in range(count) if before.is_suspect(k) or before.drowns_gain(k) or k in held]
    for k in sorted(suspects, key=lambda k: -abs(before.plain[k]))[:2]:
        sizes = [abs(share) for _, share in measured.first] if k in held else []
        evenly = sum(sizes) / sizes[k] - 1 if sizes else 1.0  # the size of the others, over this one's
        change = RetrainChange(loss_fn=weaken(loss_fn, k, min(0.01, evenly)))
        weaker = retrainer.train(change, steps, at_end=lambda: _shares_and_dealt(retrainer))
        after = _Shares(weaker.at_end, count)
        rise = after.rise(k)
        falls = FALLS if before.rise(k) < UNUSED * before.rest(k) else FAR_BELOW
        # below zero: the two balance each other, as a density and its log-determinant do
        better = 0 <= after.rest(k) < falls * before.rest(k) and rise > max(USED * after.rest(k), 3 * before.rise(k))
        if better or before.drowns_gain(k) and _is_gained(before, after, k):
            with preserve_rng(loss_fn):
                place = term_site(model, loss_fn, batch, k)
            rests = before.rest(k), after.rest(k)
            experiment = Experiment("weaker term", tuple(as_is.losses), tuple(weaker.losses), *rests)
            return {
                "experiments": {"weaker term": experiment},
                "places": {**run.places, "outweighing term": place},
                "outweighs": before.plain[k],
            }
    return None


def _is_gained(before: _Shares, after: _Shares, k: int) -> bool:
    """Whether the rest, a gain with a minus, grows by what the inputs tell, and by no more: a density grows without."""
    used, gained = after.rise(k) - before.rise(k), before.rest(k) - after.rest(k)
    return after.rise(k) > GAINED * max(before.rise(k), 0.0) and 0 < used < 2 * gained < 4 * used


class _Shares:
    """What each term adds to the loss: as it is, and with the inputs of other samples."""

    def __init__(self, values: Sequence[float], count: int):
        if len(values) != 2 * count:
            raise ValueError("the loss has other terms at the end of the run than at its start")
        self.plain, self.dealt = values[:count], values[count:]

    def rest(self, k: int) -> float:
        return sum(self.plain) - self.plain[k]

    def rise(self, k: int) -> float:
        """By how much the rest rises with the inputs of other samples."""
        return sum(self.dealt) - self.dealt[k] - self.rest(k)

    def is_suspect(self, k: int) -> bool:
        rest = self.rest(k)
        return rest > 0 and self.rise(k) < HARDLY * rest and self.dealt[k] - self.plain[k] < TASK * rest

    def drowns_gain(self, k: int) -> bool:
        """Next to it the rest, a gain with a minus (what a policy earns), is small, and it does not use the inputs."""
        own, idle, rest = abs(self.plain[k]), abs(self.dealt[k] - self.plain[k]), self.rest(k)
        return own > GAINED * abs(rest) and idle < abs(rest) and rest <= 0


def _shares_and_dealt(retrainer: Retrainer) -> list[float]:
    """The mean share of each term on the fixed batches, and the same with the inputs of other samples."""
    model, loss_fn, batches = retrainer.model, retrainer.loss_fn, retrainer.on_train.batches
    values: list[float] = []
    with preserve_rng(loss_fn), mode(model, training=False):
        for dealt in (False, True):
            rows = []
            for number, batch in enumerate(batches):
                torch.manual_seed(number)
                with _inputs_dealt(model, batch) if dealt else contextlib.nullcontext():
                    rows.append(shares(model, loss_fn, batch))
            values += [statistics.fmean(column) for column in zip(*rows)]
    return values


@contextlib.contextmanager
def _inputs_dealt(model: nn.Module, batch: Any) -> Iterator[None]:
    """Inside, modules that are given a tensor of the batch get the next sample's rows."""
    own = {t.data_ptr() for t in output_tensors(batch) if t.dim() and len(t) > 1}

    def deal(module: nn.Module, args: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.roll(1, 0) if t.data_ptr() in own else t, args)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(deal))
        yield


# Classes


def missed_classes(retrainer: Retrainer, steps: int, before: _ClassTable) -> Found:
    """Classes that are hardly found beside a common one, and are once all weigh alike; or, of labels for each position,
    once the commonest is left out. before: the run as it is."""
    batches = _judged(retrainer)
    samples = sum(len(t) for b in batches for t in tensors_in(b)[:1])
    dense = len(before.labels) > 2 * samples and before.scores.shape[1] > 2
    if not before.may_be_drowned(dense):
        return None
    for leave_out in (True, False) if dense else (False,):
        weights = before.weights(leave_out)
        after = _table_with(_weighted(retrainer.loss_fn, weights), retrainer, steps)
        if after is None:
            continue
        if leave_out:
            values = before.apart(before.common), after.apart(before.common)
            cured = values[1] > max(CURED, values[0] + APART)
        else:
            values = before.others(), after.others(before.common)
            cured = values[1] > max(CURED, values[0] + GAIN) or before.are_raised(after, values[1] - values[0])
        if cured:
            counts = before.counts()
            row = tuple(f"{weight:g}" for weight in weights.tolist())
            return {"weighting": ClassWeighting(counts, str(before.common), leave_out, row, steps, *values)}
    return None


def _table_with(loss_fn: LossFn, retrainer: Retrainer, steps: int) -> _ClassTable | None:
    """What is found of each class at the end of the run with this loss."""
    tables: list[_ClassTable | None] = []

    def measure() -> list[float]:
        tables.append(_class_table(retrainer.model, retrainer.loss_fn, _judged(retrainer)))
        return []

    retrainer.train(RetrainChange(loss_fn=loss_fn), steps, at_end=measure)
    return next(iter(tables), None)


def undecided_pair(model: nn.Module, loss_fn: LossFn, train: Sequence[Any], val: Sequence[Any]) -> UndecidedPair | None:
    """Two labels whose samples the trained model knows to be of these two, but not of which; it knows the others."""
    judged = _class_table(model, loss_fn, val) if val else None
    pair = _undecided(_class_table(model, loss_fn, train), train, judged)
    return pair or _undecided(judged, val, None)  # training labels may have been memorized


RENAMED, SAMPLES = 0.7, 8
"""Share of a class that is taken for one and the same other one, and samples of it in validation."""


def renumbered(
    model: nn.Module, loss_fn: LossFn, train: Sequence[Any], val: Sequence[Any]
) -> tuple[Mapping[int, int], float, float] | None:
    """Where validation numbers the classes otherwise: (its label → the model's answer, for each of the classes; the
    share of right answers as it is, and with the numbers so exchanged). The model knows the classes in training."""
    known, judged = (_class_table(model, loss_fn, batches) if batches else None for batches in (train, val))
    if known is None or judged is None or known.hits.sum() < RENAMED * len(known.labels):
        return None
    guess = judged.scores.argmax(1)
    common = {
        k: guess[judged.labels == k].mode().values for k in (judged.there >= SAMPLES).nonzero().flatten().tolist()
    }
    answers = {k: int(answer) for k, answer in common.items()}
    shares = [float((guess[judged.labels == k] == answer).float().mean()) for k, answer in answers.items()]
    others = {k for k, answer in answers.items() if answer != k}
    if not others or len({*answers.values()}) < len(answers) or min(shares) < RENAMED:
        return None
    exchanged = sum(share * int(judged.there[k]) for k, share in zip(answers, shares))
    total = int(judged.there.sum())
    return answers, int(judged.hits.sum()) / total, exchanged / total


def _undecided(table: _ClassTable | None, batches: Sequence[Any], judged: _ClassTable | None) -> UndecidedPair | None:
    if (
        table is None
        or table.scores.shape[1] < 3
        or len(table.labels) > 50 * sum(len(t) for b in batches for t in tensors_in(b)[:1])
    ):
        return None
    guess, recall = table.scores.argmax(1), table.hits / table.there.clamp_min(1)
    known = (table.there >= PAIR).nonzero().flatten().tolist()
    if len(known) < 3:
        return None
    weakest = min(known, key=lambda k: float(recall[k]))
    taken = guess[(table.labels == weakest) & (guess != weakest)]  # what its samples are taken for
    if not len(taken):
        return None
    a, b = sorted((weakest, int(taken.mode().values)))
    others = [k for k in known if k not in (a, b)]
    if b not in known or a not in known or float(recall[[a, b]].mean()) > UNDECIDED:
        return None
    if min(float(recall[k]) for k in others) < KNOWN:
        return None
    own = (table.labels == a) | (table.labels == b)
    within = float(((guess[own] == a) | (guess[own] == b)).float().mean())
    apart = table.apart_in(a, b)
    if within < KNOWN or not 1 - BY_CHANCE < apart < BY_CHANCE:
        return None
    enough = judged is not None and min(int(judged.there[a]), int(judged.there[b])) >= PAIR
    val_apart = judged.apart_in(a, b) if judged is not None and enough else None
    found = statistics.fmean(float(recall[k]) for k in others)
    return UndecidedPair((str(a), str(b)), int(own.sum()), apart, val_apart, found)


def inverse_weights(retrainer: Retrainer, steps: int, before: _ClassTable, weights: Sequence[float]) -> Found:
    """Whether classes are found better with one over each of the user's weights, which grow with their counts."""
    inverse = torch.tensor([1 / w if w > 0 else w for w in weights], device="cpu")
    after = _table_with(_weighted(retrainer.loss_fn, inverse), retrainer, steps)
    if after is None:
        return None
    values = before.others(), after.others(before.common)
    if not values[1] > values[0] + RAISED:
        return None
    row = tuple(f"{weight:.3g}" for weight in inverse.tolist())
    return {"weighting": ClassWeighting(before.counts(), str(before.common), False, row, steps, *values, inverse=True)}


def ignored_class(retrainer: Retrainer, steps: int, before: _ClassTable) -> Found:
    """A class that the loss ignores by its number, and that is found once it is counted, no worse the others."""
    with LossInputs() as inputs, preserve_rng(retrainer.loss_fn), torch.no_grad():
        for batch in retrainer.batches[:MOST]:
            retrainer.loss_fn(retrainer.model, batch)
    label = next((ignored for *_, ignored in inputs.calls if 0 <= ignored < before.scores.shape[1]), None)
    if label is None or before.there[label] < PAIR or before.hits[label] > RARELY * before.there[label]:
        return None
    if any(
        _is_padding(batch, inputs.calls[i][1], label) for i, batch in enumerate(retrainer.batches[: len(inputs.calls)])
    ):
        return None

    def count(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        counted = kwargs.get("ignore_index") == label and name in ("cross_entropy", "nll_loss")
        return func(*args, **{**kwargs, "ignore_index": -100}) if counted else None

    after = _table_with(under(retrainer.loss_fn, lambda: OtherCalls(count)), retrainer, steps)
    rest = [k for k in range(len(before.there)) if k != label and before.there[k] >= LEAST]
    own, known = (before.labels != label), before.scores.clone()
    known[:, label] = -torch.inf
    others = _ClassTable(known[own], before.labels[own]).f1(rest)
    if after is None or after.f1([label]) < REFOUND or after.f1(rest) < others - RAISED - 0.05:
        return None
    share = float(before.there[label]) / len(before.labels)
    found = float(before.hits[label] / before.there[label])
    return {"ignored": IgnoredClass(label, share, found, after.f1([label]), (others, after.f1(rest)), steps)}


def _is_padding(batch: Any, labels: torch.Tensor, label: int) -> bool:
    """Whether the ignored labels end (or begin) their rows, or all inputs there are alike."""
    rows = len(tensors_in(batch)[0])
    if not rows or labels.numel() % rows or labels.numel() == rows:
        return False
    ignored = labels.reshape(rows, -1) == label
    if ignored.shape[1] > 1 and labels.dim() < 3:
        ends = (side.int().diff(dim=1) >= 0 for side in (ignored, ignored.flip(1)))
        if any(bool(side.all()) for side in ends):
            return True
    for x in tensors_in(batch):
        places = (
            x.reshape(rows, -1, ignored.shape[1]) if x is not labels and x[0].numel() % ignored.shape[1] == 0 else None
        )
        there = None if places is None else places.movedim(1, 2)[ignored]
        if there is not None and len(there) and bool((there == there[0]).all()):
            return True
    return False


@dataclasses.dataclass
class _ClassTable:
    """scores: (N, classes); labels: (N)."""

    scores: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        classes = self.scores.shape[1]
        guess = self.scores.argmax(1)
        self.there = self.labels.bincount(minlength=classes)
        self.hits = self.labels[guess == self.labels].bincount(minlength=classes)
        self.guessed = guess.bincount(minlength=classes)
        self.common = int(self.there.argmax())

    def may_be_drowned(self, dense: bool) -> bool:
        """dense: labels belong to positions, of which the commonest may stand for nothing."""
        top = max(float(self.there.max()), 1.0)
        if int((self.there >= LEAST).sum()) < 2 or top < COMMON * len(self.labels):
            return False
        if float(self.hits[self.common]) <= FOUND * top:
            return False
        if self.others() < MISSED or dense and self.apart(self.common) < 1 - APART:
            return True
        return self.taken_for_common() > MOSTLY and bool(self.missed())

    def taken_for_common(self) -> float:
        """Of the other classes' samples that are not found, the share that is taken for the commonest."""
        guess = self.scores.argmax(1)
        taken = guess[(guess != self.labels) & (self.labels != self.common)]
        return float((taken == self.common).float().mean()) if len(taken) else 0.0

    def counts(self) -> dict[str, int]:
        return {str(k): int(n) for k, n in enumerate(self.there.tolist()) if n}

    def missed(self) -> list[int]:
        """Classes of which next to none is found."""
        recall = self.hits / self.there.clamp_min(1)
        return ((recall < RARELY) & (self.there >= LEAST)).nonzero().flatten().tolist()

    def are_raised(self, after: _ClassTable, gain: float) -> bool:
        """Those that were missed are found after, and the mean F1 has risen or theirs is fair."""
        missed = self.missed()
        if not missed:
            return False
        recall = statistics.fmean(float(after.hits[k] / after.there[k]) for k in missed)
        sure = min(after.auc(k) for k in missed) > SURE
        return recall > REFOUND and gain > GAIN and sure or after.f1(missed) > CURED

    def auc(self, k: int) -> float:
        """How often the score of a sample of this class is above that of another's."""
        ranks = self.scores[:, k].argsort().argsort().double() + 1
        own = self.labels == k
        n, others = int(own.sum()), int((~own).sum())
        return float((ranks[own].sum() - n * (n + 1) / 2) / max(1, n * others))

    def apart_in(self, a: int, b: int) -> float:
        """How often a sample of b has a higher score for b over a than one of a (0.5: by chance)."""
        own = (self.labels == a) | (self.labels == b)
        return _ClassTable(
            torch.stack([self.scores[own, a], self.scores[own, b]], 1).diff(dim=1).expand(-1, 2),
            (self.labels[own] == b).long(),
        ).auc(1)

    def f1(self, classes: Sequence[int]) -> float:
        """Mean F1 of these."""
        scores = [2 * float(self.hits[k]) / max(1.0, float(self.there[k] + self.guessed[k])) for k in classes]
        return statistics.fmean(scores) if scores else 1.0

    def others(self, common: int | None = None) -> float:
        """Mean F1 of the classes other than the commonest."""
        common = self.common if common is None else common
        return self.f1([k for k in range(len(self.there)) if k != common and self.there[k] >= LEAST])

    def apart(self, common: int) -> float:
        """How often the right one of the other classes has the highest score among them."""
        own = self.labels != common
        scores = self.scores[own].clone()
        scores[:, common] = -torch.inf
        return float((scores.argmax(1) == self.labels[own]).float().mean())

    def weights(self, leave_out: bool) -> torch.Tensor:
        """As many digits as a person would write."""
        there = self.there.clamp_min(1).float()
        weights = len(self.labels) / (len(there) * there) * (self.there > 0)
        if leave_out:
            weights = torch.ones_like(weights)
            weights[self.common] = 0.0
        return torch.tensor([float(f"{weight:.3g}") for weight in weights.tolist()], device="cpu")


def _class_table(model: nn.Module, loss_fn: LossFn, batches: Sequence[Any]) -> _ClassTable | None:
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in PROBABILITY_LOSSES and len(args) > 1:
            pair = _scores_and_labels(name, args[0].detach().cpu().float(), args[1].detach().cpu())
            rows.extend([pair] if pair is not None else [])

    with preserve_rng(loss_fn), torch.no_grad(), mode(model, training=False), OtherCalls(note):
        for batch in batches:
            loss_fn(model, batch)
    if not rows or len({r[0].shape[1] for r in rows}) > 1:
        return None
    scores, labels = (torch.cat(column)[:MOST_LABELS] for column in zip(*rows))
    return _ClassTable(scores, labels)


def _scores_and_labels(name: str, o: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    if name in ("cross_entropy", "nll_loss"):
        if t.is_floating_point() or o.dim() < 2:
            return None
        scores, labels = o.movedim(1, -1).flatten(0, -2), t.flatten()
        counted = (labels >= 0) & (labels < scores.shape[1])
        return scores[counted], labels[counted]
    if o.shape != t.shape or not bool(((t == 0) | (t == 1)).all()):
        return None
    score = o.flatten() - PROBABILITY_LOSSES[name]
    return torch.stack([-score, score], 1), t.flatten().long()


def _weighted(loss_fn: LossFn, weights: torch.Tensor) -> LossFn:
    def weigh(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        known = name in PROBABILITY_LOSSES and 2 <= len(args) <= 3
        if not known or kwargs.get("reduction", "mean") != "mean":
            return None
        args = args[:2]
        own = weights.to(args[0].device)
        if name in ("cross_entropy", "nll_loss"):
            if args[0].dim() < 2 or args[0].shape[1] != len(own) or args[1].is_floating_point():
                return None
            return func(*args, **{**kwargs, "weight": own})
        if name == "binary_cross_entropy_with_logits":
            return func(*args, **{**kwargs, "pos_weight": own.new_tensor([float(pos_weight(own.tolist()))])})
        each = torch.where(args[1] > 0.5, own[1], own[0])
        return (func(*args, **{**kwargs, "reduction": "none"}) * each).sum() / each.sum()

    return under(loss_fn, lambda: OtherCalls(weigh))


# Terms of a loss

SUMS = frozenset("add sub rsub __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__".split())
FACTORS = frozenset("mul div neg __mul__ __rmul__ __imul__ __truediv__ __itruediv__ __neg__ mean sum".split())
LINEAR = SUMS | FACTORS | (VIEWS - DETACHES)
MOST_TERMS = 8
"""Terms: a loss of more is no sum of a few parts with a meaning each."""
MOST_PENALTIES = 1000
"""The same where only what depends on the batch is told from what does not: a penalty may have one for each weight."""
UNLIKE = 2
"""Nodes by which the graph of a loss may differ from the one that the loop sends backward: a division, a scale."""


class TermRecorder(TorchFunctionMode):
    """Records sums, means and constant factors while active, so that a loss can be taken apart. sites: also where in
    the user's code each of its numbers is computed, by the tensor's id."""

    def __init__(self, sites: bool = False) -> None:
        super().__init__()
        self.parts: dict[int, list[torch.Tensor]] = {}
        self.ops: dict[int, str] = {}
        self.sites: dict[int, Any] | None = {} if sites else None
        self._alive: list[torch.Tensor] = []  # else an id would be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.dim() <= 1:
            self._note(getattr(func, "__name__", ""), args, out)
        return out

    def _note(self, op: str, args: Any, out: torch.Tensor) -> None:
        op = op if op.startswith("__") else op.rstrip("_")
        if self.sites is not None:
            self.sites[id(out)] = locate().site
        if op not in LINEAR:
            self._alive.append(out)
            return
        parts = [a for a in args if isinstance(a, torch.Tensor)]
        if any(p is out for p in parts):  # in place
            parts = [*self.parts.get(id(out), []), *(p for p in parts if p is not out)] if id(out) in self.parts else []
        self.parts[id(out)], self.ops[id(out)] = parts, op
        self._alive += [out, *parts]

    def terms(
        self, loss: torch.Tensor, moves: Callable[[torch.Tensor], bool], most: int = MOST_TERMS
    ) -> list[torch.Tensor]:
        """The terms of a loss, itself where it has no others, or more than that. moves: whether a value depends on
        parameters."""
        terms: list[torch.Tensor] = []
        todo = [loss]
        while todo:
            value = todo.pop()
            parts = [p for p in self.parts.get(id(value), []) if moves(p)]
            flat = all(p.dim() <= 1 for p in parts)
            if parts and flat and (len(parts) == 1 or self.ops[id(value)] in SUMS):
                todo += reversed(parts)
            else:
                terms.append(value)
        return terms if len(terms) <= most else [loss]


# Shares


def shares(model: nn.Module, loss_fn: LossFn, batch: Any) -> list[float]:
    """What each term adds to the loss of this batch; raises what the loss raises."""
    return [share for _, share in weighted_terms(model, loss_fn, batch)]


def weighted_terms(model: nn.Module, loss_fn: LossFn, batch: Any) -> list[tuple[float, float]]:
    """The same, each after the factor that the loss gives the term."""
    with torch.enable_grad(), TermRecorder() as recorder:
        loss = loss_root(loss_fn(model, batch))
        terms = recorder.terms(loss, lambda t: t.requires_grad)
    slopes = torch.autograd.grad(loss.sum(), terms, allow_unused=True)
    return [(0.0, 0.0) if g is None else (float(g.sum()), float((g * t.detach()).sum())) for g, t in zip(slopes, terms)]


def term_site(model: nn.Module, loss_fn: LossFn, batch: Any, number: int) -> Where:
    """The user's line that computes a term."""
    with torch.enable_grad(), TermRecorder(sites=True) as recorder:
        terms = recorder.terms(loss_root(loss_fn(model, batch)), lambda t: t.requires_grad)
    return at_site(Where(), (recorder.sites or {}).get(id(terms[number]))) if number < len(terms) else Where()


def weaken(loss_fn: LossFn, number: int, factor: float) -> LossFn:
    """The same loss with the same value, in which the gradient of one term is multiplied by a factor."""

    def loss(model: nn.Module, batch: Any) -> Any:
        with TermRecorder() as recorder:
            whole = loss_root(loss_fn(model, batch))
            terms = recorder.terms(whole, lambda t: t.requires_grad)
        if number < len(terms) and terms[number].grad_fn is not None:
            terms[number].grad_fn.register_prehook(
                lambda grads: tuple(None if g is None else g * factor for g in grads)
            )
        return whole

    return loss


# Cut terms


def graph_signature(loss: torch.Tensor) -> Counter[str]:
    """How often each kind of node stands in the graph behind a loss."""
    return Counter(type(node).__name__ for node in graph_nodes([loss.grad_fn]))


def optimizers_behind(
    signature: Counter[str], known: Sequence[Counter[str]], stepped: Sequence[Sequence[int]]
) -> set[int]:
    """The optimizers, by position, that step after the backward whose loss has this graph; none where no call fits.

    known, stepped: of the first calls of backward, the graph of the loss, and the optimizers that stepped next."""
    positions: set[int] = set()
    for i, other in enumerate(known):
        unlike = ((signature - other) + (other - signature)).total()
        if unlike <= UNLIKE:
            positions.update(next((row for row in stepped[i:] if row), ()))
    return positions


DISCRETE = frozenset("multinomial bernoulli poisson binomial geometric".split())
"""Draws that no reparametrization can follow."""


def severed_term(model: nn.Module, loss_fn: LossFn, batch: Any, trained: set[int], held: set[int]) -> DetachedAt | None:
    """Where a term of the loss is cut off from all parameters that are trained by it, though it depends on them; None
    where none is: a term of parameters that no optimizer holds lacks one. trained, held: ids. Raises as the loss."""
    calls = calls_for(model, batch)
    with preserve_rng(loss_fn), torch.enable_grad(), TermRecorder() as recorder:
        loss = loss_root(record(calls, loss_fn, batch))
    mask = sum(1 << i for i, (_, p) in enumerate(calls.parameters) if id(p) in trained)
    own = {*trained, *(id(p) for _, p in calls.parameters if id(p) not in held)}
    terms = recorder.terms(loss, lambda t: bool(calls.dependence(t).params))
    for term in terms:
        dependence = calls.dependence(term)
        reached = {id(leaf) for leaf in graph_leaves(term)} if term.requires_grad else set()
        on_purpose = dependence.maker is not None and dependence.maker.op in DETACHES
        if dependence.params & mask and not reached & own and not on_purpose:
            cut = _cut_before(calls, dependence.maker, mask)
            if cut is not None:
                return detached_at(calls, cut, set(calls.positions(cut.params & mask)))
    return _drawn(calls, terms, mask) or _reached_by_penalties_alone(calls, loss, recorder, mask)


def _drawn(calls: Calls, terms: Sequence[torch.Tensor], mask: int) -> DetachedAt | None:
    """Where `sample()` of a distribution cuts a term off from what the distribution is made of, though autograd has
    followed that. None where a log_prob is computed: an estimate by the score function has no other gradient."""
    drawn = [c for c in calls.calls if not c.grad and c.params & mask and ".sample(" in (c.where.text or "")]
    scored = drawn and any("log_prob" in (c.where.text or "") for c in calls.calls)
    for call in () if scored or any(c.op in DISCRETE for c in drawn) else drawn:
        behind = set(calls.positions(call.params & mask))
        ids = {id(calls.parameters[i][1]) for i in behind}
        for term in terms if any(t.requires_grad for t in call.inputs) else ():
            seen = calls.dependence(term).params & call.params & mask == call.params & mask
            if seen and term.requires_grad and not ids & {id(leaf) for leaf in graph_leaves(term)}:
                call = dataclasses.replace(call, op="sample")
                return dataclasses.replace(detached_at(calls, call, behind), how="drawn")
    return None


def _reached_by_penalties_alone(
    calls: Calls, loss: torch.Tensor, recorder: TermRecorder, mask: int
) -> DetachedAt | None:
    """Where parameters are cut off from every term that depends on the batch, though these depend on them: what
    reaches them are penalties."""
    terms = recorder.terms(loss, lambda t: bool(calls.dependence(t).params), MOST_PENALTIES)
    data = [term for term in terms if calls.dependence(term).leaves]
    reached = {id(leaf) for term in data if term.requires_grad for leaf in graph_leaves(term)}
    others = {id(leaf) for t in terms if t.requires_grad and not calls.dependence(t).leaves for leaf in graph_leaves(t)}
    if not reached or not others:
        return None
    alive = 0
    for term in data:
        alive |= calls.dependence(term).params
    lost = {i for i in calls.positions(alive & mask) if id(calls.parameters[i][1]) in others - reached}
    for call in calls.detached:
        cut_off = {i for i in lost if call.params >> i & 1}
        if cut_off:
            return detached_at(calls, call, cut_off)
    return None


def _cut_before(calls: Calls, last: OpCall | None, mask: int) -> OpCall | None:
    """The call nearest to this one that cuts these parameters off."""
    cuts = {id(call) for call in calls.detached if call.params & mask}
    todo, visited = deque([last]), set()
    while todo:
        call = todo.popleft()
        if call is None or id(call) in visited:
            continue
        if id(call) in cuts:
            return call
        visited.add(id(call))
        todo += [calls.dependence(t).maker for t in call.inputs]
    return None
