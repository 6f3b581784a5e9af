"""From the user's loop to the facts: watch it once, measure what it left, try what the signs call for."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.arguments import with_callback
from nbdebug.observe.locations import at_site
from nbdebug.observe.modules import on_one_gpu
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.validation import OUTPUT_FORM, check_loss, check_model, loss_call, names_used_by, optimizers_of
from nbdebug.report import Where
from nbdebug.text import count, figures
from nbdebug.tools.training import retrain
from nbdebug.tools.training.batches import copies_of_one
from nbdebug.tools.training.edits import made_in_step
from nbdebug.tools.training.evaluate import (
    MOST,
    FixedBatches,
    LoaderWatch,
    LossFn,
    ProbeErrors,
    batches_of,
    is_iterator,
    loss_root,
    mean_and_error,
    no_warnings,
    preserve_rng,
    recalls,
    running_norms,
    samples_of,
    save_rng,
    target_order,
    with_new_statistics,
)
from nbdebug.tools.training.experiments import (
    EMPTY_STEPS,
    RATE,
    agreement_at_end,
    experiments,
    loss_spike,
    penalty,
    reference,
    small_factor,
    with_agreement_at_start,
)
from nbdebug.tools.training.facts import (
    BatchEvaluation,
    OverEnds,
    PairedAnew,
    Schedule,
    TeacherAnswers,
    TrainingFacts,
    TrainingRunFacts,
)
from nbdebug.tools.training.interventions import (
    graph_signature,
    interventions,
    optimizers_behind,
    renumbered,
    severed_term,
    undecided_pair,
)
from nbdebug.tools.training.loop import TAKEN, LoopRun, norm_of
from nbdebug.tools.training.loop_frames import LoopStart, LoopSubject
from nbdebug.tools.training.one_step import PlainLeaves, cancelled, is_fresh
from nbdebug.tools.training.outputs import lost_level
from nbdebug.tools.training.regularizers import regularizers, without_flips
from nbdebug.tools.training.retrain import LoopSchedule, RetrainChange, Retrainer, RetrainResult, loop_schedule
from nbdebug.tools.training.rows import out_of_step, over_ends, paired_anew
from nbdebug.tools.training.rules import is_weak, name_all, signs
from nbdebug.tools.training.signals import Order, activation_units, gradient_flow, is_linear
from nbdebug.tools.training.static_facts import SAME_LOSS, DetachedAt, Parameter, StaticFacts, UnitsFact

TIMES = 3.0
"""Experiments may take this many times the run's own time …"""
LEAST_SECONDS = 20.0
"""… or this long, whichever is more: a run of a second deserves more than three of them."""
MOST_STEPS = 600
"""Steps of one experiment."""
SOME = 0.2
"""Below this share of the first loss nobody asks what more could have been learned."""
ALL_NEW = 0.5
"""A momentum of batch normalization: from here on running statistics are those of the last batch or two."""
STEPS = 8
"""Steps from which on it is no accident that an optimizer finds no gradient."""

LOOP = "What the run shows beside its losses: schedule, order of calls, layers"
STOPPED = "How the run ends"
UNITS = "Dead and saturated units"
AGREEMENT = "Whether outputs agree with targets"
PENALTY = "How much of the loss is a penalty on the weights"
REFERENCE = "Whether another, small network learns this data (if not, the cause is the data or the loss)"

CHANGES = (
    "your loop changes gradients between backward and step in another way than clip_grad_norm_ does, so that a "
    "plain loop does not repeat its losses"
)
UNLIKE = (
    "a plain loop over train_loader with loss_fn (one batch, one backward, one step at a time) does not repeat "
    "the losses of your loop; possible reasons are random numbers that are drawn elsewhere, another loss, or another "
    "order of batches"
)


@dataclasses.dataclass
class LoopArguments:
    """The arguments of diagnose, checked. optimizers: empty where they are made in the loop, which adds them. loss_fn:
    as loss_fn(model, batch); where None was given, what the run learns of it; guessed: it is a criterion that nobody
    named; takes_own: the batches come from no loader. static: computes what preflight knows, from these arguments;
    before: that, of the start. names: further variables of the loop; start: of a loop that makes its own model, which
    tells it when the loop runs again."""

    model: Any
    optimizers: list[Any]
    loss_fn: LossFn | None
    train_loader: Any
    val_loader: Any
    scheduler: Any
    static: Callable[[LoopArguments], StaticFacts]
    guessed: bool = False
    takes_own: bool = False
    regularize: bool = False
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: LoopStart | None = None
    before: StaticFacts = dataclasses.field(default_factory=StaticFacts)


def run_facts(
    train: Callable[..., Any],
    arguments: LoopArguments,
    keep: bool = False,
    on_step: Callable[[int, float], None] | None = None,
) -> TrainingFacts:
    """Run the user's loop once, and everything that follows from it. Model, optimizers, scheduler and random numbers
    are as before afterwards; with `keep` as the loop left them. Exceptions of the loop pass unchanged."""
    watching = _watched_facts(train, arguments, keep, on_step)
    return _finished(watching, lambda: train(next(watching).callback))


