"""Which experiments a run calls for. Each is called for by a sign, costs about one run, and is read by a rule.

The most telling come first: when the time is up, what is left is reported as not checked.

    experiments        the changes that a run calls for, each trained from its start
    penalty            the part of the loss that is a penalty on the weights
    small_factor       a constant that makes what trained parameters do next to nothing
    matched            the loss against targets in the order that is nearest, where they are in none
    agreement_at_end   how outputs agree with the targets that the loss compares them with
    held_out           what models that are trained on half of the samples show of the other half
    loss_spike         the largest jump of the loss, and the batch at which it happens
    reference          a small network of our own on the same data
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.observe.tensors import tensors_in
from nbdebug.tools.training.evaluate import (
    FixedBatches,
    LossFn,
    LossInputs,
    OtherCalls,
    ProbeErrors,
    batch_size,
    loss_root,
    loss_value,
    mean_and_error,
    mode,
    preserve_rng,
    rows_of,
    shuffled,
    takes_fewer_rows,
    targets_of,
    under,
    with_targets,
)
from nbdebug.tools.training.facts import Agreement, Experiment, HeldOut, SmallFactor, TrainingRunFacts
from nbdebug.tools.training.one_step import Calls, OpCall, calls_for, own_functions, record
from nbdebug.tools.training.outputs import CLASSES, SIGNED, TIMES, outputs_and_targets
from nbdebug.tools.training.retrain import RetrainChange, Retrainer, RetrainResult
from nbdebug.tools.training.rows import row_keys
from nbdebug.tools.training.rules import signs
from nbdebug.verdict import AGREES

RATES = (("lr/10", 0.1), ("lr/100", 0.01), ("lr/1000", 0.001))
HEALTHY = (1e-3, 0.2)
"""Update over weight that a higher rate is to reach: what healthy runs show, up to what their first steps show."""
CLIP = 1.0
"""The limit that nearly all published recipes clip at."""
DROPOUT = 0.7
"""A dropout above this is worth an experiment."""
DECAY = 5e-3
"""A weight decay from here on is worth an experiment; recipes use 1e-4 with SGD and 1e-2 to 0.1 with AdamW."""
ENOUGH = 0.3
"""A rate with which the loss ends at this share of the first one needs no further search."""
EMPTY_STEPS = 2
"""Steps that find their gradients gone, from more of which on it is no accident."""
JUMP = 3.0
"""A loss over the median of the ten before it. Most heavy-tailed losses stay below; a jump alone accuses nobody."""
BEFORE = 10
FLOOR = 0.02
"""Below this share of the first losses no jump is one: from nothing to next to nothing is a large multiple."""
AROUND = 12
"""Batches on either side that a suspected one is compared with."""
SMALL_FACTOR = 0.01
"""Constants in a forward that scale down what parameters make: attention's is above 0.05."""
TINY = 1e-12
MOST_SAMPLES, SURE = 3000, 5.0
"""Of which half are held out; standard errors by which validation and unseen training samples differ."""
MEMORIZED = 0.1
"""Where validation learns nothing, each half is trained until that share of the fall of the training loss is left."""
UNRELATED, ENOUGH_SAMPLES = 0.25, 200
"""How much more often other targets raise the loss of an unseen sample than lower it, over the same for samples that
were trained on; so many samples, and as many as an input has numbers: from fewer nothing general may be learned."""
OWN = 0.5
"""Without validation data: how much more often other targets raise the loss of samples that were trained on."""
RARE, SUSPECT = 0.97, 0.08
"""Share of the validation losses: a training sample with a larger one than these, unseen, is suspect. From this share
on they matter: curated sets hold 3 to 6% of wrong labels (Northcutt et al. 2021), which harms little."""
CLEANER = 0.75
"""Without the suspect samples, the validation loss ends at this share of what it was, or below. Augmentation makes
training samples hard as well, but leaving out the hardest does not help (0.86 and more)."""
MOST_SLOTS, BLURRED, LIKE_OTHERS = 4, 0.3, 4.0
"""Rows of a target that are put in each order; variance between the rows of an output over that between those of the
targets; standard errors up to which means are the same."""
OF_CLASS, MOST_LABELS = 5, 50_000
"""Samples of a class from which on its scores are compared with those of the others', and labels that are looked at."""
TURNED = "loss turned"
PICKED = CLASSES | TIMES | {"gather", "__getitem__"}
WIDTH = 128
RATE = 3e-3
MOST_INPUTS = 20_000
"""Of the reference network: units of its hidden layers, Adam's rate, the largest inputs."""

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
SQUASHING = (nn.Sigmoid, nn.Tanh, nn.Softsign, nn.LogSigmoid)


# Experiments


def experiments(
    run: TrainingRunFacts,
    retrainer: Retrainer,
    steps: int,
    errors: ProbeErrors,
    as_is: RetrainResult | None = None,
    only: str = "",
) -> TrainingRunFacts:
    """The facts with the experiments that they call for, each of so many steps. as_is: the result of the run itself,
    for runs that the retrainer does not repeat; else the retrainer's own repetition is compared with. only: what their
    names begin with."""
    done = _Experiments(run, retrainer, steps, as_is)
    skipped: list[str] = []
    for name, change in _changes(run, retrainer, errors):
        if not name.startswith(only):
            continue
        if retrainer.time_is_up:
            skipped.append(name)
        elif not done.makes_needless(name):
            errors.run(f'The experiment "{name}"', lambda n=name, c=change: done.run(n, c), None)  # type: ignore[misc]
    unchecked = run.unchecked
    if skipped:
        unchecked += (f"Experiments for which there was no time: {', '.join(skipped)}",)
    return dataclasses.replace(
        run, experiments=done.results, spike=done.spike, agreement=done.agreement, unchecked=unchecked
    )


