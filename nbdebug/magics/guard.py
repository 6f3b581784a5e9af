"""%guard: one guard for a shell, turned on and off by name; what it says and shows comes from `nbdebug.guard`."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.magics._arguments import HELP, WatchSubject, parsed_in_any_order, unquoted, visible

REQUESTS = ("on", "off", "status", "open")
ON_TRIP = {
    "trace": "its cause is shown and NonFiniteStep is raised",
    "raise": "NonFiniteStep is raised (sys.last_value.trip.locate() then names the cause)",
    "skip": "it is counted and training goes on",
    "record": "its cause is written to the record and training goes on",
}
"""What happens about a step that is not finite, after its update has been dropped."""
OPTIONS = ("model", "optimizer", "scaler", "max_grad_norm", "skip_above", "on_trip", "keep", "record")


@magics_class
class GuardMagics(Magics):
    """What watches training. running: the guard that %guard has turned on, None while there is none."""

    magic = "guard"
    running: Any = None
    watched: Any = None  # what it watches, a Watched

    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument(
        "--model",
        action="append",
        metavar="NAME",
        help="the model; may be given more than once. Left out: "
        "every model among your variables is taken, and it is said which",
    )
    @argument("--optimizer", action="append", metavar="NAME", help="the same for the optimizer")
    @argument("--scaler", metavar="NAME", help="the GradScaler; left out: the one among your variables, if any")
    @argument("--max-grad-norm", type=float, metavar="X", help="clip the gradients to this norm before each step")
    @argument(
        "--skip-above",
        type=float,
        metavar="X",
        help="drop and count a step whose gradient norm, after clipping, is above X",
    )
    @argument(
        "--on-trip",
        choices=ON_TRIP,
        help="when a step is not finite, its update is dropped; then, with "
        + "; ".join(f"{choice}: {what}" for choice, what in ON_TRIP.items())
        + " (default trace)",
    )
    @argument("--keep", type=int, metavar="N", help="losses and norms to keep, of the last N steps (default 8)")
    @argument("--record", metavar="PATH", help="write a line for each step to this folder, and each report")
    @argument(
        "request",
        nargs="?",
        choices=REQUESTS,
        default="status",
        help="on: watch from now on; off: stop, give the last report; status: give the report so far; "
        "open: show a record from disk",
    )
    @argument("path", nargs="?", metavar="PATH", help="the record that %%guard open shows")
    @line_magic
    def guard(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Watch every training step at almost no cost, and stop the first bad one before it reaches the weights.

        %guard on takes the model and optimizer among your variables and watches them until %guard off. A step whose
        loss or gradient is not finite is dropped: the weights stay as they were before it. %guard, %guard off and
        %guard open give a report: shown when it comes last, assignable (rep = %guard status), silenced by a semicolon.
        In a script: with nbdebug.guard(model, optimizer): ...
        """
        __tracebackhide__ = True
        typed = line.rstrip()
        args = parsed_in_any_order(self.guard, typed.rstrip(";"))
        if args is None:
            return None
        _check(args)
        if args.request == "on":
            print(self._on(args, visible(self.shell, local_ns)))
            return None
        shown = _opened(args.path) if args.request == "open" else self._report(args.request)
        return None if typed.endswith(";") else shown

    def _on(self, args: Any, names: dict[str, Any]) -> str:
        before = f"The guard of {self.watched.things} ({_counted(self.running)})" if self.running else ""
        try:
            watched = WatchSubject.chosen(args, names, self.shell.user_ns)
            self.close()
            self.running = nbdebug.guard(
                watched.subject.models, watched.subject.optimizers, scaler=watched.scaler, **_given(args)
            )
        except (TypeError, ValueError, OSError) as wrong:
            ended = f" {before} has been closed." if before and self.running is None else ""
            raise UsageError(f"{_said(wrong)}{ended}") from None
        self.watched = watched
        return (
            f"The guard is on, watching {watched}.\nA step that is not finite never reaches the weights: "
            f"{ON_TRIP[args.on_trip or 'trace']}."
            + (f"\n{before} has been closed: this one replaces it." if before else "")
        )

    def switch(self, on: bool) -> str:
        """On with the usual settings, or off; what is to be said of it. Raises UsageError where there is no model."""
        if on:
            return self._on(parsed_in_any_order(self.guard, "on"), self.shell.user_ns)
        self.close()
        return "The guard is off."

    def _report(self, request: str) -> Any:
        """The report so far, with what was asked and of what; None, and a word, while no guard is on."""
        __tracebackhide__ = True
        if self.running is None:
            print(
                "No guard is on. %guard on starts one."
                + "".join(f" (`{name}` is one of your own: {name}.report() shows it.)" for name in self._own())
            )
            return None
        running, watched, outdated = self.running, self.watched, self.watched.outdated(self.shell.user_ns)
        if request == "off":
            self.close()
        report = running.report()
        notes = (outdated, *report.notes) if outdated and request == "status" else report.notes
        return dataclasses.replace(report, question=f"%guard {request}", subject=str(watched), notes=notes)

    def active(self) -> list[str]:
        """A line for each guard that is on, for %nbdebug status."""
        lines = []
        if self.running is not None:
            outdated = self.watched.outdated(self.shell.user_ns)
            lines += [
                f"Active: the guard of {self.watched.things} ({_counted(self.running)}). %guard shows its "
                "report, %guard off ends it."
            ] + [outdated] * bool(outdated)
        return lines + [
            f"Active: the guard `{name}` ({_counted(guard)}). {name}.close() ends it."
            for name, guard in self._own().items()
        ]

    def close(self) -> None:
        """End the guard that %guard has turned on, if any. A bad step that it notices only now is told, not raised."""
        running, self.running, self.watched = self.running, None, None
        if running is None:
            return
        try:
            running.close()
        except nbdebug.NonFiniteStep as late:
            print(late)

    def close_all(self) -> None:
        """The same, and the guards among the user's variables."""
        self.close()
        for guard in self._own().values():
            guard.close()

    def _own(self) -> dict[str, Any]:
        """The active guards that the user's own code has made, by the user's names."""
        watch = sys.modules.get("nbdebug.tools.guard.guard")  # where it was never imported there is no guard
        return (
            {}
            if watch is None
            else {
                name: value
                for name, value in self.shell.user_ns.items()
                if isinstance(value, watch.Guard) and value.active and not name.startswith("_")
            }
        )