def late_facts(
    train: Callable[..., Any],
    start: LoopStart,
    found: Callable[[LoopSubject], LoopArguments],
    keep: bool = False,
    on_step: Callable[[int, float], None] | None = None,
) -> TrainingFacts | None:
    """The same for a loop that tells itself what it trains: `found` makes the arguments of that. None where no model
    was called with gradients."""
    watching: Generator[LoopRun, None, TrainingFacts] | None = None
    run: LoopRun | None = None

    def begin(subject: LoopSubject) -> LoaderWatch:
        nonlocal watching, run
        watching = _watched_facts(train, found(subject), keep, on_step)
        run = next(watching)
        return run.reading

    def callback(*args: Any, **named: Any) -> None:
        if run is not None:
            run.callback(*args, **named)

    with start.waiting(begin), on_one_gpu():
        try:
            train(callback)
        except BaseException as error:
            if watching is not None:
                watching.throw(error)
            raise
    facts = None if watching is None else _finished(watching, lambda: None)
    if not keep:
        start.restore_rng()
    return facts


def _finished(watching: Generator[LoopRun, None, TrainingFacts], loop: Callable[[], Any]) -> TrainingFacts:
    """What a watch gives when its loop has ended."""
    try:
        with on_one_gpu():
            loop()
    except BaseException as error:
        watching.throw(error)
        raise
    try:
        next(watching)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("a watch gives one run")


def _watched_facts(
    train: Callable[..., Any], arguments: LoopArguments, keep: bool, on_step: Callable[[int, float], None] | None
) -> Generator[LoopRun, None, TrainingFacts]:
    """Gives the watched run, whose loop runs meanwhile, and returns the facts."""
    static = arguments.before = arguments.static(arguments)
    given = arguments.loss_fn
    scheduler = arguments.scheduler
    known = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    used = {**names_used_by(train), **arguments.names}  # the loop may also change an average of the weights, a critic
    others = [scheduler, *used.values()]
    owners = list(
        {id(one): one for one in others if issubclass(type(one), known) and one is not arguments.model}.values()
    )

    def save() -> tuple[Callable[[], None], Snapshot]:
        """The state of everything as it is now."""
        try:
            snapshot = Snapshot.take(arguments.model, arguments.optimizers, others=owners)
        except (torch.OutOfMemoryError, MemoryError):  # a large one, such as a teacher, that no loop changes
            snapshot = Snapshot.take(arguments.model, arguments.optimizers)
        return save_rng(arguments.train_loader, arguments.val_loader, arguments.loss_fn, train), snapshot

    restore_rng, start = save()
    errors, plain = ProbeErrors(), PlainLeaves(arguments.model, used)
    ends: list[Callable[[], None]] = [restore_rng, start.restore, plain.restore]
    try:
        on_train = FixedBatches(arguments.model, arguments.loss_fn, _spread_out(arguments.train_loader))
        on_val = FixedBatches(arguments.model, arguments.loss_fn, _spread_out(arguments.val_loader))
        units = [_units(arguments, on_train, errors)]

        def learned() -> None:
            arguments.loss_fn, arguments.takes_own = run.loss_fn, run.takes_own
            if run.takes_own:
                arguments.train_loader, arguments.val_loader = run.saved.batches, None
            errors.by_topic.pop(UNITS, None)
            units[0] = _units(arguments, on_train, errors)

        run = LoopRun(
            arguments.model,
            arguments.optimizers,
            arguments.train_loader,
            arguments.val_loader,
            scheduler,
            on_train,
            on_val,
            errors,
            on_step,
            start.include,
            None if is_iterator(arguments.train_loader) else learned,
            arguments.guessed,
        )
        try:
            with run.watched():
                yield run
        finally:
            ends[:0] = [scaler.restore for scaler in run.updates.scalers]  # first: they know later random numbers
        plain.look(run.updates.backwards)
        arguments.loss_fn = on_train.loss_fn
        if keep:
            restore_end_rng, end = save()
            ends[:] = [end.restore, restore_end_rng]
        facts = errors.run(
            LOOP,
            lambda: _loop_facts(arguments, run, units[0][1]),
            TrainingRunFacts(losses=tuple(run.losses), step_numbers=tuple(run.step_numbers), seconds=run.seconds),
        )
        own = {f"model.{name}" for name, _ in arguments.model.named_parameters()}
        changed = bool(run.stepping) or not own.isdisjoint(start.differences())
        facts = dataclasses.replace(facts, moved=changed, start_units=units[0][0], **_end_facts(arguments, run, errors))
        moved = {name: (m, [p.detach().clone() for p in m.parameters()]) for name, m in run.moving.items()}
        restore_rng()
        start.restore()
        facts = _against_the_end(facts, run, moved)
        start.restore()
        if arguments.loss_fn is not given:
            facts = _evaluated_at_start(facts, run)
            wrong, static = static.wrong_calls, arguments.static(arguments)
            static = static if run.rewards is None else dataclasses.replace(static, wrong_calls=wrong)
            restore_rng()
            start.restore()
        static = plain.judged(static)
        facts = _with_floor(facts, *static.floor)
        facts = errors.run(AGREEMENT, lambda: with_agreement_at_start(facts, arguments.model, run.on_train), facts)
        pairs = errors.run(
            "Whether passes pair inputs and targets alike", lambda: _paired_anew(arguments, run, static), None
        )
        facts = dataclasses.replace(facts, paired_anew=pairs)
        over = errors.run("Whether targets go on over an end", lambda: _over_ends(arguments, run), None)
        facts = dataclasses.replace(facts, over_ends=over)
        start.restore()
        severed = errors.run("Whether a term of the loss is cut off", lambda: _severed(arguments, run), None)
        severed = severed or errors.run("Gradients of zero", lambda: _cancelled(arguments, run, given), None)
        facts = dataclasses.replace(facts, severed=severed or facts.severed)
        start.restore()
        try:
            facts = _experiment_facts(arguments, run, facts, start, errors, static)
        except Exception as error:  # the border: your loop has run; that ours can't repeat it is no fault of yours
            facts = _without_experiments(facts, f"{type(error).__name__}: {error}")
        if not keep:
            start.restore()
            cut = functools.partial(_severed, arguments, run)
            edits = retrain.EditTrials(train, arguments, run, facts, static, start, restore_rng, cut)
            facts = edits.facts = errors.run("One optimizer for all steps", edits.with_one_optimizer, facts)
            facts = dataclasses.replace(facts, edits=errors.run("Whether an edit of your lines helps", edits.all, {}))
        unchecked = (*facts.unchecked, *errors.lines, *_failed_evaluations(run))
        return TrainingFacts(static, dataclasses.replace(facts, unchecked=unchecked))
    finally:
        for end_action in ends:
            end_action()


