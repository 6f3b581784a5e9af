"""Code as the shell names it: In [7], line 4.

A magic is given text, without its place. Here the text gets back the place that the user sees: it is compiled under the
shell's own name for the cell, with the line numbers of the cell, so that tracebacks, the debugger, `linecache` and a
report all speak of the same lines. Nothing here imports IPython; the shell is handed in.
"""

from __future__ import annotations

import ast
import sys
from types import CodeType, FrameType, TracebackType
from typing import Any


def line_code(shell: Any, text: str) -> CodeType:
    """The text of a line magic, placed where the magic stands: an expression where it is one, else statements."""
    number, line = _called_from(shell)
    source = "\n" * (line - 1) + text
    return _compile(shell, source, shell.compile.cache(source, number), expression=True)


def cell_code(shell: Any, body: str) -> CodeType:
    """The code below a cell magic, on the lines where the user sees it. Magics and `!commands` in it work."""
    raw = shell.history_manager.input_hist_raw[-1]
    whole = raw.rstrip().endswith(body.rstrip())  # a magic called from code, not typed, is in no cell
    above = raw.rstrip()[: -len(body.rstrip())].splitlines() if whole else ["%%"]
    # The lines above (the magic itself) become comments: the numbers stay right and the text can be parsed.
    source = shell.transform_cell("".join(f"# {text}\n" for text in above) + body)
    name = shell.compile.cache(source, _called_from(shell)[0], raw_code=raw if whole else None)
    return _compile(shell, source, name, expression=False)


def _called_from(shell: Any) -> tuple[int, int]:
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


def traceback_from(code: CodeType, traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins at this code; None where the code is not in it."""
    at = traceback
    while at is not None and at.tb_frame.f_code is not code:
        at = at.tb_next
    return at