def _check(args: Any) -> None:
    """Raises UsageError where a request comes with what belongs to another one, or without what it needs."""
    options = [f"--{name.replace('_', '-')}" for name in OPTIONS if getattr(args, name) is not None]
    if options and args.request != "on":
        raise UsageError(
            f"%guard {args.request} takes no options; {' and '.join(options)} can only be given to %guard on"
        )
    if args.request == "open" and args.path is None:
        raise UsageError("%guard open takes the path of a record, for example: %guard open run.nbdebug")
    if args.request != "open" and args.path is not None:
        raise UsageError(
            f"%guard {args.request} takes no {args.path!r}: %guard open {args.path} shows a record, and "
            f"%guard on --record {args.path} writes one"
        )


def _given(args: Any) -> dict[str, Any]:
    """The options that were typed, as the function takes them; the others keep the function's own defaults."""
    given = {name: getattr(args, name) for name in OPTIONS[3:] if getattr(args, name) is not None}
    return {**given, "record": _path(args.record)} if args.record else given


def _path(word: str) -> str:
    return os.path.expanduser(unquoted(word))


def _opened(path: str) -> Any:
    try:
        return nbdebug.open_record(_path(path))
    except (ValueError, OSError) as wrong:
        raise UsageError(_said(wrong)) from None


def _said(wrong: Exception) -> str:
    """The error in a sentence; of an OSError without its number."""
    text = f"{wrong.strerror}: {wrong.filename}" if isinstance(wrong, OSError) and wrong.strerror else str(wrong)
    return text.rstrip(".") + "."


def _counted(guard: Any) -> str:
    if guard.fault:
        return f"it stopped watching: {guard.fault}"
    counts = [f"{guard.steps} step{'s' * (guard.steps != 1)} watched"]
    counts += [f"{count} {what}" for count, what in ((guard.clipped, "clipped"), (guard.skipped, "skipped")) if count]
    counts += [f"the last bad one was step {trip.step}" for trip in guard.trips[-1:]]
    return ", ".join(counts)