class _Experiments:
    """The experiments of one run, one after the other. as_is: what they are compared with."""

    def __init__(self, facts: TrainingRunFacts, retrainer: Retrainer, steps: int, as_is: RetrainResult | None):
        self.facts, self.retrainer, self.steps, self.as_is = facts, retrainer, steps, as_is
        self.results: dict[str, Experiment] = dict(facts.experiments)
        self.spike, self.agreement = facts.spike, facts.agreement

    def makes_needless(self, name: str) -> bool:
        """Whether another experiment has shown enough."""
        if name.startswith("lr"):  # one factor that helps so much is enough
            return any(
                n.startswith(name[:3])
                and signs.helps(e, signs.MUCH_BETTER)
                and e.end_changed < ENOUGH * signs.first_loss(self.facts)
                for n, e in self.results.items()
            )
        return name == "normalized" and signs.helps(self.results.get("rescaled"))

    def run(self, name: str, change: RetrainChange) -> None:
        retrainer, steps = self.retrainer, self.steps
        if name == "no penalty":  # what counts is the loss on the data
            as_is = retrainer.train(RetrainChange(), steps, penalty)
            self.results[name] = retrainer.train(change, steps, penalty).against(as_is, name)
            return
        self.as_is = self.as_is or retrainer.train(RetrainChange(), steps)
        if name == "without the batch" and self.spike is not None:
            index = self.spike["batch"]
            result = retrainer.train(change, steps, at_end=lambda: _losses_around(index, retrainer))
            self.spike = _with_end(self.spike, result.at_end)
        elif name == TURNED and self.agreement is not None:
            of = retrainer.model, retrainer.loss_fn, retrainer.on_train.batches
            result = retrainer.train(change, steps, at_end=lambda: [_agreement(*of)[0]])
            self.agreement = dataclasses.replace(self.agreement, turned=result.at_end[0])
        else:
            result = retrainer.train(change, steps)
        self.results[name] = result.against(self.as_is, name)


def _changes(run: TrainingRunFacts, retrainer: Retrainer, errors: ProbeErrors) -> Iterator[tuple[str, RetrainChange]]:
    """Names and changes, most telling first."""
    certain = _change_of_calls(run)
    if certain is None and run.agreement is not None and signs.turns_away(run):
        certain = TURNED, RetrainChange(loss_fn=lambda model, batch: -loss_root(retrainer.loss_fn(model, batch)))
    if certain is not None:
        yield certain
        return
    if any((m.switched_at is not None or m.from_start) and not m.frozen for m in run.modes):
        yield "train mode", RetrainChange(training=True)
    if frozen := [m.module for m in signs.frozen_in_train_mode(run)]:
        yield signs.FROZEN_EVALUATED, RetrainChange(prepare=functools.partial(_evaluate, frozen))
    if run.spike is not None and run.spike.get("batch") is not None:
        yield "without the batch", RetrainChange(without=frozenset({run.spike["batch"]}))
    if run.order.spread > signs.UNFAIR or signs.order_may_matter(run):
        batches = errors.run("Whether a shuffled order helps", lambda: shuffled(retrainer.batches), None)
        if batches is not None:
            yield "shuffled", RetrainChange(batches=batches)
    if signs.rate_passes_peak(run) or signs.rate_grows(run):
        peak = run.schedule.peak if run.schedule is not None else 0.0
        yield "level rate", RetrainChange(level=True, to=max(peak, run.rates[0]))
    elif signs.rate_fell(run) is not None or signs.rate_stays_low(run):
        low = signs.rate_stays_low(run) and run.schedule is not None
        yield "level rate", RetrainChange(level=True, to=run.schedule.peak if low and run.schedule else None)
    yield from _changes_of_frozen(run)
    layers, rates = _changes_of_layers(run, retrainer), _changes_of_rates(run)
    # what died may have died of the rate
    yield from itertools.chain(rates, layers) if signs.units_died(run) else itertools.chain(layers, rates)
    yield from _changes_of_penalties(run, retrainer)


def _changes_of_frozen(run: TrainingRunFacts) -> Iterator[tuple[str, RetrainChange]]:
    head = tuple(f.name for f in run.frozen if f.last and not f.normal)
    if head and signs.has_room(run, signs.OF_A_HEAD):
        yield signs.HEAD_UNFROZEN, RetrainChange(unfreeze=head)
    if any(f.held or f.fresh or (f.zero and f.dims > 1) for f in run.frozen) and signs.has_room(run):
        yield "unfrozen", RetrainChange(unfreeze=tuple(f.name for f in run.frozen))


def _evaluate(names: Sequence[str], model: nn.Module) -> None:
    for name in names:
        model.get_submodule(name).training = False


def _change_of_calls(run: TrainingRunFacts) -> tuple[str, RetrainChange] | None:
    """Of a loop that makes a call too few or too early."""
    if run.stale.share > signs.STALE or run.stale.empty_steps > EMPTY_STEPS:
        return "zero_grad", RetrainChange(zero=True)
    if run.set_back:
        return "weights kept", RetrainChange()
    if run.scaler is not None and (run.scaler.clipped or run.scaler.carried):
        return "unscaled first", RetrainChange(clip=run.scaler.norm_after if run.scaler.clipped else None)
    return None


