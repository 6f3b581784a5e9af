"""The reports of a guard: on its state at any time, and on a step that it stopped, with notes on the stop itself."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from nbdebug import verdict
from nbdebug.arguments import Subject
from nbdebug.report import Report, Symptom
from nbdebug.text import count, percent
from nbdebug.tools.guard.distributed import unwrapped, without_communication
from nbdebug.tools.guard.locate import SHARDED, locate, not_located, report_of_all, report_of_one
from nbdebug.tools.guard.record.files import CLIPPED_TOO_OFTEN, last_steps, too_often_clipped
from nbdebug.tools.guard.rollback import UpdateBackup
from nbdebug.tools.guard.step import Trip

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
