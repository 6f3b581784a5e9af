"""%first_aid and %checklist: what to try, in which order, run on what is among the variables; %describe: its tensors, a
line each; %smallest: a failing step as a short script. Their answers: the functions of these names."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument

from nbdebug.magics._arguments import answer, evaluate, parse, report_magic, usage_errors, variables
from nbdebug.report import Report

SYMPTOMS = "nan, memory, slow, hang, crash, not-learning, error or quality"


@magics_class
class FirstAidMagics(Magics):
    """%first_aid, %checklist, %describe and %smallest."""

    @report_magic
    @argument("symptom", metavar="SYMPTOM", nargs="*", help=f"{SYMPTOMS} (default: the list, and what fits here)")
    @argument("--all", action="store_true", help="run all of the steps (default: up to the first cause)")
    @argument("--log", action="store_true", help="show what was tried in this session, and what you changed in between")
    @line_magic
    def first_aid(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Run what a calm person would try, in that order, up to the first cause.

            %first_aid
            %first_aid nan
            report = %first_aid not-learning

        Each step is one of nbdebug's tools, and runs on what is among your variables: model, optimizer, loss_fn,
        train_loader, a step train_step(batch). Afterwards they are as they were. The steps are ticked off; below them
        is the report of the step that found the cause. A step that can't run says what it needs. In a script:
        nbdebug.first_aid("nan").
        """
        __tracebackhide__ = True
        args = parse(self.first_aid, line)
        return (
            None
            if args is None
            else self._answer(args, "-".join(args.symptom) or None, line, local_ns, args.all, args.log)
        )

    @report_magic
    @argument(
        "moment", metavar="MOMENT", choices=("before", "during", "after"), nargs="?", help="before, during, after"
    )
    @line_magic
    def checklist(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Run the checks that belong before, during or after a training, and tick them off.

            %checklist before
            report = %checklist after

        All of the steps run, whatever they find. A step that can't run says what it needs. In a script:
        nbdebug.first_aid("before").
        """
        __tracebackhide__ = True
        if (args := parse(self.checklist, line)) is None:
            return None
        if args.moment is None:
            raise UsageError("%checklist takes a moment: %checklist before, during or after training.")
        return self._answer(args, args.moment, line, local_ns)

    @report_magic
    @argument("thing", metavar="THING", nargs="*", help="a variable or an expression: a tensor, a batch, a model, ...")
    @line_magic
    def describe(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Show a line for each tensor of anything: shape, type, device, finite range, NaN and inf counted.

            %describe batch
            %describe model
            report = %describe optimizer

        Nested dicts and lists, batches, models (their devices and types at a glance), optimizers. A DataLoader is not
        iterated, nothing is copied and nothing of yours runs. In a script: nbdebug.describe(x).
        """
        __tracebackhide__ = True
        if (args := parse(self.describe, line)) is None:
            return None
        text = " ".join(args.thing)
        if not text:
            raise UsageError("%describe needs a variable or an expression: %describe batch")
        from nbdebug.tools.first_aid.describe import describe  # as below

        report = describe(evaluate(text, variables(self.shell, local_ns)), name=text)
        return answer(dataclasses.replace(report, question=f"%describe {text}"), args, line)

    @report_magic
    @argument("step", metavar="STEP", nargs="?", help="your step, a function (default: train_step, or a usual name)")
    @argument(
        "--batch", metavar="EXPR", help="what it is called with (default: the variable batch, where it takes one)"
    )
    @argument("--steps", type=int, default=1, metavar="N", help="calls within which it fails (default 1)")
    @argument("--folder", default="smallest", metavar="DIR", help="gets smallest.py and smallest.pt")
    @argument("--seconds", type=float, default=60.0, metavar="S", help="for the tries (default 60)")
    @line_magic
    def smallest(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Shrink a failing step while it fails in the same way, and write it as a script that runs alone.

            %smallest train_step --batch batch
            report = %smallest --steps 20

        Steps, rows of the batch, layers and widths are taken away, on copies. The script is run, and the report says
        whether it fails alike: something to send to a colleague. In a script: nbdebug.smallest(step, batch=batch).
        """
        __tracebackhide__ = True
        if (args := parse(self.smallest, line)) is None:
            return None
        import nbdebug
        from nbdebug.tools.first_aid.procedures import STEPS

        names = variables(self.shell, local_ns)
        text = args.step or next((name for name in STEPS if callable(names.get(name))), "")
        if not text:
            raise UsageError(f"%smallest needs a function of yours: %smallest {STEPS[0]} --batch batch")
        step = evaluate(text, names)
        batch = args.batch or ("batch" if "batch" in names and _takes_one(step) else None)
        with usage_errors():
            value = None if batch is None else evaluate(batch, names)
            report = nbdebug.smallest(step, batch=value, steps=args.steps, folder=args.folder, seconds=args.seconds)
        return answer(dataclasses.replace(report, question=f"%smallest {text}"), args, line)

    def _answer(
        self,
        args: Any,
        word: str | None,
        line: str,
        local_ns: dict[str, Any] | None,
        whole: bool = False,
        log: bool = False,
    ) -> Report | None:
        __tracebackhide__ = True
        from nbdebug.tools.first_aid.first_aid import first_aid  # imports torch: %load_ext must stay quick

        try:
            report = first_aid(word, names=variables(self.shell, local_ns), shell=self.shell, all_steps=whole, log=log)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return answer(report, args, line)


def _takes_one(step: Any) -> bool:
    try:
        return any(p.default is p.empty for p in inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return False