def _evaluated_at_start(facts: TrainingRunFacts, run: LoopRun) -> TrainingRunFacts:
    """With the loss of a loop's own batches at the start, which were not known then. The start has been put back."""
    first = run.on_train.mean() if run.takes_own and not facts.follows else None
    if first is None or not math.isfinite(first[0]):
        return facts
    return dataclasses.replace(facts, evaluations=(BatchEvaluation(0, first[0], None), *facts.evaluations))


def _against_the_end(
    facts: TrainingRunFacts, run: LoopRun, moving: Mapping[str, tuple[nn.Module, list[torch.Tensor]]]
) -> TrainingRunFacts:
    """Where targets follow the model, evaluated at its start, which has been put back, and at its end against the same
    ones: those of the end."""
    if not moving:
        return facts
    for model, values in moving.values():
        _set_values(model, values)
    first, known = run.on_train.mean(), facts.evaluations[-1:]
    pair = () if first is None or not math.isfinite(first[0]) else (BatchEvaluation(0, first[0], None), *known)
    return dataclasses.replace(facts, evaluations=pair if known else (), follows=next(iter(moving)))


def _spread_out(loader: Any, most: int = MOST) -> list[Any]:
    """At most `most` batches, evenly over the first pass of a loader: of a sorted one, every part."""
    batches = batches_of(loader, 64 * most, seconds=5.0)
    if len(batches) <= most:
        return batches
    return [batches[round(i * (len(batches) - 1) / (most - 1))] for i in range(most)]


def _units(
    arguments: LoopArguments, on_train: FixedBatches, errors: ProbeErrors
) -> tuple[tuple[UnitsFact, ...], Order]:
    return errors.run(UNITS, lambda: activation_units(arguments.model, arguments.loss_fn, on_train.batches), ((), {}))


def _failed_evaluations(run: LoopRun) -> Iterator[str]:
    for name, batches in (("training", run.on_train), ("validation", run.on_val)):
        if batches.error:
            yield f"The loss on fixed {name} batches: {batches.error}"


# The loop