def _changes_of_layers(run: TrainingRunFacts, retrainer: Retrainer) -> Iterator[tuple[str, RetrainChange]]:
    if run.factor is not None and signs.has_room(run):
        yield "factor 1", RetrainChange(loss_fn=_without_factor(retrainer.loss_fn, run.factor.factor), measured=True)
    if signs.flat_units_matter(run):
        names = [layer.name for layer in run.layers]
        for name in ("rescaled", "normalized"):
            by_weights = name == "rescaled"
            yield name, RetrainChange(prepare=_resize(retrainer.loss_fn, retrainer.batches[0], names, by_weights))
    if signs.vanishing(run, signs.VANISHES_SOMEWHAT) and signs.learns_nothing(run):
        yield "relu", RetrainChange(prepare=_use_relus)
    if signs.explodes(run):
        yield "clip", RetrainChange(clip=CLIP)


def _changes_of_rates(run: TrainingRunFacts) -> Iterator[tuple[str, RetrainChange]]:
    if signs.rate_may_be_high(run):
        for name, factor in RATES:
            yield name, RetrainChange(rate=factor)
    if signs.updates_are_small(run) and not signs.flat(run) and not signs.vanishing(run):
        for factor in _higher_rates(run):
            yield f"lr*{factor:g}", RetrainChange(rate=factor)


def _higher_rates(run: TrainingRunFacts) -> list[float]:
    """The powers of ten that bring the largest update over weight into the healthy range."""
    largest = max(signs.updates(run), default=0.0)
    if largest <= 0:
        return []
    low, high = (math.log10(bound / largest) for bound in HEALTHY)
    return [10.0**power for power in range(max(1, math.ceil(low)), math.floor(high) + 1)]


def _changes_of_penalties(run: TrainingRunFacts, retrainer: Retrainer) -> Iterator[tuple[str, RetrainChange]]:
    if signs.penalty_dominates(run):
        yield "no penalty", RetrainChange(loss_fn=_without_penalty(retrainer.loss_fn))
    if not signs.has_room(run, 0.05):
        return
    if run.regularization.get("weight decay", 0.0) >= DECAY:
        yield "no weight decay", RetrainChange(decay=0.0)
    if run.regularization.get("dropout", 0.0) >= DROPOUT:
        yield "less dropout", RetrainChange(prepare=_lower_dropout)


# Targets in no order


def _slots(model: nn.Module, loss_fn: LossFn, batch: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The model's output, and targets that are a few rows of several numbers for each sample; None of others."""
    target, outputs = targets_of(batch), list[torch.Tensor]()
    if target is None or target.dim() != 3 or not 2 <= target.shape[1] <= MOST_SLOTS or target.shape[2] < 2:
        return None
    with model.register_forward_hook(lambda module, args, out: outputs.extend(tensors_in(out))), torch.no_grad():
        loss_fn(model, batch)
    fits = len(outputs) == 1 and outputs[0].numel() == target.numel() and target.is_floating_point()
    return (outputs[0].reshape(target.shape), target) if fits else None


def is_blurred(retrainer: Retrainer) -> bool:
    """Whether the rows of targets are as if in any order, and those of the output nearly one and the same."""
    model, loss_fn = retrainer.model, retrainer.loss_fn
    with preserve_rng(loss_fn), mode(model, training=False):
        pairs = [_slots(model, loss_fn, batch) for batch in retrainer.on_train.batches]
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) < len(pairs):
        return False
    out, target = (torch.cat(rows).detach().float() for rows in zip(*known))
    means, errors = target.mean(0), target.std(0) / len(target) ** 0.5
    alike = bool(((means - means.mean(0)).abs() <= LIKE_OTHERS * errors).all())
    return alike and float(out.var(1).mean()) < BLURRED * float(target.var(1).mean())


def matched(loss_fn: LossFn) -> LossFn:
    """The loss against the targets of each sample in the order that is nearest to the output."""

    def loss(model: nn.Module, batch: Any) -> Any:
        pair = _slots(model, loss_fn, batch)
        if pair is None:
            return loss_fn(model, batch)
        orders = torch.tensor([*itertools.permutations(range(pair[1].shape[1]))], device=pair[1].device)
        far = torch.stack([(pair[0] - pair[1][:, order]).square().sum((1, 2)) for order in orders])
        best = orders[far.argmin(0)][:, :, None].expand_as(pair[1])
        return loss_fn(model, with_targets(batch, pair[1].gather(1, best)))

    return loss


# Outputs against their targets

Pair = tuple[torch.Tensor, torch.Tensor]
"""Outputs and targets: (N, numbers) and the same, or scores (N, classes) and labels (N)."""


def agreement_at_end(model: nn.Module, train: FixedBatches, val: FixedBatches) -> Agreement | None:
    """With the weights of the end; None where nothing is known to be compared with data."""
    (end, samples), (other, others) = (_agreement(model, train.loss_fn, part.batches) for part in (train, val))
    return Agreement(math.nan, end, other, (samples, others)) if samples else None


def with_agreement_at_start(run: TrainingRunFacts, model: nn.Module, train: FixedBatches) -> TrainingRunFacts:
    """The facts; of outputs that agree well at the end nobody asks how they began."""
    if run.agreement is None or run.agreement.end > AGREES:
        return run
    start = _agreement(model, train.loss_fn, train.batches)[0]
    return dataclasses.replace(run, agreement=dataclasses.replace(run.agreement, start=start))


