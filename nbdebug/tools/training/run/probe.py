"""From the user's loop to the facts: watch it once, look at what it left, try what the signs call for."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nbdebug.observe.locations import at_site
from nbdebug.observe.snapshot import Snapshot
from nbdebug.report import Where
from nbdebug.tools.training.facts import Frozen, Schedule, TrainingRunFacts
from nbdebug.tools.training.probe_errors import ProbeErrors
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules import signs as signs_data
from nbdebug.tools.training.run import experiments as trials
from nbdebug.tools.training.run.data import batches_of, iter_is_itself, quiet, remembered
from nbdebug.tools.training.run.evaluate import MOST, FixedBatches, loss_root, mean_and_error, recalls
from nbdebug.tools.training.run.experiments import RATE, SuspectLabels, doubts, penalty, reference, spike_of
from nbdebug.tools.training.run.layers import flow, look
from nbdebug.tools.training.run.loop import LoopRun, order_of
from nbdebug.tools.training.run.retrain import LoopSchedule, RetrainChange, Retrainer, RetrainResult, routine_of
from nbdebug.tools.training.run.updates import norm_of
from nbdebug.tools.training.static.parameters import is_fresh


@dataclasses.dataclass
class LoopArguments:
    """What the user gave."""

    model: Any
    optimizers: list[Any]
    loss_fn: Callable[[Any, Any], Any] | None
    train_loader: Any
    val_loader: Any
    scheduler: Any


def course(asked: LoopArguments, run: LoopRun, order: dict[str, tuple[str, int]]) -> TrainingRunFacts:
    """What the watched run showed, as facts. order: the layers in the order of the forward pass."""
    flags, updates = run.flags, run.updates
    rates = tuple(max(row, default=0.0) for row in run.rate_at)
    functions = {**flags.functions, "backward": updates.functions}
    places = {
        name: at_site(Where(), site)
        for name, site in (*flags.sites.items(), ("backward", updates.place), ("optimizer", updates.stepped_at))
        if site
    }
    return TrainingRunFacts(
        losses=tuple(run.losses),
        numbers=tuple(run.numbers),
        optimizer_steps=updates.steps,
        passes=run.reading.passes,
        seconds=run.seconds,
        optimizer=" and ".join(type(o).__name__ for o in asked.optimizers),
        optimizers=len(asked.optimizers),
        rates=rates,
        schedule=_schedule(asked, run),
        stale=updates.stale(),
        scaler=updates.scaled(),
        modes=flags.modes(),
        root_evaluated=flags.root_evaluated,
        functions=functions,
        places=places,
        layers=updates.layers(order),
        gradient_norms=updates.gradient_norms(),
        checkups=tuple(run.checkups),
        frozen=_frozen(asked, order),
        trained_elements=sum(p.numel() for p in asked.model.parameters() if p.requires_grad),
        samples=_samples(asked.train_loader),
        decay=_penalties(asked),
        batches_in_pass=run.reading.in_pass,
        unchecked=tuple(_unchecked(asked)),
    )


def _schedule(asked: LoopArguments, run: LoopRun) -> Schedule | None:
    scheduler = asked.scheduler
    if scheduler is None:
        return None
    planned = next(
        (
            getattr(scheduler, n)
            for n in ("T_max", "total_steps", "total_iters", "step_size", "T_0")
            if isinstance(getattr(scheduler, n, None), int)
        ),
        None,
    )
    groups = [g for o in asked.optimizers for g in o.param_groups]
    peak = max((float(g.get(key) or 0.0) for g in groups for key in ("initial_lr", "max_lr")), default=0.0)
    holder = getattr(scheduler, "optimizer", None)
    return Schedule(
        type(scheduler).__name__,
        len(run.schedule_calls),
        bool(run.schedule_calls) and run.schedule_calls[0] == 0 and run.updates.steps > 0,
        planned,
        peak,
        holder is not None and all(holder is not o for o in asked.optimizers),
        getattr(scheduler, "mode", None),
        tuple(run.metrics),
    )


def _frozen(asked: LoopArguments, order: Iterable[str]) -> tuple[Frozen, ...]:
    """Parameters that the forward uses and that are not trained."""
    held = {id(p) for o in asked.optimizers for g in o.param_groups for p in g["params"]}
    used, found = set(order), []
    for name, p in asked.model.named_parameters():
        owner = name.rpartition(".")[0]
        if p.requires_grad or (used and owner not in used):
            continue
        normal = "Norm" in type(asked.model.get_submodule(owner)).__name__
        found.append(
            Frozen(name, not bool(p.detach().any()), id(p) in held, p.dim() > 1, p.numel(), normal, is_fresh(p))
        )
    return tuple(found)


def _samples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _penalties(asked: LoopArguments) -> dict[str, float]:
    groups = [g for o in asked.optimizers for g in o.param_groups]
    dropouts = [float(m.p) for m in asked.model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd)]
    return {
        "weight decay": max((float(g.get("weight_decay") or 0.0) for g in groups), default=0.0),
        "dropout": max(dropouts, default=0.0),
    }


def _unchecked(asked: LoopArguments) -> Iterable[str]:
    if asked.loss_fn is None:
        yield "Anything that needs the loss of a batch of our own (experiments, validation on the way): no loss_fn"
    if asked.train_loader is None or iter_is_itself(asked.train_loader):
        yield "Experiments: there is no train_loader that can be read again"
    if asked.val_loader is None:
        yield "Overfitting and evaluation: no val_loader given"


TIMES = 3.0
"""Experiments may take this many times the run's own time …"""
LEAST_SECONDS = 20.0
"""… or this long, whichever is more: a run of a second deserves more than three of them."""
MOST_STEPS = 600
"""Steps of one experiment."""


