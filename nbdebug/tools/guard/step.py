"""One step while it runs: its numbers, and what it takes to roll it back; the history of the run, in numbers; and a
step that a guard has stopped: what is known of it, and the exception that it raises."""

from __future__ import annotations

import array
import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.interrupts import ShownAtUsersLine
from nbdebug.observe.locations import StackLines, at_site, locate
from nbdebug.observe.step_log import model_inputs
from nbdebug.observe.tape import Tape
from nbdebug.observe.tensors import can_be_nonfinite, dense, largest, read_scalars, tensors_in
from nbdebug.report import Report, Where
from nbdebug.tools.guard.finite_check import CheckResult
from nbdebug.tools.guard.record.files import StepLine
from nbdebug.tools.guard.rollback import BufferCopies
from nbdebug.tools.nan.probe import RunHistory


@dataclasses.dataclass
class GuardedStep:
    """number: 0-based. losses: one number for each root of backward, on its device. buffers: as they were before.
    settings: the optimizers' hyperparameters then; stateless: those that had no state. stepped: optimizers that are
    done. losses_checked: how many of the losses an optimizer's step has been checked with. reads: numbers on their way
    from the device."""

    number: int
    buffers: BufferCopies
    tape: Tape
    settings: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    stateless: set[int] = dataclasses.field(default_factory=set)
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    losses_checked: int = 0
    stepped: set[int] = dataclasses.field(default_factory=set)
    loss: float | None = None
    norm: float | None = None
    clipped: bool = False
    outcome: str = "ok"
    lr: float | None = None
    reads: list[Any] = dataclasses.field(default_factory=list)
    bad_ranks: tuple[int, ...] = ()

    def note_loss(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Remember what backward starts from, as numbers that stay on their device."""
        for root in roots:
            values = dense(root)
            if values is None or not can_be_nonfinite(values) or not values.numel():
                continue
            one = values.numel() == 1 and not values.is_complex()
            value = values.detach().reshape(()) if one else largest([values])[0]
            self.losses.append(value)

    def note_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer's hyperparameters, and whether it has any state yet."""
        self.settings[id(optimizer)] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if not optimizer.state:
            self.stateless.add(id(optimizer))
        lr = optimizer.param_groups[0].get("lr")
        if self.lr is None and isinstance(lr, (int, float)):
            self.lr = float(lr)

    def restore_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's hyperparameters as they were before this step; no state where it had none."""
        for group, before in zip(optimizer.param_groups, self.settings.get(id(optimizer), []), strict=False):
            group.update(before)
        if id(optimizer) in self.stateless:
            optimizer.state.clear()

    def note_result(self, result: CheckResult) -> None:
        """Of several optimizers the norms are combined; a check holds the losses of all so far."""
        self.loss = result.loss if self.losses else None
        self.norm = result.norm if self.norm is None else math.hypot(self.norm, result.norm)
        self.bad_ranks = result.bad_ranks

    def line(self) -> StepLine:
        """The step in numbers."""
        return StepLine(self.number, self.loss, self.norm, self.clipped, self.outcome, self.lr, time.time())


_LOSSES = 200
_COURSE = 4000
_PLAIN = (nn.Parameter, torch.Tensor)


class StepHistory:
    """The run so far. It begins with the guard: the parameters are measured then, and once more when a step is
    located. course: (step, loss) of the whole run, thinned out where it is long; resumed: optimizers had state then."""

    def __init__(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]):
        self._start = RunHistory()
        parameters = {id(p): p for m in models.values() for p in m.parameters()}
        parameters |= {id(p): p for o in optimizers.values() for g in o.param_groups for p in g["params"]}
        plain: list[torch.Tensor] = [p for p in parameters.values() if p.device.type != "meta" and type(p) in _PLAIN]
        self._start.begin_step(plain, all(p.device.type == "cpu" for p in plain))
        self._first: float | None = None
        self._losses: collections.deque[float] = collections.deque(maxlen=_LOSSES)
        self._course = array.array("d")  # step, loss, step, loss …: no object for each step
        self.resumed = any(o.state for o in optimizers.values())
        self._places: dict[int, StackLines] = {}
        self._last: Any = None
        self._inputs: list[torch.Tensor] | None = None  # their largest magnitudes in the first step, not read

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that was made after the guard is watched, too."""
        self.resumed = self.resumed or bool(optimizer.state)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps: remember from where, the first time."""
        self._last = optimizer
        if id(optimizer) not in self._places:
            self._places[id(optimizer)] = locate()._replace(frame=None)

    def add(self, step: GuardedStep) -> None:
        """A step is over."""
        if self._inputs is None:
            inputs = [v for t in tensors_in([i[1:] for i in model_inputs(step.tape)]) if (v := dense(t)) is not None]
            self._inputs = largest([v for v in inputs if can_be_nonfinite(v) and v.device.type != "meta" and v.numel()])
        if step.loss is not None and step.outcome not in ("tripped", "skipped"):
            self._first = step.loss if self._first is None else self._first
            self._losses.append(step.loss)
            if step.outcome != "scaler" or math.isfinite(step.loss):  # else the scale made it so
                self._course.extend((step.number, step.loss))
            if len(self._course) > 2 * _COURSE:  # the larger of each two: what has jumped stays
                pairs = zip(self.course[::2], self.course[1::2])
                self._course = array.array("d", [n for pair in pairs for n in max(pair, key=lambda row: row[1])])

    @property
    def course(self) -> list[tuple[int, float]]:
        return [(int(step), loss) for step, loss in zip(self._course[::2], self._course[1::2], strict=True)]

    @property
    def ends(self) -> list[float]:
        """The first loss and the last, as far as they are known."""
        return [x for x in (self._first, *list(self._losses)[-1:]) if x is not None]

    def until(self, number: int) -> RunHistory:
        """The run up to step `number`, as nan_trace's rules read it; its growth is measured when the step is
        located."""
        run = RunHistory(
            losses=[x for x in (self._first, *self._losses) if x is not None], first_step=number, optimizer_steps=number
        )
        run.first_sizes = list(self._start.first_sizes)
        run.first_input = max((s for s in read_scalars(self._inputs or []) if math.isfinite(s)), default=0.0)
        if self._last is not None:
            run.optimizer = type(self._last).__name__
            lr = self._last.param_groups[0].get("lr")
            run.learning_rate = None if lr is None else float(lr)
            run.optimizer_line = at_site(Where(step=number, phase="optimizer"), self._places[id(self._last)])
        return run


