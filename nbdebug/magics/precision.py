"""%precision: which modules must stay in float32; the answer comes from `nbdebug.precision`."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.arguments import Subject
from nbdebug.magics._arguments import HELP, USUAL, parsed_in_any_order, silenced, visible
from nbdebug.report import Report

FORMAT = re.compile(r"\s*(\d+|%\S+)\s*;?\s*")
"""What IPython's own %precision takes: it stays."""
BATCH = ("batch", "data", "inputs")
"""Names by which a batch is found among the user's variables where no option names it, in this order."""


@magics_class
class PrecisionMagics(Magics):
    """What searches the modules that half precision does not suit."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument("--model", action="append", metavar="NAME", help="the model; left out: the one among your variables")
    @argument(
        "--batch",
        metavar="EXPR",
        help="a batch, as loss_fn takes it; left out: the variable batch, or the first batch of the training loader",
    )
    @argument(
        "--loss-fn",
        metavar="NAME",
        help="loss_fn(model, batch), or a criterion of (outputs, targets); left "
        "out: the variable of that name, or criterion",
    )
    @argument("--optimizer", metavar="NAME", help="its epsilon is compared with the dtype")
    @argument("--dtype", default="float16", metavar="DTYPE", help="float16 (the default) or bfloat16")
    @argument(
        "--mode",
        default="autocast",
        choices=("autocast", "cast"),
        help="autocast: the model as it is, under torch.autocast (the default); cast: as by model.half()",
    )
    @argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="T",
        help="a step works when its loss is within T of the float32 loss, relative (default 0.05)",
    )
    @argument("--budget", type=float, metavar="S", help="seconds for the search; Ctrl-C ends it, too")
    @line_magic
    def precision(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find the smallest set of modules that must stay in float32 for your step to work in half precision.

        It takes the model, a batch and the loss among your variables, and says which. Your model is left as it is. The
        result is a report: shown when it comes last, assignable (rep = %precision; rep.fp32_modules), silenced by a
        semicolon. In a script: nbdebug.precision(model, batch, loss_fn). %precision 3 and %precision %.4f are still
        IPython's own: they set how numbers are printed.
        """
        __tracebackhide__ = True
        if FORMAT.fullmatch(line):
            return self.shell.magics_manager.registry["BasicMagics"].precision(line)
        args = parsed_in_any_order(self.precision, line.rstrip().rstrip(";"))
        if args is None:
            return None
        names = visible(self.shell, local_ns)
        model, batch, loss_fn, said = _given(args, names)
        optimizer = None if args.optimizer is None else _named("optimizer", args.optimizer, names)
        try:
            report = nbdebug.precision(
                model,
                batch,
                loss_fn,
                args.dtype,
                mode=args.mode,
                tolerance=args.tolerance,
                budget=args.budget,
                optimizer=optimizer,
            )
        except ValueError as wrong:
            if "; got " in str(wrong):
                raise UsageError(str(wrong)) from None
            raise
        report.question, report.subject = f"%precision --dtype {args.dtype} --mode {args.mode}", said
        return None if silenced(line) else report


def _given(args: Any, names: dict[str, Any]) -> tuple[Any, Any, Any, str]:
    """(model, batch, loss, what was taken). Raises UsageError where one is missing, or not clear."""
    loss_name = args.loss_fn or next((n for n in USUAL["loss_fn"] if names.get(n) is not None), "")
    if not loss_name:
        raise UsageError(
            "%precision needs a loss, loss_fn(model, batch) or a criterion, and there is none among your "
            f"variables under a usual name ({', '.join(USUAL['loss_fn'])}). Name it: --loss-fn NAME"
        )
    loss_fn = _named("loss-fn", loss_name, names)
    try:
        name, model = Subject.chosen(args.model, [], names).one_model("%precision", loss_fn)
    except ValueError as wrong:
        raise UsageError(str(wrong)) from None
    batch, batch_name = _batch(args.batch, names)
    return model, batch, loss_fn, f"model `{name}` ({type(model).__name__}), batch `{batch_name}`, loss `{loss_name}`"


def _batch(given: str | None, names: dict[str, Any]) -> tuple[Any, str]:
    if given is not None:
        return _named("batch", given, names), given
    for name in BATCH:
        if names.get(name) is not None:
            return names[name], name
    for name in USUAL["train_loader"]:
        if names.get(name) is not None:
            return next(iter(names[name])), f"next(iter({name}))"
    raise UsageError(
        "%precision needs a batch, and there is neither a variable `batch` nor a training loader under a "
        "usual name. Give it: --batch EXPR"
    )


def _named(option: str, text: str, names: dict[str, Any]) -> Any:
    try:
        return eval(text, names)
    except Exception as wrong:  # whatever it raises, it names nothing
        raise UsageError(f"--{option} {text!r} names nothing: {wrong}") from None
