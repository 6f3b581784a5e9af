"""From the user's loop to the facts: watch it once, look at what it left, try what the signs call for."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nbdebug.chapters.training.facts_run import RunFacts
from nbdebug.chapters.training.rules import run_signs as signs
from nbdebug.chapters.training.rules import run_signs_data as signs_data
from nbdebug.chapters.training.run import trials
from nbdebug.chapters.training.run.bench import Bench, Change, Outcome
from nbdebug.chapters.training.run.checkup import MOST, Checkups, loss_root, mean_and_error
from nbdebug.chapters.training.run.classes import recalls
from nbdebug.chapters.training.run.course import Asked, course
from nbdebug.chapters.training.run.doubts import Doubts, doubts
from nbdebug.chapters.training.run.faults import Faults
from nbdebug.chapters.training.run.flow import flow
from nbdebug.chapters.training.run.penalty import penalty
from nbdebug.chapters.training.run.reading import order_of
from nbdebug.chapters.training.run.reference import RATE, reference
from nbdebug.chapters.training.run.routine import Routine, routine_of
from nbdebug.chapters.training.run.sources import batches_of, quiet, remembered
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


def watch(
    train: Callable[..., Any], asked: Asked, keep: bool = False, done: Callable[[int, float], None] | None = None
) -> RunFacts:
    """Run the user's loop once, and everything that follows from it. Model, optimizers, scheduler and random numbers
    are as before afterwards; with `keep` as the loop left them. Exceptions of the loop pass unchanged."""
    schedulers = [asked.scheduler] if isinstance(asked.scheduler, torch.optim.lr_scheduler.LRScheduler) else []
    start = Snapshot.take(asked.model, asked.optimizers, others=schedulers)
    put_back = remembered(asked.train_loader, asked.val_loader, asked.loss_fn, train)
    ends: list[Callable[[], None]] = [put_back, start.restore]
    faults = Faults()
    try:
        on_train = Checkups(asked.model, asked.loss_fn, spread_out(asked.train_loader))
        on_val = Checkups(asked.model, asked.loss_fn, spread_out(asked.val_loader))
        units, order = _units(asked, on_train, faults)
        run = Watched(
            asked.model,
            asked.optimizers,
            asked.train_loader,
            asked.val_loader,
            asked.scheduler,
            on_train,
            on_val,
            faults,
            done,
        )
        try:
            run.run(train)
        finally:
            ends += [scaler.restore for scaler in run.updates.scalers]
        if keep:
            ends[:] = [
                Snapshot.take(asked.model, asked.optimizers, others=schedulers).restore,
                remembered(asked.train_loader, asked.val_loader, asked.loss_fn, train),
            ]
        facts = faults.ask(
            COURSE,
            lambda: course(asked, run, order),
            RunFacts(losses=tuple(run.losses), numbers=tuple(run.numbers), seconds=run.seconds),
        )
        facts = dataclasses.replace(facts, start_units=units, **_left(asked, run, faults))
        doubtful = _doubted(asked, facts, faults)
        put_back()
        start.restore()
        try:
            facts = _experiments(asked, run, facts, start, doubtful, faults)
        except Exception as fault:  # the border: your loop has run; that ours can't repeat it is no fault of yours
            facts = _without(facts, f"{type(fault).__name__}: {fault}")
        return dataclasses.replace(facts, unchecked=(*facts.unchecked, *faults.lines, *_on_fixed(run)))
    finally:
        for end in ends:
            end()


def spread_out(loader: Any, most: int = MOST) -> list[Any]:
    """At most `most` batches, evenly over the first pass of a loader: a sorted one shows all that it has."""
    read = batches_of(loader, 64 * most, seconds=5.0)
    return read if len(read) <= most else [read[round(i * (len(read) - 1) / (most - 1))] for i in range(most)]


COURSE = "What the run shows beside its losses: schedule, order of calls, layers"
UNITS = "Dead and saturated units"
PENALTY = "How much of the loss is a penalty on the weights"


def _units(asked: Asked, on_train: Checkups, faults: Faults) -> Any:
    nothing: Any = ((), {})
    return faults.ask(UNITS, lambda: look(asked.model, asked.loss_fn, on_train.batches), nothing)


def _on_fixed(run: Watched) -> Iterator[str]:
    for name, checkups in (("training", run.on_train), ("validation", run.on_val)):
        if checkups.fault:
            yield f"The loss on fixed {name} batches: {checkups.fault}"


def _left(asked: Asked, run: Watched, faults: Faults) -> dict[str, Any]:
    """What can be seen at the end of the run only, before anything is put back."""
    found: dict[str, Any] = {"end_units": _units(asked, run.on_train, faults)[0]}
    loss_fn = asked.loss_fn
    if loss_fn is not None and run.on_train.batches:
        found["recalls"] = faults.ask(
            "What is found of each class",
            lambda: recalls(asked.model, loss_fn, [*run.on_train.batches, *run.on_val.batches]),
            {},
        )
        found["penalty_end"] = faults.ask(PENALTY, lambda: penalty(asked.model, loss_fn, run.on_train.batches[0]), 0.0)
    for name, checkups in (("modes_on_train", run.on_train), ("modes_on_val", run.on_val)):
        both = checkups.losses(training=True), checkups.losses(training=False)
        if all(both):
            found[name] = tuple(mean_and_error(losses)[0] for losses in both)
    return found


def _doubted(asked: Asked, facts: RunFacts, faults: Faults) -> Doubts | None:
    """Samples whose label the trained model does not believe, where validation goes better than training."""
    loss_fn = asked.loss_fn
    if loss_fn is None or not signs_data.ahead_on_val(facts):
        return None
    return faults.ask(
        "Whether labels are wrong", lambda: doubts(asked.model, loss_fn, batches_of(asked.train_loader, 2000)), None
    )


def _experiments(
    asked: Asked, run: Watched, facts: RunFacts, start: Snapshot, doubtful: Doubts | None, faults: Faults
) -> RunFacts:
    """The facts with what the run's start becomes when one thing is changed."""
    if asked.loss_fn is None or not run.losses or asked.train_loader is None:
        return facts
    read = run.read_at[-1] if len(set(run.updates.used)) > 1 else 0  # else all of it was read ahead
    routine, why = routine_of(
        run.updates.stepped, run.backward_at, read, asked.optimizers, run.updates.waiting[0] > run.updates.waiting[1]
    )
    if routine is None and len(asked.optimizers) > 1:
        return _without(facts, why)
    steps = (routine or Routine()).steps_within(MOST_STEPS, len(run.losses))
    count = (routine or Routine()).until(steps - 1) if steps else 0
    batches, draws = _batches(asked, run, routine, count)
    if not count or not batches:
        return facts
    facts = dataclasses.replace(facts, order=order_of(asked.train_loader, batches[: facts.batches_in_pass or steps]))
    bench = _bench(asked, run, facts, start, batches, routine)
    bench.draws = draws
    facts = faults.ask("How the run begins", lambda: _of_start(facts, run, bench, faults), facts)
    start.restore()
    if doubtful is not None:
        facts = dataclasses.replace(facts, doubts={"share": doubtful.share, "confusions": doubtful.confusions})
    if facts.repeats or _explained(facts):
        tried = trials.tried(facts, bench, steps, faults, doubtful, _seen(facts, steps))
        return _with_reference(tried, bench, steps, faults)
    changes = run.updates.clipped() == (None, True)
    return _without(facts, why or (CHANGES if changes else UNLIKE))


