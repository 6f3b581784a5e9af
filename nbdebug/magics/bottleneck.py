"""%bottleneck, %%bottleneck and %generation: what makes a training, or the writing of tokens, slow."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument

import nbdebug
from nbdebug.magics._arguments import (
    MODELS,
    OPTIMIZERS,
    answer,
    evaluate,
    option_or_usual,
    parse,
    report_magic,
    step_text,
    subject_of,
    usage_errors,
    variables,
)
from nbdebug.magics._user_code import cell_code, line_code, run
from nbdebug.report import Report


@magics_class
class BottleneckMagics(Magics):
    """%bottleneck, %%bottleneck and %generation."""

    @report_magic
    @MODELS
    @OPTIMIZERS
    @argument("--loader", metavar="NAME", help="whose batches STEP takes (default: train_loader)")
    @argument("--steps", type=int, default=20, metavar="N", help="steps that are timed (default 20)")
    @argument("--goal", type=float, metavar="N", help="steps a second that you want")
    @argument(
        "--watch",
        nargs="?",
        const="on",
        choices=("on", "off"),
        help="time every step from now on, and say when steps become slower than the first ones; off: end it",
    )
    @argument("--no-cures", action="store_true", help="try no cures: only time the steps")
    @argument(
        "step",
        nargs=argparse.REMAINDER,
        metavar="STEP",
        help="one training step, such as step() or train_step(batch); or a name: a step that takes a batch, a trainer",
    )
    @line_cell_magic
    def bottleneck(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Time training steps, name what makes them slow, and try the cure.

            %bottleneck step()
            report = %bottleneck --loader train_loader train_step

        The steps train as they always do. %%bottleneck runs the cell below, and ends its loop after N steps. The report
        shows a step by its parts, your dearest lines, the cause with its line, and how fast the step is with the cure,
        which is tried in a copy of the process. In a script: nbdebug.bottleneck(step).
        """
        __tracebackhide__ = True
        if (args := parse(self.bottleneck, line)) is None:
            return None
        if args.watch:
            return answer(self._watch(args.watch == "on"), args, line)
        if args.steps < 1:
            raise UsageError(f"--steps takes a whole number of at least 1; got {args.steps}.")
        names = variables(self.shell, local_ns)
        if cell is not None:
            if args.step:
                raise UsageError("%%bottleneck runs the cell below it: it takes no STEP.")
            code, space = cell_code(self.shell, cell), self.shell.user_ns
            report = _time(code, lambda: exec(code, space), "%%bottleneck", args, names, whole=True)
        elif args.step:
            report = self._line(step_text(line, args.step), args, names)
        elif self.running is not None:
            report = self.running.report()
        else:
            raise UsageError("%bottleneck needs a step: %bottleneck step(), or %%bottleneck above a loop.")
        return answer(report, args, line if cell is None else cell)

    @report_magic
    @argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to write in each way (default 64)")
    @argument("model", metavar="MODEL", help="a model of transformers, or what maps tokens to logits")
    @argument("inputs", metavar="IDS", help="the tokens (batch, length), or what a tokenizer gives")
    @line_magic
    def generation(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Time how a model writes tokens: the prompt, each further token, with and without a cache.

            %generation model ids
            report = %generation model tokenizer("Once",return_tensors="pt")

        Each way writes the same tokens greedily; the report says whether they are equal. In a script:
        nbdebug.generation(model, ids).
        """
        __tracebackhide__ = True
        if (args := parse(self.generation, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        with usage_errors():
            report = nbdebug.generation(
                evaluate(args.model, names), evaluate(args.inputs, names), max_new_tokens=args.max_new_tokens
            )
        return answer(dataclasses.replace(report, question=f"%generation {args.model} {args.inputs}"), args, line)

    running: Any = None
    """The watch that is on."""

    def _watch(self, on: bool) -> Report | None:
        """Turn the watch on; off: its report."""
        report = self.running.report() if self.running is not None else None
        self.close()
        if not on:
            if report is None:
                print("No step is watched.")
            return report
        from nbdebug.tools.speed.bottleneck import SpeedWatch  # imports torch: %load_ext must stay quick

        self.running = SpeedWatch(print).attach()
        print("Every step is timed from now on. %bottleneck shows the times, %bottleneck --watch off ends it.")
        return None

    def active(self) -> list[str]:
        """A line for %nbdebug while steps are watched."""
        if self.running is None:
            return []
        slow = f" {self.running.sentence()}" if self.running.slow_since is not None else ""
        return [f"Active: %bottleneck --watch, {self.running.steps:,} steps.{slow} %bottleneck --watch off ends it."]

    def close(self) -> None:
        """End the watch."""
        if self.running is not None:
            self.running.detach()
            self.running = None

    close_all = close

    def _line(self, text: str, args: Any, names: dict[str, Any]) -> Report:
        __tracebackhide__ = True
        from nbdebug.observe.validation import needed
        from nbdebug.tools.speed.bottleneck import loop_of

        thing: Any = None
        if text.replace(".", "").isidentifier():
            thing, whole = loop_of(eval(text, names))
            if whole:
                code = line_code(self.shell, f"{text}.{thing.__name__}()")
                return _time(code, lambda: eval(code, names), f"%bottleneck {text}", args, names, whole=True)
            if callable(thing) and len(needed(thing)) != 1:
                text += "()"
        code = line_code(self.shell, text)
        if not callable(thing) or len(needed(thing)) != 1:
            return _time(code, lambda: eval(code, names), f"%bottleneck {text}", args, names)
        name, loader = option_or_usual("train_loader", args.loader, names)
        if loader is None:
            raise UsageError("%bottleneck needs the loader whose batches the step takes: --loader NAME")
        return _time(code, thing, f"%bottleneck --loader {name} {text}", args, names, loader=loader)


def _time(
    code: Any, call: Any, question: str, args: Any, names: dict[str, Any], whole: bool = False, loader: Any = None
) -> Report:
    __tracebackhide__ = True
    from nbdebug.tools.speed.bottleneck import time_training  # imports torch: %load_ext must stay quick
    from nbdebug.tools.speed.clock import Training

    subject = subject_of(args.model, args.optimizer, names)
    training = Training(call, subject.models, subject.optimizers, loader, whole, names)
    return run(code, lambda: time_training(training, question, str(subject), args.steps, args.goal, not args.no_cures))
