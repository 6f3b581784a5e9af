"""The start of the run, put back, and trained on again with one thing changed.

The retrainer trains by itself: the batches that the user's loop read, in their order, the user's loss function, the
user's optimizers, the learning rates of the run, and its schedule (`LoopSchedule`): which optimizer steps after which
batch. It does not call the user's loop again, which may write files or append to lists. Before anything is concluded
from it, it has to repeat the run as it was (`Retrainer.repeats`). Only a fix that is an edit of the user's own lines is
tried in their loop itself (`EditTrials`), on copies of all that this loop changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.observe.backward import EngineWatch
from nbdebug.observe.snapshot import Snapshot, StepState
from nbdebug.observe.sources import edited_functions
from nbdebug.observe.step_hooks import StepHook, SteppingOptimizers
from nbdebug.observe.validation import names_used_by
from nbdebug.report import Edit, Finding, Where
from nbdebug.text import count, listed
from nbdebug.tools.training.edits import (
    LABEL_CRITERIA,
    MODEL,
    NONE_IGNORED,
    SQUASHING,
    LoopStatements,
    as_relus,
    before_optimizer,
    in_call,
    in_label_loss,
    in_loader,
    in_loop,
    joined,
    setup_text,
    users_files,
    with_all_parameters,
    without_factor,
)
from nbdebug.tools.training.evaluate import FixedBatches, LossFn, loss_root, loss_value, no_warnings, recalls
from nbdebug.tools.training.facts import Experiment, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.one_step import hidden_parameters
from nbdebug.tools.training.rules import name_all, signs, slug
from nbdebug.tools.training.rules.findings import pos_weight, tensor_of
from nbdebug.tools.training.static_facts import DetachedAt, LossCall, StaticFacts, TriedEdit

NEAR = 0.15
"""Relative difference up to which a loss counts as divided by that number: dropout may draw other numbers."""
MORE = 0.05
"""Share of the batches that were read by which there may be more calls of backward. Fewer are no riddle: an evaluation
reads batches too."""
ALIKE = 0.02
"""The retrainer repeats the run where the first losses agree to this (relative); other threads and kernels change the
sixth digit, a different batch or rate the first."""
FIRST = 12
"""Losses compared for that."""

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda losses: losses[-1],
    "first": lambda losses: losses[0],
    "mean": statistics.fmean,
    "sum": sum,
}
"""What a loop may pass to its callback of several batches (or of several calls of a closure)."""

Correction = Callable[[Any, Any, Any], float]
"""What is subtracted from a batch's loss: (model, loss_fn, batch) → a number."""


# The schedule of a loop


@dataclasses.dataclass(frozen=True)
class LoopSchedule:
    """stepped: for each batch, the optimizers by position that step after its backward (empty: all, after each).
    batches_at: for each loss of the callback, the batches by then (empty: one each). share: what a loss is multiplied
    by before its backward. clears_always: gradients are cleared before each batch, whichever optimizer has stepped;
    else those of the optimizers that have. closure: the optimizer calls the loss itself. reduce: one of REDUCTIONS;
    shared: the callback's loss is multiplied by the share, too."""

    stepped: tuple[tuple[int, ...], ...] = ()
    batches_at: tuple[int, ...] = ()
    share: float = 1.0
    clears_always: bool = False
    closure: bool = False
    reduce: str = "last"
    shared: bool = False

    def until(self, step: int) -> int:
        """How many batches there are by the end of this step, counted from 0."""
        return self.batches_at[min(step, len(self.batches_at) - 1)] if self.batches_at else step + 1

    def steps_within(self, batches: int, steps: int) -> int:
        """How many of these steps fit into so many batches."""
        return sum(count <= batches for count in self.batches_at[:steps]) if self.batches_at else min(batches, steps)

    def stepping(self, batch: int, optimizers: int) -> Sequence[int]:
        """The optimizers that step after this batch."""
        return self.stepped[batch] if batch < len(self.stepped) else range(optimizers)

    @property
    def every(self) -> int:
        """Batches for one step of the optimizer that steps most seldom, as a rule."""
        gaps = []
        for optimizer in {o for row in self.stepped for o in row}:
            at = [i for i, row in enumerate(self.stepped) if optimizer in row]
            gaps += [Counter(b - a for a, b in zip([-1, *at], at)).most_common(1)[0][0]] if at else []
        return max(gaps, default=1)

    def loss(self, parts: Sequence[float]) -> float:
        """What the loop would pass to its callback, of the losses of each batch (or call) since the last time."""
        return REDUCTIONS[self.reduce](parts) * (self.share if self.shared else 1.0)


