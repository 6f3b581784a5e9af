"""Expressions around the one that failed: what a name was bound to before it, and which layer takes what it gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from nbdebug.chapters.error.looks.shapes.expressions import is_shaped, look_up
from nbdebug.chapters.error.operands import statement
from nbdebug.chapters.error.syntax import SCOPES, bound, entries, functions, tree_of
from nbdebug.observe.frames import Frame

FLATTENING = ("reshape", "view", "flatten", "contiguous", "long", "clone", "detach", "squeeze")
HOPS = 3


def scope_of(frame: Frame) -> ast.AST | None:
    """The function of a frame as syntax, or the whole file or cell."""
    tree = tree_of(frame.site.file)
    if tree is None:
        return None
    line = frame.site.line
    around = [n for n in functions(tree) if isinstance(n, SCOPES) and n.lineno <= line <= (n.end_lineno or 0)]
    return min(around, key=lambda n: (n.end_lineno or 0) - n.lineno, default=tree)


def before_flattening(node: ast.AST | None, frame: Frame, rows: int) -> Iterator[tuple[ast.expr, ast.expr, Any]]:
    """(expression, the part of it before it was flattened, what that is) of a flat operand of so many rows: of what
    stands there, or of what its name was bound to before."""
    for source in _sources(node, frame):
        base = source
        while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr in FLATTENING:
            base = base.func.value
            value = look_up(base, frame)
            if is_shaped(value) and value.ndim > 1 and value.shape[0] * value.shape[1] == rows:
                yield source, base, value


def _sources(node: ast.AST | None, frame: Frame) -> Iterator[ast.expr]:
    """The expression itself, then what its name was bound to, nearest first."""
    scope, line = scope_of(frame), frame.site.line
    for _ in range(HOPS):
        if not isinstance(node, ast.expr):
            return
        yield node
        if not isinstance(node, ast.Name) or scope is None:
            return
        earlier = [b for b in bound(scope, node.id) if b[0].lineno < line]
        if not earlier:
            return
        value, keys = earlier[-1]
        node, line = next((part for part, rest in entries(value, keys) if not rest), None), value.lineno


def with_base(source: ast.expr, base: ast.expr, new: str) -> str:
    """The expression with another text in the place of its base; views become reshapes, as a cut tensor needs."""
    text = ast.unparse(source).replace(ast.unparse(base), new, 1)
    return text.replace(".view(", ".reshape(")


def taken_by(node: ast.AST | None, frame: Frame) -> ast.Call | None:
    """The call that is given what the failing expression gives: the one around it, or the next one after the statement
    that is given the name which it binds."""
    made, scope = statement(frame), scope_of(frame)
    if made is None or scope is None:
        return None
    calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and n.args]
    around = next((call for call in calls if call.args[0] is node), None)
    if around is not None or not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name):
        return around
    name, end = made.targets[0].id, made.end_lineno or made.lineno
    after = [n for n in calls if n.lineno > end and isinstance(n.args[0], ast.Name) and n.args[0].id == name]
    return min(after, key=lambda n: n.lineno, default=None)
