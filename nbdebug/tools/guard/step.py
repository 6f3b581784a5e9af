"""The steps of a guarded run: where one begins and ends, how it is checked before each update and a bad one rolled
back; its numbers, and the run's; and a step that was stopped: what is known of it, and the exception that it raises.

A step is a round: every optimizer steps once; an optimizer that steps again begins the next. A model's call after one
optimizer has stepped may belong to either, so the state before it is remembered until that is known.

Decisions that are taken on the device are read by the host when they have arrived, and it waits at most two steps. A
fused optimizer's kernels leave everything as it is where `found_inf` is 1 (GradScaler's own way). After a bad step the
decision stays, so that later steps change nothing either, until the host knows and has rolled back what it must.
"""

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
from nbdebug.observe.tensors import all_finite, can_be_nonfinite, dense, largest, read_scalars, tensors_in
from nbdebug.report import Report, Where
from nbdebug.tools.guard.distributed import withheld_by_scaler
from nbdebug.tools.guard.finite_check import CheckResult, StepCheck, read_check, skips_on_device
from nbdebug.tools.guard.record.files import StepLine
from nbdebug.tools.guard.rollback import BufferCopies, UpdateBackup, WithheldGradients
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


# -- reads that wait ---------------------------------------------------------------------------------------------------


MOST_PENDING = 2
"""How many later steps may have begun before the host waits. One is not enough to keep a device busy."""
_UNSET = object()


@dataclasses.dataclass
class PendingRead:
    """Numbers on their way to the host: where they will be, and the event that says they are there."""

    numbers: torch.Tensor
    event: Any
    ranks: Any
    scaling: bool


class PendingReads:
    """The decisions of one guard's steps that are taken on devices. steps: those that are over and not yet read."""

    def __init__(self, tracker: Any):
        self.tracker, self.policy = tracker, tracker.policy
        self.steps: collections.deque[GuardedStep] = collections.deque()
        self._stopped: dict[torch.device, torch.Tensor] = {}  # one bool a device: a step was bad, until it is read
        self._dropped: torch.Tensor | None = None
        self._found_inf: dict[int, tuple[torch.optim.Optimizer, Any]] = {}  # optimizers and what they had there

    def decide(
        self, optimizer: torch.optim.Optimizer, step: GuardedStep, check: StepCheck, ignore_buffers: bool
    ) -> None:
        """Let the device decide, and tell the optimizer there."""
        scaling = self.tracker.scale is not None
        numbers = check.numbers()
        bad, above, scaler = check.decide(numbers, self.policy, scaling, ignore_buffers)
        if self.policy.stops:
            stopped = self._stopped.setdefault(check.device, torch.zeros((), dtype=torch.bool, device=check.device))
            bad = stopped.logical_or_(bad)
        if self.policy.max_grad_norm is not None:
            check.clip(self.policy.max_grad_norm, check.norm_to_clip(numbers))
        drop = bad | above | scaler
        self._dropped = drop if self._dropped is None else self._dropped | drop
        self._found_inf[id(optimizer)] = optimizer, getattr(optimizer, "found_inf", _UNSET)
        optimizer.found_inf = drop.float()  # type: ignore[attr-defined]
        values = torch.cat([numbers, torch.stack([bad, above]).float()])
        on_host = torch.empty(values.shape, pin_memory=True, device="cpu")
        on_host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(check.device))
        step.reads.append(PendingRead(on_host, event, check.ranks, scaling))

    def after_update(self, optimizer: torch.optim.Optimizer, step: GuardedStep) -> None:
        """The optimizer has stepped: `found_inf` as it was, and buffers as before a step that was dropped."""
        _, before = self._found_inf.pop(id(optimizer), (None, None))
        if before is None:
            return
        _restore_found_inf(optimizer, before)
        if self._dropped is not None:
            self.tracker.buffers.restore_where(self._dropped, step.buffers)
            self._dropped = None

    def read(self, wait: bool = False) -> None:
        """Read the steps whose numbers have arrived. wait: all of them."""
        __tracebackhide__ = True
        while self.steps:
            reads = self.steps[0].reads
            together = self.tracker.ranks is not None
            due = wait or len(self.steps) > MOST_PENDING - together  # the step that has begun is the latest of them
            if not due and (together or not all(read.event.query() for read in reads)):
                return  # several processes have to read it at the same step
            for read in reads:
                read.event.synchronize()
            self._finish(self.steps.popleft())

    def _finish(self, step: GuardedStep) -> None:
        __tracebackhide__ = True
        reason = ""
        for read in step.reads:
            *values, bad, above = read.numbers.tolist()
            result = CheckResult(values, read.ranks, read.scaling)
            result.raise_if_left()
            step.note_result(result)
            if bad and not reason:  # buffers are not checked again: they have been put back since
                reason = result.reason() or ("gradient" if math.isfinite(result.buffers) else "buffer")
            step.clipped = step.clipped or self.policy.clips(result.norm)
            if step.outcome == "ok":
                step.outcome = "above" if above else "scaler" if result.scaler_skips else "ok"
        step.reads = []
        if not reason:
            self.tracker.write(step)
            return
        step.outcome, step.clipped = "skipped", False
        if self.policy.stops:
            self._roll_back(step, reason)
        else:  # what it had changed was put back on the device, and later steps have gone on
            self.tracker.write(step)

    def _roll_back(self, step: GuardedStep, reason: str) -> None:
        """Everything as it was before the step; what has begun since changed nothing, and is no step."""
        __tracebackhide__ = True
        tracker, later = self.tracker, list(self.steps)
        self.steps.clear()
        for stopped in self._stopped.values():
            stopped.zero_()
        for optimizer in tracker.guard.optimizers.values():
            step.restore_settings(optimizer)
        begun = tracker.current is not None
        tracker.discard_step()
        try:
            tracker.guard.trip(step, reason, late=len(later) + begun)
            tracker.write(step)
        finally:
            for dropped in later:
                read = dropped.reads[0]
                read.event.synchronize()
                dropped.note_result(CheckResult(read.numbers.tolist()[:-2], read.ranks, False))
                dropped.reads, dropped.outcome = [], "skipped"
                tracker.write(dropped)

    def leave(self) -> None:
        """Hold nothing, and leave nothing on the optimizers."""
        for optimizer, before in self._found_inf.values():
            _restore_found_inf(optimizer, before)
        self._found_inf.clear()
        self.steps.clear()
        self._stopped.clear()
        self._dropped = None


