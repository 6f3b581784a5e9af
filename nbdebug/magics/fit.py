"""%fit: whether a training step fits into memory, and what would make it fit. Its answer: `nbdebug.fit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.arguments import Subject, around, discover, one_of, planned_optimizers
from nbdebug.magics._arguments import (
    FULL,
    HELP,
    answer,
    batch_of,
    evaluate,
    option_or_usual,
    parse,
    required,
    usage_errors,
    variables,
)
from nbdebug.report import Report

USAGE = "%fit MODEL BATCH LOSS_FN"


@magics_class
class FitMagics(Magics):
    """%fit."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
    @argument(
        "--optimizer",
        metavar="NAME",
        help="an optimizer, or a class or partial that makes one (default: the one among your variables, if any)",
    )
    @argument("--memory", metavar="SIZE", help="the memory there is, such as 24GiB (default: what is free on the GPU)")
    @argument(
        "--device",
        choices=("cuda", "cpu"),
        help="where the step will run (default: where the model is, or a GPU)",
    )
    @argument(
        "--autocast",
        choices=("bfloat16", "float16"),
        help="for a loss that is computed under autocast, where loss_fn does not enter autocast itself",
    )
    @argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the model, or a function that builds it (default: the one among your variables)",
    )
    @argument("batch", nargs="?", metavar="BATCH", help="a batch (default: batch, or the first one of train_loader)")
    @argument(
        "loss_fn",
        nargs="?",
        metavar="LOSS_FN",
        help="loss_fn(model, batch), or a criterion of (outputs, targets) (default: loss_fn or criterion)",
    )
    @line_magic
    def fit(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Predict whether a training step fits into memory, before anything is allocated, and what would make it fit.

            %fit
            report = %fit model batch loss_fn --optimizer opt --memory 24GiB

        It shows the peak and what it is made of, the largest batch that fits, and what each remedy saves and costs.
        Nothing is computed, and nothing of yours changes. In a script: nbdebug.fit(model, batch, loss_fn).
        """
        __tracebackhide__ = True
        args = parse(self.fit, line)
        if args is None:
            return None
        from nbdebug.tools.memory.fit import fit  # imports torch: %load_ext must stay quick

        names = variables(self.shell, local_ns)
        _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
        with usage_errors():
            model = _model(args.model, names, criterion)
            values = {
                "model": model,
                "batch": batch_of(args.batch, names, "%fit", USAGE, usual=2, model=model[1]),
                "loss_fn": required("loss_fn", args.loss_fn, names, "%fit", USAGE, model=model[1]),
                "optimizer": _optimizer(args.optimizer, around(model[1], names)),
            }
        with usage_errors():
            report = fit(
                **{kind: value for kind, (_, value) in values.items()},
                device_memory=args.memory,
                device=args.device,
                autocast=args.autocast,
            )
        taken = ", ".join(f"{kind} `{name}`" for kind, (name, _) in values.items() if name)
        question = f"%fit {line.strip().rstrip(';')}".strip()
        report = dataclasses.replace(report, question=question, subject=f"{taken}; {report.subject}")
        return answer(report, args, line)


def _model(expression: str | None, names: Mapping[str, Any], loss_fn: Any) -> tuple[str, Any]:
    """(name, value): a model, or a function that builds one."""
    if expression is not None:
        return expression, evaluate(expression, names)
    return Subject.chosen(None, None, dict(names)).one_model("%fit", loss_fn, USAGE)


def _optimizer(expression: str | None, names: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, value): an optimizer, or what makes one; ("", None) where the user has none."""
    if expression is not None:
        return expression, evaluate(expression, names)
    optimizers = discover("optimizer", names) or planned_optimizers(names)
    return one_of("optimizer", optimizers, "%fit", "%fit --optimizer NAME") if optimizers else ("", None)
