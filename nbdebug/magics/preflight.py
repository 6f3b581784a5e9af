"""%preflight: what would keep the model from learning, before training. Its answer: `nbdebug.preflight`."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import magic_arguments

import nbdebug
from nbdebug.arguments import around, planned_optimizers
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
    required,
    usage_errors,
    variables,
)
from nbdebug.report import Report


@magics_class
class PreflightMagics(Magics):
    """%preflight."""

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
    @line_magic
    def preflight(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Check, in seconds and before training, what would keep the model from learning.

            %preflight
            report = %preflight --model net --train-loader loader --loss-fn criterion

        It takes the model, the loaders, the loss and the optimizer among your variables, and says which. It changes
        nothing: model, optimizer, loaders and random numbers are as before. In a script: nbdebug.preflight(model,
        loader, loss_fn).
        """
        __tracebackhide__ = True
        args = parse(self.preflight, line)
        if args is None:
            return None
        names = variables(self.shell, local_ns)
        _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
        subject = one_model(args.model, args.optimizer, names, "%preflight", criterion)
        if not subject.optimizers:
            subject = dataclasses.replace(subject, optimizers=planned_optimizers(around(subject.model, names)))
        loader = required("train_loader", args.train_loader, names, "%preflight", model=subject.model)
        loss_fn = required("loss_fn", args.loss_fn, names, "%preflight", model=subject.model)
        val_loader = option_or_usual("val_loader", args.val_loader, names, subject.model)
        scheduler = option_or_usual("scheduler", args.scheduler, names, subject.model)
        with usage_errors():
            report = nbdebug.preflight(
                subject.model,
                loader[1],
                loss_fn[1],
                optimizer=subject.optimizer,
                val_loader=val_loader[1],
                scheduler=scheduler[1],
            )
        taken = {"train_loader": loader, "loss_fn": loss_fn, "val_loader": val_loader, "scheduler": scheduler}
        parts = [str(subject), *(f"{kind} `{name}`" for kind, (name, _) in taken.items() if name)]
        form_of_the_loss = report.subject.rpartition("; ")[2]
        report.question, report.subject = "%preflight", f"{', '.join(parts)}; {form_of_the_loss}"
        return answer(report, args, line)