def _batches(
    asked: Asked, run: Watched, routine: Routine | None, count: int
) -> tuple[list[Any], list[Callable[[], None]]]:
    """The batches that the loop used, and the random numbers that each met: those that it had read last, or, where it
    reads ahead, one after the other. Where they were not kept, the loader is read again."""
    told = routine is not None and routine.told
    indices = (run.updates.used if told else [at - 1 for at in run.read_at])[:count]
    batches, draws = run.kept.used(indices)
    if batches and all(a < b for a, b in itertools.pairwise(indices)):
        return batches, draws
    if run.kept.batches and run.reading.read == len(run.kept.batches):
        return run.kept.batches[:count], []
    return batches_of(asked.train_loader, count, passes=True), []


CHANGES = (
    "your loop changes gradients between backward and step in another way than clip_grad_norm_ does, so that a "
    "plain loop does not repeat its losses"
)
UNLIKE = (
    "a plain loop over train_loader with loss_fn (one batch, one backward, one step at a time) does not repeat "
    "the losses that your loop told; random numbers that are drawn elsewhere, another loss or another order of "
    "batches do that"
)


def _bench(
    asked: Asked, run: Watched, facts: RunFacts, start: Snapshot, batches: list[Any], routine: Routine | None
) -> Bench:
    assert asked.loss_fn is not None, "there is one"
    bench = Bench(
        asked.model, asked.optimizers, asked.loss_fn, batches, start, run.rate_at, run.on_train, run.on_val, routine
    )
    bench.zero = facts.stale.share <= 0.5
    bench.clip = run.updates.clipped()[0]
    bench.evaluated = frozenset(m.module for m in facts.modes if m.from_start)
    bench.until = time.perf_counter() + max(TIMES * run.seconds, LEAST_SECONDS)
    return bench


