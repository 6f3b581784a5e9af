"""%nan_trace and %%nan_trace: the cause of a NaN in a step, or in a whole cell. Their answer: `nbdebug.nan_trace`."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument

from nbdebug.arguments import Subject
from nbdebug.magics._arguments import (
    MODELS,
    OPTIMIZERS,
    answer,
    parse,
    report_magic,
    step_text,
    subject_of,
    variables,
)
from nbdebug.magics._user_code import cell_code, line_code, named_call, run
from nbdebug.report import Report


@magics_class
class NanTraceMagics(Magics):
    """%nan_trace and %%nan_trace."""

    @report_magic
    @MODELS
    @OPTIMIZERS
    @argument("--steps", type=int, metavar="N", help="run the step up to N times, until it fails (default 1)")
    @argument(
        "--strategy",
        choices=("auto", "trace", "replay", "bisect"),
        default="auto",
        help="trace: check every op while the step runs\n"
        "replay: record the step, and search in a replay of it\n"
        "bisect: run the step a few times, and halve modules and batch rows\n"
        "auto (the default): trace on a CPU, replay on a GPU",
    )
    @argument("--restore", action="store_true", help="put model and optimizer back to where they were before the step")
    @argument(
        "step",
        nargs=argparse.REMAINDER,
        metavar="STEP",
        help="one whole training step, such as step(), train_step(batch) or loss = model(x).sum()",
    )
    @line_cell_magic
    def nan_trace(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Name the cause of a NaN or inf: the step, module, op, line and batch rows, and a fix.

            %nan_trace step()
            report = %nan_trace --steps 100 train_step(next(batches))

        %nan_trace STEP watches one training step. %%nan_trace watches the whole cell below, such as a training loop,
        and stops it after the first step that is not finite. In a script: nbdebug.nan_trace(step).
        """
        __tracebackhide__ = True  # IPython leaves such frames out of what it shows
        if (args := parse(self.nan_trace, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        subject = subject_of(args.model, args.optimizer, names)
        if cell is None:
            report = self._trace_line(step_text(line, args.step), args, subject, names)
        else:
            report = self._trace_cell(cell, args, subject)
        return answer(report, args, line if cell is None else cell)

    def _trace_line(self, text: str, args: Any, subject: Subject, names: dict[str, Any]) -> Report:
        __tracebackhide__ = True
        from nbdebug.tools.nan.nan_trace import nan_trace  # imports torch: %load_ext must stay quick

        if not text:
            raise UsageError("%nan_trace takes one training step, for example: %nan_trace step()")
        if (thing := named_call("nan_trace", text, names)) is not None:
            call = f"{text}()" if callable(thing) else f"{text}.train()"
            raise UsageError(f"{text} is a {'function' if callable(thing) else 'trainer'}; call it: %nan_trace {call}")
        code = line_code(self.shell, text)

        def ask() -> Report:
            return nan_trace(
                lambda: eval(code, names),
                model=subject.model,
                optimizer=subject.optimizer,
                max_steps=1 if args.steps is None else args.steps,
                strategy=args.strategy,
                restore=args.restore,
            )

        return run(code, ask, lambda report: _label(report, f"%nan_trace {text}", subject))

    def _trace_cell(self, cell: str, args: Any, subject: Subject) -> Report:
        __tracebackhide__ = True
        from nbdebug.tools.nan.nan_trace import trace_cell  # as above

        if args.step or args.steps is not None or args.restore:
            raise UsageError("%%nan_trace runs the cell below it: it takes no STEP, no --steps and no --restore.")
        code = cell_code(self.shell, cell)

        def ask() -> Report:
            return trace_cell(
                lambda: exec(code, self.shell.user_ns),
                models=subject.models,
                optimizers=subject.optimizers,
                strategy=args.strategy,
            )

        return run(code, ask, lambda report: _label(report, "%%nan_trace", subject))


def _label(report: Report, question: str, subject: Subject) -> Report:
    """Write into the report what was asked, and of which model."""
    report.question = question
    if not report.facts.get("met"):  # else the report says itself which model ran
        report.subject = str(subject)
    return report
