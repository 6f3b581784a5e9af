"""%nan_trace and %%nan_trace: a step, or a whole cell, under observation."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug.arguments import Subject
from nbdebug.magics._arguments import HELP, as_typed, parsed, silenced, visible
from nbdebug.magics._user_code import cell_code, line_code, traceback_from
from nbdebug.report import Report

STRATEGIES = ("auto", "trace", "replay", "bisect")


@magics_class
class NanTraceMagics(Magics):
    """What names the cause of a NaN."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument(
        "--model",
        action="append",
        metavar="NAME",
        help="the model; may be given more than once. Left out: "
        "every model among your variables is taken, and the report says which",
    )
    @argument("--optimizer", action="append", metavar="NAME", help="the same for the optimizer")
    @argument("--steps", type=int, metavar="N", help="run the step at most N times, until it fails (default 1)")
    @argument(
        "--strategy",
        choices=STRATEGIES,
        default="auto",
        help="trace: watch every op of one run; bisect: repeat the step, look at few places; auto chooses",
    )
    @argument("--restore", action="store_true", help="leave model and optimizer as they were before the step")
    @argument(
        "step",
        nargs=argparse.REMAINDER,
        metavar="EXPR",
        help="one whole training step: step(), train_step(batch), loss = model(x).sum() ...",
    )
    @line_cell_magic
    def nan_trace(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Name the cause of a NaN or Inf: which step, module, op, line and batch rows made it, and what fixes it.

        %nan_trace EXPR runs one training step under observation. %%nan_trace runs a whole cell, a training loop
        included, and stops it after the step that went bad. The result is a report: shown when it comes last,
        assignable (rep = %nan_trace step()), silenced by a semicolon. The function of the same name,
        nbdebug.nan_trace(step), does the same in a script.
        """
        __tracebackhide__ = True  # IPython leaves such frames out of what it shows
        args = parsed(self.nan_trace, line)
        if args is None:
            return None
        names = visible(self.shell, local_ns)
        try:
            subject = Subject.chosen(args.model, args.optimizer, names)
        except ValueError as wrong:
            raise UsageError(str(wrong)) from None
        if cell is None:
            report = self._trace_line(as_typed(line, args.step), args, subject, names)
        else:
            report = self._trace_cell(cell, args, subject)
        return None if silenced(line if cell is None else cell) else report

    def _trace_line(self, text: str, args: Any, subject: Subject, names: dict[str, Any]) -> Report:
        __tracebackhide__ = True
        if not text:
            raise UsageError("%nan_trace takes one training step, for example: %nan_trace step()")
        if re.fullmatch(r"[\w.]+", text) and callable(eval(text, names)):
            raise UsageError(f"{text} is only named, not run: write %nan_trace {text}()")
        code = line_code(self.shell, text)
        steps = 1 if args.steps is None else args.steps
        return _asked(
            f"%nan_trace {text}",
            code,
            subject,
            lambda: nbdebug.nan_trace(
                lambda: eval(code, names),
                model=subject.model,
                optimizer=subject.optimizer,
                max_steps=steps,
                strategy=args.strategy,
                restore=args.restore,
            ),
        )

    def _trace_cell(self, cell: str, args: Any, subject: Subject) -> Report:
        __tracebackhide__ = True
        from nbdebug.tools.nan import nan_trace as trace  # brings torch, which %load_ext does not wait for

        if args.step or args.steps is not None or args.restore:
            raise UsageError("%%nan_trace runs the cell below it: it takes no EXPR, no --steps and no --restore")
        code = cell_code(self.shell, cell)
        return _asked(
            "%%nan_trace",
            code,
            subject,
            lambda: trace.trace_cell(
                lambda: exec(code, self.shell.user_ns),
                models=subject.models,
                optimizers=subject.optimizers,
                strategy=args.strategy,
            ),
        )


def _asked(question: str, code: CodeType, subject: Subject, ask: Callable[[], Report]) -> Report:
    """Ask; the report says what was asked, and of which model.

    Where the user's own code raises, the report that came with the error is shown, then the error passes. Its traceback
    begins at the user's code: the frames that watched it say nothing about it.
    """
    __tracebackhide__ = True
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError("`await` outside a function cannot be traced: put it into a function, and run that")
    try:
        report = ask()
    except BaseException as raised:
        own = traceback_from(code, raised.__traceback__)
        if isinstance(getattr(raised, "report", None), Report):
            display(_said(raised.report, question, subject))  # type: ignore[attr-defined]
        elif own is None and _is_refusal(raised):
            raise UsageError(str(raised)) from None
        raise raised.with_traceback(own or raised.__traceback__)  # noqa: B904 (it is the same one)
    return _said(report, question, subject)


def _is_refusal(raised: BaseException) -> bool:
    """A wrong argument, or an error that nbdebug itself declares, when none of the user's code is to blame."""
    return isinstance(raised, ValueError) or type(raised).__module__.startswith("nbdebug.")


def _said(report: Report, question: str, subject: Subject) -> Report:
    report.question = question
    if not report.facts.get("met"):  # else it says itself which model it met in the run
        report.subject = str(subject)
    return report
