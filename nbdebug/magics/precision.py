"""%precision: which modules must stay in float32. Its answer: `nbdebug.precision`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument

import nbdebug
from nbdebug.magics._arguments import (
    BATCH,
    LOSS_FN,
    MODEL,
    answer,
    batch_of,
    evaluate,
    one_model,
    option_or_usual,
    parse,
    report_magic,
    required,
    step_text,
    usage_errors,
    variables,
)
from nbdebug.magics._user_code import loop_parts
from nbdebug.report import Report

FORMAT = re.compile(r"\s*(\d+|%\S+)\s*;?\s*")
"""What IPython's own %precision takes: it stays."""


@magics_class
class PrecisionMagics(Magics):
    """%precision."""

    @report_magic
    @MODEL
    @BATCH
    @LOSS_FN
    @argument("--optimizer", metavar="NAME", help="the optimizer: its epsilon is compared with the dtype")
    @argument("--dtype", default="float16", metavar="DTYPE", help="float16 (the default) or bfloat16")
    @argument(
        "--mode",
        default="autocast",
        choices=("autocast", "cast"),
        help="autocast (the default): the model under torch.autocast\ncast: the model as after model.half()",
    )
    @argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="T",
        help="a step works when its loss differs from the float32 loss by less than this share of it (default 0.05)",
    )
    @argument("--budget", type=float, metavar="S", help="seconds for the search; Ctrl-C ends it as well")
    @argument(
        "train",
        nargs=argparse.REMAINDER,
        metavar="LOOP",
        help="your loop, which tells model, batch and loss (default: your variables do)",
    )
    @line_cell_magic
    def precision(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find the smallest set of modules that must stay in float32 for your step to work in half precision.

            %precision
            report = %precision --dtype bfloat16 --batch "next(iter(loader))"
            %precision train()

        It takes the model, a batch and the loss among your variables, and says which. With a loop, or above the cell
        that is one (%%precision), it takes what the first steps train and read; the loop is stopped there. Your model
        does not change.
        report.fp32_modules has the names of the modules. In a script: nbdebug.precision(model, batch, loss_fn).
        %precision 3 and %precision %.4f are still IPython's own: they set how numbers are printed.
        """
        __tracebackhide__ = True
        if cell is None and FORMAT.fullmatch(line):
            return self.shell.magics_manager.registry["BasicMagics"].precision(line)
        if (args := parse(self.precision, line)) is None:
            return None
        text, names = step_text(line, args.train), variables(self.shell, local_ns)
        if cell is not None or text:
            named = {"model": (args.model or [None])[-1], "batch": args.batch, "loss_fn": args.loss_fn}
            question, subject, parts = loop_parts(self.shell, "precision", text, cell, local_ns, **named)
        else:
            question, (subject, parts) = "%precision", self._parts(args, names)
        if args.optimizer is not None:
            parts["optimizer"] = evaluate(args.optimizer, names)
        settings = {"dtype": args.dtype, "mode": args.mode, "tolerance": args.tolerance, "budget": args.budget}
        with usage_errors():
            report = nbdebug.precision(**parts, **settings)
        options = f"--dtype {args.dtype} --mode {args.mode}"
        report.question, report.subject = f"{question.removesuffix(text).rstrip()} {options} {text}".rstrip(), subject
        return answer(report, args, line if cell is None else cell)

    def _parts(self, args: Any, names: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """(what was taken, model, batch and loss_fn) of the user's variables."""
        _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
        subject = one_model(args.model, [], names, "%precision", criterion)
        loss_name, loss_fn = required("loss_fn", args.loss_fn, names, "%precision", model=subject.model)
        batch_name, batch = batch_of(args.batch, names, "%precision", model=subject.model)
        model = f"model `{next(iter(subject.models))}` ({type(subject.model).__name__})"
        parts = {"model": subject.model, "batch": batch, "loss_fn": loss_fn}
        return f"{model}, batch `{batch_name}`, loss `{loss_name}`", parts
