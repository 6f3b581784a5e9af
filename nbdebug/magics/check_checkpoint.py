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

PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "sampler", "load")


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
    @argument("--sampler", metavar="NAME", help="the sampler or loader whose position is to be saved")
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
    @argument(
        "build", metavar="BUILD", nargs="?", help="your function build() that gives a run, or a trainer, ready to train"
    )
    @argument(
        "step", metavar="STEP", nargs="?", help="your function step(run) that trains one step; a trainer needs none"
    )
    @argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a file that is there; BUILD is resumed(path), STEP trains without a stop",
    )
    @argument("--at", type=int, default=10, metavar="N", help="the step of the stop (default: 10)")
    @argument("--steps", type=int, default=20, metavar="N", help="the last step (default: 20)")
    @argument("--save", metavar="NAME", help="your function save(run, path) (default: the run's own way)")
    @argument("--load", metavar="NAME", help="your function load(run, path) (default: the run's own way)")
    @FULL
    @HELP
    @line_magic
    def resume_proof(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Is a run that was stopped, saved and loaded the run that never stopped? And if not, what was not saved?

            %resume_proof build step --at 10 --steps 20 --save save --load load
            %resume_proof make_trainer
            report = %resume_proof resumed uninterrupted runs/step_1000.pt

        The run is trained with and without a stop, in copies of the process: nothing here changes. Losses, rows and
        weights are compared bit for bit. A Trainer of transformers, or (Trainer, module, loader) of Lightning, saves by
        itself. With a file both functions give a list of the same steps, such as the losses. In a script:
        nbdebug.resume_proof(build, step).
        """
        __tracebackhide__ = True
        args = parse(self.resume_proof, line)
        if args is None:
            return None
        if args.build is None:
            raise UsageError("%resume_proof needs a function that builds your run: %resume_proof build step")
        names = variables(self.shell, local_ns)
        build, step, save, load = (
            None if word is None else evaluate(word, names) for word in (args.build, args.step, args.save, args.load)
        )
        path = None if args.path is None else names.get(unquote(args.path), unquote(args.path))
        try:
            with usage_errors():
                report = nbdebug.resume_proof(build, step, path, at=args.at, steps=args.steps, save=save, load=load)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        return answer(dataclasses.replace(report, question=f"%resume_proof {line.strip()}"), args, line)