def _agreement(model: nn.Module, loss_fn: LossFn | None, batches: Sequence[Any]) -> tuple[float, int]:
    """How far outputs agree with the targets that the loss compares them with, from -1 to 1, where 0 is what an answer
    has that does not look at the input; and of how many samples. Of several comparisons, the best."""
    rows = [_compared(model, loss_fn, batch) for batch in batches] if loss_fn is not None else []
    known = [value for pairs in zip(*rows) if math.isfinite(value := _agreement_of(pairs))]
    return max(known, default=math.nan), sum(batch_size(b) or len(row[0][1]) for b, row in zip(batches, rows) if row)


def _compared(model: nn.Module, loss_fn: LossFn, batch: Any) -> list[Pair]:
    calls = calls_for(model, batch)
    with preserve_rng(loss_fn), mode(model, training=False), torch.enable_grad():
        record(calls, loss_fn, batch)
    pairs = outputs_and_targets(calls) or [pair for call in calls.calls for pair in _by_hand(calls, call)]
    fixed = ((call, o.detach().float(), t.detach()) for call, o, t in pairs if not calls.dependence(t).params)
    return [pair for known in fixed if (pair := _rows_of(*known)) is not None]


def _by_hand(calls: Calls, call: OpCall) -> Iterator[tuple[OpCall, torch.Tensor, torch.Tensor]]:
    """Cosines with a target, and what labels pick from (the logs of) probabilities."""
    ours = sorted(((calls.dependence(t), t) for t in call.inputs), key=lambda pair: not pair[0].params)
    if call.inside or len(ours) < 2 or not ours[0][0].params or ours[-1][0].params or not ours[-1][0].leaves:
        return
    output, target = ours[0][1], ours[-1][1]
    made = calls.maker(output)
    made = calls.maker(made.inputs[0]) if made is not None and made.op == "log" else made
    if call.op == "cosine_similarity" and output.shape == target.shape:
        yield call, output, target
    elif output.dim() == 2 and made is not None and made.op in ("softmax", "log_softmax"):
        one_hot = call.op in TIMES and target.shape == output.shape and bool((target.sum(1) == 1).all())
        target = target.argmax(1) if one_hot else target
        if target.dtype == torch.long and target.numel() == len(output):
            yield call, output, target.reshape(-1)


def _rows_of(call: OpCall, output: torch.Tensor, target: torch.Tensor) -> Pair | None:
    if call.op in SIGNED or not target.dim() or not output.dim() or target.numel() < 2:
        return None
    if output.shape == target.shape:
        return output.reshape(len(output), -1), target.float().reshape(len(target), -1)
    if target.is_floating_point() or output.dim() != target.dim() + 1 or call.op not in PICKED:
        return None
    scores, labels = output.movedim(1, -1).reshape(-1, output.shape[1]), target.reshape(-1)
    counts = (labels != call.kwargs.get("ignore_index", -100)) & (labels >= 0) & (labels < scores.shape[1])
    return scores[counts], labels[counts]