def _loop_facts(arguments: LoopArguments, run: LoopRun, order: Order) -> TrainingRunFacts:
    """What the watched run showed. order: the layers in the order of the forward pass."""
    modes, updates, clip = run.modes, run.updates, run.updates.clips.without_gradients
    sites = {**modes.sites, "backward": updates.backward_site, "optimizer": updates.step_site}
    return TrainingRunFacts(
        losses=tuple(run.losses),
        trainer=run.trainer,
        severed=run.first_losses.left_out(_held(run), updates.names, at_site(Where(), updates.backward_site)),
        unheld={name: sum(p.numel() for p in model.parameters()) for name, model in run.unheld.items()},
        reward=None if run.rewards is None else (run.rewards.name, tuple(run.rewards.values)),
        reward_slope=None if run.rewards is None else run.rewards.slope,
        trains_critic=run.rewards is not None and run.rewards.leads,
        step_numbers=tuple(run.step_numbers),
        optimizer_steps=updates.steps,
        backwards=updates.backwards,
        others_step=bool(run.stepping) and not updates.steps,
        unused=updates.unused,
        accumulation=run.first_losses.accumulation(updates.stepped, updates.used, updates.waiting),
        one_label=run.one_label,
        set_back=tuple(run.set_back.at),
        drawn_anew=tuple(run.set_back.anew) if len(run.stepping) == 1 else (),
        idle=tuple(_idle(run)),
        starved=tuple(_starved(run)),
        unclipped=None if clip is None else (clip[0], at_site(Where(), clip[1])),
        passes=run.reading.passes,
        first_alone=copies_of_one(run.saved.batches[:STEPS]) if run.reading.read == run.reading.passes >= STEPS else 0,
        seconds=run.seconds,
        optimizer=" and ".join(type(o).__name__ for o in arguments.optimizers),
        optimizers=len(arguments.optimizers),
        adversaries=run.adversaries,
        rates=tuple(max(row, default=0.0) for row in run.rate_at),
        schedule=_schedule(arguments, run),
        stale=updates.stale_gradients(),
        scaler=updates.scaler_fact(),
        modes=modes.facts(),
        root_evaluated=modes.root_evaluated,
        functions={**modes.functions, "backward": updates.functions},
        places={name: at_site(Where(), site) for name, site in sites.items() if site} | _made_anew(run),
        layers=updates.layers(order),
        gradient_norms=updates.gradient_norms(),
        evaluations=tuple(run.evaluations),
        frozen=_frozen(arguments, order),
        trained_elements=sum(p.numel() for p in arguments.model.parameters() if p.requires_grad),
        samples=samples_of(arguments.train_loader),
        regularization=_regularization(arguments) | ({"clip": limit} if (limit := updates.clip_limit()[0]) else {}),
        batches_per_pass=run.reading.per_pass,
        renewed=(run.stepping.kind.__name__, run.stepping.renewals, run.stepping.steps),
        validations=None
        if (validated_at := run.reading.validated_at) is None
        else tuple(bisect.bisect_right(run.read_at, read) for read in validated_at),
        teacher=_teacher(run),
        unchecked=(*_others_trained(run), *_unchecked(arguments)),
        loss_from="" if run.loss_fn is None else f"`{run.loss_fn.text}` of {at_site(Where(), run.loss_fn.site).place}",
    )


def _made_anew(run: LoopRun) -> dict[str, Where]:
    """Where an optimizer is made that takes the place of another in the middle of the run."""
    site, kind = run.stepping.site, run.stepping.kind
    return {} if site is None else {"made anew": made_in_step(kind, at_site(Where(phase="optimizer"), site))}


def _optimizers(run: LoopRun) -> dict[str, Any]:
    named = {n: o for n, o in run.names.items() if issubclass(type(o), torch.optim.Optimizer)}
    return {**{type(o).__name__: o for o in run.updates.optimizers}, **named}


def _idle(run: LoopRun) -> list[str]:
    """Optimizers that never step, though what they hold is held by no other, and gets gradients or is a model of the
    loop that most steps call with gradients."""
    held = _held(run)
    called = [
        m for m in (run.model, *run.model.children()) if run.graphs[id(m)] > max(run.updates.backwards // 2, STEPS)
    ]
    trained = {id(p) for model in called for p in model.parameters() if p.requires_grad}
    own = {n: (o, _ids(o)) for n, o in _optimizers(run).items() if id(o) not in run.stepping}
    return [n for n, (o, ids) in own.items() if held and held.isdisjoint(ids) and (norm_of(o) or ids <= trained)][-1:]


def _starved(run: LoopRun) -> list[str]:
    """Optimizers that step as others do, and never find a gradient."""
    fed, steps = run.updates.fed, run.updates.steps_of
    return [n for n, o in _optimizers(run).items() if fed and id(o) not in fed and steps.get(id(o), 0) > STEPS][-1:]


def _held(run: LoopRun) -> set[int]:
    return set[int]().union(*map(_ids, run.stepping.values()))


def _ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _others_trained(run: LoopRun) -> Iterator[str]:
    if not run.updates.steps and run.stepping:
        what = "model" if _held(run).isdisjoint(map(id, run.model.parameters())) else "optimizer"
        yield (
            f"The run: the loop works with another {what} than the one that is watched. Name no {what}: the loop then "
            "tells which one it is"
        )


def _teacher(run: LoopRun) -> TeacherAnswers | None:
    rows, before, again = run.soft.rows, dict[int, int](), list[bool]()
    if not rows:
        return None
    labels, answers, own, keys = zip(*rows)
    for key, answer in zip(keys, answers):
        again += [before[key] == answer] if key in before else []
        before[key] = answer
    agrees, right = (statistics.fmean(map(operator.eq, labels, said)) for said in (answers, own))
    times, known, n = Counter(labels), Counter(answers), len(rows)
    by_chance, same_by_chance = (
        sum(times[k] * c[k] for k in c) / n**2 for times, c in ((times, known), (known, known))
    )
    same = statistics.fmean(again) if again else 1.0
    return TeacherAnswers(n, agrees, by_chance, right, len(again), same, same_by_chance)


def _with_floor(facts: TrainingRunFacts, floor: float, at_floor: float) -> TrainingRunFacts:
    """Where no loss on fixed batches is below it: labels may be smoothed in training only."""
    ends = [e.train for e in facts.evaluations]
    sure = bool(ends) and min(ends) >= floor * (1 - SAME_LOSS)
    return dataclasses.replace(facts, floor=floor, at_floor=at_floor) if sure else facts


def _paired_anew(arguments: LoopArguments, run: LoopRun, static: StaticFacts) -> PairedAnew | None:
    """Of the batches that the loop read or made itself."""
    targets = {call.target for call in static.loss_calls}
    target = targets.pop() if len(targets) == 1 else None
    if target is None:
        return None
    codes = [part.loop for part in run.loss_fn.parts] if run.loss_fn is not None else []
    data: Any = getattr(type(getattr(arguments.train_loader, "dataset", None)), "__getitem__", None)
    codes += [data.__code__] if hasattr(data, "__code__") else []
    files = sorted({code.co_filename for code in codes})
    pairs = paired_anew(run.saved.batches, target, files)
    ends = [e.val if e.val is not None else e.train for e in run.evaluations]
    learns = not ends or ends[-1] < 0.9 * ends[0]
    return pairs or (None if learns else out_of_step(arguments.train_loader, target))


def _over_ends(arguments: LoopArguments, run: LoopRun) -> OverEnds | None:
    if arguments.loss_fn is None or not run.saved.batches:
        return None
    used = run.loss_fn.takes if run.loss_fn is not None else ()
    marks = [{n: t for n, t in row.items() if n not in used} for row in run.marks]
    marks = marks if run.takes_own else [{}] * len(run.saved.batches)
    return over_ends(arguments.model, arguments.loss_fn, run.saved.batches, marks)


def _schedule(arguments: LoopArguments, run: LoopRun) -> Schedule | None:
    scheduler = arguments.scheduler
    if scheduler is None:
        return None
    lengths = (getattr(scheduler, n, None) for n in ("T_max", "total_steps", "total_iters", "step_size", "T_0"))
    groups = [g for o in arguments.optimizers for g in o.param_groups]
    held = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)  # what accelerate wraps has the same
    return Schedule(
        type(scheduler).__name__,
        len(run.schedule_calls),
        bool(run.schedule_calls) and run.schedule_calls[0] == 0 and run.updates.steps > 0,
        next((length for length in lengths if isinstance(length, int)), None),
        max((float(g.get(key) or 0.0) for g in groups for key in ("initial_lr", "max_lr")), default=0.0),
        held is not None and all(held is not o.param_groups for o in arguments.optimizers),
        getattr(scheduler, "mode", None),
        tuple(run.metrics),
    )


