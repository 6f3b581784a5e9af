"""`%mem EXPR` and `%%mem`: a step run several times, or a cell run once, with its memory followed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from nbdebug.cells import cell_code, line_code, traceback_from
from nbdebug.finding import Report
from nbdebug.subject import Subject


def follow_line(shell: Any, text: str, args: Any, subject: Subject, names: dict[str, Any]) -> Report:
    """The step that was typed behind %mem, run `--steps` times."""
    __tracebackhide__ = True
    if re.fullmatch(r"[\w.]+", text) and callable(eval(text, names)):
        text = f"{text}()"
    code = line_code(shell, text)
    steps = 3 if args.steps is None else args.steps
    return _asked(code, lambda: _follow(lambda: eval(code, names), code, f"%mem {text}", args, subject, names, steps))


def follow_cell(shell: Any, cell: str, args: Any, subject: Subject) -> Report:
    """The cell below %%mem, run once."""
    __tracebackhide__ = True
    if args.step or args.steps is not None:
        raise UsageError("%%mem runs the cell below it, once: it takes no EXPR and no --steps")
    code, names = cell_code(shell, cell), shell.user_ns
    return _asked(code, lambda: _follow(lambda: exec(code, names), code, "%%mem", args, subject, names, 1))


def _follow(
    run: Callable[[], Any],
    code: CodeType,
    question: str,
    args: Any,
    subject: Subject,
    names: dict[str, Any],
    steps: int,
) -> Report:
    from nbdebug.chapters.memory.mem import follow_step, loaders_of  # brings torch: %load_ext does not wait for it

    if steps < 1:
        raise UsageError(f"--steps takes a whole number of at least 1; got {steps}")
    return follow_step(
        run,
        subject.models,
        subject.optimizers,
        loaders_of(None, names),
        names,
        question,
        str(subject),
        steps,
        args.device,
        files=(code.co_filename,),
    )


def _asked(code: CodeType, ask: Callable[[], Report]) -> Report:
    """Where the user's own code raises, what was seen before is shown, and the error passes; its traceback begins at
    their code."""
    __tracebackhide__ = True
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError("`await` outside a function cannot be followed: put it into a function, and run that")
    try:
        return ask()
    except BaseException as raised:
        own = traceback_from(code, raised.__traceback__)
        if isinstance(getattr(raised, "report", None), Report):
            display(raised.report)  # type: ignore[attr-defined]
        elif own is None and isinstance(raised, (TypeError, ValueError)):
            raise UsageError(str(raised)) from None
        raise raised.with_traceback(own or raised.__traceback__)  # noqa: B904 (it is the same one)
