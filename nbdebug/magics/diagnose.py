"""%preflight, %%preflight, %diagnose, %%diagnose: what keeps a model from learning, before its training and in it.
Their answers: the functions of these names."""

from __future__ import annotations

import argparse
import dataclasses
import dis
import itertools
import types
from types import CodeType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument

import nbdebug
from nbdebug.arguments import around, planned_optimizers
from nbdebug.magics._arguments import (
    LOSS_FN,
    MODEL,
    OPTIMIZERS,
    SCHEDULER,
    TRAIN_LOADER,
    VAL_LOADER,
    answer,
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
from nbdebug.magics._user_code import loop_code, run_loop
from nbdebug.report import Report
from nbdebug.text import count, listed

KINDS = ("loss_fn", "train_loader", "val_loader", "scheduler")
FIRST = 8
"""Batches of a loader that can be read once, which preflight gets from a copy of the process."""


@magics_class
class DiagnoseMagics(Magics):
    """%preflight, %diagnose and %%diagnose."""

    @report_magic
    @argument("--whole", action="store_true", help="read all of the data, too: check_loader and check_data on the sets")
    @MODEL
    @OPTIMIZERS
    @LOSS_FN
    @TRAIN_LOADER
    @VAL_LOADER
    @SCHEDULER
    @argument(
        "train",
        nargs=argparse.REMAINDER,
        metavar="LOOP",
        help="your loop, which tells its parts (default: your variables do)",
    )
    @line_cell_magic
    def preflight(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Check, in seconds and before training, what would keep the model from learning.

            %preflight
            report = %preflight --model net --train-loader loader --loss-fn criterion
            %preflight --whole
            %preflight train()

        It takes the model, the loaders, the loss and the optimizer among your variables, and says which. With a loop,
        or above the cell that is one (%%preflight), it takes what the first steps train and read, by the loop's own
        lines; the loop is stopped there. It changes nothing: model, optimizer, loaders and random numbers are as
        before. In a script: nbdebug.preflight(model, loader, loss_fn), or nbdebug.preflight(train).
        """
        __tracebackhide__ = True
        if (args := parse(self.preflight, line)) is None:
            return None
        text = step_text(line, args.train)
        if cell is not None or text:
            return self._preflight_loop(args, line, cell, text, local_ns)
        names = variables(self.shell, local_ns)
        _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
        subject = one_model(args.model, args.optimizer, names, "%preflight", criterion)
        if not subject.optimizers:
            subject = dataclasses.replace(subject, optimizers=planned_optimizers(around(subject.model, names)))
        loader = required("train_loader", args.train_loader, names, "%preflight", model=subject.model)
        loss_fn = required("loss_fn", args.loss_fn, names, "%preflight", model=subject.model)
        val_loader = option_or_usual("val_loader", args.val_loader, names, subject.model)
        scheduler = option_or_usual("scheduler", args.scheduler, names, subject.model)
        first, val_first = (first_batches(one) if args.whole else one for _, one in (loader, val_loader))
        with usage_errors():
            report = nbdebug.preflight(
                subject.model,
                first,
                loss_fn[1],
                optimizer=subject.optimizer,
                val_loader=val_first,
                scheduler=scheduler[1],
            )
        taken = {"train_loader": loader, "loss_fn": loss_fn, "val_loader": val_loader, "scheduler": scheduler}
        parts = [str(subject), *(f"{kind} `{name}`" for kind, (name, _) in taken.items() if name)]
        form_of_the_loss = report.subject.rpartition("; ")[2]
        report.question, report.subject = "%preflight", f"{', '.join(parts)}; {form_of_the_loss}"
        for (name, one), taken_first in zip((loader, val_loader), (first, val_first)):
            if one is not taken_first:
                text = f"`{name}` beyond its first {count(len(taken_first), 'batch', 'batches')}: it can be read once"
                report.unchecked = (*report.unchecked, f"{text}, and these are from a copy of the process")
        return answer(with_data(report, loader[1], val_loader[1], subject.model) if args.whole else report, args, line)

    def _preflight_loop(self, args: Any, line: str, cell: str | None, text: str, local_ns: Any) -> Report | None:
        from nbdebug.tools.training.preflight import preflight_loop  # here, so that %load_ext nbdebug stays quick

        question, code, names = loop_code(self.shell, "preflight", text, cell, local_ns)
        named = one_model(args.model, args.optimizer, names, "%preflight") if args.model or args.optimizer else None
        given = {kind: e if (e := getattr(args, kind)) is None else evaluate(e, names) for kind in KINDS}
        given |= {"model": named and named.model, "optimizer": named and named.optimizer}
        report, known = run_loop(code, names, lambda train: preflight_loop(train, given, names))
        report.question = question
        if args.whole:
            report = with_data(report, known.train_loader, known.val_loader, known.model)
        return answer(report, args, line if cell is None else cell)

    @report_magic
    @MODEL
    @OPTIMIZERS
    @LOSS_FN
    @TRAIN_LOADER
    @VAL_LOADER
    @SCHEDULER
    @argument(
        "--regularize",
        action="store_true",
        help="try dropout, weight decay, smoothed labels, a smaller model, augmentation, warm-up and an earlier stop, "
        "one at a time, and compare the validation loss",
    )
    @argument("--keep", action="store_true", help="leave the model as the loop leaves it (default: it is put back)")
    @argument(
        "train",
        nargs=argparse.REMAINDER,
        metavar="LOOP",
        help="your loop: a function, which may take a callback and call callback(step, loss) after each step; or a "
        "call, such as train(5)",
    )
    @line_cell_magic
    def diagnose(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find out why a training does not learn, overfits, jumps or stalls, and try the fix on a copy of its start.

            %diagnose train
            report = %diagnose --model net --loss-fn criterion train(5, callback)
            %diagnose --regularize train

        %diagnose runs your loop once. %%diagnose runs the cell below, which is the loop itself. It may call
        callback(step, loss), and if it does not, each step of the optimizer counts. What is not named, the loop tells:
        the model or models that it trains, also such as it makes itself, its batches, and the loss of one by its own
        lines. Where these don't tell the loss, no fix can be tried. Afterwards the model, the optimizer and the random
        numbers are put back.
        In a script: nbdebug.diagnose(train).
        """
        __tracebackhide__ = True
        if (args := parse(self.diagnose, line)) is None:
            return None
        text = step_text(line, args.train)
        if cell is None and not text:
            trains = _training_functions(variables(self.shell, local_ns))
            yours = f" ({listed(trains, most=5)})" if trains else ""
            raise UsageError(
                f"%diagnose takes your training loop. Type %diagnose {[*trains, 'train'][0]} for a function of "
                f"yours{yours}, %diagnose train(5) for a call, or %%diagnose as the first line of the cell that holds "
                "the loop."
            )
        question, code, names = loop_code(self.shell, "diagnose", text, cell, local_ns)
        call, subject = _call_arguments(args, names, code)

        from nbdebug.tools.training.diagnose import diagnose_loop  # here, so that %load_ext nbdebug stays quick

        call |= {"regularize": args.regularize, "keep": args.keep}
        report = run_loop(code, names, lambda train: diagnose_loop(train, **call))
        args.full |= args.regularize  # for its table
        report.question = question
        if subject:
            trained = report.subject.rpartition(", trained by ")[2]
            report.subject = subject.replace("no optimizer", f"optimizer {trained}, made in it", 1)
        return answer(report, args, line if cell is None else cell)


def _training_functions(names: dict[str, Any]) -> list[str]:
    """The user's functions that hold both a backward and an update, in the order in which they were defined."""

    def calls(code: CodeType) -> set[str]:
        return {*code.co_names, *(name for c in code.co_consts if isinstance(c, CodeType) for name in calls(c))}

    functions = {name: thing for name, thing in names.items() if type(thing) is types.FunctionType}
    return [name for name, thing in functions.items() if {"backward", "step"} <= calls(thing.__code__)]


def _call_arguments(args: Any, names: dict[str, Any], code: CodeType) -> tuple[dict[str, Any], str]:
    """(model and parts for `diagnose_loop`, what was taken); without a model where the loop has to tell it."""
    given = {kind: e if (e := getattr(args, kind)) is None else evaluate(e, names) for kind in KINDS}
    _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
    try:
        subject = one_model(args.model, args.optimizer, names, "%diagnose", criterion)
    except UsageError:
        if args.model or args.optimizer:
            raise
        subject = None
    if subject is None or not (args.model or _uses(code, names, *subject.models.items())):
        optimizer = subject.optimizer if subject is not None and args.optimizer else None
        return {"model": None, "parts": {**given, "optimizer": optimizer}, "names": names}, ""
    taken = {kind: option_or_usual(kind, getattr(args, kind), names, subject.model) for kind in KINDS}
    parts = [str(subject), *(f"{kind} `{name}`" for kind, (name, _) in taken.items() if name)]
    usual = {kind: value for kind, (_, value) in taken.items()}
    return {
        "model": subject.model,
        "parts": {**given, "optimizer": subject.optimizer},
        "usual": usual.get,
    }, ", ".join(parts)


def _uses(code: CodeType, names: dict[str, Any], model: tuple[str, Any]) -> bool:
    """Whether the user's code trains this model as it is: it names it, or what holds it, and does not make it anew."""
    from nbdebug.observe.validation import names_used_by

    variable = model[0].partition(".")[0]
    made = any(i.opname.startswith("STORE_") and i.argval == variable for i in dis.get_instructions(code))
    used = names_used_by(types.FunctionType(code, names))
    return not made and (variable in used or any(value is model[1] for value in used.values()))


def first_batches(loader: Any) -> Any:
    """The loader; of one that can be read once its first batches, from a copy of the process: none is taken from it."""
    from nbdebug.process import CopyFailed, can_fork, in_copy
    from nbdebug.tools.training.evaluate import is_iterator

    if loader is None or not can_fork() or not is_iterator(loader):
        return loader
    try:
        return in_copy(lambda: list(itertools.islice(loader, FIRST)))
    except CopyFailed:
        return loader


def with_data(report: Report, train: Any, val: Any, model: Any) -> Report:
    """The report with what is wrong with the data: both loaders as streams, and the rows of their sets, by split."""
    from nbdebug.tools.data.check_data import check_data
    from nbdebug.tools.data.check_loader import check_loader

    more = [check_loader(loader) for loader in (train, val) if loader is not None]
    own = {"train": getattr(train, "dataset", None), "val": getattr(val, "dataset", None)}
    sets = {split: rows for split, rows in own.items() if hasattr(rows, "__getitem__") and hasattr(rows, "__len__")}
    if sets:
        more.append(check_data(sets, expected=model))
    streams = [split for split, loader in (("train", train), ("val", val)) if loader is not None and split not in sets]
    more += [
        Report("", unchecked=(f"rows of the {s} set one by one: its loader gives batches alone",)) for s in streams
    ]
    findings = {f.code: f for part in more for f in part.findings}  # of rows rather than of batches
    return dataclasses.replace(
        report,
        findings=(*report.findings, *(f for f in findings.values() if f.code not in {g.code for g in report.findings})),
        unchecked=(*report.unchecked, *(text for part in more for text in part.unchecked)),
        notes=(*report.notes, *(text for part in more for text in (part.headline, *part.notes) if text)),
        independent=report.independent or bool(findings),
    )