def _frozen(arguments: LoopArguments, order: Iterable[str]) -> tuple[Parameter, ...]:
    """Parameters that the forward uses and that are not trained."""
    held = {id(p) for o in arguments.optimizers for g in o.param_groups for p in g["params"]}
    used, frozen = set(order), []
    last = [name for name in order if any(True for _ in arguments.model.get_submodule(name).parameters(recurse=False))]
    for name, p in arguments.model.named_parameters():
        owner = name.rpartition(".")[0]
        if p.requires_grad or (used and owner not in used):
            continue
        normal = "Norm" in type(arguments.model.get_submodule(owner)).__name__
        row = Parameter(name, owner, p.numel(), p.dim(), False, id(p) in held, True, False, None)
        row = dataclasses.replace(row, zero=not bool(p.detach().any()), normal=normal, fresh=is_fresh(p))
        frozen.append(dataclasses.replace(row, last=owner in last[-1:]))
    return tuple(frozen)


def _regularization(arguments: LoopArguments) -> dict[str, float]:
    groups = [g for o in arguments.optimizers for g in o.param_groups]
    dropouts = [float(m.p) for m in arguments.model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd)]
    return {
        "weight decay": max((float(g.get("weight_decay") or 0.0) for g in groups), default=0.0),
        "dropout": max(dropouts, default=0.0),
    }


def _unchecked(arguments: LoopArguments) -> Iterable[str]:
    if arguments.loss_fn is None:
        yield "Everything that needs the loss of a single batch (experiments, validation during the run): no loss_fn"
    if arguments.train_loader is None or is_iterator(arguments.train_loader):
        yield "Experiments: there is no train_loader that can be read again"
    if arguments.val_loader is None:
        yield "Overfitting and evaluation: no val_loader given"


# The end of the run


def _end_facts(arguments: LoopArguments, run: LoopRun, errors: ProbeErrors) -> dict[str, Any]:
    """What is known at the end of the run only, before anything is put back."""
    facts: dict[str, Any] = {"end_units": _units(arguments, run.on_train, errors)[0]}
    model, loss_fn = arguments.model, arguments.loss_fn
    if loss_fn is not None and run.on_train.batches:
        facts["recalls"] = errors.run(
            "What is found of each class",
            lambda: recalls(model, loss_fn, [*run.on_train.batches, *run.on_val.batches]),
            {},
        )
        facts["renumbered"] = errors.run(
            "Classes by other numbers",
            lambda: renumbered(model, loss_fn, run.on_train.batches, run.on_val.batches),
            None,
        )
        facts["undecided"] = errors.run(
            "Labels that are not told apart",
            lambda: undecided_pair(model, loss_fn, run.on_train.batches, run.on_val.batches),
            None,
        )
        if run.rewards is None and not run.adversaries:
            facts["agreement"] = errors.run(AGREEMENT, lambda: agreement_at_end(model, run.on_train, run.on_val), None)
        level = functools.partial(lost_level, model, loss_fn, run.on_train.batches)
        facts["lost_level"] = errors.run("Whether outputs know the level of their inputs", level, 0.0)
        topic = "Running statistics of batch normalization"
        facts["statistics"] = errors.run(topic, lambda: _statistics(run, model), None)
        facts["penalty_end"] = errors.run(PENALTY, lambda: penalty(model, loss_fn, run.on_train.batches[0]), 0.0)
    facts |= {
        "stopped_at": run.reading.stopped_at,
        "still": errors.run("A copy that gives targets", lambda: _still(run, model), None),
        "bad_end": errors.run(STOPPED, lambda: _bad_end(arguments, run), ""),
    }
    by_mode = run.on_val.losses(training=True), run.on_val.losses(training=False)
    if all(by_mode):
        facts["mode_losses"] = tuple(mean_and_error(losses)[0] for losses in by_mode)
    return facts


