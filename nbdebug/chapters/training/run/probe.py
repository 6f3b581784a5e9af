"""From the user's loop to the facts: watch it once, look at what it left, try what the signs call for."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.chapters.training.facts_run import RunFacts
from nbdebug.chapters.training.rules import run_signs as signs
from nbdebug.chapters.training.run import trials
from nbdebug.chapters.training.run.bench import Bench, Change, Outcome
from nbdebug.chapters.training.run.checkup import MOST, Checkups, mean_and_error
from nbdebug.chapters.training.run.course import Asked, course
from nbdebug.chapters.training.run.doubts import Doubts, doubts
from nbdebug.chapters.training.run.flow import flow
from nbdebug.chapters.training.run.penalty import penalty
from nbdebug.chapters.training.run.reading import order_of
from nbdebug.chapters.training.run.reference import RATE, reference
from nbdebug.chapters.training.run.sources import batches_of, remembered
from nbdebug.chapters.training.run.spike import spike_of
from nbdebug.chapters.training.run.units import look
from nbdebug.chapters.training.run.updates import norm_of
from nbdebug.chapters.training.run.watched import Watched
from nbdebug.observe.state import Snapshot

TIMES = 3.0
"""Experiments may take this many times the run's own time …"""
LEAST_SECONDS = 20.0
"""… or this long, whichever is more: a run of a second deserves more than three of them."""
MOST_STEPS = 600
"""Steps of one experiment."""


def watch(train: Callable[..., Any], asked: Asked, keep: bool = False,
          done: Callable[[int, float], None] | None = None) -> RunFacts:
    """Run the user's loop once, and everything that follows from it. Model, optimizers, scheduler and random numbers
    are as before afterwards; with `keep` as the loop left them. Exceptions of the loop pass unchanged."""
    schedulers = [asked.scheduler] if isinstance(asked.scheduler, torch.optim.lr_scheduler.LRScheduler) else []
    start = Snapshot.take(asked.model, asked.optimizers, others=schedulers)
    put_back = remembered(asked.train_loader, asked.val_loader, asked.loss_fn, train)
    ends: list[Callable[[], None]] = [put_back, start.restore]
    try:
        on_train = Checkups(asked.model, asked.loss_fn, spread_out(asked.train_loader))
        on_val = Checkups(asked.model, asked.loss_fn, spread_out(asked.val_loader))
        units, order = look(asked.model, asked.loss_fn, on_train.batches)
        run = Watched(asked.model, asked.optimizers, asked.train_loader, asked.val_loader, asked.scheduler, on_train,
                      on_val, done)
        try:
            run.run(train)
        finally:
            ends += [scaler.restore for scaler in run.updates.scalers]
        if keep:
            ends[:] = [Snapshot.take(asked.model, asked.optimizers, others=schedulers).restore,
                       remembered(asked.train_loader, asked.val_loader, asked.loss_fn, train)]
        facts = dataclasses.replace(course(asked, run, order), start_units=units, **_left(asked, run))
        doubtful = _doubted(asked, facts)
        put_back()
        start.restore()
        try:
            return _experiments(asked, run, facts, start, doubtful)
        except Exception as fault:  # the border: your loop has run; that ours can't repeat it is no fault of yours
            return _without(facts, f"{type(fault).__name__}: {fault}")
    finally:
        for end in ends:
            end()


def spread_out(loader: Any, most: int = MOST) -> list[Any]:
    """At most `most` batches, evenly over the first pass of a loader: a sorted one shows all that it has."""
    read = batches_of(loader, 64 * most, seconds=5.0)
    return read if len(read) <= most else [read[round(i * (len(read) - 1) / (most - 1))] for i in range(most)]


def _left(asked: Asked, run: Watched) -> dict[str, Any]:
    """What can be seen at the end of the run only, before anything is put back."""
    found: dict[str, Any] = {"end_units": look(asked.model, asked.loss_fn, run.on_train.batches)[0]}
    if asked.loss_fn is not None and run.on_train.batches:
        found["penalty_end"] = penalty(asked.model, asked.loss_fn, run.on_train.batches[0])
    for name, checkups in (("modes_on_train", run.on_train), ("modes_on_val", run.on_val)):
        both = checkups.losses(training=True), checkups.losses(training=False)
        if all(both):
            found[name] = tuple(mean_and_error(losses)[0] for losses in both)
    return found


def _doubted(asked: Asked, facts: RunFacts) -> Doubts | None:
    """Samples whose label the trained model does not believe, where validation goes better than training."""
    if asked.loss_fn is None or not signs.ahead_on_val(facts):
        return None
    return doubts(asked.model, asked.loss_fn, batches_of(asked.train_loader, 2000))