def _of_start(facts: RunFacts, run: Watched, bench: Bench, faults: Faults) -> RunFacts:
    """What the start of the run shows, and whether the bench repeats it."""
    root = run.updates.roots[0] if run.updates.roots else None
    facts = dataclasses.replace(
        facts,
        repeats=bench.repeats(run.losses, root),
        weight_norm=_weight_norm(bench),
        start_gradient=faults.ask("The size of the first gradient", lambda: _start_gradient(bench), 0.0),
        spike=faults.ask(
            "Whether one batch makes the loss jump",
            lambda: spike_of(run.losses, run.numbers, () if bench.routine.closure else run.backward_at, bench),
            None,
        ),
    )
    nothing: Any = ((), ())
    points, through = faults.ask(
        "How gradients grow or fade with depth and time",
        lambda: flow(bench.model, bench.loss_fn, bench.batches[0]),
        nothing,
    )
    return dataclasses.replace(
        facts,
        flow=points,
        through=through,
        penalty=faults.ask(PENALTY, lambda: penalty(bench.model, bench.loss_fn, bench.batches[0]), 0.0),
    )


def _seen(facts: RunFacts, steps: int) -> Outcome | None:
    """What the run came to by itself, where the bench does not repeat it."""
    if facts.repeats or not facts.checkups:
        return None
    end = next((c for c in facts.checkups if c.step >= steps), facts.checkups[-1])
    return Outcome(list(facts.losses[:steps]), end.train, end.val)


def _with_reference(facts: RunFacts, bench: Bench, steps: int, faults: Faults) -> RunFacts:
    """A small network of our own tells whether the data can be learnt, where the model has settled above that."""
    if bench.time_is_up or not facts.repeats or not signs.settled(facts) or signs.kept(facts) < SOME:
        return facts
    found = faults.ask(
        REFERENCE,
        lambda: reference(bench.model, bench.loss_fn, bench.batches, steps, bench.on_train, bench.on_val),
        None,
    )
    if found is None or bench.time_is_up:
        return dataclasses.replace(facts, reference=None)
    # Is it the model that can't, or its optimizer?
    with_adam = [bench.train(Change(adam=rate), steps).train for rate in (RATE, 10 * RATE)]
    return dataclasses.replace(facts, reference=found | {"the model with Adam": min(with_adam)})


REFERENCE = "Whether another, small network learns this data (else the data or the loss holds the model up)"
SOME = 0.2
"""Below this share of the first loss nobody asks what more could have been learnt."""


def _without(facts: RunFacts, why: str) -> RunFacts:
    return dataclasses.replace(facts, unchecked=(*facts.unchecked, f"Experiments: {why}"))


def _explained(facts: RunFacts) -> bool:
    """A plain loop can't repeat this run, and we know why."""
    return (
        facts.stale.share > trials.STALE
        or facts.stale.emptied > trials.EMPTIED
        or facts.scaler is not None
        or any(m.switched is not None for m in facts.modes)
    )


def _weight_norm(bench: Bench) -> float:
    return math.sqrt(sum(float(p.detach().float().square().sum()) for p in bench.model.parameters() if p.requires_grad))


def _start_gradient(bench: Bench) -> float:
    """The norm of the gradient at the start, on the first batch."""
    try:
        for optimizer in bench.optimizers:
            optimizer.zero_grad()
        with quiet():
            loss_root(bench.loss_fn(bench.model, bench.batches[0])).backward()
        return norm_of(*bench.optimizers)
    finally:
        bench.start.restore()