def watch(
    train: Callable[..., Any],
    asked: LoopArguments,
    keep: bool = False,
    done: Callable[[int, float], None] | None = None,
) -> TrainingRunFacts:
    """Run the user's loop once, and everything that follows from it. Model, optimizers, scheduler and random numbers
    are as before afterwards; with `keep` as the loop left them. Exceptions of the loop pass unchanged."""
    schedulers = [asked.scheduler] if isinstance(asked.scheduler, torch.optim.lr_scheduler.LRScheduler) else []
    start = Snapshot.take(asked.model, asked.optimizers, others=schedulers)
    put_back = remembered(asked.train_loader, asked.val_loader, asked.loss_fn, train)
    ends: list[Callable[[], None]] = [put_back, start.restore]
    faults = ProbeErrors()
    try:
        on_train = FixedBatches(asked.model, asked.loss_fn, spread_out(asked.train_loader))
        on_val = FixedBatches(asked.model, asked.loss_fn, spread_out(asked.val_loader))
        units, order = _units(asked, on_train, faults)
        run = LoopRun(
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
            TrainingRunFacts(losses=tuple(run.losses), numbers=tuple(run.numbers), seconds=run.seconds),
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


def _units(asked: LoopArguments, on_train: FixedBatches, faults: ProbeErrors) -> Any:
    nothing: Any = ((), {})
    return faults.ask(UNITS, lambda: look(asked.model, asked.loss_fn, on_train.batches), nothing)


def _on_fixed(run: LoopRun) -> Iterator[str]:
    for name, checkups in (("training", run.on_train), ("validation", run.on_val)):
        if checkups.fault:
            yield f"The loss on fixed {name} batches: {checkups.fault}"


def _left(asked: LoopArguments, run: LoopRun, faults: ProbeErrors) -> dict[str, Any]:
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


def _doubted(asked: LoopArguments, facts: TrainingRunFacts, faults: ProbeErrors) -> SuspectLabels | None:
    """Samples whose label the trained model does not believe, where validation goes better than training."""
    loss_fn = asked.loss_fn
    if loss_fn is None or not signs_data.ahead_on_val(facts):
        return None
    return faults.ask(
        "Whether labels are wrong", lambda: doubts(asked.model, loss_fn, batches_of(asked.train_loader, 2000)), None
    )


def _experiments(
    asked: LoopArguments,
    run: LoopRun,
    facts: TrainingRunFacts,
    start: Snapshot,
    doubtful: SuspectLabels | None,
    faults: ProbeErrors,
) -> TrainingRunFacts:
    """The facts with what the run's start becomes when one thing is changed."""
    if asked.loss_fn is None or not run.losses or asked.train_loader is None:
        return facts
    read = run.read_at[-1] if len(set(run.updates.used)) > 1 else 0  # else all of it was read ahead
    routine, why = routine_of(
        run.updates.stepped, run.backward_at, read, asked.optimizers, run.updates.waiting[0] > run.updates.waiting[1]
    )
    if routine is None and len(asked.optimizers) > 1:
        return _without(facts, why)
    steps = (routine or LoopSchedule()).steps_within(MOST_STEPS, len(run.losses))
    count = (routine or LoopSchedule()).until(steps - 1) if steps else 0
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
    asked: LoopArguments, run: LoopRun, routine: LoopSchedule | None, count: int
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
    asked: LoopArguments,
    run: LoopRun,
    facts: TrainingRunFacts,
    start: Snapshot,
    batches: list[Any],
    routine: LoopSchedule | None,
) -> Retrainer:
    assert asked.loss_fn is not None, "there is one"
    bench = Retrainer(
        asked.model, asked.optimizers, asked.loss_fn, batches, start, run.rate_at, run.on_train, run.on_val, routine
    )
    bench.zero = facts.stale.share <= 0.5
    bench.clip = run.updates.clipped()[0]
    bench.evaluated = frozenset(m.module for m in facts.modes if m.from_start)
    bench.until = time.perf_counter() + max(TIMES * run.seconds, LEAST_SECONDS)
    return bench


