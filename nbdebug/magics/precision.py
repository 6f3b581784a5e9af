"""%precision: which modules must stay in float32. Its answer: `nbdebug.precision`."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.magics._arguments import (
    BATCH,
    FULL,
    HELP,
    LOSS_FN,
    MODEL,
    answer,
    batch_of,
    evaluate,
    one_model,
    option_or_usual,
    parse,
    required,
    usage_errors,
    variables,
)
from nbdebug.report import Report

FORMAT = re.compile(r"\s*(\d+|%\S+)\s*;?\s*")
"""What IPython's own %precision takes: it stays."""


@magics_class
class PrecisionMagics(Magics):
    """%precision."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
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
    @line_magic
    def precision(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find the smallest set of modules that must stay in float32 for your step to work in half precision.

            %precision
            report = %precision --dtype bfloat16 --batch "next(iter(loader))"

        It takes the model, a batch and the loss among your variables, and says which. Your model does not change.
        report.fp32_modules has the names of the modules. In a script: nbdebug.precision(model, batch, loss_fn).
        %precision 3 and %precision %.4f are still IPython's own: they set how numbers are printed.
        """
        __tracebackhide__ = True
        if FORMAT.fullmatch(line):
            return self.shell.magics_manager.registry["BasicMagics"].precision(line)
        args = parse(self.precision, line)
        if args is None:
            return None
        names = variables(self.shell, local_ns)
        _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
        subject = one_model(args.model, [], names, "%precision", criterion)
        loss_name, loss_fn = required("loss_fn", args.loss_fn, names, "%precision", model=subject.model)
        batch_name, batch = batch_of(args.batch, names, "%precision", model=subject.model)
        optimizer = None if args.optimizer is None else evaluate(args.optimizer, names)
        settings = {"mode": args.mode, "tolerance": args.tolerance, "budget": args.budget, "optimizer": optimizer}
        with usage_errors():
            report = nbdebug.precision(subject.model, batch, loss_fn, args.dtype, **settings)
        model = f"model `{next(iter(subject.models))}` ({type(subject.model).__name__})"
        report.question = f"%precision --dtype {args.dtype} --mode {args.mode}"
        report.subject = f"{model}, batch `{batch_name}`, loss `{loss_name}`"
        return answer(report, args, line)
