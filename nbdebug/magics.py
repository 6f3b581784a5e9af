"""The magics: read what was typed, call the function of the same name, return its report.

    %nan_trace step()          one training step, written as an expression or a statement
    %%nan_trace                the whole cell, a training loop included
    %explain CODE              the catalogue page of a cause
    %nbdebug [catalogue|off]   what is active; all causes; take everything away

Only this module knows IPython; `cells.py` gives what was typed its place, `subject.py` finds the models.
"""

from __future__ import annotations

import argparse
import inspect
import re
import tokenize
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

import nbdebug
from nbdebug import catalogue
from nbdebug.cells import cell_code, line_code, traceback_from
from nbdebug.finding import Report
from nbdebug.subject import Subject, found

HELP = argument("-h", "--help", action="store_true", help="show this text")
STRATEGIES = ("auto", "trace", "replay", "bisect")
REQUESTS = ("status", "catalogue", "off")


def register(shell: Any) -> None:
    """Add the magics and the completion of their options to a shell."""
    unregister(shell)
    magics = NbdebugMagics(shell)
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(magics.complete)


def unregister(shell: Any) -> None:
    """Take them away again; a magic of the same name that somebody else has registered since stays."""
    for table in shell.magics_manager.magics.values():
        for name in [name for name, magic in table.items() if _ours(magic)]:
            del table[name]
    shell.magics_manager.registry.pop(NbdebugMagics.__name__, None)
    matchers = shell.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if not _ours(matcher)]


def _ours(method: Any) -> bool:
    return isinstance(getattr(method, "__self__", None), NbdebugMagics)


@magics_class
class NbdebugMagics(Magics):
    """What `%load_ext nbdebug` adds."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument("--model", action="append", metavar="NAME", help="the model; may be given more than once. Left out: "
              "every model among your variables is taken, and the report says which")
    @argument("--optimizer", action="append", metavar="NAME", help="the same for the optimizer")
    @argument("--steps", type=int, metavar="N", help="run the step at most N times, until it fails (default 1)")
    @argument("--strategy", choices=STRATEGIES, default="auto",
              help="trace: watch every op of one run; bisect: repeat the step, look at few places; auto chooses")
    @argument("--restore", action="store_true", help="leave model and optimizer as they were before the step")
    @argument("step", nargs=argparse.REMAINDER, metavar="EXPR",
              help="one whole training step: step(), train_step(batch), loss = model(x).sum() ...")
    @line_cell_magic
    def nan_trace(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Name the cause of a NaN or Inf: which step, module, op, line and batch rows made it, and what fixes it.

        %nan_trace EXPR runs one training step under observation. %%nan_trace runs a whole cell, a training loop
        included, and stops it after the step that went bad. The result is a report: shown when it comes last,
        assignable (rep = %nan_trace step()), silenced by a semicolon. The function of the same name,
        nbdebug.nan_trace(step), does the same in a script.
        """
        __tracebackhide__ = True  # IPython leaves such frames out of what it shows
        args = _parsed(self.nan_trace, line)
        if args is None:
            return None
        names = self.shell.user_ns if not local_ns or local_ns is self.shell.user_ns else {
            **self.shell.user_ns, **local_ns}
        try:
            subject = Subject.chosen(args.model, args.optimizer, names)
        except ValueError as wrong:
            raise UsageError(str(wrong)) from None
        if cell is None:
            report = self._trace_line(_as_typed(line, args.step), args, subject, names)
        else:
            report = self._trace_cell(cell, args, subject)
        return None if _silenced(line if cell is None else cell) else report

    def _trace_line(self, text: str, args: Any, subject: Subject, names: dict[str, Any]) -> Report:
        __tracebackhide__ = True
        if not text:
            raise UsageError("%nan_trace takes one training step, for example: %nan_trace step()")
        if re.fullmatch(r"[\w.]+", text) and callable(eval(text, names)):
            raise UsageError(f"{text} is only named, not run: write %nan_trace {text}()")
        code = line_code(self.shell, text)
        steps = 1 if args.steps is None else args.steps
        return _asked(f"%nan_trace {text}", code, subject, lambda: nbdebug.nan_trace(
            lambda: eval(code, names), model=subject.model, optimizer=subject.optimizer, max_steps=steps,
            strategy=args.strategy, restore=args.restore))

    def _trace_cell(self, cell: str, args: Any, subject: Subject) -> Report:
        __tracebackhide__ = True
        from nbdebug.chapters.nan import trace  # brings torch, which %load_ext does not wait for

        if args.step or args.steps is not None or args.restore:
            raise UsageError("%%nan_trace runs the cell below it: it takes no EXPR, no --steps and no --restore")
        code = cell_code(self.shell, cell)
        return _asked("%%nan_trace", code, subject, lambda: trace.trace_cell(
            lambda: exec(code, self.shell.user_ns), models=subject.models, optimizers=subject.optimizers,
            strategy=args.strategy))

    @no_var_expand
    @magic_arguments()
    @HELP
    @argument("code", nargs="?", metavar="CODE", help="a cause, such as nan/overflow (overflow will do)")
    @line_magic
    def explain(self, line: str) -> None:
        """Show the catalogue page of a cause: what you see, why, how to make sure, what to do."""
        args = _parsed(self.explain, line)
        if args is None:
            return
        if args.code is None:
            raise UsageError("%explain takes a code, such as %explain nan/overflow; %nbdebug catalogue lists them all")
        try:
            page = catalogue.look_up(args.code).page()
        except KeyError as unknown:
            raise UsageError(unknown.args[0]) from None
        display({"text/plain": page, "text/markdown": page}, raw=True)

    @no_var_expand
    @magic_arguments("nbdebug")
    @HELP
    @argument("request", nargs="?", choices=REQUESTS, default="status",
              help="status: version and what is active; catalogue: every cause; off: take magics and hooks away")
    @line_magic("nbdebug")
    def control(self, line: str) -> None:
        """Say what nbdebug is doing, list the causes it can name, or turn it off."""
        args = _parsed(self.control, line)
        if args is None:
            return
        if args.request == "catalogue":
            print("\n".join(f"{rule.code:34}{rule.title}" for rule in catalogue.rules()))
        elif args.request == "off":
            if self.shell.extension_manager.unload_extension("nbdebug") is not None:  # not loaded by %load_ext
                unregister(self.shell)
            print("nbdebug is off: its magics and hooks are gone. %load_ext nbdebug brings the magics back.")
        else:
            print(f"nbdebug {nbdebug.__version__}: %nan_trace, %%nan_trace, %explain, %nbdebug.\n"
                  "Active: nothing; it watches only while one of its magics or functions runs.")

    @context_matcher()
    def complete(self, context: Any) -> Any:
        """Options after a dash, the user's names after --model and --optimizer, codes after %explain, and so on."""
        typed = re.search(r"(?:^|=)\s*%%?(nan_trace|explain|nbdebug)\s(?:.*\s)?(\S*)$", context.text_until_cursor)
        if typed is None:
            return {"completions": []}
        magic, fragment = typed.groups()
        words = context.text_until_cursor[: typed.start(2)].split()
        offered = [choice for choice in self._choices(magic, words[-1], fragment) if choice.startswith(fragment)]
        return {"completions": [SimpleCompletion(text=choice) for choice in offered], "matched_fragment": fragment,
                "suppress": bool(offered)}

    def _choices(self, magic: str, before: str, fragment: str) -> Iterable[str]:
        """What may follow the word `before` in a call of this magic; nothing where Python itself follows."""
        if before in ("--model", "--optimizer"):
            return found(before[2:], self.shell.user_ns)
        if before == "--strategy":
            return STRATEGIES
        if fragment.startswith("-"):
            parser = {"nan_trace": self.nan_trace, "explain": self.explain, "nbdebug": self.control}[magic].parser
            return [option for action in parser._actions for option in action.option_strings]
        if before.endswith("explain"):
            return [rule.code for rule in catalogue.rules()]
        return REQUESTS if before.endswith("%nbdebug") else ()