def _restore_found_inf(optimizer: Any, before: Any) -> None:
    if before is _UNSET:
        vars(optimizer).pop("found_inf", None)
    else:
        optimizer.found_inf = before


# -- the steps ---------------------------------------------------------------------------------------------------------


class StepTracker:
    """The steps of one guard. current: the one that has begun."""

    def __init__(self, guard: Any):
        self.guard, self.policy, self.ranks, self.buffers = guard, guard.policy, guard.ranks, guard.buffers
        self.current: GuardedStep | None = None
        self.history = StepHistory(guard.models, guard.optimizers)
        self.pending = PendingReads(self)
        self._next: tuple[int, BufferCopies] | None = None  # where on the tape the next step may have begun
        self._withheld: WithheldGradients | None = None
        self._backup: UpdateBackup | None = None
        self._ignore_buffers = False
        self.buffers.note_masks()

    # -- where steps begin and end ------------------------------------------------------------------------------------

    def model_called(self) -> None:
        """A model is about to be called."""
        if self.ranks is None:
            self.pending.read()
        else:
            self.ranks.model_called()
        if self.current is None:
            self._begin(self.buffers.take())
        elif self.current.stepped and self._next is None:
            self._next = len(self.current.tape.entries), self.buffers.take()

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        step = self.current or self._begin(self.buffers.take())
        if self._backup is None or not self._backup.closure or not step.losses:
            step.note_loss(roots)  # of a closure the first only: a search may try a point that overflows

    def _begin(self, buffers: BufferCopies) -> GuardedStep:
        self._next = None
        self.current = GuardedStep(self.guard.steps + len(self.pending.steps), buffers, self.guard.log.tape)
        return self.current

    def _begin_next(self) -> GuardedStep:
        """An optimizer steps again: what came since it last did belongs to the next step."""
        before, following = self.current, self._next
        assert before is not None
        tape, losses = self.guard.log.tape, before.losses[before.losses_checked :]
        self._end()
        step = self._begin(following[1] if following else self.buffers.take())
        if following:
            self.guard.log.continue_from(tape, following[0])
        step.losses = losses
        return step

    def _end(self) -> None:
        step, self.current, self._next = self.current, None, None
        assert step is not None
        step.tape = self.guard.log.tape
        if step.reads:
            self.pending.steps.append(step)
        else:
            self.write(step)
        self.guard.log.begin()

    def write(self, step: GuardedStep) -> None:
        """A step is over, and its outcome is known."""
        self.history.add(step)
        self.guard.note_step(step.line())

    def discard_step(self) -> None:
        """The step that has begun is no step."""
        self.current = self._next = self._backup = None
        self.guard.log.begin()

    def finish(self) -> None:
        """The guard is closed: read everything that is still on its way."""
        if self.current is not None and self.current.stepped:
            self._end()
        self.pending.read(wait=True)

    @property
    def progress(self) -> tuple[bool, set[int]]:
        """Whether a finished update has yet to be judged; the optimizers that have stepped in this step."""
        return self._backup is not None, set(self.current.stepped if self.current is not None else ())

    def give_back(self) -> None:
        """The gradients of an update that was not to be made."""
        if self._withheld is not None:
            self._withheld.give_back()
            self._withheld = None

    def leave(self) -> None:
        """Hold nothing any more, and leave nothing on the optimizers."""
        self.give_back()
        self._backup = self.current = self._next = None
        self.pending.leave()

    # -- before an update ---------------------------------------------------------------------------------------------

    def before_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """An optimizer is about to step."""
        __tracebackhide__ = True
        if self.guard.log.ignored:
            self.guard.unwatched += not self.guard.log.rerunning
            return
        self.guard.log.pause()
        step = self.current or self._begin(self.buffers.take())
        if id(optimizer) in step.stepped:
            step = self._begin_next()
        if self.ranks is not None:
            self.pending.read()  # here all processes are in the same place; when a model is called they need not be
            if self.current is None:  # rolled back, with an earlier step
                self._withheld, step.outcome = WithheldGradients(optimizer), "skipped"
                self.write(step)
                return
        step.tape = self.guard.log.tape
        step.note_settings(optimizer)
        self.history.note(optimizer)
        self._backup = UpdateBackup.if_needed(optimizer, args, kwargs)
        if self._backup is not None and self._backup.closure:
            return
        written = [] if self._ignore_buffers else self.buffers.written(step.buffers)
        check = StepCheck(optimizer, step.losses, self.ranks, written, self.scale)
        step.losses_checked = len(step.losses)
        if self._backup is None and skips_on_device(optimizer, check.device):
            self.pending.decide(optimizer, step, check, self._ignore_buffers)
        else:
            self._decide_now(optimizer, step, check)

    @property
    def scale(self) -> torch.Tensor | None:
        """The GradScaler's scale, on its device."""
        scaler = self.guard.scaler
        return scaler._scale if scaler is not None and scaler.is_enabled() else None

    def _decide_now(self, optimizer: torch.optim.Optimizer, step: GuardedStep, check: StepCheck) -> None:
        __tracebackhide__ = True
        result = read_check(check, self.scale is not None)
        step.note_result(result)
        reason = self._reason(result, step)
        if reason:
            self.guard.trip(step, reason)
            step.outcome = "skipped"
        elif result.scaler_skips:
            step.outcome = "scaler"
        elif self.policy.drops(result.norm):
            step.outcome = "above"
        elif self.policy.clips(result.norm):
            step.clipped = True
            check.clip(self.policy.max_grad_norm, torch.tensor(result.norm, device=check.device))
        if step.outcome in ("skipped", "above"):
            self._withheld = WithheldGradients(optimizer)

    def _reason(self, result: CheckResult, step: GuardedStep) -> str:
        """What is not finite; "" where all is well. A buffer that was not finite before (a mask) is no statistic."""
        if (reason := result.reason()) or math.isfinite(result.buffers):
            return reason
        return self._bad_buffers(step)

    def _bad_buffers(self, step: GuardedStep) -> str:
        """The same of the buffers alone."""
        bad = not self._ignore_buffers and self.buffers.became_nonfinite(step.buffers)
        if self.ranks is not None:
            bad = self.ranks.any(bad)
        self._ignore_buffers = not bad
        return "buffer" if bad else ""

    # -- after an update ----------------------------------------------------------------------------------------------

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or has been kept from it."""
        __tracebackhide__ = True
        step = self.current
        if self.guard.log.ignored:
            return
        if step is None:
            self.give_back()
            return
        if self._withheld is not None:
            self.give_back()
            self.buffers.restore(step.buffers)
        self.pending.after_update(optimizer, step)
        backup = self._backup
        if backup is not None and step.outcome == "ok":
            self._judge_update(step, backup)
        self._backup = None
        self._note_stepped(optimizer, step)

    def _judge_update(self, step: GuardedStep, backup: UpdateBackup) -> None:
        """The update has been made, and there is a copy: was it good?"""
        __tracebackhide__ = True
        reason, loss, norm = backup.judge(step.losses, self.ranks)
        if backup.closure:
            step.loss, step.norm, step.losses_checked = loss, norm, len(step.losses)
            step.bad_ranks = backup.bad_ranks
            if not reason and self.ranks is None and not all(map(all_finite, self.buffers.written(step.buffers))):
                reason = self._bad_buffers(step)
        if reason:
            backup.restore()
            self.guard.trip(step, reason, backup)
            step.outcome = "skipped"

    def _note_stepped(self, optimizer: torch.optim.Optimizer, step: GuardedStep) -> None:
        step.stepped.add(id(optimizer))
        if len(step.stepped) == len(self.guard.optimizers):
            self._end()

    def scaler_updates(self) -> None:
        """The GradScaler is about to set its scale: has it kept an optimizer from stepping?"""
        __tracebackhide__ = True
        step = self.current
        if step is None:
            return
        for optimizer in self.guard.optimizers.values():
            if not withheld_by_scaler(self.guard.scaler, optimizer) or id(optimizer) in step.stepped:
                continue
            step.note_settings(optimizer)
            result = read_check(StepCheck.of_scaler_skip(step.losses, self.ranks, self.scale), True)
            step.losses_checked = len(step.losses)
            step.note_result(result)
            step.norm, step.outcome = None, "scaler"
            if reason := result.reason():
                self.guard.trip(step, reason)
                step.outcome = "skipped"
            self._note_stepped(optimizer, step)
            if self.current is None:
                return
