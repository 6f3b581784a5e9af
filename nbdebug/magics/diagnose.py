"""%diagnose and %%diagnose: why a training loop does not learn. Their answer: `nbdebug.diagnose`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.magics._arguments import (
    FULL,
    HELP,
    LOSS_FN,
    MODEL,
    OPTIMIZERS,
    SCHEDULER,
    TRAIN_LOADER,
    VAL_LOADER,
    answer,
    one_model,
    option_or_usual,
    parse,
    step_text,
    variables,
)
from nbdebug.magics._user_code import cell_code, line_code, run
from nbdebug.report import Report

NOTHING = object()


@magics_class
class DiagnoseMagics(Magics):
    """%diagnose and %%diagnose."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
    @MODEL
    @OPTIMIZERS
    @LOSS_FN
    @TRAIN_LOADER
    @VAL_LOADER
    @SCHEDULER
    @argument("--keep", action="store_true", help="leave the model as the loop leaves it (default: it is put back)")
    @argument(
        "train",
        nargs=argparse.REMAINDER,
        metavar="LOOP",
        help="your loop: train, where train(callback) calls callback(step, loss) after each step; or a call, such as "
        "train(5, callback)",
    )
    @line_cell_magic
    def diagnose(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find out why a training does not learn, overfits, jumps or stalls, and try the fix on a copy of its start.

            %diagnose train
            report = %diagnose --model net --loss-fn criterion train(5, callback)

        %diagnose runs your loop once, as train(callback). %%diagnose runs the cell below, which is the loop itself; it
        may call callback(step, loss), and if it does not, each step of the optimizer counts. Without a loss and
        training batches no fix can be tried. Afterwards the model, the optimizer and the random numbers are put back.
        In a script: nbdebug.diagnose(train, model=...).
        """
        __tracebackhide__ = True
        args = parse(self.diagnose, line)
        if args is None:
            return None
        names = variables(self.shell, local_ns)
        call, subject = _call_arguments(args, names)
        if cell is None:
            text = step_text(line, args.train)
            if not text:
                raise UsageError(
                    "%diagnose takes your training loop. Type %diagnose train, where train(callback) calls "
                    "callback(step, loss) after each step."
                )
            question, code = f"%diagnose {text}", line_code(self.shell, _called(text))
        elif args.train:
            raise UsageError("%%diagnose runs the cell below it, so it takes no LOOP.")
        else:
            question, code, names = "%%diagnose", cell_code(self.shell, cell), self.shell.user_ns

        def train(callback: Any) -> None:
            names["callback"] = callback
            exec(code, names)

        before = names.get("callback", NOTHING)
        try:
            report = run(code, lambda: nbdebug.diagnose(train, **call))
        finally:
            names.pop("callback", None)
            if before is not NOTHING:
                names["callback"] = before
        trained = report.subject.rpartition(", trained by ")[2]
        report.question = question
        report.subject = subject.replace("no optimizer", f"optimizer {trained}, made in it", 1)
        return answer(report, args, line if cell is None else cell)


def _called(text: str) -> str:
    """The call of the loop: a name alone is called with the callback."""
    return f"{text}(callback)" if re.fullmatch(r"[\w.]+", text) else text


def _call_arguments(args: Any, names: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(keyword arguments of `nbdebug.diagnose`, what was taken). Raises UsageError where a needed one is missing."""
    kinds = ("loss_fn", "train_loader", "val_loader", "scheduler")
    _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
    subject = one_model(args.model, args.optimizer, names, "%diagnose", criterion)
    taken = {kind: option_or_usual(kind, getattr(args, kind), names, subject.model) for kind in kinds}
    values = {kind: value for kind, (_, value) in taken.items()}
    parts = [str(subject), *(f"{kind} `{name}`" for kind, (name, _) in taken.items() if name)]
    return {"model": subject.model, "optimizer": subject.optimizer, "keep": args.keep, **values}, ", ".join(parts)
