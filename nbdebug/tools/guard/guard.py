"""`guard`: watch every step at almost no cost, and stop the bad update before it reaches the weights.

    hooks of the models ──▶ StepLog: the step remembered    hooks of the optimizers ──▶ StepCheck: one norm, a decision
                                               │                                            │
                                               └────────── not finite: Trip ◀───────────────┘
                                                          roll back, locate, report

A fault of the guard's own never reaches the training: it is reported once, and the guard leaves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from nbdebug import verdict
from nbdebug.arguments import Subject, opened
from nbdebug.interrupts import undone_by, uninterrupted
from nbdebug.observe.backward import ScalerWatch
from nbdebug.observe.step_hooks import BatchHook, OptimizerSteps
from nbdebug.observe.step_log import StepLog, model_inputs
from nbdebug.observe.validation import check_scaler, models_of, optimizers_of
from nbdebug.report import Report, Symptom
from nbdebug.text import count, in_a_line, percent
from nbdebug.tools.guard.distributed import GuardShutdown, Ranks, unwrapped, without_communication
from nbdebug.tools.guard.finite_check import Policy
from nbdebug.tools.guard.locate import SHARDED, locate, not_located, report_of_all, report_of_one
from nbdebug.tools.guard.record.files import CLIPPED_TOO_OFTEN, StepLine, last_steps, too_often_clipped
from nbdebug.tools.guard.rollback import BufferBackup, UpdateBackup, restore_overwritten
from nbdebug.tools.guard.step import GuardedStep, NonFiniteStep, StepHistory, StepTracker, Trip

CALL = "guard(model, optimizer)"


def guard(
    model: Any,
    optimizer: Any = None,
    *,
    scaler: Any = None,
    max_grad_norm: float | None = None,
    skip_above: float | None = None,
    on_trip: str = "trace",
    keep: int = 8,
    record: Any = None,
) -> Guard:
    """Watch training steps until closed; a step that is not finite changes neither weights nor optimizer state.

    model: a Module, a dict or list of them, or a trainer that holds them; optimizer: an Optimizer, or several; without
    one, each that trains the model is taken at its first step. scaler: the GradScaler, found by itself where it makes
    the optimizer step. Before each update the guard checks the losses and one norm of all gradients. On a bad step
    weights, buffers, optimizer state and hyperparameters are those before it, and on_trip says what happens then:
    "trace" runs the step again to name the cause, shows the report and raises NonFiniteStep; "raise" raises at once
    (`error.trip.locate()` names the cause later); "skip" drops the step, counts it and goes on; "record" drops it,
    writes it to the record with its cause (the first three) and goes on. max_grad_norm: clip gradients to this 2-norm.
    skip_above: drop a step whose norm is above this before it is clipped, and count it. keep: how many steps' numbers
    are kept. record: a folder to which each step's numbers are written, and what a replay of a bad step needs.

    With a fused optimizer on an accelerator nothing is read: the device takes the decision, and the host learns of it
    at most two steps later. Otherwise there is one read a step. With a closure (LBFGS) or float16 parameters a copy of
    parameters and optimizer state is kept for each step. A step is a round of all optimizers.

    In a run of several processes (DDP, FSDP) create one guard in each: with one all-reduce a step all decide alike.
    Where only one process has a guard, and within `ddp.join()`, it decides alone: gradients are the same in all.

    Returns a Guard, to be used as a context manager or closed by `close()`. Raises TypeError or ValueError for
    arguments that make no sense, OSError where the record can't be written.
    """
    check_scaler(scaler, CALL)
    policy = Policy(on_trip, max_grad_norm, skip_above, keep)
    model, optimizer = opened(model, optimizer)
    return Guard(models_of(model, CALL), optimizers_of(optimizer, CALL), policy, scaler, record)


class ScalerFinder:
    """Tells a guard of the GradScaler that makes one of its optimizers step."""

    def __init__(self, guard: Guard):
        self.guard = guard

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        if self.guard.scaler is None and any(optimizer is own for own in self.guard.optimizers.values()):
            self.guard.adopt(scaler)

    step_began = unscaling

    def step_ended(self, scaler: Any, optimizer: Any) -> None:
        """Its `update` tells the guard."""


MOST_LOCATED = 3
"""How many bad steps on_trip="record" locates and writes; later ones are only counted."""
MAY_DIFFER = (
    " It came after the processes had agreed on this step, so this process may have made another update than the "
    "others: go on from a checkpoint."
)


class Guard:
    """A watch over training steps; see `guard`. steps: how many it has watched; of them, bad: were not finite; clipped;
    skipped: were dropped while training went on, above: for their norm; scaler_skips: by GradScaler. unwatched:
    updates while another tool traced the ops: none of them was checked. lines: the last steps in numbers; trips: what
    was stopped; fault: why it has left, "" while it has not."""

    def __init__(self, models: dict[str, Any], optimizers: dict[str, Any], policy: Policy, scaler: Any, record: Any):
        self.models, self.optimizers, self.policy, self.scaler = models, optimizers, policy, scaler
        self.lines: collections.deque[StepLine] = collections.deque(maxlen=policy.keep)
        self.trips: list[Trip] = []
        self.steps = self.bad = self.clipped = self.skipped = self.above = self.scaler_skips = 0
        self.unwatched = 0
        self.fault, self.active, self._located = "", True, 0
        self.ranks = Ranks.of(models.values())
        self._shutdown: GuardShutdown | None = None
        self._writer = None if record is None else self._open(record)
        self.buffers = BufferBackup(models.values())
        self._tracker = StepTracker(self)
        self.log = StepLog(models, self._tracker.model_called, self._tracker.backward_begins, self._error_boundary)
        self.batches = BatchHook(lambda begins: self._error_boundary(self.log.loading, begins))
        self._scalers = ScalerWatch(ScalerFinder(self), self._error_boundary, self._updating)
        self._steps = OptimizerSteps(self.models, self.optimizers, self._before, self._after, self._taken)
        self._attach()

    def _open(self, record: Any) -> Any:
        from nbdebug.tools.guard.record.writer import RecordWriter

        about = {
            "models": {n: type(m).__name__ for n, m in self.models.items()},
            "optimizers": {n: type(o).__name__ for n, o in self.optimizers.items()},
            "on_trip": self.policy.on_trip,
            "max_grad_norm": self.policy.max_grad_norm,
            "skip_above": self.policy.skip_above,
            "world_size": self.ranks.world if self.ranks else 1,
        }
        return RecordWriter(record, about, self.ranks.rank if self.ranks else None)

    # -- attaching ----------------------------------------------------------------------------------------------------

    @undone_by("_detach")
    def _attach(self) -> None:
        self.log.attach()
        self.batches.attach()
        self._steps.attach()
        self._scalers.attach()
        if self.scaler is not None and self.scaler.is_enabled():
            self.adopt(self.scaler)

    def adopt(self, scaler: Any) -> None:
        """The GradScaler that makes the optimizers step. One with an `update` of its own (FSDP's) is followed at the
        object itself."""
        self.scaler = scaler
        if not self._scalers.follows(scaler):
            self.scaler.update = self._own_update

    def _taken(self, optimizer: Any) -> None:
        self._error_boundary(self.history.take, optimizer)

    @uninterrupted
    def _detach(self) -> None:
        self.log.detach()
        self.batches.detach()
        self._scalers.detach()
        self._steps.detach()
        if self.scaler is not None and vars(self.scaler).get("update") == self._own_update:
            del self.scaler.update
        self._tracker.leave()

    def close(self) -> None:
        """Stop watching. A bad step that is noticed only now is reported as any other; a closed guard stays closed."""
        try:
            if self.active:
                self._error_boundary(self._tracker.finish)
        finally:
            self.active = False
            self._detach()
            if self.ranks is not None:
                self.ranks.close()
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None and self.ranks is not None:
            self._tracker.pending.steps.clear()  # what is still on its way may never come: the others are elsewhere
        try:
            self.close()
        except NonFiniteStep:
            if error is None:
                raise

    # -- the error boundary -------------------------------------------------------------------------------------------

    def _error_boundary(self, method: Callable, *args: Any) -> Any:
        """Call something of ours; what it raises, other than NonFiniteStep, ends the guard and not the training."""
        __tracebackhide__ = True
        if not self.active:
            if self.fault and (self._shutdown is None or self._shutdown.over):
                self._detach()
            return None
        try:
            return method(*args)
        except NonFiniteStep:
            if self.ranks is not None:
                self.ranks.agreed = False
            raise
        except Exception as fault:
            self.disable(fault)
            return None

    def disable(self, fault: Exception) -> None:
        """Leave, after a fault of our own; reported once. An optimizer's hooks go with the next call of a model."""
        if not self.active:
            return
        self.active, self.fault = False, in_a_line(fault)
        warning = ""
        if self.ranks is not None:
            warning = MAY_DIFFER if self.ranks.agreed and self.policy.changes else ""
            self._shutdown = GuardShutdown(self.ranks, *self._tracker.progress)
        self._tracker.leave()
        warnings.warn(
            f"nbdebug's guard has stopped watching because of a fault of its own ({self.fault}). "
            f"The training itself goes on, unguarded.{warning}",
            RuntimeWarning,
            stacklevel=4,
        )

    def _before(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        __tracebackhide__ = True
        if self.active:
            self._error_boundary(self._tracker.before_update, optimizer, args, kwargs)
        if self._shutdown is not None:
            self._shutdown.before(optimizer, args, kwargs)
        if self.ranks is not None:
            self.ranks.agreed = False

    def _after(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        __tracebackhide__ = True
        if self.active:
            self._error_boundary(self._tracker.after_update, optimizer)
        if not self.active:
            self._tracker.give_back()
        if self._shutdown is not None:
            self._shutdown.after()
        if self.ranks is not None:
            self.ranks.agreed = False

    def _own_update(self, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        self._scaler_updates()
        type(self.scaler).update(self.scaler, *args, **kwargs)

    def _updating(self, scaler: Any) -> None:
        __tracebackhide__ = True
        if scaler is self.scaler and scaler.is_enabled() and "update" not in vars(scaler):
            self._scaler_updates()

    def _scaler_updates(self) -> None:
        __tracebackhide__ = True
        if self.active:
            self._error_boundary(self._tracker.scaler_updates)
        if self._shutdown is not None:
            self._shutdown.scaler_updates(self.scaler, self.optimizers.values())
        if self.ranks is not None:
            self.ranks.agreed = False

    # -- steps and trips ----------------------------------------------------------------------------------------------

    def note_step(self, line: StepLine) -> None:
        """A step is over: count it, keep its line, write it to the record."""
        self.steps += 1
        self.clipped += line.clipped
        self.bad += line.outcome in ("tripped", "skipped")
        self.skipped += line.outcome in ("skipped", "above")
        self.above += line.outcome == "above"
        self.scaler_skips += line.outcome == "scaler"
        self.lines.append(line)
        if self._writer is not None:
            self._writer.line(line)

    def trip(self, step: GuardedStep, reason: str, backup: UpdateBackup | None = None, late: int = 0) -> None:
        """A step is not finite, and has been rolled back: locate, write, show and raise it, as the policy says."""
        __tracebackhide__ = True
        if self.ranks is not None:
            self.ranks.share_due = self._locates and self.ranks.together
        restore_overwritten(step.tape, self.models.values())  # first: a fault in it leaves the step as it would be
        self.buffers.restore(step.buffers)
        if self.policy.on_trip == "skip":
            return
        raises = self.policy.on_trip in ("trace", "raise")
        step.outcome = "tripped" if raises else "skipped"
        rank = self.ranks.rank if self.ranks else None
        lines = (*self.lines, step.line())[-self.policy.keep :]
        locator = Locator(self, backup)
        trip = Trip(
            step.number,
            reason,
            step.loss,
            step.norm,
            lines,
            self._inputs(step),
            step.tape,
            late,
            rank,
            step.bad_ranks,
            locator=locator,
        )
        self.trips = [*self.trips[-7:], trip]
        try:
            self._report_trip(trip, locator)
        except Exception as fault:  # the step is dropped all the same
            if self.policy.on_trip == "trace" and trip.report is None:
                trip.report = locator.failed(trip, fault)
            self.disable(fault)
        if raises:
            error = NonFiniteStep(trip)
            try:
                self._tracker.discard_step()
                self._tracker.write(step)
            except Exception as fault:  # it is raised all the same
                self.disable(fault)
            raise error

    def _inputs(self, step: GuardedStep) -> list[tuple[str, tuple, dict]]:
        try:
            return model_inputs(step.tape)
        except Exception as fault:  # the step is dropped all the same
            self.disable(fault)
            return []

    @property
    def _locates(self) -> bool:
        """Whether the next trip is located at once."""
        return self.policy.on_trip == "trace" or self.policy.on_trip == "record" and self._located < MOST_LOCATED

    def _report_trip(self, trip: Trip, locator: Locator) -> None:
        """Locate, show and write a trip; of those to be recorded the first few, as more would take a night."""
        locates, self._located = self._locates, self._located + 1
        if self._located > MOST_LOCATED and self.policy.on_trip == "record":
            return
        if locates:
            trip.report = locator.with_all_ranks(trip)
        if self.policy.on_trip == "trace" and trip.report is not None and (self.ranks is None or self.ranks.shows):
            trip.report.show()
        if self._writer is not None:
            trip.folder = self._writer.trip(trip, self.models, self.history.until(trip.step))

    @property
    def several(self) -> bool:
        """Whether other optimizers step, too, watched or not: their losses may pull at each other."""
        return len(self._steps.stepping) > 1

    @property
    def history(self) -> StepHistory:
        """The run so far."""
        return self._tracker.history

    def report(self) -> Report:
        """The report so far: the last trip's findings, or none, and the counts."""
        return guard_report(self)

    def __repr__(self) -> str:
        return str(self.report())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.report()._repr_mimebundle_(include, exclude)


QUESTION = "guard(model, optimizer)"


def guard_report(guard: Any) -> Report:
    """The report of a guard, at any time: how many steps it has watched and stopped, and the cause of the last one."""
    subject = str(Subject(guard.models, guard.optimizers, True))
    last = _last_report(guard, subject) or Report(QUESTION)
    return dataclasses.replace(
        last,
        question=QUESTION,
        subject=subject,
        headline=_headline(guard),
        symptoms=_symptoms(guard),
        unchecked=(*_unchecked(guard), *last.unchecked),
        notes=(*_notes(guard), *last.notes),
        steps=guard.steps,
        losses=guard.history.ends[: guard.steps],
        tables=last_steps(guard.lines),
    )


def _last_report(guard: Any, subject: str) -> Report | None:
    """The report on the last step that was located; where none was, one that says so."""
    if not guard.trips or (guard.policy.on_trip == "skip" and guard.trips[-1].report is None):
        return None
    reports = [trip.report for trip in guard.trips if trip.report is not None]
    if reports:
        return reports[-1]
    reason, call = "its cause has not been searched for yet", "guard.trips[-1].locate()"
    return not_located(guard.trips[-1], QUESTION, subject, reason, locate_call=call)


def _headline(guard: Any) -> str:
    """ "412 steps watched, none stopped.", "3 of 412 steps stopped, the last of them step 200.", "2 of 412 steps
    dropped as not finite; 7 dropped for their norm." """
    steps, bad = guard.steps, guard.bad
    if guard.fault:
        head = f"The guard stopped watching after {count(steps, 'step')}, because of a fault of its own"
        return head + (f"; {bad:,} of them had been stopped." if bad else ".")
    if not steps:
        return "No step has been watched yet." if guard.active else "No step was watched."
    above = f"; {guard.above:,} dropped for {'its' if guard.above == 1 else 'their'} norm" if guard.above else ""
    if not bad:
        return f"{count(steps, 'step')} watched, none stopped{above}."
    done = "stopped" if guard.policy.on_trip in ("trace", "raise") else "dropped as not finite"
    last = guard.trips[-1].step if guard.trips else None
    where = "" if last is None else f": step {last:,}" if bad == 1 else f", the last of them step {last:,}"
    return f"{bad:,} of {count(steps, 'step')} {done}{where}{above}."


LEFT_OUT, MANY = 0.5, 32
"""Share of the steps that GradScaler leaves out, of so many at least: its scale falls from 65,536 to 1 in 16."""


def _symptoms(guard: Any) -> list[Symptom]:
    """What is not well in the run so far, beside what was located."""
    steps, found = guard.steps, []
    if guard.fault or not steps and not guard.active:
        found.append(Symptom(_headline(guard), "`%guard on` starts a new guard."))
    if dropped := guard.skipped - guard.above:
        said = f"{dropped:,} of {count(steps, 'step')} {'was' if dropped == 1 else 'were'} dropped: not finite."
        found.append(Symptom(said, verdict.FINITE))
    if guard.scaler_skips > LEFT_OUT * steps and steps >= MANY:
        said = f"GradScaler left out {guard.scaler_skips:,} of {count(steps, 'step')}: it finds no scale that works."
        found.append(Symptom(said, verdict.FINITE))
    run = guard.history
    return [*found, *verdict.of_losses(run.course, several=guard.several, resumed=run.resumed)]


def _unchecked(guard: Any) -> tuple[str, ...]:
    if not guard.fault:
        return ()
    return (
        f"Everything after a fault of the guard's own ({guard.fault}); please report it. `%guard on` starts a new "
        "guard.",
    )


def _notes(guard: Any) -> list[str]:
    steps, policy, notes = guard.steps, guard.policy, []
    if too_often_clipped(guard.clipped, steps):
        notes.append(CLIPPED_TOO_OFTEN)
    if dropped := guard.skipped - guard.above:
        notes.append(f"{_share(dropped, steps)} skipped because something was not finite; training went on.")
    if guard.above:
        notes.append(
            f"{_share(guard.above, steps)} skipped because the gradient norm was above "
            f"skip_above={policy.skip_above:g}."
        )
    if guard.scaler_skips:
        notes.append(f"{_share(guard.scaler_skips, steps)} skipped by GradScaler: normal while it looks for its scale.")
    if policy.max_grad_norm is not None:
        notes.append(f"{_share(guard.clipped, steps)} clipped to a norm of {policy.max_grad_norm:g}.")
    if guard.unwatched:
        one = guard.unwatched == 1
        notes.append(
            f"{count(guard.unwatched, 'update was', 'updates were')} not watched: another tool, such as %%mem, traced "
            f"{'it' if one else 'them'}. NaN may have reached the weights there."
        )
    if guard.active and steps:
        notes.append(
            f"The guard is still watching. If a step is not finite, it stops that step, and {ACTIONS[policy.on_trip]}."
        )
    return notes


ACTIONS = {
    "trace": "it shows the cause and raises NonFiniteStep",
    "raise": "it raises NonFiniteStep",
    "skip": "training goes on",
    "record": "it writes down the cause, and training goes on",
}
"""What a guard does about a step that is not finite, by on_trip."""


def _share(number: int, steps: int) -> str:
    share = f"{number:,} of {count(steps, 'step')} ({percent(number / max(steps, 1))})"
    return f"{share} {'was' if number == 1 else 'were'}"


class Locator:
    """What `Trip.locate` calls: it has the guard's models, and the backup with which a bad update can be redone."""

    def __init__(self, guard: Any, backup: UpdateBackup | None):
        self.guard, self.backup = guard, backup

    def __call__(self, trip: Trip) -> Report:
        """By hand, at any time: this process runs its own batch again, and waits for no other."""
        ranks = self.guard.ranks
        report = self._of_trip(trip, self._own(trip))
        return report if ranks is None or len(ranks.members) < 2 else report_of_one(trip, report, ranks.members)

    def with_all_ranks(self, trip: Trip) -> Report:
        """Where all processes have stopped the same step: each runs its own batch again, and gets the reports of
        all."""
        ranks = self.guard.ranks
        if ranks is None or not ranks.share_due:
            return self(trip)
        report = self._own(trip)
        everyone = ranks.share(dataclasses.replace(report, saver=None))
        return self._of_trip(trip, report_of_all(trip, report, everyone, ranks))

    def failed(self, trip: Trip, fault: Exception) -> Report:
        """Where locating it came to a fault of our own."""
        return not_located(trip, QUESTION, "", f"nbdebug failed ({type(fault).__name__}: {fault})")

    def _of_trip(self, trip: Trip, report: Report) -> Report:
        """The report with what it says of the stop itself."""
        report.headline = f"Step {trip.step:,} was stopped: weights, buffers and optimizer state are as before it."
        if trip.late:
            late = (
                f"The device stopped it at once; the host learned of it {count(trip.late, 'step')} later. What had "
                "begun by then changed nothing, but a learning rate schedule of yours may be ahead."
            )
            report.notes = (late, *report.notes)
        report.tables = last_steps(trip.lines)
        return report

    def _own(self, trip: Trip) -> Report:
        guard, subject = self.guard, str(Subject(self.guard.models, self.guard.optimizers, True))
        if guard.ranks is not None and guard.ranks.sharded:
            return not_located(trip, QUESTION, subject, SHARDED)
        models = {name: unwrapped(model) for name, model in guard.models.items()}
        guard.log.rerunning = True
        try:
            alone = guard.ranks is not None
            with without_communication(guard.models.values()) if alone else contextlib.nullcontext():
                return locate(
                    trip,
                    models,
                    guard.optimizers,
                    history=guard.history.until(trip.step),
                    question=QUESTION,
                    subject=subject,
                    backup=self.backup,
                    batches=guard.batches.log,
                )
        finally:
            guard.log.rerunning = False
            if self.backup is not None:
                self.backup.restore()