def _statistics(run: LoopRun, model: nn.Module) -> tuple[str, str, float | None, float, float] | None:
    """Of the first model that may have others than those of the data: by its momentum, or as an average of weights."""
    fixed = run.on_val if run.on_val.batches else run.on_train
    suspects = {"": model} if any((norm.momentum or 0.0) > ALL_NEW for norm in running_norms(model)) else {}
    for name, other in {**suspects, **run.copies.stale(_held(run))}.items():
        whole, source = run.copies.parts.get(name, (other, "model"))
        losses, new = fixed.losses_of(whole), with_new_statistics(whole, other, fixed, run.on_train)
        if losses and new is not None and math.isfinite(new):
            return name, source, running_norms(other)[0].momentum, statistics.fmean(losses), new
    return None


def _still(run: LoopRun, model: nn.Module) -> tuple[str, float, float] | None:
    """The copy of the model that stays as it was, and the loss at the end with it, and with the model's end in it."""
    name, copy = next(iter(run.still.items()), ("", None))
    known = None if copy is None else run.on_train.mean()
    if copy is None or known is None:
        return None
    before = [p.detach().clone() for p in copy.parameters()]
    try:
        _set_values(copy, model.parameters())
        against = run.on_train.mean()
    finally:
        _set_values(copy, before)
    return None if against is None else (name, known[0], against[0])


