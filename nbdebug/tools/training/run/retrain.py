"""The start of the run, put back, and trained on again with one thing changed.

The bench trains by itself: the batches that the user's loop read, in their order, the user's loss function, the user's
optimizers, the learning rates that were seen, and the routine (`Routine`): which optimizer steps after which batch. It
does not call the user's loop again, which may write files or append to lists. Before anything is concluded from it, it
is asked to repeat the run as it was (`Bench.repeats`).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.observe.snapshot import Snapshot
from nbdebug.tools.training.facts import Experiment
from nbdebug.tools.training.run.data import quiet
from nbdebug.tools.training.run.evaluate import FixedBatches, loss_root, loss_value

NEAR = 0.15
"""Relative difference up to which a loss counts as divided by that number: dropout may draw otherwise."""
MORE = 0.05
"""Share of the batches that were read by which there may be more calls of backward. Fewer are no riddle: an evaluation
reads batches too."""

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda losses: losses[-1],
    "first": lambda losses: losses[0],
    "mean": statistics.fmean,
    "sum": sum,
}
"""What a loop may tell of several batches (or of several calls of a closure)."""


@dataclasses.dataclass(frozen=True)
class LoopSchedule:
    """stepped: for each batch, the optimizers by position that step behind its backward (empty: all, after each).
    told: for each loss that was told, the batches by then (empty: one each). share: what a loss is multiplied by before
    its backward. emptied: gradients are cleared before each batch, whoever has stepped; else where one has stepped.
    closure: the optimizer calls the loss itself. reduce: one of REDUCTIONS, and whether the share is in it."""

    stepped: tuple[tuple[int, ...], ...] = ()
    told: tuple[int, ...] = ()
    share: float = 1.0
    emptied: bool = False
    closure: bool = False
    reduce: str = "last"
    shared: bool = False

    def until(self, step: int) -> int:
        """How many batches there are by the end of this step, counted from 0."""
        return self.told[min(step, len(self.told) - 1)] if self.told else step + 1

    def steps_within(self, most: int, told: int) -> int:
        """How many losses are told of at most so many batches; `told` at most."""
        return sum(count <= most for count in self.told[:told]) if self.told else min(most, told)

    def stepping(self, batch: int, optimizers: int) -> Sequence[int]:
        """The optimizers that step behind this batch."""
        return self.stepped[batch] if batch < len(self.stepped) else range(optimizers)

    @property
    def every(self) -> int:
        """Batches for one step of the optimizer that steps most seldom, as a rule."""
        gaps = []
        for optimizer in {o for row in self.stepped for o in row}:
            at = [i for i, row in enumerate(self.stepped) if optimizer in row]
            gaps += [Counter(b - a for a, b in zip([-1, *at], at)).most_common(1)[0][0]] if at else []
        return max(gaps, default=1)

    def tell(self, losses: Sequence[float]) -> float:
        """What the loop would tell of these losses, one of each batch (or call) since it last told one."""
        return REDUCTIONS[self.reduce](losses) * (self.share if self.shared else 1.0)


def routine_of(
    stepped: Sequence[Sequence[int]], told: Sequence[int], read: int, optimizers: Sequence[Any], emptied: bool
) -> tuple[LoopSchedule | None, str]:
    """(the routine, "") or (None, why this loop can't be done again).

    stepped: for each call of backward, the optimizers that stepped behind it; told: calls of backward by each loss that
    was told; read: batches that were read by then (0: not known)."""
    if any(wants_closure(o) for o in optimizers):
        if len(optimizers) > 1:
            return None, (
                "one of several optimizers takes a closure: which loss it is given, and when the others "
                "step, only your own loop knows"
            )
        return LoopSchedule(closure=True), ""
    calls = told[-1] if told else 0
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
    if list(told) == list(range(1, len(told) + 1)) and all(tuple(sorted(row)) == plain for row in stepped[:calls]):
        return LoopSchedule(), ""
    if any(b <= a for a, b in zip([0, *told], told)):
        return None, "your loop tells its callback more losses than it calls backward"
    return LoopSchedule(tuple(tuple(row) for row in stepped[:calls]), tuple(told), emptied=emptied), ""


def wants_closure(optimizer: Any) -> bool:
    """LBFGS and the like, which call the loss themselves."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def share_of(root: float | None, loss: float, every: int) -> float:
    """What a loss was multiplied by, where `root` is what backward was given: 1, or one over the batches of a step."""
    if root is None or not loss or every < 2:
        return 1.0
    return 1 / every if abs(root / loss * every - 1) <= NEAR else 1.0


ALIKE = 0.02
"""The bench repeats the run where the first losses agree to this (relative); other threads and kernels move the sixth
digit, a different batch or rate the first."""
FIRST = 12
"""Losses compared for that."""


Less = Callable[[Any, Any, Any], float]


@dataclasses.dataclass(frozen=True)
class RetrainChange:
    """What is done otherwise. rate: factor on every learning rate; level: one rate all along, the largest that was
    seen, or `to`; zero: whether gradients are cleared where an optimizer has stepped (None: as the user's loop does);
    clip: largest gradient norm; decay: factor on weight decay; unfreeze: names of parameters; prepare: called once on
    the model; without: batches that are left out; batches: others in their place; loss_fn: another loss; training: all
    modules in train mode; adam: this rate, with a fresh Adam in place of the optimizers."""

    rate: float = 1.0
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
    loss_fn: Callable[[Any, Any], Any] | None = None


@dataclasses.dataclass
class RetrainResult:
    """losses: step by step, up to the first that is not finite; train, val: mean losses afterwards, in eval mode."""

    losses: list[float]
    train: float
    val: float | None
    asked: list[float] = dataclasses.field(default_factory=list)


class Retrainer:
    """Trains from the start of the run. start: the state to begin at; rates: the learning rates of all groups at each
    step; batches: those of the run, in order. A step is as much as the user's loop does for one loss that it tells.
    until: when the time for trials is up. evaluated: modules that the user keeps in eval mode while training; zero:
    False where the user's loop clears no gradients; clip: the largest gradient norm that it lets pass; draws: for each
    batch, what puts the random numbers back that it met."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Any],
        loss_fn: Callable[[Any, Any], Any],
        batches: list[Any],
        start: Snapshot,
        rates: Sequence[Sequence[float]],
        on_train: FixedBatches,
        on_val: FixedBatches,
        routine: LoopSchedule | None = None,
    ):
        self.model, self.optimizers, self.loss_fn, self.batches = model, optimizers, loss_fn, batches
        self.routine = routine or LoopSchedule()
        self.start, self.on_train, self.on_val = start, on_train, on_val
        self.rates = [list(r) for r in rates]
        self.evaluated: frozenset[str] = frozenset()
        self.draws: Sequence[Callable[[], None]] = ()
        self.zero = True
        self.clip: float | None = None
        self._broke = False
        self.until = math.inf
        self.spent = 0.0
        self._done: dict[tuple[RetrainChange, int], RetrainResult] = {}

    @property
    def time_is_up(self) -> bool:
        return time.perf_counter() > self.until

    def repeats(self, losses: Sequence[float], root: float | None = None) -> bool:
        """Whether the bench, changing nothing, gets the losses that the user's loop got. root: what its first backward
        was given; by it and by what was told, the routine learns what losses are divided by, and how they are told."""
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        count = min(FIRST, bad)
        if count < 1 or len(losses) < 2:
            return False
        first = self._parts(1)
        if not first:
            return False
        every = self.routine.every
        self.routine = dataclasses.replace(self.routine, share=share_of(root, first[0][0], every))
        mine = self._parts(count)
        if len(mine) < count:
            return False
        for reduce, shared in ((r, s) for s in (False, True)[: 1 + (self.routine.share != 1)] for r in REDUCTIONS):
            routine = dataclasses.replace(self.routine, reduce=reduce, shared=shared)
            if all(_alike(routine.tell(part), told) for part, told in zip(mine, losses)):
                self.routine = routine
                return True
        return False

    def _parts(self, count: int) -> list[list[float]]:
        """The losses of so many steps, each with all its parts; the state is put back afterwards."""
        self.start.restore()
        try:
            with torch.enable_grad(), quiet():
                return list(self._steps(RetrainChange(), count))
        finally:
            self.start.restore()

    def train(
        self, change: RetrainChange, steps: int, less: Less | None = None, ask: Callable[[], list[float]] | None = None
    ) -> RetrainResult:
        """Train from the start with this change; the state is put back to the start before and after. less: what is
        taken off a batch's loss when it is measured afterwards; ask: asked while the weights are those of the end."""
        began = time.perf_counter()
        self.start.restore()
        try:
            with torch.enable_grad(), quiet():
                losses = [self.routine.tell(part) for part in self._steps(change, steps)]
            train, val = self._measured(self.on_train, less), self._measured(self.on_val, less)
            outcome = RetrainResult(losses, math.nan if train is None else train, val)
            outcome.asked = ask() if ask is not None else []
            if self._broke or not math.isfinite(outcome.train):
                outcome.train = math.inf
            return outcome
        finally:
            self.start.restore()
            self.spent += time.perf_counter() - began

    def _measured(self, checkups: FixedBatches, less: Less | None) -> float | None:
        losses = checkups.losses()
        if less is not None:
            losses = [loss - less(self.model, self.loss_fn, batch) for loss, batch in zip(losses, checkups.batches)]
        return sum(losses) / len(losses) if losses else None

    def _steps(self, change: RetrainChange, steps: int) -> Iterator[list[float]]:
        """Train, and give the losses of each step (of its batches, or of the calls of a closure), up to the first that
        is not finite."""
        self._broke = False
        self._prepare(change)
        batches = self.batches if change.batches is None else change.batches
        optimizers = (
            self.optimizers
            if change.adam is None
            else [
                torch.optim.Adam([p for o in self.optimizers for g in o.param_groups for p in g["params"]], change.adam)
            ]
        )
        turn = _Turn(self, change, optimizers)
        for step in range(steps):
            if change.adam is None:
                self._set_rates(change, step)
            parts: list[float] = []
            for number in range(self.routine.until(step - 1) if step else 0, self.routine.until(step)):
                if number not in change.without:
                    parts += turn.take(number, batches[number % len(batches)])
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
        if change.level and self.rates:
            now = [max(column) for column in zip(*self.rates)]
        else:
            now = self.rates[min(step, len(self.rates) - 1)] if self.rates else [float(g["lr"]) for g in groups]
        for group, rate in zip(groups, now):
            group["lr"] = (rate if change.to is None else change.to) * change.rate

    def trial(
        self, what: str, change: RetrainChange, as_is: RetrainResult, steps: int, less: Less | None = None
    ) -> Experiment:
        """Train with the change, and set it beside what came of the run as it is."""
        return self.beside(what, self.train(change, steps, less), as_is)

    @staticmethod
    def beside(what: str, got: RetrainResult, as_is: RetrainResult) -> Experiment:
        return Experiment(what, tuple(as_is.losses), tuple(got.losses), as_is.train, got.train, as_is.val, got.val)


class _Turn:
    """One batch after the other, with the optimizers that step behind it."""

    def __init__(self, bench: Retrainer, change: RetrainChange, optimizers: list[Any]):
        self.optimizers, self.model = optimizers, bench.model
        self.loss_fn = change.loss_fn or bench.loss_fn
        self.clip = bench.clip if change.clip is None else change.clip
        self.zero = bench.zero if change.zero is None else change.zero
        self.routine, self.draws = bench.routine, bench.draws
        self.closure = self.routine.closure and change.adam is None
        self._used = set(range(len(optimizers)))  # those whose gradients have done their work

    def take(self, number: int, batch: Any) -> list[float]:
        """The loss of the batch; several where an optimizer calls a closure. What is not finite is not stepped on."""
        losses: list[float] = []
        if number < len(self.draws):
            self.draws[number]()

        def learn() -> Any:
            self._clear()
            loss = loss_root(self.loss_fn(self.model, batch))
            losses.append(loss_value(loss))
            if math.isfinite(losses[-1]):
                (loss if self.routine.share == 1 else loss * self.routine.share).backward()
                if self.closure:
                    self._clipped(self.optimizers)
            return loss

        if self.closure:
            self.optimizers[0].step(learn)
            self._used = {0}
            return losses
        learn()
        if not math.isfinite(losses[-1]):
            return losses
        alone = len(self.optimizers) == 1 and not self.routine.stepped
        stepping = [0] if alone else self.routine.stepping(number, len(self.optimizers))
        self._clipped([self.optimizers[i] for i in stepping if i < len(self.optimizers)])
        for i in stepping:
            if i < len(self.optimizers):
                self.optimizers[i].step()
                self._used.add(i)
        return losses

    def _clear(self) -> None:
        if not self.zero:
            return
        for i, optimizer in enumerate(self.optimizers):
            if i in self._used or self.routine.emptied or self.closure:
                optimizer.zero_grad()
        self._used.clear()

    def _clipped(self, optimizers: list[Any]) -> None:
        """Bring the gradients of all of these together to the largest norm that is allowed."""
        if self.clip is not None and optimizers:
            torch.nn.utils.clip_grad_norm_(
                [p for o in optimizers for g in o.param_groups for p in g["params"]], self.clip
            )


def _alike(mine: float, told: float) -> bool:
    return abs(mine - told) <= ALIKE * max(abs(mine), abs(told), 1e-8)
