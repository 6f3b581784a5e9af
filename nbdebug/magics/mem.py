"""%mem and %%mem: what is held in memory now, by owner; what a step or a cell needs. It comes from `nbdebug.mem`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from nbdebug.arguments import Subject
from nbdebug.magics._arguments import HELP, as_typed, parsed, silenced, visible
from nbdebug.magics._user_code import cell_code, line_code, traceback_from
from nbdebug.magics.free import card_of_last
from nbdebug.report import Report


def follow_line(shell: Any, text: str, args: Any, subject: Subject, names: dict[str, Any]) -> Report:
    """The step that was typed behind %mem, run `--steps` times."""
    __tracebackhide__ = True
    if re.fullmatch(r"[\w.]+", text) and callable(eval(text, names)):
        text = f"{text}()"
    code = line_code(shell, text)
    steps = 3 if args.steps is None else args.steps
    return _asked(code, lambda: _follow(lambda: eval(code, names), code, f"%mem {text}", args, subject, names, steps))


def follow_cell(shell: Any, cell: str, args: Any, subject: Subject) -> Report:
    """The cell below %%mem, run once."""
    __tracebackhide__ = True
    if args.step or args.steps is not None:
        raise UsageError("%%mem runs the cell below it, once: it takes no EXPR and no --steps")
    code, names = cell_code(shell, cell), shell.user_ns
    return _asked(code, lambda: _follow(lambda: exec(code, names), code, "%%mem", args, subject, names, 1))


def _follow(
    run: Callable[[], Any],
    code: CodeType,
    question: str,
    args: Any,
    subject: Subject,
    names: dict[str, Any],
    steps: int,
) -> Report:
    from nbdebug.tools.memory.mem import (
        follow_step,
        loaders_of,  # brings torch: %load_ext does not wait for it
    )

    if steps < 1:
        raise UsageError(f"--steps takes a whole number of at least 1; got {steps}")
    return follow_step(
        run,
        subject.models,
        subject.optimizers,
        loaders_of(None, names),
        names,
        question,
        str(subject),
        steps,
        args.device,
        files=(code.co_filename,),
    )


def _asked(code: CodeType, ask: Callable[[], Report]) -> Report:
    """Where the user's own code raises, what was seen before is shown, and the error passes; its traceback begins at
    their code."""
    __tracebackhide__ = True
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError("`await` outside a function cannot be followed: put it into a function, and run that")
    try:
        return ask()
    except BaseException as raised:
        own = traceback_from(code, raised.__traceback__)
        if isinstance(getattr(raised, "report", None), Report):
            display(raised.report)  # type: ignore[attr-defined]
        elif own is None and isinstance(raised, (TypeError, ValueError)):
            raise UsageError(str(raised)) from None
        raise raised.with_traceback(own or raised.__traceback__)  # noqa: B904 (it is the same one)


@magics_class
class MemoryMagics(Magics):
    """What says where memory is."""

    @no_var_expand
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
    @argument("--device", metavar="DEVICE", help="tell what lies on this device alone, such as cuda:0 or cpu")
    @argument("--steps", type=int, metavar="N", help="run EXPR so many times (default 3): a leak shows over several")
    @argument(
        "step",
        nargs=argparse.REMAINDER,
        metavar="EXPR",
        help="one whole training step, such as step() or "
        "train_step(batch): its peak, and what it leaves behind. Left out: what is held now",
    )
    @line_cell_magic
    def mem(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Say where memory is now: every live tensor, counted once, with its owner by name; what the devices say.

        %mem EXPR runs one training step a few times and tells its peak by use, module and line, and what every step
        leaves behind, with the holder and the line. %%mem runs the cell below once: its peak, and what it has added.

        Without a step, owners are parameters, gradients, optimizer state and buffers of your models, your variables and
        what lies in them, Out[n], tracebacks, closures, and graphs that a tensor keeps. After a cell that ran out of
        memory it also says why. The result is a report: shown when it comes last, assignable (rep = %mem; rep.frame()
        gives a table), silenced by a semicolon. In a script: nbdebug.mem().
        """
        __tracebackhide__ = True
        args = parsed(self.mem, line.rstrip().rstrip(";"))
        if args is None:
            return None
        names = visible(self.shell, local_ns)
        if cell is not None:
            report = follow_cell(self.shell, cell, args, _subject(args, self.shell.user_ns))
        elif args.step:
            report = follow_line(self.shell, as_typed(line, args.step), args, _subject(args, names), names)
        else:
            report = self._held(args, names)
        return None if silenced(line if cell is None else cell) else report

    def _held(self, args: Any, names: dict[str, Any]) -> Report:
        """The report on what is held now, with the card of the last failure where that ran out of memory."""
        __tracebackhide__ = True
        from nbdebug.tools.memory.owners.report import held_report  # brings torch: %load_ext does not wait for it

        try:
            subject = Subject.chosen(args.model, args.optimizer, names)
            report = held_report(
                subject.models,
                subject.optimizers,
                names,
                device=args.device,
                question=asked(args),
                subject=str(subject),
                shell=self.shell,
            )
        except (TypeError, ValueError) as wrong:
            raise UsageError(str(wrong)) from None
        card = card_of_last(self.shell, just_now=True)
        if card is None:
            return report
        return dataclasses.replace(
            report, findings=(*card.findings, *report.findings), notes=(*card.notes, *report.notes)
        )


def asked(args: Any) -> str:
    """The magic as it was typed."""
    options = [f"--{kind} {name}" for kind in ("model", "optimizer") for name in getattr(args, kind) or ()]
    return " ".join(["%mem", *options, *[f"--device {args.device}"] * bool(args.device)])


def _subject(args: Any, names: Mapping[str, Any]) -> Subject:
    """The models and optimizers that are meant. Raises UsageError for a name of none."""
    try:
        return Subject.chosen(args.model, args.optimizer, dict(names))
    except ValueError as wrong:
        raise UsageError(str(wrong)) from None