def loop_schedule(
    stepped: Sequence[Sequence[int]], backward_at: Sequence[int], read: int, optimizers: Sequence[Any], clears: bool
) -> tuple[LoopSchedule | None, str]:
    """(the schedule, "") or (None, why this loop can't be repeated).

    stepped: for each call of backward, the optimizers that stepped after it; backward_at: calls of backward by each
    loss of the callback; read: batches that were read by then (0: not known); clears: see `clears_always`."""
    if any(wants_closure(o) for o in optimizers):
        if len(optimizers) > 1:
            return None, (
                "one of several optimizers takes a closure: only your own loop knows its loss, and when the other "
                "optimizers step"
            )
        return LoopSchedule(closure=True), ""
    calls = backward_at[-1] if backward_at else 0
    if not calls:
        return LoopSchedule(), ""  # backward was called where nobody could see it
    if read and calls - read > 2 + MORE * read:
        several = (
            "several optimizers step on losses of their own"
            if len(optimizers) > 1
            else "a step is more than one batch and one backward"
        )
        return None, (
            f"your loop calls backward {calls:,} times for {read:,} batches: {several}, which only your own loop can do"
        )
    plain = tuple(range(len(optimizers)))
    one_each = list(backward_at) == list(range(1, len(backward_at) + 1))
    if one_each and all(tuple(sorted(row)) == plain for row in stepped[:calls]):
        return LoopSchedule(), ""
    if any(b <= a for a, b in zip([0, *backward_at], backward_at)):
        return None, "your loop passes more losses to its callback than it calls backward"
    rows = tuple(tuple(row) for row in stepped[:calls])
    return LoopSchedule(rows, tuple(backward_at), clears_always=clears), ""


