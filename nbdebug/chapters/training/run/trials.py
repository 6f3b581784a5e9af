"""Which experiments a run calls for. Each is asked for by a sign, costs about one run, and is read by a rule.

The most telling come first: when the time is up, what is left is reported as not checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from torch import nn

from nbdebug.chapters.training.facts_run import RunFacts, Trial
from nbdebug.chapters.training.rules import run_signs as signs
from nbdebug.chapters.training.rules import run_signs_data as signs_data
from nbdebug.chapters.training.run import order
from nbdebug.chapters.training.run.bench import Bench, Change, Outcome
from nbdebug.chapters.training.run.doubts import Doubts
from nbdebug.chapters.training.run.faults import Faults
from nbdebug.chapters.training.run.penalty import penalty, without
from nbdebug.chapters.training.run.rescale import as_relus, normalised, rescaled
from nbdebug.chapters.training.run.spike import at_the_end, beside

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
STALE = 0.5
"""Gradients that are left standing in most steps are not cleared at all; in a few, somebody accumulates."""
EMPTIED = 2
"""Steps that find their gradients gone, from more of which on it is no accident."""


def wanted(run: RunFacts, bench: Bench, faults: Faults, doubtful: Doubts | None = None) -> Iterator[tuple[str, Change]]:
    """Names and changes, most telling first."""
    if run.stale.share > STALE or run.stale.emptied > EMPTIED:
        yield "zero_grad", Change(zero=True)
        return
    if run.scaler is not None and run.scaler.clipped:
        yield "unscaled first", Change(clip=run.scaler.after)
        return
    if any(m.switched is not None or m.from_start for m in run.modes):
        yield "train mode", Change(training=True)
    if run.spike is not None and run.spike.get("batch") is not None:
        yield "without the batch", Change(without=frozenset({run.spike["batch"]}))
    if run.order.spread > order.UNFAIR or signs_data.order_in_doubt(run):
        dealt = faults.ask("Whether a shuffled order helps", lambda: order.shuffled(bench.batches), None)
        if dealt is not None:
            yield "shuffled", Change(batches=dealt)
    if signs.rate_fell(run) is not None or signs.rate_stays_low(run):
        low = signs.rate_stays_low(run) and run.schedule is not None
        yield "level rate", Change(level=True, to=run.schedule.peak if low and run.schedule else None)
    if any(f.held or (f.zero and f.matrix) for f in run.frozen) and signs.has_room(run):
        yield "unfrozen", Change(unfreeze=tuple(f.name for f in run.frozen))
    if doubtful is not None and doubtful.batches:
        yield "without doubtful labels", Change(batches=doubtful.batches)
    yield from _of_layers(run, bench)
    yield from _of_rates(run)
    yield from _of_penalties(run, bench)


def _of_layers(run: RunFacts, bench: Bench) -> Iterator[tuple[str, Change]]:
    if signs.held_by_flat(run):
        names = [la.name for la in run.layers]
        yield "rescaled", Change(prepare=rescaled(bench.loss_fn, bench.batches[0], names))
        yield "normalised", Change(prepare=normalised(bench.loss_fn, bench.batches[0], names))
    if signs.fading(run, signs.FADES_SOMEWHAT) and signs.learns_nothing(run):
        yield "relu", Change(prepare=as_relus)
    if signs.explodes(run):
        yield "clip", Change(clip=CLIP)


def _of_rates(run: RunFacts) -> Iterator[tuple[str, Change]]:
    if signs.rate_in_doubt(run):
        for name, factor in RATES:
            yield name, Change(rate=factor)
    if signs.slow(run) and not signs.flat(run) and not signs.fading(run):
        for factor in _higher(run):
            yield f"lr*{factor:g}", Change(rate=factor)


def _higher(run: RunFacts) -> list[float]:
    """The powers of ten that bring the largest update over weight into the healthy range."""
    largest = max((la.update for la in run.layers if math.isfinite(la.update)), default=0.0)
    if largest <= 0:
        return []
    low, high = (math.log10(bound / largest) for bound in HEALTHY)
    return [10.0**power for power in range(max(1, math.ceil(low)), math.floor(high) + 1)]


def _of_penalties(run: RunFacts, bench: Bench) -> Iterator[tuple[str, Change]]:
    if signs.outweighs(run):
        yield "no penalty", Change(loss_fn=without(bench.loss_fn))
    if not signs.has_room(run, 0.05):
        return
    if run.decay.get("weight decay", 0.0) >= DECAY:
        yield "no weight decay", Change(decay=0.0)
    if run.decay.get("dropout", 0.0) >= DROPOUT:
        yield "less dropout", Change(prepare=_less_dropout)


def _less_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = min(module.p, 0.1)


def tried(
    run: RunFacts, bench: Bench, steps: int, faults: Faults, doubtful: Doubts | None, seen: Outcome | None = None
) -> RunFacts:
    """The facts with the trials that they call for, each of so many steps. seen: what the run itself came to, for runs
    that the bench does not repeat; else the bench's own repetition is what trials are compared with."""
    trying = _Trying(run, bench, steps, faults, seen)
    skipped: list[str] = []
    for name, change in wanted(run, bench, faults, doubtful):
        if bench.time_is_up:
            skipped.append(name)
        elif not trying.needless(name):
            faults.ask(f'The experiment "{name}"', lambda n=name, c=change: trying.one(n, c), None)  # type: ignore[misc]
    unchecked = run.unchecked
    if skipped:
        unchecked += (f"Experiments that the time did not suffice for: {', '.join(skipped)}",)
    return dataclasses.replace(run, trials=trying.trials, spike=trying.spike, unchecked=unchecked)


class _Trying:
    """The trials of one run, one after the other. as_is: what they are compared with."""

    def __init__(self, run: RunFacts, bench: Bench, steps: int, faults: Faults, as_is: Outcome | None):
        self.run, self.bench, self.steps, self.faults, self.as_is = run, bench, steps, faults, as_is
        self.trials: dict[str, Trial] = dict(run.trials)
        self.spike = run.spike

    def needless(self, name: str) -> bool:
        """Whether another trial has shown enough."""
        if name.startswith("lr"):  # one factor that helps so much is enough
            return any(
                n.startswith(name[:3])
                and signs.helps(t, signs.MUCH_BETTER)
                and t.end_changed < ENOUGH * signs.first(self.run)
                for n, t in self.trials.items()
            )
        return name == "normalised" and signs.helps(self.trials.get("rescaled"))

    def one(self, name: str, change: Change) -> None:
        bench, steps = self.bench, self.steps
        if name == "no penalty":  # what counts is the loss on the data
            self.trials[name] = bench.trial(name, change, bench.train(Change(), steps, penalty), steps, penalty)
            return
        self.as_is = self.as_is or bench.train(Change(), steps)
        if name == "without the batch" and self.spike is not None:
            index = self.spike["batch"]
            got = bench.train(change, steps, ask=lambda: beside(index, bench))
            self.spike = at_the_end(self.spike, got.asked)
            self.trials[name] = bench.beside(name, got, self.as_is)
            return
        self.trials[name] = bench.trial(name, change, self.as_is, steps)
