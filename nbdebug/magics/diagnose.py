"""%diagnose and %%diagnose: a training loop, run once under watch; the answer comes from `nbdebug.diagnose`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from types import CodeType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.arguments import Subject, one_of
from nbdebug.magics._arguments import HELP, USUAL, as_typed, found, parsed, silenced, visible
from nbdebug.magics._user_code import cell_code, line_code, traceback_from
from nbdebug.report import Report


@magics_class
class DiagnoseMagics(Magics):
    """What says why a training does not learn."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument("--model", action="append", metavar="NAME", help="the model; left out: the one among your variables")
    @argument("--optimizer", action="append", metavar="NAME", help="the same for the optimizer, or several")
    @argument(
        "--loss-fn",
        metavar="NAME",
        help="loss_fn(model, batch), the loss of one batch; left out: the variable "
        "of that name, if there is one. Without it nothing can be tried",
    )
    @argument("--train-loader", metavar="NAME", help="the training batches; left out: train_loader, or the like")
    @argument("--val-loader", metavar="NAME", help="the validation batches, likewise")
    @argument("--scheduler", metavar="NAME", help="the learning rate scheduler, likewise")
    @argument("--keep", action="store_true", help="leave the model as the loop leaves it; else it is put back")
    @argument(
        "train",
        nargs=argparse.REMAINDER,
        metavar="EXPR",
        help="your loop: train, where train(callback) calls callback(step, loss); or a call, such as train(5, "
        "callback)",
    )
    @line_cell_magic
    def diagnose(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Say why a training does not learn, overfits, jumps or stalls, with the fix tried on a copy of its start.

        %diagnose train runs your loop once, as train(callback). %%diagnose runs the cell below, which is the loop
        itself; it may call callback(step, loss), and where it does not, each step of the optimizer counts. The model,
        the optimizer and the random numbers are put back afterwards. The result is a report: shown when it comes last,
        assignable (rep = %diagnose train), silenced by a semicolon. In a script: nbdebug.diagnose(train, model=...).
        """
        __tracebackhide__ = True
        args = parsed(self.diagnose, line)
        if args is None:
            return None
        names = visible(self.shell, local_ns)
        given = _given(args, names)
        if cell is None:
            question, code = _line(self.shell, as_typed(line, args.train), names)
        elif args.train:
            raise UsageError("%%diagnose runs the cell below it: it takes no EXPR")
        else:
            question, code = "%%diagnose", cell_code(self.shell, cell)
        report = _asked(code, names if cell is None else self.shell.user_ns, given)
        report.question, report.subject = question, given.pop("subject")
        return None if silenced(line if cell is None else cell) else report


def _line(shell: Any, text: str, names: dict[str, Any]) -> tuple[str, CodeType]:
    """What was asked, and the code that runs the loop: a name alone is called with the callback."""
    if not text:
        raise UsageError(
            "%diagnose takes your training loop, for example: %diagnose train (where train(callback) "
            "calls callback(step, loss))"
        )
    question = f"%diagnose {text}"
    if re.fullmatch(r"[\w.]+", text):
        text = f"{text}(callback)"
    return question, line_code(shell, text)


def _given(args: Any, names: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `nbdebug.diagnose`, and `subject`, which says what was taken."""
    taken = {kind: found(kind, getattr(args, kind), names) for kind in USUAL}
    try:
        subject = Subject.chosen(args.model, args.optimizer, names)
        name, model = subject.one_model("%diagnose", taken["loss_fn"][1])
        if not subject.optimizers:
            one_of("optimizer", {}, "%diagnose", "--optimizer NAME")
    except ValueError as wrong:
        raise UsageError(str(wrong)) from None
    subject = dataclasses.replace(subject, models={name: model})
    said = [f"{kind} `{name}`" for kind, (name, _) in taken.items() if name]
    return {
        "model": subject.model,
        "optimizer": subject.optimizer,
        "keep": args.keep,
        **{kind: value for kind, (_, value) in taken.items()},
        "subject": ", ".join([str(subject), *said]),
    }


def _asked(code: CodeType, names: dict[str, Any], given: dict[str, Any]) -> Report:
    """Ask, with `callback` among the user's names while the loop runs. Errors of the user's own begin at their code."""
    __tracebackhide__ = True
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError("`await` outside a function cannot be watched: put it into a function, and run that")
    missing = object()
    before = names.get("callback", missing)

    def train(callback: Any) -> None:
        names["callback"] = callback
        exec(code, names)

    try:
        return nbdebug.diagnose(train, **{k: v for k, v in given.items() if k != "subject"})
    except BaseException as raised:
        own = traceback_from(code, raised.__traceback__)
        if own is None and isinstance(raised, (TypeError, ValueError)):
            raise UsageError(str(raised)) from None
        raise raised.with_traceback(own or raised.__traceback__)  # noqa: B904 (it is the same one)
    finally:
        if before is missing:
            names.pop("callback", None)
        else:
            names["callback"] = before