def _agreement_of(pairs: Sequence[Pair]) -> float:
    """Of numbers, the correlation, column by column; of labels, how often a sample of a class has a higher score for it
    than a sample of another has (each class counts the same)."""
    widths = {o.shape[1] for o, _ in pairs}
    if pairs[0][1].dim() > 1:
        output, target = (torch.cat(column if len(widths) == 1 else column[:1]) for column in zip(*pairs))
        a, b = output - output.mean(0), target - target.mean(0)
        size = float((a.square().sum() * b.square().sum()).sqrt())
        return float((a * b).sum()) / size if size > 0 else math.nan
    labels = torch.cat([t for _, t in pairs])
    if len(widths) > 1 or all(o.shape[1] == len(o) for o, _ in pairs) or len(labels.unique()) < 2:
        places = [_places(*pair) for pair in pairs if pair[0].numel()]  # rows are compared with one another
        return 2 * float(torch.cat(places).mean()) - 1 if places else math.nan
    every = max(1, len(labels) // MOST_LABELS)
    scores, labels = torch.cat([o for o, _ in pairs])[::every].log_softmax(1), labels[::every]
    sides = [(scores[labels == k, k], scores[labels != k, k].sort().values) for k in labels.unique().tolist()]
    above = [_share_above(o, own) for own, o in sides if len(own) >= OF_CLASS and len(o)]
    return statistics.fmean(above) if above else math.nan


def _share_above(others: torch.Tensor, own: torch.Tensor) -> float:
    """How much oftener own scores are above others, which are sorted, than below."""
    places = torch.searchsorted(others, own) + torch.searchsorted(others, own, right=True)
    return float(places.float().mean()) / len(others) - 1


def _places(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share of the other classes that each row's own is scored above; what is masked does not count."""
    own = scores.gather(1, labels[:, None])
    others = torch.isfinite(scores).scatter_(1, labels[:, None], False)
    above = (own > scores).float() + 0.5 * (own == scores).float()
    return ((above * others).sum(1) / others.sum(1))[others.any(1)]


# Changes of the model


def _resize(loss_fn: LossFn, batch: Any, names: Sequence[str], weights: bool) -> Callable[[nn.Module], None]:
    """The outputs of the named layers, in this order, get mean 0 and deviation 1 on this batch: by their weights, or by
    a hook, which cures what multiplies a layer's inputs in the forward as well."""

    def change(model: nn.Module) -> None:
        for layer in map(model.get_submodule, names):
            moments = _output_moments(model, layer, loss_fn, batch) if isinstance(layer, LAYERS) else None
            if moments is None:
                continue
            mean, std = moments
            if not weights:
                layer.register_forward_hook(lambda module, args, out, m=mean, s=std: (out - m) / s)
                continue
            weight, bias = layer.weight, layer.bias
            with torch.no_grad():
                weight.div_(std)  # type: ignore[operator]
                if bias is not None:
                    bias.sub_(mean.flatten().to(bias.dtype)).div_(std)  # type: ignore[operator, arg-type]

    return change


def _output_moments(
    model: nn.Module, layer: nn.Module, loss_fn: LossFn, batch: Any
) -> tuple[torch.Tensor, float] | None:
    """Mean by channel, shaped as the output is, and deviation over all, of a layer's output."""
    outputs: list[torch.Tensor] = []
    with layer.register_forward_hook(lambda module, args, out: outputs.append(out.detach())), torch.no_grad():
        loss_fn(model, batch)
    if not outputs:
        return None
    out = outputs[0].float()
    channel = out.dim() - 1 if isinstance(layer, nn.Linear) else 1
    std = float(out.std()) if out.numel() > 1 else 0.0
    mean = out.mean([d for d in range(out.dim()) if d != channel], keepdim=True)[0]
    return (mean, std) if math.isfinite(std) and std > 0 else None


def _use_relus(model: nn.Module) -> None:
    """Squashing activations become ReLUs, and layers get He initialization."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SQUASHING) and name:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], nn.ReLU())
        elif isinstance(module, LAYERS):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _lower_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = min(module.p, 0.1)


def _factor(op: str, args: Sequence[Any]) -> tuple[Any, float | None]:
    """A product's tensor, and the constant that it is multiplied by; None where there is no such constant."""
    if op.strip("_") not in ("mul", "rmul", "imul", "div", "truediv", "itruediv") or len(args) != 2:
        return None, None
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() > 1]
    numbers = [a for a in args if isinstance(a, (int, float)) or isinstance(a, torch.Tensor) and a.numel() == 1]
    if len(tensors) != 1 or len(numbers) != 1 or getattr(numbers[0], "requires_grad", False):
        return None, None
    number = float(numbers[0])
    return tensors[0], number if "div" not in op else 1 / number if number else None


def _without_factor(loss_fn: LossFn, factor: float) -> LossFn:
    """Multiplication by this constant changes nothing."""

    def same(op: str, func: Any, args: Any, kwargs: Any) -> Any:
        operand, known = _factor(op, args)
        return operand if known == factor else None

    return under(loss_fn, lambda: OtherCalls(same))


def small_factor(model: nn.Module, loss_fn: LossFn, batch: Any) -> SmallFactor | None:
    """The smallest constant of at most SMALL_FACTOR by which a forward multiplies what trained parameters made."""
    calls = calls_for(model, batch)
    with preserve_rng(loss_fn), torch.no_grad():
        record(calls, loss_fn, batch)
    small = []
    for call in calls.calls:
        factor = _factor(call.op, call.args)[1]
        names = tuple(n for n, p in map(calls.parameters.__getitem__, calls.positions(call.params)) if p.requires_grad)
        if factor is not None and 0 < abs(factor) <= SMALL_FACTOR and names and call.leaves and call.inside:
            small.append(SmallFactor(factor, names, call.where))
    return min(small, key=lambda known: abs(known.factor), default=None)


# The penalty on the weights


def penalty(model: nn.Module, loss_fn: LossFn, batch: Any) -> float:
    """The part of the loss that is a penalty on the weights; 0 where there is none, or where it can't be told apart
    because the model is called more than once. Raises what the loss raises."""
    outputs: list[Any] = []
    weights = [p for p in model.parameters() if p.requires_grad]
    values = [p.detach().clone() for p in weights]
    try:
        with preserve_rng(loss_fn), torch.no_grad():
            with model.register_forward_hook(lambda module, args, out: outputs.append(out)):
                whole = loss_value(loss_fn(model, batch))
            if len(outputs) != 1:
                return 0.0
            for p in weights:
                p.zero_()
            with model.register_forward_hook(lambda module, args, out: outputs[0]):
                return whole - loss_value(loss_fn(model, batch))
    finally:
        with torch.no_grad():
            for p, value in zip(weights, values):
                p.copy_(value)


def _without_penalty(loss_fn: LossFn) -> LossFn:
    """The same loss with the same value, whose gradient comes through the output only."""

    def loss(model: nn.Module, batch: Any) -> Any:
        whole = loss_root(loss_fn(model, batch))
        state = torch.get_rng_state()
        with model.register_forward_hook(lambda *call: tree_map_only(torch.Tensor, torch.Tensor.detach, call[-1])):
            direct = loss_root(loss_fn(model, batch))
        torch.set_rng_state(state)
        return whole - direct + direct.detach() if direct.requires_grad else whole

    return loss


# Samples that the model has not seen


def held_out(
    run: TrainingRunFacts, retrainer: Retrainer, steps: int, alone: bool = False
) -> tuple[HeldOut, Experiment | None] | None:
    """What models that are trained on half of the samples show of the other half, where that tells a cause; and the run
    without the samples that are suspect. None where it tells nothing; raises what the loss raises. alone: there is no
    validation data."""
    start, best = run.evaluations[0], signs.best_validation(run)
    batches: list[Any] | None = [*_until(retrainer.batches[: run.batches_per_pass], MOST_SAMPLES)]
    with contextlib.suppress(*([RuntimeError, TypeError] if alone else [])):  # padded to lengths of their own
        batches = _once(shuffled(batches or []))
    if batches is None or len(batches) < 4 or not alone and (best is None or best.val is None or start.val is None):
        return None
    one_batch = batches[0], len(tensors_in(batches[0])[0])
    if not takes_fewer_rows(retrainer.model, retrainer.loss_fn, *one_batch):
        return None
    end = run.evaluations[-1].train
    low = max(end, MEMORIZED * start.train + (1 - MEMORIZED) * end)
    memorized = next(e.step for e in run.evaluations if e.train <= low)
    most = min(steps, max(1, best.step if best is not None and signs.validation_is_ahead(run) else memorized))
    halves = batches[::2], batches[1::2]
    one, other = (_judged(retrainer, most, *pair) for pair in (halves, halves[::-1]))
    unseen, val = [*other[1], *one[1]], [one[2], other[2]]
    own = _means([*one[0], *other[0]], 0)
    held, dealt = _means(unseen, 0), _means(unseen, 1)
    if alone:
        return _unrelated(
            own, held, dealt, _means([*one[0], *other[0]], 1), len(tensors_in(batches[0])[0][0].flatten()), most
        )
    valid = (_means(val[0], 0) + _means(val[1], 0)) / 2
    means = [float(part.mean()) for part in (own, held, valid, dealt)]
    facts = HeldOut("", len(held), most, means[0], means[1], means[2], means[3])
    if signs.validation_learns_nothing(run):
        more = dealt - held, _means([*one[0], *other[0]], 1) - own
        gain, own_gain = (d[d != 0].sign() for d in more)  # single losses may be huge
        enough = len(held) > max(ENOUGH_SAMPLES, tensors_in(batches[0])[0][0].numel())
        if enough and float(gain.mean()) + 2 / len(gain) ** 0.5 < UNRELATED * float(own_gain.mean()):
            return dataclasses.replace(facts, what="unrelated"), None
        far = _above(valid.clamp_min(TINY).log(), held.clamp_min(TINY).log()) > SURE  # single losses may be huge
        far = far and facts.val > max(2 * facts.unseen, 0.3 * signs.first_loss(run))
        if far and float(valid.median()) > 3 * float(held.median()):
            return dataclasses.replace(facts, what="unlike", confusions=_confusions(val[0])), None
    if not signs.validation_is_ahead(run) or _above(held, valid) < SURE:
        return None
    limit = torch.cat([row.losses.flatten() for row in val[0]]).quantile(RARE)
    suspect = [row.losses > limit for row in unseen]
    share = float(torch.cat([s.flatten() for s in suspect]).float().mean())
    if share < SUSPECT:
        return None
    clean = [_without(b, s) for b, s in zip([*halves[0], *halves[1]], suspect) if not bool(s.all())]
    without = retrainer.train(RetrainChange(batches=clean), most)
    experiment = without.against(retrainer.train(RetrainChange(), most), "without suspect labels")
    if without.val is None or experiment.val_as_is is None or without.val > CLEANER * experiment.val_as_is:
        return None
    pairs = _confusions(row.only(s) for row, s in zip(unseen, suspect))
    return dataclasses.replace(facts, what="noise", share=share, confusions=pairs), experiment


def _once(batches: list[Any] | None) -> list[Any] | None:
    """Without samples that were there before, as a loop that leaves a pass early reads them again: a half would be
    judged by what the other was trained on."""
    seen, left = set[tuple[bytes, ...]](), list[Any]()
    for batch in batches or []:
        keys = [*zip(*map(row_keys, tensors_in(batch)))]
        new = [i for i, key in enumerate(keys) if key not in seen and key not in keys[:i]]
        seen |= set(keys)
        if len(new) > 1:
            left.append(rows_of(batch, torch.tensor(new, device="cpu")))
    return left or None


def _unrelated(
    own: torch.Tensor, held: torch.Tensor, dealt: torch.Tensor, own_dealt: torch.Tensor, size: int, steps: int
) -> tuple[HeldOut, None] | None:
    """Without validation data: samples that were trained on are known, and of the others nothing is. The losses of
    both, with their own targets and with those of others; size: numbers of an input."""
    gain, own_gain = (float(d[d != 0].sign().mean()) for d in (dealt - held, own_dealt - own))
    error = len(held) ** -0.5
    surely = gain < 2 * error and gain + 2 * error < UNRELATED * own_gain
    if len(held) <= max(ENOUGH_SAMPLES, size) or own_gain < OWN or not surely:
        return None
    means = float(own.mean()), float(held.mean()), math.nan, float(dealt.mean())
    return HeldOut("unrelated", len(held), steps, *means), None


@dataclasses.dataclass
class _Judged:
    """Losses of a batch's single labels, shaped as these are, or of its samples; the same with the targets of other
    samples; the labels and what is predicted in their place, where there are any."""

    losses: torch.Tensor
    dealt: torch.Tensor
    labels: torch.Tensor | None = None
    predictions: torch.Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, loss_fn: LossFn, batch: Any) -> _Judged:
        targets = targets_of(batch)
        if targets is None or not targets.dim():
            raise ValueError("the form of the batches does not tell which of their members are the targets")
        with LossInputs() as inputs:
            loss_fn(model, batch)
        if len(inputs.calls) == 1 and inputs.calls[0][2] == "cross_entropy":
            scores, labels, _, ignored = inputs.calls[0]
            if not labels.is_floating_point() and labels.numel() == targets.numel():
                own = labels.reshape(targets.shape)
                both = [
                    nn.functional.cross_entropy(scores, t.reshape(labels.shape), ignore_index=ignored, reduction="none")
                    for t in (own, own.roll(1, 0))
                ]
                own_loss, dealt, best = (each.reshape(own.shape) for each in (*both, scores.argmax(1)))
                return cls(own_loss, dealt, own, best)
        other = with_targets(batch, targets.roll(1, 0))
        rows = torch.arange(len(targets), device="cpu").split(1)
        both = [
            torch.tensor([loss_value(loss_fn(model, rows_of(b, r))) for r in rows], device="cpu")
            for b in (batch, other)
        ]
        return cls(both[0], both[1])

    def only(self, mask: torch.Tensor) -> _Judged:
        parts = (None if t is None else t[mask] for t in (self.losses, self.dealt, self.labels, self.predictions))
        return _Judged(*parts)  # type: ignore[arg-type]


