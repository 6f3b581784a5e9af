"""The user's code that a magic runs: compiled so that it is In [7], line 4, and run under observation.

IPython hands a magic the text without its place. The text is compiled under the shell's own name for the cell, with the
line numbers of the cell, so that tracebacks, the debugger, `linecache` and a report all speak of the same lines.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from nbdebug.arguments import callback_argument
from nbdebug.magics._arguments import evaluate, usage_errors, variables
from nbdebug.report import Report
from nbdebug.text import module_name


def line_code(shell: Any, text: str) -> CodeType:
    """The text of a line magic, placed where the magic stands: an expression where it is one, else statements.
    Raises UsageError where it is no Python."""
    number, line = called_from(shell)
    source = "\n" * (line - 1) + text
    try:
        return _compile(shell, source, shell.compile.cache(source, number), expression=True)
    except SyntaxError as error:
        raise UsageError(
            f"`{text}` is no Python ({error.msg}): what is to run is typed as a call, such as step()."
        ) from None


def named_call(magic: str, text: str, names: Mapping[str, Any]) -> Any:
    """The function whose bare name was typed in the place of a step, or a trainer; None for more than a name. Raises
    UsageError for another thing: run as a step, it would show nothing, and look well."""
    if not re.fullmatch(r"[^\W\d][\w.]*", text):
        return None
    thing = evaluate(text, names)
    if callable(thing) or callable(getattr(thing, "train", None)):
        return thing
    raise UsageError(f"{text} is of type {type(thing).__name__}: %{magic} takes a call or a function, such as step().")


def cell_code(shell: Any, body: str) -> CodeType:
    """The code below a cell magic, on the lines where the user sees it. Magics and `!commands` in it work."""
    raw = shell.history_manager.input_hist_raw[-1]
    whole = raw.rstrip().endswith(body.rstrip())  # a magic called from code, not typed, is in no cell
    above = raw.rstrip()[: -len(body.rstrip())].splitlines() if whole else ["%%"]
    # The lines above (the magic itself) become comments: the numbers stay right and the text can be parsed.
    source = shell.transform_cell("".join(f"# {text}\n" for text in above) + body)
    name = shell.compile.cache(source, called_from(shell)[0], raw_code=raw if whole else None)
    return _compile(shell, source, name, expression=False)


def called_from(shell: Any) -> tuple[int, int]:
    """The cell (its execution count) and the line in it from which the running magic was called."""
    cells = shell.compile._filename_map
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in cells:
            return cells[frame.f_code.co_filename], frame.f_lineno
        frame = frame.f_back
    return shell.execution_count, 1


def _compile(shell: Any, source: str, name: str, expression: bool) -> CodeType:
    """Compile as the shell would, `await` outside a function included: who runs the code says what becomes of that."""
    with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
        tree: Any = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
        expression = expression and len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr)
        if expression:
            tree = ast.Expression(tree.body[0].value)
        code: CodeType = shell.compile(tree, name, "eval" if expression else "exec")
    return code


def run(code: CodeType, ask: Callable[[], Report], label: Callable[[Report], Report] = lambda report: report) -> Report:
    """The report that `ask` gives while it runs this code of the user's; `label` writes into it what was asked.

    Where the user's code raises, the report that came with the error is shown, then the error passes. Its traceback
    begins at the user's code: the frames of nbdebug above it say nothing about it. Raises UsageError for `await`, and
    where nbdebug refuses an argument.
    """
    __tracebackhide__ = True
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError("nbdebug cannot run `await` outside a function: put it into a function, and call that")
    try:
        return label(ask())
    except BaseException as error:
        own = _traceback_from(code, error.__traceback__)
        if isinstance(getattr(error, "report", None), Report):
            display(label(error.report))  # type: ignore[attr-defined]
        elif own is None and (
            isinstance(error, (TypeError, ValueError)) or module_name(type(error)).startswith("nbdebug.")
        ):
            raise UsageError(str(error)) from None
        raise error.with_traceback(own or error.__traceback__)  # noqa: B904 (it is the same one)


def _traceback_from(code: CodeType, traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins at this code; None where the code is not in it."""
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    return traceback


# -- loops -------------------------------------------------------------------------------------------------------------

NOTHING = object()


def loop_code(
    shell: Any, magic: str, text: str, cell: str | None, local_ns: dict[str, Any] | None
) -> tuple[str, CodeType, dict[str, Any]]:
    """(question, code, variables) of the loop that was typed behind the magic, or stands in the cell below it. A name
    alone is called, with a variable `callback` if it takes one."""
    if cell is None:
        names = variables(shell, local_ns)
        thing, call = named_call(magic, text, names), text
        if callable(thing):
            call = f"{text}({callback_argument(thing)})"
        elif thing is not None:
            call = f"{text}.train()"
        return f"%{magic} {text}", line_code(shell, call), names
    if text:
        raise UsageError(f"%%{magic} runs the cell below it, so it takes no LOOP.")
    return f"%%{magic}", cell_code(shell, cell), shell.user_ns


def run_loop(code: CodeType, names: dict[str, Any], ask: Callable[[Callable[[Any], None]], Any]) -> Any:
    """ask(train), where train(callback) runs the code with a variable `callback`."""
    __tracebackhide__ = True

    def train(callback: Any) -> None:
        names["callback"] = callback
        exec(code, names)

    before = names.get("callback", NOTHING)
    try:
        with usage_errors():
            return run(code, lambda: ask(train))
    finally:
        names.pop("callback", None)
        if before is not NOTHING:
            names["callback"] = before


def loop_parts(
    shell: Any, magic: str, text: str, cell: str | None, local_ns: dict[str, Any] | None, **named: str | None
) -> tuple[str, str, dict[str, Any]]:
    """(question, what was taken, model, batch, loss_fn and optimizer) of a loop, as its first steps tell them; the loop
    is stopped there, and everything put back. named: the user's expressions for those that need not be told."""
    from nbdebug.tools.training.evaluate import preserve_rng
    from nbdebug.tools.training.probe import first_steps  # imports torch: %load_ext must stay quick

    question, code, names = loop_code(shell, magic, text, cell, local_ns)
    own = {kind: evaluate(expression, names) for kind, expression in named.items() if expression is not None}
    given = {"model": own.get("model"), "loss_fn": own.get("loss_fn")}
    known, taken = run_loop(code, names, lambda train: first_steps(train, given, names))
    with preserve_rng(known.train_loader):
        batch = own["batch"] if "batch" in own else next(iter(known.train_loader))
    optimizer = known.optimizers[0] if len(known.optimizers) == 1 else None
    parts = {"model": known.model, "batch": batch, "loss_fn": known.loss_fn}
    return question, taken, {**parts, "optimizer": own.get("optimizer", optimizer)}
