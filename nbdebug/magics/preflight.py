"""%preflight: what can be known before training; the answer comes from `nbdebug.preflight`."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.arguments import Subject
from nbdebug.magics._arguments import HELP, USUAL, found, parsed_in_any_order, refused, silenced, visible
from nbdebug.report import Report

ARGUMENTS = {"train_loader": "loader", "loss_fn": "loss_fn", "val_loader": "val_loader", "scheduler": "scheduler"}
"""The options, and the arguments of `nbdebug.preflight` that they give."""


@magics_class
class PreflightMagics(Magics):
    """What looks before training."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument("--model", action="append", metavar="NAME", help="the model; left out: the one among your variables")
    @argument(
        "--optimizer", action="append", metavar="NAME", help="the same for the optimizer; may be given several times"
    )
    @argument(
        "--loss-fn",
        metavar="NAME",
        help="loss_fn(model, batch), or a criterion of (outputs, targets); "
        "left out: the variable of that name, or criterion",
    )
    @argument("--train-loader", metavar="NAME", help="the training batches; left out: train_loader, or a usual name")
    @argument("--val-loader", metavar="NAME", help="the validation batches, likewise")
    @argument("--scheduler", metavar="NAME", help="the learning rate scheduler, likewise")
    @line_magic
    def preflight(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Look at everything that can be known before training, in seconds: what would keep the model from learning?

        It takes the model, the loaders, the loss and the optimizer among your variables, and says which. Nothing is
        changed: model, optimizer, loaders and random numbers are as before. The result is a report: shown when it
        comes last, assignable (rep = %preflight), silenced by a semicolon. In a script: nbdebug.preflight(model,
        loader, loss_fn).
        """
        __tracebackhide__ = True
        args = parsed_in_any_order(self.preflight, line.rstrip().rstrip(";"))
        if args is None:
            return None
        names = visible(self.shell, local_ns)
        model, given, subject = _given(args, names)
        try:
            report = nbdebug.preflight(model, **given)
        except (TypeError, ValueError) as wrong:
            if refused(wrong):
                raise UsageError(str(wrong)) from None
            raise
        taken = report.subject.rpartition("; ")[2]
        report.question, report.subject = "%preflight", f"{subject}; {taken}"
        return None if silenced(line) else report


def _given(args: Any, names: dict[str, Any]) -> tuple[Any, dict[str, Any], str]:
    """(model, keyword arguments, what was taken). Raises UsageError where a needed one is missing, or not clear."""
    taken = {kind: found(kind, getattr(args, kind), names) for kind in ARGUMENTS}
    try:
        subject = Subject.chosen(args.model, args.optimizer, names)
        name, model = subject.one_model("%preflight", taken["loss_fn"][1])
    except ValueError as wrong:
        raise UsageError(str(wrong)) from None
    subject = dataclasses.replace(subject, models={name: model})
    for kind in ("train_loader", "loss_fn"):
        if taken[kind][1] is None:
            raise UsageError(
                f"%preflight needs {_MEANS[kind]}, and there is none among your variables under a usual "
                f"name ({', '.join(USUAL[kind])}). Name it: --{kind.replace('_', '-')} NAME"
            )
    said = [f"{kind} `{name}`" for kind, (name, _) in taken.items() if name]
    given = {name: taken[kind][1] for kind, name in ARGUMENTS.items()}
    return subject.model, {**given, "optimizer": subject.optimizer}, ", ".join([str(subject), *said])


_MEANS = {"train_loader": "the training batches", "loss_fn": "a loss, loss_fn(model, batch) or a criterion"}
