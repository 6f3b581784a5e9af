"""%guard: one guard for a shell, turned on and off by name. What it reports comes from `nbdebug.guard`."""

from __future__ import annotations

import os
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class, needs_local_scope
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.magics._arguments import FULL, HELP, MODELS, OPTIMIZERS, answer, parse, unquote, variables
from nbdebug.magics._watch import WatchMagics, WatchSubject, request_argument
from nbdebug.text import count, sentence

ON_TRIP = {
    "trace": "the cause is shown and NonFiniteStep is raised",
    "raise": "NonFiniteStep is raised (sys.last_value.trip.locate() then names the cause)",
    "skip": "the step is counted and training goes on",
    "record": "the cause is written to the record and training goes on",
}
"""What happens after the update of a step that is not finite has been dropped."""


@magics_class
class GuardMagics(WatchMagics):
    """%guard."""

    magic, noun = "guard", "guard"
    home, kind = "nbdebug.tools.guard.guard", "Guard"
    options = ("model", "optimizer", "scaler", "max_grad_norm", "skip_above", "on_trip", "keep", "record")

    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
    @MODELS
    @OPTIMIZERS
    @argument("--scaler", metavar="NAME", help="the GradScaler (default: the one among your variables, if any)")
    @argument("--max-grad-norm", type=float, metavar="X", help="clip the gradients to this norm before each step")
    @argument(
        "--skip-above",
        type=float,
        metavar="X",
        help="drop and count a step whose gradient norm is above X before it is clipped",
    )
    @argument(
        "--on-trip",
        choices=ON_TRIP,
        help="what happens when a step is not finite (its update is dropped in any case):\n"
        + "\n".join(f"{choice}{' (the default)' * (choice == 'trace')}: {what}" for choice, what in ON_TRIP.items()),
    )
    @argument("--keep", type=int, metavar="N", help="keep the losses and norms of the last N steps (default 8)")
    @argument("--record", metavar="PATH", help="write a line for each step, and each report, to this folder")
    @request_argument("open", also="\nopen PATH: show a record from disk")
    @argument("path", nargs="?", metavar="PATH", help="the record that %%guard open shows")
    @line_magic
    def guard(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Watch every training step at low cost, and stop a step that is not finite before it reaches the weights.

            %guard on
            %guard on --max-grad-norm 1 --on-trip record --record run.nbdebug

        %guard on takes the model and optimizer among your variables, or, before there is one, what a loop calls and
        trains first, and watches them until %guard off. When the loss or a gradient of a step is not finite, its update
        is dropped: the weights stay as they were. %guard, %guard off and %guard open give a report. In a script:
        with nbdebug.guard(model, optimizer): ...
        """
        __tracebackhide__ = True
        if (args := parse(self.guard, line)) is None:
            return None
        wanted = args.request or "status"
        self.check_options(args, wanted)
        _check_path(args.path, wanted)
        if wanted == "on":
            print(self.turn_on(args, variables(self.shell, local_ns)))
            return None
        report = _open(args.path, args.full) if wanted == "open" else self.report(wanted)
        return answer(report, args, line)

    def _make_room(self) -> None:
        self.close()  # two guards would both drop and clip

    def _new(self, subject: WatchSubject, args: Any) -> Any:
        settings = {name: value for name, value in self.typed_options(args).items() if name in self.options[3:]}
        if args.record:
            settings["record"] = _path(args.record)
        models, optimizers = subject.subject.models, subject.subject.optimizers
        return nbdebug.guard(models, optimizers, scaler=subject.scaler, **settings)

    def _started(self, args: Any) -> str:
        return (
            f"The guard is on, watching {self.subject}.\nA step that is not finite never reaches the weights: "
            f"{ON_TRIP[args.on_trip or 'trace']}."
        )

    def close(self) -> None:
        """End the guard that %guard has turned on, if any. A bad step that it notices only now is printed, not
        raised."""
        try:
            super().close()
        except nbdebug.NonFiniteStep as late:
            print(late)

    def _counts(self, guard: Any) -> list[str]:
        counts = [f"{count(guard.steps, 'step')} watched"]
        counts += [f"{n} {what}" for n, what in ((guard.clipped, "clipped"), (guard.skipped, "skipped")) if n]
        return counts + [f"the last bad one was step {trip.step}" for trip in guard.trips[-1:]]


def _check_path(path: str | None, wanted: str) -> None:
    """Raises UsageError where the path is missing or belongs to another request."""
    if wanted == "open" and path is None:
        raise UsageError("%guard open takes the path of a record, for example: %guard open run.nbdebug")
    if wanted != "open" and path is not None:
        raise UsageError(
            f"%guard {wanted} takes no {path!r}: %guard open {path} shows a record, and %guard on --record {path} "
            "writes one."
        )


def _path(word: str) -> str:
    return os.path.expanduser(unquote(word))


def _open(path: str, full: bool) -> Any:
    """The record, or its report where all of that is asked for."""
    try:
        record = nbdebug.open_record(_path(path))
        return record.report() if full else record
    except (ValueError, OSError) as error:
        raise UsageError(sentence(error)) from None