def _judged(retrainer: Retrainer, steps: int, own: list[Any], others: list[Any]) -> list[list[_Judged]]:
    """By a model that is trained on some batches: these, others, and validation."""
    model, loss_fn = retrainer.model, retrainer.loss_fn
    parts: list[list[_Judged]] = []

    def judge() -> list[float]:
        with preserve_rng(loss_fn), torch.no_grad(), mode(model, training=False):
            for batches in (own, others, retrainer.on_val.batches):
                parts.append([_Judged.of(model, loss_fn, batch) for batch in batches])
        return []

    retrainer.train(RetrainChange(batches=own), steps, at_end=judge)
    return parts


def _until(batches: Sequence[Any], samples: int) -> Sequence[Any]:
    sizes = itertools.accumulate(len(t) for batch in batches for t in tensors_in(batch)[:1])
    return batches[: max(1, sum(size <= samples for size in sizes))]


def _means(rows: Iterable[_Judged], column: int) -> torch.Tensor:
    """The mean loss of each sample; with the column 1 that of the targets of others."""
    parts = (row.dealt if column else row.losses for row in rows)
    return torch.cat([part.float().reshape(len(part), -1).mean(1) for part in parts])


def _above(a: torch.Tensor, b: torch.Tensor) -> float:
    """By how many standard errors the mean of the first is above that of the second."""
    error = (a.var() / len(a) + b.var() / len(b)).sqrt()
    return float((a.mean() - b.mean()) / error.clamp_min(TINY))


