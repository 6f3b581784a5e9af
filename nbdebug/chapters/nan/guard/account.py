"""A guard in words: its state as a report, and what stands above the report on a step that it stopped."""

from __future__ import annotations

from typing import Any

from nbdebug.chapters.nan.guard.lines import ENOUGH, TOO_OFTEN
from nbdebug.chapters.nan.guard.locate import lost
from nbdebug.chapters.nan.guard.trip import Trip
from nbdebug.finding import Report
from nbdebug.subject import Subject

QUESTION = "guard(model, optimizer)"


def status(guard: Any) -> Report:
    """The report of a guard, at any time: how many steps it has watched and stopped, and what the last one had."""
    subject = str(Subject(guard.models, guard.optimizers, True))
    found = _found(guard, subject) or Report(QUESTION)
    facts = {
        **found.facts,
        "steps": guard.steps,
        "headline": _headline(guard),
        "history": {"losses": guard.history.ends[: guard.steps]},
        "guard": [line.to_json() for line in guard.lines],
    }
    return Report(
        QUESTION,
        found.findings,
        found.ruled_out,
        (*_unchecked(guard), *found.unchecked),
        (*_notes(guard), *found.notes),
        subject,
        facts,
        found.saver,
    )


def of_trip(trip: Trip) -> dict[str, Any]:
    """What the report on a stopped step has beside its finding: a sentence to stand above it, and the steps before."""
    return {
        "headline": f"Step {trip.step:,} was stopped: weights, buffers and optimizer state are as before it.",
        "guard": [line.to_json() for line in trip.lines],
    }


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
