"""%mem, %%mem, %fit and %free: who holds memory, whether a step will fit, and what the notebook itself keeps alive."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument

from nbdebug.arguments import Subject, around, discover, one_of, planned_optimizers
from nbdebug.magics._arguments import (
    MODELS,
    OPTIMIZERS,
    answer,
    batch_of,
    evaluate,
    option_or_usual,
    parse,
    report_magic,
    required,
    step_text,
    subject_of,
    unquote,
    usage_errors,
    variables,
)
from nbdebug.magics._user_code import cell_code, line_code, loop_parts, named_call, run
from nbdebug.report import Report
from nbdebug.text import size

KINDS = ("traceback", "outputs", "exceptions", "graphs", "hooks", "figures", "cache")
"""What %free frees."""
USAGE = "%fit MODEL BATCH LOSS_FN"


@magics_class
class MemoryMagics(Magics):
    """%mem, %%mem, %fit and %free."""

    @report_magic
    @MODELS
    @OPTIMIZERS
    @argument("--device", metavar="DEVICE", help="only what is on this device, such as cuda:0 or cpu")
    @argument("--steps", type=int, metavar="N", help="run STEP N times (default 3): a leak shows over several steps")
    @argument(
        "step",
        nargs=argparse.REMAINDER,
        metavar="STEP",
        help="one whole training step, such as step() or train_step(batch) (default: the memory that is held now)",
    )
    @line_cell_magic
    def mem(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Show where memory is: every live tensor once, under the name of its owner, and what the devices report.

            %mem
            report = %mem --steps 5 train_step(batch)

        %mem alone lists what is held now: by your models, optimizers and variables, by Out[n], tracebacks, closures,
        and graphs that a tensor keeps. %mem STEP runs a training step and shows its peak by use, module and line, and
        what each step leaves behind, with the line that keeps it. %%mem does this for the cell below, which runs once.
        After a cell that ran out of memory, %mem also says why. report.frame() is a table. In a script: nbdebug.mem().
        """
        __tracebackhide__ = True
        if (args := parse(self.mem, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        if cell is not None:
            report = self._follow_cell(cell, args)
        elif args.step:
            report = self._follow_line(step_text(line, args.step), args, names)
        else:
            report = self._held(args, names)
        return answer(report, args, line if cell is None else cell)

    def _follow_line(self, text: str, args: Any, names: dict[str, Any]) -> Report:
        __tracebackhide__ = True
        if (thing := named_call("mem", text, names)) is not None:
            text += "()" if callable(thing) else ".train()"
        code = line_code(self.shell, text)
        steps = 3 if args.steps is None else args.steps
        return _follow(code, lambda: eval(code, names), f"%mem {text}", args, names, steps)

    def _follow_cell(self, cell: str, args: Any) -> Report:
        __tracebackhide__ = True
        if args.step or args.steps is not None:
            raise UsageError("%%mem runs the cell below it, once: it takes no STEP and no --steps.")
        from nbdebug.tools.memory.mem import container_sizes, growing_containers

        code, names = cell_code(self.shell, cell), self.shell.user_ns
        before = container_sizes(names)
        report = _follow(code, lambda: exec(code, names), "%%mem", args, names, 1)
        if (table := growing_containers(before, names)) is None:
            return report
        name, kind, had, entries, whole, each = table.rows[0]
        grown = f"`{name}` ({kind}) grew from {had:,} to {entries:,} entries"
        note = f"{grown} and holds {size(whole)}: {size(each)} for 1,000 entries."
        return dataclasses.replace(
            report,
            headline=report.headline or ("" if report.findings else note),
            notes=(note, *report.notes) if report.findings or report.headline else report.notes,
            tables=[table, *report.tables],
        )

    def _held(self, args: Any, names: dict[str, Any]) -> Report:
        """The report on what is held now; after a cell that ran out of memory also why it did."""
        from nbdebug.tools.memory.mem import held_report  # imports torch: %load_ext must stay quick

        subject = subject_of(args.model, args.optimizer, names)
        options = [f"--{kind} {name}" for kind in ("model", "optimizer") for name in getattr(args, kind) or ()]
        question = " ".join(["%mem", *options, *[f"--device {args.device}"] * bool(args.device)])
        with usage_errors():
            report = held_report(
                subject.models,
                subject.optimizers,
                names,
                device=args.device,
                question=question,
                subject=str(subject),
                shell=self.shell,
            )
        if (failure := out_of_memory_report(self.shell)) is None:
            return report
        return dataclasses.replace(
            report, findings=(*failure.findings, *report.findings), notes=(*failure.notes, *report.notes)
        )

    @report_magic
    @argument("--all", action="store_true", help="free all that the list shows, and the cache of the allocators")
    @argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"{', '.join(KINDS)}, or a name from the list, such as Out[7] (default: nothing is freed)",
    )
    @line_magic
    def free(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """List the memory that the notebook itself keeps, and free what you choose.

            %free
            %free traceback outputs

        The list has outputs (Out, _), the traceback of the last failed cell, exceptions in variables, losses with their
        graph, hooks that a cell has registered twice, and figures, each with its size. %free alone frees nothing. %free
        traceback outputs frees these two and says how much memory is free again; after that, %debug no longer works. In
        a script: nbdebug.free("traceback").
        """
        __tracebackhide__ = True
        if (args := parse(self.free, line)) is None:
            return None
        from nbdebug.tools.memory.free import free  # imports torch: %load_ext must stay quick

        words = [*args.what, *["all"] * args.all]
        with usage_errors():
            report = free(*words, names=variables(self.shell, local_ns), shell=self.shell)
        report = dataclasses.replace(report, question=" ".join(["%free", *args.what, *["--all"] * args.all]))
        return answer(report, args, line)

    def free_words(self) -> Iterable[str]:
        """The words that Tab offers: the kinds, and the outputs that the notebook keeps."""
        return [*KINDS, *(f"Out[{number}]" for number in self.shell.user_ns.get("_oh", ()))]

    @report_magic
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
    @argument("--loop", metavar="CALL", help="your loop, such as train(): its first step runs, and tells all three")
    @line_cell_magic
    def fit(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Predict whether a training step fits into memory, before anything is allocated, and what would make it fit.

            %fit
            report = %fit model batch loss_fn --optimizer opt --memory 24GiB
            %fit --memory 24GiB --loop train()

        It shows the peak and what it is made of, the largest batch that fits, and what each remedy saves and costs.
        Nothing is computed, and nothing of yours changes. With --loop, or above the cell that is the loop (%%fit), its
        first steps run, tell model, batch, loss and optimizer, and are put back. In a script: nbdebug.fit(model, batch,
        loss_fn).
        """
        __tracebackhide__ = True
        if (args := parse(self.fit, line)) is None:
            return None
        from nbdebug.tools.memory.fit import fit  # imports torch: %load_ext must stay quick

        names = variables(self.shell, local_ns)
        if cell is not None or args.loop:
            named = {kind: getattr(args, kind) for kind in ("model", "batch", "loss_fn", "optimizer")}
            question, taken, parts = loop_parts(self.shell, "fit", unquote(args.loop or ""), cell, local_ns, **named)
        else:
            question, (taken, parts) = f"%fit {line.strip().rstrip(';')}".strip(), _parts(args, names)
        with usage_errors():
            report = fit(**parts, device_memory=args.memory, device=args.device, autocast=args.autocast)
        report = dataclasses.replace(report, question=question, subject=f"{taken}; {report.subject}")
        return answer(report, args, line if cell is None else cell)


def _parts(args: Any, names: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(what was taken, model, batch, loss_fn and optimizer) of the user's variables."""
    _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
    with usage_errors():
        model = _model(args.model, names, criterion)
        values = {
            "model": model,
            "batch": batch_of(args.batch, names, "%fit", USAGE, usual=2, model=model[1]),
            "loss_fn": required("loss_fn", args.loss_fn, names, "%fit", USAGE, model=model[1]),
            "optimizer": _optimizer(args.optimizer, around(model[1], names)),
        }
    taken = ", ".join(f"{kind} `{name}`" for kind, (name, _) in values.items() if name)
    return taken, {kind: value for kind, (_, value) in values.items()}


def _follow(
    code: CodeType, call: Callable[[], Any], question: str, args: Any, names: dict[str, Any], steps: int
) -> Report:
    __tracebackhide__ = True
    from nbdebug.tools.memory.mem import loaders_of, trace_step  # imports torch: %load_ext must stay quick

    if steps < 1:
        raise UsageError(f"--steps takes a whole number of at least 1; got {steps}.")
    subject = subject_of(args.model, args.optimizer, names)
    return run(
        code,
        lambda: trace_step(
            call,
            subject.models,
            subject.optimizers,
            loaders_of(None, names),
            names,
            question,
            str(subject),
            steps,
            args.device,
            files=(code.co_filename,),
        ),
    )


def out_of_memory_report(shell: Any) -> Report | None:
    """The report on the cell before this one, if it failed because memory ran out."""
    from nbdebug.observe.variables import last_error
    from nbdebug.tools.memory import oom

    error, before = last_error(), getattr(shell, "last_execution_result", None)
    if error is None or before is not None and before.success:
        return None
    cause = oom.cause_of(error)
    return None if cause is None else oom.out_of_memory(cause, shell.user_ns, shell=shell)


def _model(expression: str | None, names: Mapping[str, Any], loss_fn: Any) -> tuple[str, Any]:
    """(name, value): a model, or a function that builds one."""
    if expression is not None:
        value = evaluate(expression, names)
        if not callable(value) and getattr(value, "model", None) is not None:  # a trainer
            return f"{expression}.model", value.model
        return expression, value
    return Subject.chosen(None, None, dict(names)).one_model("%fit", loss_fn, USAGE)


def _optimizer(expression: str | None, names: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, value): an optimizer, or what makes one; ("", None) where the user has none."""
    if expression is not None:
        return expression, evaluate(expression, names)
    optimizers = discover("optimizer", names) or planned_optimizers(names)
    return one_of("optimizer", optimizers, "%fit", "%fit --optimizer NAME") if optimizers else ("", None)
