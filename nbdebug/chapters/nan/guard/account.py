"""A guard's state as a report: what it has seen, what it has done, and what that says."""

from __future__ import annotations

from typing import Any

from nbdebug.finding import Report
from nbdebug.subject import Subject

TOO_OFTEN = 0.5
"""Where more than this share of the steps is clipped, clipping sets the step size and not the learning rate."""
ENOUGH = 20
"""Steps before a share says anything."""


def status(guard: Any) -> Report:
    """The report of a guard, at any time."""
    report = guard.trips[-1].report if guard.trips else None
    subject = str(Subject(guard.models, guard.optimizers, True))
    facts = {"steps": guard.steps, "guard": [line.to_json() for line in guard.lines]}
    return Report("guard(model, optimizer)", report.findings if report else (), report.ruled_out if report else (),
                  _unchecked(guard), tuple(_notes(guard)), subject, {**(report.facts if report else {}), **facts},
                  report.saver if report else None)


def _unchecked(guard: Any) -> tuple[str, ...]:
    return (f"Everything after a fault of the guard's own ({guard.fault})",) if guard.fault else ()


def _notes(guard: Any) -> list[str]:
    steps, policy = guard.steps, guard.policy
    state = "watching" if guard.active else "closed"
    notes = [f"{steps:,} step{'s' * (steps != 1)} watched ({state}; on_trip={policy.on_trip!r})."]
    if guard.lines:
        last = guard.lines[-1]
        notes.append(f"Last step {last.step}: loss {_number(last.loss)}, gradient norm {_number(last.norm)}.")
    if guard.trips and guard.trips[-1].report is None:
        notes.append(f"{guard.trips[-1].sentence()}; its cause has not been looked for "
                     "(guard.trips[-1].locate() names it).")
    if guard.skipped:
        notes.append(f"{_share(guard.skipped, steps)} dropped because something was not finite.")
    if guard.above:
        notes.append(f"{_share(guard.above, steps)} dropped: the norm was above skip_above={policy.skip_above:g}.")
    if guard.scaler_skips:
        notes.append(f"{_share(guard.scaler_skips, steps)} skipped by GradScaler: normal while it seeks its scale.")
    if policy.max_grad_norm is not None:
        notes.append(f"{_share(guard.clipped, steps)} clipped to a norm of {policy.max_grad_norm:g}.")
        if steps >= ENOUGH and guard.clipped > TOO_OFTEN * steps:
            notes.append("Over half of the steps were clipped: the learning rate is too high for this model "
                         "(or max_grad_norm is too low); clipping sets the size of the steps, not the rate.")
    return notes


def _share(count: int, steps: int) -> str:
    return f"{count:,} step{'s' * (count != 1)} ({count / max(steps, 1):.1%})"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