# -- a trip ------------------------------------------------------------------------------------------------------------


REASONS = ("loss", "gradient", "parameter", "buffer")


@dataclasses.dataclass(repr=False)
class Trip:
    """A step that was not finite, and was stopped before it changed anything.

    step: 0-based. reason: what was seen not finite first, one of REASONS. loss, norm: of that step, None if not known.
    lines: the last steps in numbers, this one last. inputs: what the models were called with, (name, args, kwargs);
    references, no copies. tape: the remembered step, random numbers included. late: how many later steps had begun when
    it was noticed (their updates were dropped). rank: of this process; bad_ranks: those that were bad themselves.
    report: what `locate` found, None before. folder: where the record has it.
    """

    step: int
    reason: str
    loss: float | None
    norm: float | None
    lines: tuple[StepLine, ...]
    inputs: list[tuple[str, tuple, dict]]
    tape: Tape
    late: int = 0
    rank: int | None = None
    bad_ranks: tuple[int, ...] = ()
    report: Report | None = None
    folder: Any = None
    locator: Callable[[Trip], Report] | None = dataclasses.field(default=None, compare=False)

    def locate(self) -> Report:
        """Replay the step and name what first made the bad value. Weights and optimizer stay as they are."""
        if self.report is None:
            if self.locator is None:
                raise ValueError("This trip is over: its step can't be replayed any more.")
            self.report = self.locator(self)
        return self.report

    def sentence(self) -> str:
        """What happened, in one sentence."""
        what = {
            "loss": f"the loss is {_number(self.loss)}",
            "gradient": f"the gradient norm is {_number(self.norm)}",
            "parameter": "the update makes a parameter non-finite",
            "buffer": "a running statistic became non-finite",
        }[self.reason]
        if self.reason == "loss" and self.bad_ranks and self.rank not in self.bad_ranks:
            what = f"the loss of rank {self.bad_ranks[0]} is not finite"
        return f"In step {self.step} {what}"

    def __repr__(self) -> str:
        return f"<Trip: {self.sentence()}>"


class NonFiniteStep(ShownAtUsersLine, RuntimeError):
    """A step was not finite; the update was not made: weights, buffers and optimizer state are as before it.

    `trip` holds what is known of it; `report` the answer, where it was located; `step` the step's number, from 0.
    """

    def __init__(self, trip: Trip):
        self.trip, self.step = trip, trip.step
        super().__init__(_message(trip))

    @property
    def report(self) -> Report | None:
        return self.trip.report


def _message(trip: Trip) -> str:
    text = f"{trip.sentence()}. The update was not made: weights, buffers and optimizer state are as before it."
    if trip.report is not None and trip.report.findings:
        first = trip.report.findings[0]
        text += f" Cause: {first.title} [{first.code}]; the whole report is this exception's attribute `report`."
    else:
        text += " This exception's `trip.locate()` names the cause."
    return text + (f" It is written to {trip.folder}." if trip.folder else "")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