def _set_values(model: nn.Module, values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(model.parameters(), values):
            p.data.copy_(value)


def _bad_end(arguments: LoopArguments, run: LoopRun) -> str:
    """What a loop that left a pass early may have seen: a batch that it read last, and of which it told no loss."""
    unused = bool(run.read_at) and run.reading.read > run.read_at[-1]
    if run.reading.stopped_at is not None and unused and run.reading.last is not None:
        loss = FixedBatches(arguments.model, arguments.loss_fn, [run.reading.last]).losses(training=True)
        if loss and not math.isfinite(loss[0]):
            place = f"the batch after {count(run.reading.stopped_at - 1, 'batch', 'batches')} of a pass"
            return f"The loop stopped at {place}, where the loss is {figures(loss[0])}."
    if run.evaluations and not run.on_train.error and not math.isfinite(run.end):
        return f"At the end of the run the loss on fixed training batches is {figures(run.end)}."
    return ""


# The start again


def _severed(arguments: LoopArguments, run: LoopRun) -> DetachedAt | None:
    """Where a term of loss_fn is cut off from all parameters of the optimizers that step on it."""
    model, loss_fn, optimizers = arguments.model, arguments.loss_fn, arguments.optimizers
    if loss_fn is None or not run.on_train.batches:
        return None
    batch = run.on_train.batches[0]
    with preserve_rng(loss_fn), torch.enable_grad():
        signature = graph_signature(loss_root(loss_fn(model, batch)))
    stepping = optimizers_behind(signature, run.updates.signatures, run.updates.stepped)
    members = (p for i in stepping for g in optimizers[i].param_groups for p in g["params"])
    return severed_term(model, loss_fn, batch, {id(p) for p in members if p.requires_grad}, _held(run))


def _cancelled(arguments: LoopArguments, run: LoopRun, given: LossFn | None) -> DetachedAt | None:
    """Where parameters whose gradient was zero in each step that was measured come to a constant. given: the loss that
    was named; of a policy gradient it is no measure of the course, and has a graph all the same."""
    loss_fn = arguments.loss_fn or given
    zero = {name: not any(row[0] for row in rows) for name, rows in run.updates.measured.items() if len(rows) > 2}
    matrices = {name for name, p in arguments.model.named_parameters() if p.dim() > 1}  # biases cancel by right
    names = [name for name, is_zero in zero.items() if is_zero and name in matrices]
    if loss_fn is None or not run.on_train.batches or not 0 < len(names) < len(zero):
        return None
    return cancelled(arguments.model, loss_fn, run.on_train.batches[0], names)


def _experiment_facts(
    arguments: LoopArguments,
    run: LoopRun,
    facts: TrainingRunFacts,
    start: Snapshot,
    errors: ProbeErrors,
    static: StaticFacts,
) -> TrainingRunFacts:
    """The facts with what comes of the run's start when one thing is changed."""
    if arguments.loss_fn is None or not run.losses or arguments.train_loader is None:
        return facts
    updates = run.updates
    read = run.read_at[-1] if len(set(updates.used)) > 1 else 0  # else all of it was read ahead
    clears = updates.waiting[0] > updates.waiting[1]
    known, why = loop_schedule(updates.stepped, run.backward_at, read, arguments.optimizers, clears)
    if known is None and len(arguments.optimizers) > 1:
        return _without_experiments(facts, why)
    schedule = known or LoopSchedule()
    most = min(MOST_STEPS, len(run.saved.batches)) if run.takes_own else MOST_STEPS  # others can't be read again
    steps = schedule.steps_within(most, len(run.losses))
    count = schedule.until(steps - 1) if steps else 0
    batches, draws = _batches(arguments, run, schedule, count)
    if not count or not batches:
        return facts
    order = target_order(arguments.train_loader, batches[: facts.batches_per_pass or steps])
    facts = dataclasses.replace(facts, order=order)
    retrainer = Retrainer(
        arguments.model,
        arguments.optimizers,
        arguments.loss_fn,
        batches,
        start,
        run.rate_at,
        run.on_train,
        run.on_val,
        schedule,
        evaluated=frozenset(m.module for m in facts.modes if m.from_start),
        draws=draws,
        zero=facts.stale.share <= signs.STALE,
        clip=updates.clip_limit()[0],
        until=time.perf_counter() + max(TIMES * run.seconds, LEAST_SECONDS),
    )
    facts = errors.run("How the run begins", lambda: _start_facts(facts, run, retrainer, errors), facts)
    start.restore()
    if facts.repeats or _is_known_to_differ(facts):
        facts = experiments(facts, retrainer, steps, errors, _result_as_is(facts, steps))
        if facts.repeats and all(is_weak(facts, f) for f in name_all(TrainingFacts(static, facts))):
            facts = interventions(facts, retrainer, steps, static, errors)
        if facts.undecided is not None or signs.agrees_by_chance(facts):
            again = functools.partial(without_flips, facts, retrainer, steps, arguments.train_loader)
            facts = errors.run("Whether flips change labels", again, facts)
        if arguments.regularize:
            facts = errors.run("Regularization", lambda: regularizers(facts, retrainer, steps, static), facts)
        return _with_reference(facts, retrainer, steps, errors)
    if known is not None and signs.diverges(facts):  # a state that is carried on matters less than such a rate
        alone = retrainer.train(RetrainChange(), steps)
        if not alone.train < signs.DIVERGES * signs.first_loss(facts):
            facts = experiments(facts, retrainer, steps, errors, alone, only="lr/")
    changes = updates.clip_limit() == (None, True)
    return _without_experiments(facts, why or (CHANGES if changes else UNLIKE))


def _batches(
    arguments: LoopArguments, run: LoopRun, schedule: LoopSchedule, count: int
) -> tuple[list[Any], list[Callable[[], None]]]:
    """The batches that the loop used, and what puts the random numbers of each back: those that it had read last, or,
    where it reads ahead, one after the other. Where they were not saved, the loader is read again."""
    indices = (run.updates.used if schedule.batches_at else [at - 1 for at in run.read_at])[:count]
    batches, draws = run.saved.at(indices)
    if batches and all(a < b for a, b in itertools.pairwise(indices)):
        return batches, draws
    if run.saved.batches and run.reading.read == len(run.saved.batches):
        return run.saved.batches[:count], []
    return batches_of(arguments.train_loader, count, passes=True), []


def _start_facts(facts: TrainingRunFacts, run: LoopRun, retrainer: Retrainer, errors: ProbeErrors) -> TrainingRunFacts:
    """What the start of the run shows, and whether the retrainer repeats it."""
    model, loss_fn, batch = retrainer.model, retrainer.loss_fn, retrainer.batches[0]
    root = run.updates.roots[0] if run.updates.roots else None
    weights = (p.detach().float() for p in model.parameters() if p.requires_grad)
    facts = dataclasses.replace(
        facts,
        repeats=retrainer.repeats(run.losses, root),
        weight_norm=math.sqrt(sum(float(w.square().sum()) for w in weights)),
        start_gradient=errors.run("The size of the first gradient", lambda: _first_gradient_norm(retrainer), 0.0),
        spike=errors.run(
            "Whether one batch makes the loss jump",
            lambda: loss_spike(
                run.losses, run.step_numbers, () if retrainer.schedule.closure else run.backward_at, retrainer
            ),
            None,
        ),
    )
    calls, in_time = errors.run(
        "How gradients grow or fade with depth and time", lambda: gradient_flow(model, loss_fn, batch), ((), ())
    )
    return dataclasses.replace(
        facts,
        layer_calls=calls,
        time_gradients=in_time,
        factor=errors.run("Constants in the forward", lambda: small_factor(model, loss_fn, batch), None),
        penalty=errors.run(PENALTY, lambda: penalty(model, loss_fn, batch), 0.0),
    )


def _first_gradient_norm(retrainer: Retrainer) -> float:
    """The norm of the gradient at the start, on the first batch."""
    try:
        for optimizer in retrainer.optimizers:
            optimizer.zero_grad()
        with no_warnings():
            loss_root(retrainer.loss_fn(retrainer.model, retrainer.batches[0])).backward()
        return norm_of(*retrainer.optimizers)
    finally:
        retrainer.start.restore()


def _is_known_to_differ(facts: TrainingRunFacts) -> bool:
    """A plain loop can't repeat this run, and the reason is known."""
    return (
        facts.stale.share > signs.STALE
        or facts.stale.empty_steps > EMPTY_STEPS
        or facts.scaler is not None
        or any(m.switched_at is not None for m in facts.modes)
    )


def _result_as_is(facts: TrainingRunFacts, steps: int) -> RetrainResult | None:
    """The result of the run itself, where the retrainer does not repeat it (or only up to an evaluation)."""
    if facts.repeats and not facts.set_back or not facts.evaluations:
        return None
    end = next((e for e in facts.evaluations if e.step >= steps), facts.evaluations[-1])
    if facts.set_back:  # the loop may end with averaged weights, which are not to blame
        end = min(facts.evaluations[-2:], key=lambda e: e.train)
    return RetrainResult(list(facts.losses[:steps]), end.train, end.val)


def _with_reference(facts: TrainingRunFacts, retrainer: Retrainer, steps: int, errors: ProbeErrors) -> TrainingRunFacts:
    """A small network of our own tells whether the data can be learned, where the model has settled above that."""
    if retrainer.time_is_up or not facts.repeats or not signs.settled(facts) or signs.loss_left(facts) < SOME:
        return facts
    losses = errors.run(REFERENCE, lambda: reference(retrainer, steps), None)
    if losses is None or retrainer.time_is_up:
        return dataclasses.replace(facts, reference=None)
    # Is it the model that can't, or its optimizer?
    with_adam = [retrainer.train(RetrainChange(adam=rate), steps).train for rate in (RATE, 10 * RATE)]
    first = retrainer.model, retrainer.loss_fn, retrainer.batches[0]
    linear = errors.run("Whether the model is linear", lambda: is_linear(*first), False)
    return dataclasses.replace(facts, reference=losses | {"the model with Adam": min(with_adam)}, linear=linear)


def _without_experiments(facts: TrainingRunFacts, why: str) -> TrainingRunFacts:
    return dataclasses.replace(facts, unchecked=(*facts.unchecked, f"Experiments: {why}"))


# Arguments


CALL = "diagnose(train, model=, optimizer=)"


NO_MODEL = "your code called no model of your variables with gradients: name it, --model NAME or model="


def first_steps(train: Any, given: Mapping[str, Any], names: Mapping[str, Any] | None) -> tuple[LoopArguments, str]:
    """What the first steps of a loop tell of it, and in words what that is; then it is stopped, and everything put back
    but what it has made itself. given: the parts that were named, and "model". Raises ValueError where it calls no
    model with gradients, or its lines don't tell the loss of a batch; whatever it raises itself passes."""
    start, taken, run = LoopStart(names), list[tuple[LoopArguments, str]](), with_callback(train)
    given = {**dict.fromkeys(("model", "optimizer", "loss_fn", "train_loader", "val_loader", "scheduler")), **given}

    def found(what: LoopSubject) -> LoopArguments:
        parts = {kind: value for kind, value in given.items() if kind != "model"}
        model = what.model if given["model"] is None else given["model"]
        arguments = checked_arguments(model, parts, what.part, lambda _: StaticFacts())
        arguments = dataclasses.replace(arguments, names=what.names, start=start)
        taken.append((arguments, str(what)))
        return arguments

    def on_step(steps: int, loss: float) -> None:
        if steps >= (TAKEN if taken[0][0].takes_own else 1):
            raise _EnoughError

    def begun(callback: Any) -> None:
        run(callback)
        raise _EnoughError

    try:
        late_facts(begun, start, found, on_step=on_step)
    except _EnoughError:
        start.restore_rng()
    if not taken:
        raise ValueError(NO_MODEL)
    known = taken[0][0]
    if known.loss_fn is None or known.train_loader is None:
        what = "loss of a batch: name it, --loss-fn NAME" if known.loss_fn is None else "batches"
        raise ValueError(f"the lines of your loop don't tell the {what}")
    return taken[0]


class _EnoughError(BaseException):
    """Ends the user's loop; their `except Exception` does not hold it up."""


def checked_arguments(
    model: Any, given: Mapping[str, Any], usual: Callable[[str], Any], static: Callable[[LoopArguments], StaticFacts]
) -> LoopArguments:
    """The arguments, checked. usual: gives the parts that nobody named. Raises TypeError, quoting what was given."""
    check_model(model, CALL)
    parts = {kind: usual(kind) if value is None else value for kind, value in given.items()}
    optimizers = list(optimizers_of(parts["optimizer"], CALL).values())
    loaders = parts["train_loader"], parts["val_loader"]
    for name, loader in zip(("train_loader", "val_loader"), loaders):
        if loader is not None and not isinstance(loader, Iterable):
            raise TypeError(f"{name} takes something to iterate over, such as a DataLoader; got {loader!r}")
    loss_fn, form = parts["loss_fn"], ""
    if loss_fn is not None:
        check_loss(loss_fn, CALL)
        loss_fn, form = loss_call(loss_fn)
    guessed = given["loss_fn"] is None and form == OUTPUT_FORM
    return LoopArguments(model, optimizers, loss_fn, *loaders, parts["scheduler"], static, guessed=guessed)