def wants_closure(optimizer: Any) -> bool:
    """LBFGS and the like, which call the loss themselves."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def loss_share(root: float | None, loss: float, every: int) -> float:
    """What a loss was multiplied by, where backward got `root`: 1, or one over the batches of a step."""
    if root is None or not loss or every < 2:
        return 1.0
    return 1 / every if abs(root / loss * every - 1) <= NEAR else 1.0


# Retraining


@dataclasses.dataclass(frozen=True)
class RetrainChange:
    """What is changed. rate: factor on every learning rate; factor: another, of the
    step; level: one rate for all steps, the largest of the run,
    or `to`; zero: whether gradients are cleared where an optimizer has stepped (None: as the user's loop does);
    clip: largest gradient norm; decay: factor on weight decay; unfreeze: names of parameters; prepare: called once
    on the model; without: batches that are left out; batches: others in their place; loss_fn: another loss, with
    which the ends are `measured` too; training: all modules in train mode; adam: this rate, with a new Adam in
    place of the optimizers."""

    rate: float = 1.0
    factor: Callable[[int], float] | None = None
    level: bool = False
    to: float | None = None
    zero: bool | None = None
    training: bool = False
    adam: float | None = None
    clip: float | None = None
    decay: float = 1.0
    unfreeze: tuple[str, ...] = ()
    prepare: Callable[[nn.Module], None] | None = None
    without: frozenset[int] = frozenset()
    batches: Sequence[Any] | None = None
    loss_fn: LossFn | None = None
    measured: bool = False


@dataclasses.dataclass
class RetrainResult:
    """losses: step by step, up to the first that is not finite; train, val: mean losses afterwards, in eval mode;
    at_end: what was measured with the weights of the end."""

    losses: list[float]
    train: float
    val: float | None
    at_end: list[float] = dataclasses.field(default_factory=list)

    def against(self, as_is: RetrainResult, name: str) -> Experiment:
        """This result beside that of the run as it is."""
        losses = tuple(as_is.losses), tuple(self.losses)
        return Experiment(name, *losses, as_is.train, self.train, as_is.val, self.val)


@dataclasses.dataclass(eq=False)
class Retrainer:
    """Trains from the start of the run. start: the state to begin at; rates: the learning rates of all groups at each
    step; batches: those of the run, in order. A step is as much as the user's loop does for one loss of its callback.
    until: when the time for experiments is up. evaluated: modules that the user keeps in eval mode while training;
    zero: False where the user's loop clears no gradients; clip: the largest gradient norm that it lets pass; draws: for
    each batch, what puts its random numbers back."""

    model: nn.Module
    optimizers: list[Any]
    loss_fn: LossFn
    batches: Sequence[Any]
    start: Snapshot
    rates: Sequence[Sequence[float]]
    on_train: FixedBatches
    on_val: FixedBatches
    schedule: LoopSchedule = LoopSchedule()
    evaluated: frozenset[str] = frozenset()
    draws: Sequence[Callable[[], None]] = ()
    zero: bool = True
    clip: float | None = None
    until: float = math.inf
    _broke: bool = False

    @property
    def time_is_up(self) -> bool:
        return time.perf_counter() > self.until

    def repeats(self, losses: Sequence[float], root: float | None = None) -> bool:
        """Whether the retrainer, changing nothing, gets the losses of the user's loop. root: the loss of its first
        backward; by it and by the losses, the schedule learns what losses are divided by, and how the loop reduces
        them."""
        first_bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        count = min(FIRST, first_bad)
        if count < 1 or len(losses) < 2:
            return False
        first = self._parts(1)
        if not first:
            return False
        share = loss_share(root, first[0][0], self.schedule.every)
        self.schedule = dataclasses.replace(self.schedule, share=share)
        parts = self._parts(count)
        if len(parts) < count:
            return False
        for shared in (False, True)[: 1 + (share != 1)]:
            for reduce in REDUCTIONS:
                schedule = dataclasses.replace(self.schedule, reduce=reduce, shared=shared)
                pairs = ((schedule.loss(part), loss) for part, loss in zip(parts, losses))
                if all(math.isclose(*pair, rel_tol=ALIKE, abs_tol=1e-8 * ALIKE) for pair in pairs):
                    self.schedule = schedule
                    return True
        return False

    def _parts(self, count: int) -> list[list[float]]:
        """The losses of so many steps, each with all its parts; the state is put back afterwards."""
        self.start.restore()
        try:
            with torch.enable_grad(), no_warnings():
                return list(self._steps(RetrainChange(), count))
        finally:
            self.start.restore()

    def train(
        self,
        change: RetrainChange,
        steps: int,
        less: Correction | None = None,
        at_end: Callable[[], list[float]] | None = None,
    ) -> RetrainResult:
        """Train from the start with this change; the state is put back to the start before and after. less: subtracted
        from a batch's loss when it is evaluated afterwards; at_end: measured with the weights of the end."""
        self.start.restore()
        fixed = (self.on_train, self.on_val)
        try:
            with torch.enable_grad(), no_warnings():
                losses = [self.schedule.loss(parts) for parts in self._steps(change, steps)]
            for batches in fixed:
                batches.loss_fn = change.loss_fn if change.measured else self.loss_fn
            train, val = self._mean(self.on_train, less), self._mean(self.on_val, less)
            end = at_end() if at_end is not None else []
            if self._broke or train is None or not math.isfinite(train):
                train = math.inf
            return RetrainResult(losses, train, val, end)
        finally:
            for batches in fixed:
                batches.loss_fn = self.loss_fn
            self.start.restore()

    def _mean(self, batches: FixedBatches, less: Correction | None) -> float | None:
        losses = batches.losses()
        if less is not None:
            losses = [loss - less(self.model, self.loss_fn, batch) for loss, batch in zip(losses, batches.batches)]
        return sum(losses) / len(losses) if losses else None

    def _steps(self, change: RetrainChange, steps: int) -> Iterator[list[float]]:
        """Train, and give the losses of each step (of its batches, or of the calls of a closure), up to the first that
        is not finite."""
        self._broke = False
        self._prepare(change)
        batches = self.batches if change.batches is None else change.batches
        optimizers = self.optimizers
        if change.adam is not None:
            members = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
            optimizers = [torch.optim.Adam(members, change.adam)]
        stepper = _BatchStepper(self, change, optimizers)
        for step in range(steps):
            if change.adam is None:
                self._set_rates(change, step)
            parts: list[float] = []
            for number in range(self.schedule.until(step - 1) if step else 0, self.schedule.until(step)):
                if number not in change.without:
                    parts += stepper.losses(number, batches[number % len(batches)])
                broke = next((i for i, part in enumerate(parts) if not math.isfinite(part)), None)
                if broke is not None:
                    self._broke = True
                    yield from [parts[:broke]] * bool(broke)
                    return
            if parts:
                yield parts

    def _prepare(self, change: RetrainChange) -> None:
        for name, module in self.model.named_modules():
            module.training = name not in self.evaluated or change.training
        if change.prepare is not None:
            change.prepare(self.model)
        for name in change.unfreeze:
            parameter = self.model.get_parameter(name)
            parameter.requires_grad_(True)
            if all(parameter is not p for o in self.optimizers for g in o.param_groups for p in g["params"]):
                self.optimizers[0].add_param_group({"params": [parameter]})
        if change.decay != 1.0:
            for group in (g for o in self.optimizers for g in o.param_groups):
                group["weight_decay"] = group.get("weight_decay", 0.0) * change.decay

    def _set_rates(self, change: RetrainChange, step: int) -> None:
        groups = [g for o in self.optimizers for g in o.param_groups]
        rates: Sequence[float]
        if change.level and self.rates:
            rates = [max(column) for column in zip(*self.rates)]
        else:
            rates = self.rates[min(step, len(self.rates) - 1)] if self.rates else [float(g["lr"]) for g in groups]
        factor = change.rate * (1.0 if change.factor is None else change.factor(step))
        for group, rate in zip(groups, rates):
            group["lr"] = (rate if change.to is None else change.to) * factor


class _BatchStepper:
    """One batch after the other, with the optimizers that step after it."""

    def __init__(self, retrainer: Retrainer, change: RetrainChange, optimizers: list[Any]):
        self.optimizers, self.model = optimizers, retrainer.model
        self.loss_fn = change.loss_fn or retrainer.loss_fn
        self.clip = retrainer.clip if change.clip is None else change.clip
        self.zero = retrainer.zero if change.zero is None else change.zero
        self.schedule, self.draws = retrainer.schedule, retrainer.draws
        self.closure = self.schedule.closure and change.adam is None
        self._used = set(range(len(optimizers)))  # those whose gradients have done their work

    def losses(self, number: int, batch: Any) -> list[float]:
        """The loss of the batch; several where an optimizer calls a closure. There is no step where it is not
        finite."""
        losses: list[float] = []
        if number < len(self.draws):
            self.draws[number]()

        def backward() -> Any:
            self._clear()
            loss = loss_root(self.loss_fn(self.model, batch))
            losses.append(loss_value(loss))
            if math.isfinite(losses[-1]):
                (loss if self.schedule.share == 1 else loss * self.schedule.share).backward()
                if self.closure:
                    self._clip_gradients(self.optimizers)
            return loss

        if self.closure:
            self.optimizers[0].step(backward)
            self._used = {0}
            return losses
        backward()
        if not math.isfinite(losses[-1]):
            return losses
        alone = len(self.optimizers) == 1 and not self.schedule.stepped
        positions = [0] if alone else self.schedule.stepping(number, len(self.optimizers))
        stepping = [i for i in positions if i < len(self.optimizers)]
        self._clip_gradients([self.optimizers[i] for i in stepping])
        for i in stepping:
            self.optimizers[i].step()
            self._used.add(i)
        return losses

    def _clear(self) -> None:
        if not self.zero:
            return
        for i, optimizer in enumerate(self.optimizers):
            if i in self._used or self.schedule.clears_always or self.closure:
                optimizer.zero_grad()
        self._used.clear()

    def _clip_gradients(self, optimizers: list[Any]) -> None:
        """Bring the gradients of all of these together to the largest norm that is allowed."""
        if self.clip is not None and optimizers:
            members = [p for o in optimizers for g in o.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(members, self.clip)


# Edits of what a run shows, tried

LONGEST_LOOP = 60.0
"""Seconds of a loop that runs once more, with a fix in it."""


AS_RELUS = """for name, module in list(model.named_modules()):
    if name and type(module).__name__ in {}:
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], torch.nn.ReLU())"""
"""What ReLUs in the place of other activations make of the model."""
MORE_FOUND = 0.1
"""By how much the mean recall of the classes rises: to answer always the same leaves it at one over their number."""
FAR_ABOVE = 3.0
"""Times the loss of an answer that knows nothing: a run that ends above it is not cured."""


@dataclasses.dataclass
class EditTrials:
    """The fixes of what the rules name, as edits of the user's own lines: of the loop, which runs again as edited; or
    of a call that made the optimizer or takes the labels, whose argument an experiment has set. arguments, run: of
    diagnose, and its watched run; severed: where a term of the loss is cut off, as things stand."""

    train: Callable[..., Any]
    arguments: Any
    run: Any
    facts: TrainingRunFacts
    static: StaticFacts
    start: Snapshot
    restore_rng: Callable[[], None]
    severed: Callable[[], DetachedAt | None]

    def all(self) -> dict[str, TriedEdit]:
        tried = {}
        for finding in name_all(TrainingFacts(self.static, self.facts)):
            name = slug(finding)
            ways = (self._of_call, self._of_loader, self._of_factor, self._of_loop, self._of_cut, self._of_labels)
            edit = next((edit for way in ways if (edit := way(name)) is not None), None) or self._of_setup(finding)
            if edit is not None:
                tried[name] = edit
        return tried

    def with_one_optimizer(self) -> TrainingRunFacts:
        """The facts with your loop run once more, each optimizer that is made anew with the state of the last."""
        if not signs.made_anew(self.facts):
            return self.facts
        kept, facts = SteppingOptimizers(keep=True), self.facts
        hook = StepHook(kept.note)
        try:
            end = self._rerun(None)
        finally:
            hook.remove()
        last = facts.evaluations[-1] if facts.evaluations else None
        if end is None or last is None:
            return facts
        tried = Experiment("one optimizer", facts.losses, tuple(end[0]), last.train, end[1], last.val, end[2])
        return dataclasses.replace(facts, experiments={**facts.experiments, tried.what: tried})

    @property
    def _names(self) -> dict[str, Any]:
        return {**names_used_by(self.train), **self.run.names, **self.arguments.names}

    def _of_loop(self, name: str) -> TriedEdit | None:
        """The first edit that helps, else the first that runs."""
        arguments, first = self.arguments, None
        given = arguments.model, arguments.optimizers, arguments.scheduler
        accumulation = (self.facts.accumulation or (1, 1.0))[:2]
        for edit in in_loop(name, LoopStatements(self._names, *given, self.facts.places, accumulation)):
            end = self._rerun(edit)
            tried = None if end is None else self._judged(name, edit, *end)
            if tried is not None and tried.verified:
                return tried
            first = first or tried
        return first

    def _of_loader(self, name: str) -> TriedEdit | None:
        """Shuffled, as in the experiment."""
        tried = self.facts.experiments.get("shuffled") if name == "unshuffled-data" else None
        if tried is None or not signs.helps(tried):
            return None
        for edit in in_loader(self._files(), self._names, self.arguments.train_loader, self.train):
            numbers = _before_and_after(tried.end_as_is, tried.end_changed, tried.val_as_is, tried.val_changed)
            return TriedEdit(edit, True, _from_the_start(len(tried.changed)), numbers)
        return None

    def _of_setup(self, finding: Finding) -> TriedEdit | None:
        """Lines before the optimizer is made: the model runs through them, as they are, and then through your loop."""
        arguments = self.arguments
        given = self._files(), self._names, arguments.model, arguments.optimizers, self.train
        text = setup_text(finding, arguments.model)
        edits: Iterator[Edit] = iter(())
        if slug(finding) == "vanishing-gradients" and signs.helps(self.facts.experiments.get("relu")):
            kinds = sorted({type(m).__name__ for m in arguments.model.modules()} & set(SQUASHING))
            text, edits = AS_RELUS.format(tuple(kinds)), as_relus(given[0], kinds)
        elif slug(finding) == "parameters-not-in-optimizer":
            text, edits = "pass", with_all_parameters(*given, str(finding.evidence["where"][0]))
        elif text:
            edits = before_optimizer(*given, text)
        for edit in edits if arguments.start is None and arguments.optimizers else ():
            end = self._rerun(edit, text)
            tried = None if end is None else self._judged(slug(finding), edit, *end)
            if tried is not None and tried.verified:
                return tried
        return None

    def _judged(self, name: str, edit: Edit, losses: list[float], train: float, val: float | None) -> TriedEdit:
        facts, before, first = self.facts, signs.last_loss(self.facts), abs(signs.first_loss(self.facts))
        # with dropout, or shorter steps, the loss need not be lower
        learns = name in ("eval-mode-in-training", "train-mode-in-eval", "accumulation-scale")
        learns |= name == "scheduler-order" and facts.schedule is not None and facts.schedule.before_first
        most = first if learns else min(signs.BETTER * before, first)
        if name == "exploding-gradients" and self.static.guess:  # less than before is no cure yet
            most = min(most, FAR_ABOVE * self.static.guess)
        well = all(map(math.isfinite, [train, *losses]))
        last = facts.evaluations[-1].val if facts.evaluations else None
        numbers = _before_and_after(before, train if well else math.nan, last, val)
        return TriedEdit(edit, well and train <= most, f"your whole loop, {count(len(losses), 'step')}", numbers)

    def _rerun(
        self, edit: Edit | None, setup: str = "", at_end: Callable[[nn.Module], None] = lambda model: None
    ) -> tuple[list[float], float, float | None] | None:
        """The losses of the user's loop as edited (None: as it is), and that on fixed batches at the end; None where it
        can't run again. setup: the lines of the edit, where these stand before the loop; at_end: called at its end."""
        if self.run.seconds > LONGEST_LOOP:
            return None
        arguments = self.arguments
        optimizers = {str(i): optimizer for i, optimizer in enumerate(arguments.optimizers)}
        state = StepState.take(self.train, {"model": arguments.model}, optimizers)
        if state.why_not:
            return None
        losses: list[float] = []
        roots = EngineWatch(lambda call: losses.append(float(call.roots[0].detach().sum())), lambda call, result: None)
        made: list[Any] = []
        waiting = contextlib.nullcontext() if arguments.start is None else arguments.start.waiting(made.append)
        try:
            (arguments.start or self).restore_rng()
            changed = contextlib.nullcontext(1) if setup or edit is None else edited_functions(edit)
            with changed as exchanged, no_warnings(), contextlib.redirect_stdout(io.StringIO()), waiting:
                self._set_up(setup)
                if not exchanged:
                    return None
                if not self.run.has_callback:
                    roots.attach()
                self.train(lambda step, loss, *more, **named: losses.append(float(loss)))
            roots.detach()
            model = made[0].model if made else arguments.model
            end, val = self.run.on_train.losses_of(model), self.run.on_val.losses_of(model)
            at_end(model)
            return (losses, statistics.fmean(end), statistics.fmean(val) if val else None) if end and losses else None
        except Exception:  # the edit is no fix here
            return None
        finally:
            roots.detach()
            state.leave()
            self.start.restore()
            self.restore_rng()

    def _set_up(self, text: str) -> None:
        """Run lines of ours that stand before the optimizer is made; it would hold what they let be trained."""
        if text:
            exec(text, {"torch": torch, MODEL: self.arguments.model})
            model, hidden = self.arguments.model, hidden_parameters(self.arguments.model) if text == "pass" else []
            held = {id(p) for o in self.arguments.optimizers for g in o.param_groups for p in g["params"]}
            new = [p for p in (*model.parameters(), *(p for _, p in hidden)) if p.requires_grad and id(p) not in held]
            if new:
                self.arguments.optimizers[0].add_param_group({"params": new})

    def _of_factor(self, name: str) -> TriedEdit | None:
        """A small factor left out, as in the experiment."""
        tried, small = self.facts.experiments.get("factor 1"), self.facts.factor
        if name != "vanishing-gradients" or tried is None or small is None or not signs.helps(tried):
            return None
        for edit in without_factor(self._files(), small.where, small.factor):
            numbers = _before_and_after(tried.end_as_is, tried.end_changed, tried.val_as_is, tried.val_changed)
            return TriedEdit(edit, True, _from_the_start(len(tried.changed)), numbers)
        return None

    def _of_cut(self, name: str) -> TriedEdit | None:
        """The gradient of a part of the loss arrives once the cut is out."""
        cut = self.facts.severed if name == "detached-graph" else None
        for edit in joined(cut) if cut is not None else ():
            with edited_functions(edit) as exchanged:
                left = self.severed() if exchanged else cut
            self.start.restore()
            if left is None and cut is not None:
                arrives = {"gradient": f"arrives at {count(len(cut.parameters), 'tensor')}: {listed(cut.parameters)}"}
                return TriedEdit(edit, True, "the loss of one batch", arrives)
        return None

    def _of_labels(self, name: str) -> TriedEdit | None:
        """The weights of the experiment, or a label that does not count, as arguments of the loss."""
        weighting, calls = self.facts.weighting, self.static.loss_calls
        on_cpu = all(p.device.type == "cpu" for p in self.arguments.model.parameters())
        ignored = self.facts.ignored if name == "class-ignored" else None
        labelled = [call for call in calls if call.op in LABEL_CRITERIA]
        if ignored is not None and len(labelled) == 1:
            for edit in in_label_loss(self._files(), labelled[0], "ignore_index", NONE_IGNORED):
                numbers = {"F1 of the others": ignored.others[0], "with the fix": ignored.others[1]}
                return TriedEdit(edit, True, _from_the_start(ignored.steps), numbers)
        if name != "class-imbalance" or len(calls) != 1 or not on_cpu:
            return None
        if weighting is None:
            return self._of_missed_classes(calls[0])
        binary = calls[0].op == "binary_cross_entropy_with_logits"
        argument = ("weight", tensor_of(weighting.weights))
        if weighting.left_out:
            argument = ("ignore_index", weighting.common)
        elif weighting.inverse:
            argument = ("pos_weight" if binary else "weight", "1 / {}")
        elif binary:
            argument = ("pos_weight", tensor_of([pos_weight(weighting.weights)]))
        for edit in in_label_loss(self._files(), calls[0], *argument):
            numbers = {"score of the other classes": weighting.before, "with the fix": weighting.after}
            return TriedEdit(edit, True, _from_the_start(weighting.steps), numbers)
        return None

    def _of_missed_classes(self, call: LossCall) -> TriedEdit | None:
        """Classes that the run hardly finds, weighted by how rare they are, in your own loop: they are found then."""
        labels, found = self.static.labels, self.facts.recalls
        counts = {k: n for k, n in labels.counts.items() if n} if labels is not None else {}
        loss_fn, run = self.arguments.loss_fn, self.run
        if len(counts) < 2 or set(counts) != set(map(str, range(len(counts)))) or not found or loss_fn is None:
            return None
        total = sum(counts.values())
        weights = [f"{total / (len(counts) * counts[str(k)]):.3g}" for k in range(len(counts))]
        argument = ("weight", tensor_of(weights))
        if call.op == "binary_cross_entropy_with_logits":
            argument = ("pos_weight", tensor_of([pos_weight(weights)]))
        ends: list[Mapping[str, tuple[int, int]]] = []
        batches = [*run.on_train.batches, *run.on_val.batches]
        for edit in in_label_loss(self._files(), call, *argument):
            again = self._rerun(edit, at_end=lambda model: ends.append(recalls(model, loss_fn, batches)))
            before, after = _mean_recall(found), _mean_recall(ends[0]) if again is not None and ends else 0.0
            if again is not None and after > before + MORE_FOUND:
                numbers = {"mean share found of a class": before, "with the fix": after}
                return TriedEdit(edit, True, f"your whole loop, {count(len(again[0]), 'step')}", numbers)
        return None

    def _files(self) -> list[str]:
        known = self.facts.places.get("backward", Where()).file
        return users_files(self.arguments.model, self.train, self.arguments.loss_fn, file=known)

    def _of_call(self, name: str) -> TriedEdit | None:
        """Learning rate and weight decay."""
        start = {"lr-too-high": "lr/", "lr-too-low": "lr*", "over-regularized": "no weight decay"}.get(name)
        tried = {n: e for n, e in self.facts.experiments.items() if start is not None and n.startswith(start)}
        best = min(tried, key=lambda n: tried[n].end_changed, default=None)
        optimizers = self.arguments.optimizers
        limit = signs.least_gain(self.facts) if start == "lr*" else signs.BETTER
        if best is None or not optimizers or not signs.helps(tried[best], limit):
            return None
        argument, factor = "weight_decay", 0.0
        if best.startswith("lr"):
            argument, factor = "lr", 1 / float(best[3:]) if best[2] == "/" else float(best[3:])
        groups = [g for o in optimizers for g in o.param_groups]
        old = {float(g.get("initial_lr", g["lr"]) if argument == "lr" else g[argument]) for g in groups}
        if len(old) != 1 or any("max_lr" in group for group in groups):
            return None
        before, kinds, e = old.pop(), [type(o).__name__ for o in optimizers], tried[best]
        for edit in in_call(self._files(), kinds, argument, before, f"{before * factor:g}"):
            numbers = _before_and_after(e.end_as_is, e.end_changed, e.val_as_is, e.val_changed)
            return TriedEdit(edit, True, _from_the_start(len(e.changed)), numbers)
        return None


def _mean_recall(found: Mapping[str, tuple[int, int]]) -> float:
    return statistics.fmean(hits / there for there, hits in found.values() if there) if found else 0.0


def _before_and_after(before: float, after: float, val: float | None, val_after: float | None) -> dict[str, Any]:
    numbers = {"loss as it is": before, "loss with the fix": after}
    if val is not None and val_after is not None:
        numbers |= {"validation as it is": val, "validation with the fix": val_after}
    return {name: value if math.isfinite(value) else "not finite" for name, value in numbers.items()}


def _from_the_start(steps: int) -> str:
    return f"{count(steps, 'step')} from the start of your run"
