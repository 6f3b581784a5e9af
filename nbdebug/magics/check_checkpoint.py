"""%check_checkpoint and %resume_proof: will a file load, and into what; is the run that goes on from it the same?"""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

import nbdebug
from nbdebug.magics._arguments import FULL, HELP, answer, evaluate, parse, unquote, usage_errors, variables
from nbdebug.report import Report

PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "load")


@magics_class
class CheckCheckpointMagics(Magics):
    """%check_checkpoint and %resume_proof."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @argument(
        "path",
        metavar="PATH",
        nargs="?",
        default=".",
        help="a file, a folder, or a variable that holds the path of one (default: .)",
    )
    @argument("--model", metavar="NAME", help="the model that it is loaded into")
    @argument("--optimizer", metavar="NAME", help="the optimizer that goes on from it")
    @argument("--scheduler", metavar="NAME", help="the learning rate scheduler that goes on from it")
    @argument("--scaler", metavar="NAME", help="the GradScaler that goes on from it")
    @argument("--ema", metavar="NAME", help="the averaged weights that go on from it")
    @argument(
        "--load", metavar="NAME", help="your own function load(path); its lines are mended, and the edit is tried"
    )
    @FULL
    @HELP
    @line_magic
    def check_checkpoint(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Look at a checkpoint, or the newest of a folder by its step, without loading it.

            %check_checkpoint runs/step_1000.pt --model net
            report = %check_checkpoint runs --model net --optimizer opt

        It finds files that end early or changed since, classes and functions that loading would call, weights with
        other names, shapes or types than the model's, weights that are not finite, and an optimizer of other groups.
        Nothing of the file is executed. In a script: nbdebug.check_checkpoint(path, model=net).
        """
        __tracebackhide__ = True
        args = parse(self.check_checkpoint, line)
        if args is None:
            return None
        names = variables(self.shell, local_ns)
        parts = {part: evaluate(getattr(args, part), names) for part in PARTS if getattr(args, part) is not None}
        path = unquote(args.path)
        try:
            with usage_errors():
                report = nbdebug.check_checkpoint(names.get(path, path), **parts)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        return answer(dataclasses.replace(report, question=f"%check_checkpoint {args.path}"), args, line)

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @argument("resumed", metavar="RESUMED", nargs="?", help="your function resumed(path): loads the file and trains on")
    @argument("whole", metavar="UNINTERRUPTED", nargs="?", help="your function that trains without a stop")
    @argument("path", metavar="PATH", nargs="?", help="the file, or a variable that holds its path")
    @FULL
    @HELP
    @line_magic
    def resume_proof(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Is a run that was resumed from a file the run that never stopped? And if not, what was not saved?

            %resume_proof resumed uninterrupted runs/step_1000.pt
            report = %resume_proof resumed uninterrupted path

        Both functions give a list of the same steps, such as the losses. They run in copies of the process: nothing
        here changes. In a script: nbdebug.resume_proof(resumed, uninterrupted, path).
        """
        __tracebackhide__ = True
        args = parse(self.resume_proof, line)
        if args is None:
            return None
        if args.path is None:
            raise UsageError("%resume_proof needs two functions and a path: %resume_proof resumed uninterrupted PATH")
        names = variables(self.shell, local_ns)
        resumed, whole = (evaluate(each, names) for each in (args.resumed, args.whole))
        path = unquote(args.path)
        try:
            report = nbdebug.resume_proof(resumed, whole, names.get(path, path))
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        question = f"%resume_proof {args.resumed} {args.whole} {args.path}"
        return answer(dataclasses.replace(report, question=question), args, line)