def _without(batch: Any, suspect: torch.Tensor) -> Any:
    """The batch without its suspect samples; of labels for each position these do not count."""
    targets = targets_of(batch)
    if suspect.dim() > 1 and targets is not None:
        return with_targets(batch, targets.masked_fill(suspect.to(targets.device), -100))
    return rows_of(batch, (~suspect).nonzero().flatten())


def _confusions(rows: Iterable[_Judged]) -> tuple[tuple[int, int, int], ...]:
    """The commonest pairs of label and another prediction, each with its count."""
    pairs: Counter[tuple[int, int]] = Counter()
    for row in rows:
        if row.labels is not None and row.predictions is not None:
            pairs.update(zip(row.labels.flatten().tolist(), row.predictions.flatten().tolist()))
    return tuple((*pair, times) for pair, times in pairs.most_common() if pair[0] != pair[1])[:5]


# The largest jump of the loss


def loss_spike(
    losses: Sequence[float], step_numbers: Sequence[int], read_at: Sequence[int], retrainer: Retrainer
) -> dict[str, Any] | None:
    """The largest jump of the loss: its step, its size against the losses before it, and, where its batch is known, the
    batch's loss at the start of the run against its neighbours'. None where the loss never jumps."""
    at = _jump(losses)
    if at is None:
        return None
    before = [v for v in losses[max(0, at - 20) : at] if math.isfinite(v)]
    level = statistics.median(before) if before else math.nan
    after = next((i for i in range(at + 1, len(losses)) if losses[i] <= 1.5 * level), len(losses)) - at
    return {
        "step": step_numbers[at],
        "index": at,
        "loss": losses[at],
        "before": level,
        "recovers after": after,
        "of": len(losses),
        **_spike_batch(at, read_at, retrainer),
    }


def _jump(losses: Sequence[float]) -> int | None:
    """The index at which the largest jump began; None where no loss is JUMP times those before it. What follows a jump
    may be larger still: of jumps in consecutive steps the first counts."""
    ratios = {}
    floor = FLOOR * statistics.median(losses[:3]) if losses else 0.0
    for i in range(BEFORE, len(losses)):
        level = max(statistics.median(losses[i - BEFORE : i]), floor)
        if level > 0 and math.isfinite(level) and math.isfinite(losses[i]) and losses[i] > JUMP * level:
            ratios[i] = losses[i] / level
    if not ratios:
        return None
    at = max(ratios, key=lambda i: ratios[i])
    while at - 1 in ratios:
        at -= 1
    return at


