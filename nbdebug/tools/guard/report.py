"""A guard in words: its state as a report, and what stands above the report on a step that it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from nbdebug.arguments import Subject
from nbdebug.report import Report
from nbdebug.tools.guard.distributed import alone, by_itself
from nbdebug.tools.guard.locate import SHARDED, locate, lost, of_all, of_one
from nbdebug.tools.guard.record.step_lines import ENOUGH, TOO_OFTEN, last_steps
from nbdebug.tools.guard.rollback import Undo
from nbdebug.tools.guard.trip import Trip

QUESTION = "guard(model, optimizer)"


def status(guard: Any) -> Report:
    """The report of a guard, at any time: how many steps it has watched and stopped, and what the last one had."""
    subject = str(Subject(guard.models, guard.optimizers, True))
    found = _found(guard, subject) or Report(QUESTION)
    return dataclasses.replace(
        found,
        question=QUESTION,
        subject=subject,
        headline=_headline(guard),
        unchecked=(*_unchecked(guard), *found.unchecked),
        notes=(*_notes(guard), *found.notes),
        steps=guard.steps,
        losses=guard.history.ends[: guard.steps],
        tables=last_steps(guard.lines),
    )


def _found(guard: Any, subject: str) -> Report | None:
    """The report on the last step whose cause was looked for; where none was, one that says so."""
    if not guard.trips or (guard.policy.on_trip == "skip" and guard.trips[-1].report is None):
        return None
    located = [trip.report for trip in guard.trips if trip.report is not None]
    return (
        located[-1]
        if located
        else lost(
            guard.trips[-1], QUESTION, subject, "its cause has not been looked for yet", look="guard.trips[-1].locate()"
        )
    )


def _headline(guard: Any) -> str:
    """ "412 steps watched, none stopped.", "3 of 412 steps stopped, the last of them step 200.", "2 of 412 steps
    dropped as not finite; 7 dropped for their norm." """
    steps, bad = guard.steps, guard.bad
    if guard.fault:
        head = f"The guard stopped watching after {_steps(steps)}, because of a fault of its own"
        return head + (f"; {bad:,} of them had been stopped." if bad else ".")
    if not steps:
        return "No step has been watched yet." if guard.active else "No step was watched."
    above = f"; {guard.above:,} dropped for {'its' if guard.above == 1 else 'their'} norm" if guard.above else ""
    if not bad:
        return f"{_steps(steps)} watched, none stopped{above}."
    done = "stopped" if guard.policy.on_trip in ("trace", "raise") else "dropped as not finite"
    last = guard.trips[-1].step if guard.trips else None
    where = "" if last is None else f": step {last:,}" if bad == 1 else f", the last of them step {last:,}"
    return f"{bad:,} of {_steps(steps)} {done}{where}{above}."


def _unchecked(guard: Any) -> tuple[str, ...]:
    return (
        (
            f"Everything after a fault of the guard's own ({guard.fault}); please report it. `%guard on` starts a new "
            "one.",
        )
        if guard.fault
        else ()
    )


def _notes(guard: Any) -> list[str]:
    steps, policy, notes = guard.steps, guard.policy, []
    if steps >= ENOUGH and guard.clipped > TOO_OFTEN * steps:
        notes.append(
            "Over half of the steps were clipped: the learning rate is too high for this model (or "
            "max_grad_norm is too low); clipping sets the size of the steps, not the rate."
        )
    if dropped := guard.skipped - guard.above:
        notes.append(f"{_share(dropped, steps)} skipped because something was not finite; training went on.")
    if guard.above:
        notes.append(
            f"{_share(guard.above, steps)} skipped because the gradient norm was above "
            f"skip_above={policy.skip_above:g}."
        )
    if guard.scaler_skips:
        notes.append(f"{_share(guard.scaler_skips, steps)} skipped by GradScaler: normal while it seeks its scale.")
    if policy.max_grad_norm is not None:
        notes.append(f"{_share(guard.clipped, steps)} clipped to a norm of {policy.max_grad_norm:g}.")
    if guard.active and steps:
        notes.append(
            f"Still watching after {_steps(steps)}: a step that is not finite is stopped, and {DOES[policy.on_trip]}."
        )
    return notes


DOES = {
    "trace": "its cause is shown and NonFiniteStep raised",
    "raise": "NonFiniteStep is raised",
    "skip": "training goes on",
    "record": "its cause is written down and training goes on",
}
"""What a guard does about a step that is not finite, by on_trip."""


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _share(count: int, steps: int) -> str:
    return f"{count:,} of {_steps(steps)} ({count / max(steps, 1):.1%}) {'was' if count == 1 else 'were'}"


class Locator:
    """What `Trip.locate` calls: it has the guard's models, and the way to make a bad update again."""

    def __init__(self, guard: Any, undo: Undo | None):
        self.guard, self.undo = guard, undo

    def __call__(self, trip: Trip) -> Report:
        """By hand, at any time: this process runs its own batch again, and waits for no other."""
        ranks = self.guard.ranks
        report = self._told(trip, self._own(trip))
        return report if ranks is None or len(ranks.members) < 2 else of_one(trip, report, ranks.members)

    def with_the_others(self, trip: Trip) -> Report:
        """Where all processes have stopped the same step: each runs its own batch again, and hears of all."""
        ranks = self.guard.ranks
        if ranks is None or not ranks.promised:
            return self(trip)
        report = self._own(trip)
        everyone = ranks.share(dataclasses.replace(report, saver=None))
        return self._told(trip, of_all(trip, report, everyone, ranks))

    def failed(self, trip: Trip, fault: Exception) -> Report:
        """Where locating it came to a fault of our own."""
        return lost(trip, QUESTION, "", f"nbdebug failed ({type(fault).__name__}: {fault})")

    def _told(self, trip: Trip, report: Report) -> Report:
        report.headline = f"Step {trip.step:,} was stopped: weights, buffers and optimizer state are as before it."
        report.notes, report.tables = (*self._notes(trip), *report.notes), last_steps(trip.lines)
        return report

    def _own(self, trip: Trip) -> Report:
        guard, subject = self.guard, str(Subject(self.guard.models, self.guard.optimizers, True))
        if guard.ranks is not None and guard.ranks.sharded:
            return lost(trip, QUESTION, subject, SHARDED)
        models = {name: alone(model) for name, model in guard.models.items()}
        guard.script.rerunning = True
        try:
            with by_itself(guard.models.values()) if guard.ranks is not None else contextlib.nullcontext():
                return locate(
                    trip,
                    models,
                    guard.optimizers,
                    run=guard.history.run(trip.step),
                    question=QUESTION,
                    subject=subject,
                    redo=None if self.undo is None else self.undo.redo,
                )
        finally:
            guard.script.rerunning = False
            if self.undo is not None:
                self.undo.restore()

    def _notes(self, trip: Trip) -> tuple[str, ...]:
        """What is worth knowing of the stop itself."""
        if not trip.late:
            return ()
        after = f"{trip.late} step{'s' * (trip.late > 1)} later"
        return (
            f"The device stopped it at once; the host heard of it {after}. What had begun by then changed nothing; "
            "a learning-rate schedule of yours may be ahead.",
        )