def _parsed(magic: Any, line: str) -> Any:
    """The arguments, or None when help was asked for and shown. Raises UsageError for a wrong one."""
    try:
        args = parse_argstring(magic, line)
    except ValueError as wrong:  # "No closing quotation"
        raise UsageError(f"{wrong}: {line}") from None
    if not args.help:
        return args
    print(magic.__doc__)
    return None


def _as_typed(line: str, words: list[str]) -> str:
    """The step as it was typed, spaces and all: the end of the line that argparse saw as these words."""
    start = len(line)
    for word in reversed(words[1:] if words[:1] == ["--"] else words):
        start = line.rindex(word, 0, start)
    return line[start:].strip().rstrip(";").strip()


def _asked(question: str, code: CodeType, subject: Subject, ask: Callable[[], Report]) -> Report:
    """Ask; the report says what was asked, and of which model.

    Where the user's own code raises, the report that came with the error is shown, then the error passes. Its traceback
    begins at the user's code: the frames that watched it say nothing about it.
    """
    __tracebackhide__ = True
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError("`await` outside a function cannot be traced: put it into a function, and run that")
    try:
        report = ask()
    except BaseException as raised:
        own = traceback_from(code, raised.__traceback__)
        if isinstance(getattr(raised, "report", None), Report):
            display(_said(raised.report, question, subject))  # type: ignore[attr-defined]
        elif own is None and _is_refusal(raised):
            raise UsageError(str(raised)) from None
        raise raised.with_traceback(own or raised.__traceback__)  # noqa: B904 (it is the same one)
    return _said(report, question, subject)


def _is_refusal(raised: BaseException) -> bool:
    """A wrong argument, or an error that nbdebug itself declares, when none of the user's code is to blame."""
    return isinstance(raised, ValueError) or type(raised).__module__.startswith("nbdebug.")


def _said(report: Report, question: str, subject: Subject) -> Report:
    report.question = question
    if not report.facts.get("met"):  # else it says itself which model it met in the run
        report.subject = str(subject)
    return report


def _silenced(text: str) -> bool:
    """Does it end in a semicolon? Text that is no plain Python (`!ls`) does not."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(text))
    except (tokenize.TokenError, SyntaxError):
        return False