def _spike_batch(at: int, read_at: Sequence[int], retrainer: Retrainer) -> dict[str, Any]:
    index = at if not read_at or not read_at[at] else read_at[at] - 1
    if index >= len(retrainer.batches):
        return {}
    losses = _losses_around(index, retrainer)
    if len(losses) < 4:
        return {}
    return {
        "batch": index,
        "its loss at the start": losses[0],
        "its neighbours'": statistics.median(losses[1:]),
        "its neighbours' largest": max(losses[1:]),
    }


def _losses_around(index: int, retrainer: Retrainer) -> list[float]:
    """The loss of a batch, and those of the batches around it, with the weights as they are now. The very next ones
    are left out: a broken stretch of the data may reach into them."""
    around = range(max(0, index - AROUND), min(len(retrainer.batches), index + AROUND + 1))
    batches = [retrainer.batches[i] for i in (index, *(i for i in around if abs(i - index) > 1))]
    return FixedBatches(retrainer.model, retrainer.loss_fn, batches, most=None).losses()


def _with_end(spike: Mapping[str, Any], losses: Sequence[float]) -> dict[str, Any]:
    """A jump, with the losses of its batch and its neighbours after a run without it."""
    if len(losses) < 4:
        return dict(spike)
    return {
        **spike,
        "its loss at the end": losses[0],
        "its neighbours' at the end": statistics.median(losses[1:]),
        "its neighbours' largest at the end": max(losses[1:]),
    }


# A reference network


class Reference(nn.Module):
    """A network with two hidden layers, with the model's inputs, and outputs of the same shape and range."""

    def __init__(self, x: torch.Tensor, out: torch.Tensor):
        super().__init__()
        self.shape, self.squash = out.shape[1:], _squash_of(out)
        size = x[0].numel()
        self.tokens = None
        if not x.is_floating_point():
            self.tokens = nn.Embedding(int(x.max()) + 64, 16)
            size *= 16
        self.mean, self.std = (0.0, 1.0) if self.tokens else (float(x.mean()), float(x.std()) + 1e-6)
        self.layers = nn.Sequential(
            nn.Linear(size, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, math.prod(self.shape)),
        )

    def forward(self, x: Any, *more: Any, **named: Any) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x.clamp(0, self.tokens.num_embeddings - 1)).flatten(1)
        flat = (x.flatten(1) - self.mean) / self.std
        return self.squash(self.layers(flat).reshape(len(flat), *self.shape))


def _squash_of(out: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings any numbers into the range of this output, along its last dimension."""
    out = out.detach().float()
    if out.dim() > 1 and out.shape[-1] > 1:
        one = torch.ones((), device="cpu").to(out)
        if bool((out >= 0).all()) and torch.allclose(out.sum(-1), one, atol=1e-3):
            return lambda t: t.softmax(-1)
        if torch.allclose(out.exp().sum(-1), one, atol=1e-3):
            return lambda t: t.log_softmax(-1)
    if bool(((out >= 0) & (out <= 1)).all()):
        return torch.sigmoid
    return lambda t: t


def _is_causal(model: nn.Module, x: torch.Tensor, out: torch.Tensor, targets: torch.Tensor | None) -> bool:
    """Whether the model's outputs at the earlier positions do not depend on the last one, and the targets may be the
    inputs that follow."""
    if x.dim() not in (2, 3) or out.dim() < 2 or not 2 < x.shape[1] == out.shape[1] or len(x) < 2:
        return False
    if targets is not None and targets.shape == x.shape and not torch.equal(targets[:, :-1], x[:, 1:]):
        return False
    changed = x.clone()
    changed[:, -1] = x[:, -1].roll(1, 0)
    with torch.no_grad(), mode(model, training=False):
        was, now = model(x), model(changed)
    same = torch.isclose(was, now, rtol=1e-4, atol=1e-5).flatten(2).all(2) if was.dim() > 2 else was == now
    return bool(same[:, :-1].all() and not same[:, -1].all())


def reference(retrainer: Retrainer, steps: int) -> dict[str, float] | None:
    """The reference network's losses on the fixed batches after so many steps; None where it can't take the model's
    place by its form. Raises what the loss raises, which may want something of the model that the network has not."""
    model, loss_fn, batches = retrainer.model, retrainer.loss_fn, retrainer.batches
    calls: list[tuple[Any, Any]] = []
    noting = model.register_forward_hook(lambda module, args, out: calls.append((args, out)))
    with preserve_rng(loss_fn), torch.enable_grad():
        with noting, mode(model, training=False):
            loss_fn(model, batches[0])
        if len(calls) != 1:
            return None  # the loss asks its parts, or several times
        args, out = calls[0]
        inputs = tensors_in(args)
        if len(inputs) != 1 or not isinstance(out, torch.Tensor) or len(out) != len(inputs[0]):
            return None
        if _is_causal(model, inputs[0], out, targets_of(batches[0])):
            return None  # the network would see the future
        if any(own_functions(out)):
            return None  # weights of one bit, or spikes, can do less on purpose
        if inputs[0][0].numel() > MOST_INPUTS or out[0].numel() > MOST_INPUTS or out.dtype != torch.float32:
            return None
        torch.manual_seed(0)
        network = Reference(inputs[0], out).to(out.device)
        optimizer = torch.optim.Adam(network.parameters(), RATE)
        for step in range(steps):
            optimizer.zero_grad()
            loss_root(loss_fn(network, batches[step % len(batches)])).backward()
            optimizer.step()
        losses = {"train": retrainer.on_train.losses_of(network), "val": retrainer.on_val.losses_of(network)}
        return {name: mean_and_error(values)[0] for name, values in losses.items() if values}