def _of_start(facts: TrainingRunFacts, run: LoopRun, bench: Retrainer, faults: ProbeErrors) -> TrainingRunFacts:
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


def _seen(facts: TrainingRunFacts, steps: int) -> RetrainResult | None:
    """What the run came to by itself, where the bench does not repeat it."""
    if facts.repeats or not facts.checkups:
        return None
    end = next((c for c in facts.checkups if c.step >= steps), facts.checkups[-1])
    return RetrainResult(list(facts.losses[:steps]), end.train, end.val)


def _with_reference(facts: TrainingRunFacts, bench: Retrainer, steps: int, faults: ProbeErrors) -> TrainingRunFacts:
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
    with_adam = [bench.train(RetrainChange(adam=rate), steps).train for rate in (RATE, 10 * RATE)]
    return dataclasses.replace(facts, reference=found | {"the model with Adam": min(with_adam)})


REFERENCE = "Whether another, small network learns this data (else the data or the loss holds the model up)"
SOME = 0.2
"""Below this share of the first loss nobody asks what more could have been learnt."""


def _without(facts: TrainingRunFacts, why: str) -> TrainingRunFacts:
    return dataclasses.replace(facts, unchecked=(*facts.unchecked, f"Experiments: {why}"))


def _explained(facts: TrainingRunFacts) -> bool:
    """A plain loop can't repeat this run, and we know why."""
    return (
        facts.stale.share > trials.STALE
        or facts.stale.emptied > trials.EMPTIED
        or facts.scaler is not None
        or any(m.switched is not None for m in facts.modes)
    )


def _weight_norm(bench: Retrainer) -> float:
    return math.sqrt(sum(float(p.detach().float().square().sum()) for p in bench.model.parameters() if p.requires_grad))


def _start_gradient(bench: Retrainer) -> float:
    """The norm of the gradient at the start, on the first batch."""
    try:
        for optimizer in bench.optimizers:
            optimizer.zero_grad()
        with quiet():
            loss_root(bench.loss_fn(bench.model, bench.batches[0])).backward()
        return norm_of(*bench.optimizers)
    finally:
        bench.start.restore()