def _experiments(asked: Asked, run: Watched, facts: RunFacts, start: Snapshot, doubtful: Doubts | None) -> RunFacts:
    """The facts with what the run's start becomes when one thing is changed."""
    if asked.loss_fn is None or not run.losses or asked.train_loader is None:
        return facts
    steps = min(len(run.losses), MOST_STEPS)
    batches = batches_of(asked.train_loader, steps, passes=True)
    if not batches:
        return facts
    facts = dataclasses.replace(facts, order=order_of(asked.train_loader, batches[:facts.batches_in_pass or steps]))
    bench = Bench(asked.model, asked.optimizers, asked.loss_fn, batches, start, run.rate_at, run.on_train, run.on_val)
    bench.zero = facts.stale.share <= 0.5
    bench.evaluated = frozenset(m.module for m in facts.modes if m.from_start)
    bench.until = time.perf_counter() + max(TIMES * run.seconds, LEAST_SECONDS)
    if any(_wants_closure(o) for o in asked.optimizers):
        return _without(facts, "the optimizer's step takes a closure, which only your own loop can give")
    if len(asked.optimizers) > 1:
        return _without(facts, "with several optimizers only your own loop knows which one steps when")
    facts = dataclasses.replace(facts, repeats=bench.repeats(run.losses), weight_norm=_weight_norm(bench),
                                start_gradient=_start_gradient(bench),
                                spike=spike_of(run.losses, run.numbers, run.read_at, bench))
    points, through = flow(asked.model, asked.loss_fn, batches[0])
    facts = dataclasses.replace(facts, flow=points, through=through,
                                penalty=penalty(asked.model, asked.loss_fn, batches[0]))
    start.restore()
    if doubtful is not None:
        facts = dataclasses.replace(facts, doubts={"share": doubtful.share, "confusions": doubtful.confusions})
    if facts.repeats or _explained(facts):
        return _with_reference(trials.tried(facts, bench, steps, doubtful, _seen(facts, steps)), bench, steps)
    return _without(facts, "your loop does more than one batch, one backward and one step at a time, so that a plain "
                           "loop does not repeat its losses")


def _seen(facts: RunFacts, steps: int) -> Outcome | None:
    """What the run came to by itself, where the bench does not repeat it."""
    if facts.repeats or not facts.checkups:
        return None
    end = next((c for c in facts.checkups if c.step >= steps), facts.checkups[-1])
    return Outcome(list(facts.losses[:steps]), end.train, end.val)


def _with_reference(facts: RunFacts, bench: Bench, steps: int) -> RunFacts:
    """A small network of our own tells whether the data can be learnt, where the model has settled above that."""
    if bench.time_is_up or not facts.repeats or not signs.settled(facts) or signs.kept(facts) < SOME:
        return facts
    found = reference(bench.model, bench.loss_fn, bench.batches, steps, bench.on_train, bench.on_val)
    if found is None or bench.time_is_up:
        return dataclasses.replace(facts, reference=None)
    # Is it the model that can't, or its optimizer?
    with_adam = [bench.train(Change(adam=rate), steps).train for rate in (RATE, 10 * RATE)]
    return dataclasses.replace(facts, reference=found | {"the model with Adam": min(with_adam)})


SOME = 0.2
"""Below this share of the first loss nobody asks what more could have been learnt."""


def _wants_closure(optimizer: Any) -> bool:
    """LBFGS and the like, which call the loss themselves."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _without(facts: RunFacts, why: str) -> RunFacts:
    return dataclasses.replace(facts, unchecked=(*facts.unchecked, f"Experiments: {why}"))


def _explained(facts: RunFacts) -> bool:
    """A plain loop can't repeat this run, and we know why."""
    return facts.stale.share > 0.5 or facts.scaler is not None or any(m.switched is not None for m in facts.modes)


def _weight_norm(bench: Bench) -> float:
    return math.sqrt(sum(float(p.detach().float().square().sum()) for p in bench.model.parameters()
                         if p.requires_grad))


def _start_gradient(bench: Bench) -> float:
    """The norm of the gradient at the start, on the first batch."""
    try:
        for optimizer in bench.optimizers:
            optimizer.zero_grad()
        bench.loss_fn(bench.model, bench.batches[0]).backward()
        return norm_of(bench.optimizers[0])
    except Exception:  # the border: a loss that has no gradient is told by others
        return 0.0
    finally:
        bench.start.restore()
