"""Which variables bring a graph along from the turn of a loop before, read from the source around the failing line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from nbdebug.chapters.error.looks.autograd.calls import entered
from nbdebug.chapters.error.looks.autograd.parts import skipped
from nbdebug.chapters.error.looks.autograd.source import Code, calls, heads, last, loops, targets

QUIET = frozenset(
    {
        "print",
        "item",
        "detach",
        "float",
        "append",
        "add_scalar",
        "log",
        "info",
        "debug",
        "write",
        "format",
        "rand_like",
        "randn_like",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "set_postfix",
        "update",
        "len",
        "isinstance",
        "str",
    }
)
"""Calls that take a value and put none of its graph into a loss."""


def body_of(code: Code, node: Any) -> Any | None:
    """What runs again and again around a line: the innermost loop; a cell as a whole; None for a function without."""
    around = loops(code, node) if node is not None else []
    if around:
        return around[0]
    return code.node if isinstance(code.node, ast.Module) else None


def within(body: Any) -> list[Any]:
    """The statements of a loop's body, or of a cell."""
    found: list[Any] = []
    todo = list(reversed(body.body))
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("finalbody", "orelse", "handlers", "cases", "body"):
                todo += [n for n in reversed(getattr(node, part, None) or []) if isinstance(n, ast.AST)]
    return found


def outside_names(code: Code) -> set[str]:
    """The variables that a function shares with what is around it: global and nonlocal ones."""
    return {name for s in code.statements() if isinstance(s, (ast.Global, ast.Nonlocal)) for name in s.names}


def writes(statements: list[Any], text: str) -> list[Any]:
    """The statements that give a variable (or `self.x`) its value."""
    return [
        s
        for s in statements
        if any(isinstance(t, (ast.Name, ast.Attribute)) and ast.unparse(t) == text for t in targets(s))
    ]


def reads(statements: list[Any], text: str) -> list[Any]:
    """The statements that compute with it: not those that only print it, compare it, or take its number."""
    found = []
    for statement in statements:
        if isinstance(statement, (ast.If, ast.While)):
            continue
        counts = isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == text
        if counts or any(
            _reads(node, text)
            for field, node in ast.iter_fields(statement)
            if field not in ("targets", "target", "body", "orelse", "handlers", "finalbody")
        ):
            found.append(statement)
    return found


def _reads(node: Any, text: str) -> bool:
    if isinstance(node, list):
        return any(_reads(one, text) for one in node)
    if not isinstance(node, ast.AST):
        return False
    if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == text:
        return True
    if (
        isinstance(node, ast.Compare)
        or isinstance(node, ast.Attribute)
        and node.attr in ("data", "shape", "dtype", "device", "grad")
    ):
        return False
    if isinstance(node, ast.Call) and last(node.func) in QUIET:
        return False
    return any(_reads(child, text) for child in ast.iter_child_nodes(node))


def carried(code: Code, body: Any, text: str) -> tuple[str, Any, Any] | None:
    """(how, where it gets its value, where that is read in the next turn) of a variable; None where it is not
    carried."""
    statements = within(body)
    written = [s for s in writes(statements, text) if not skipped(s, code)]
    read = [s for s in reads(statements, text) if not skipped(s, code)]
    if not written or not read:
        return None
    steady = [s for s in written if _always(code, s, body, written)]
    first = steady[0] if steady else written[0]
    sums = [s for s in written if isinstance(s, ast.AugAssign) or isinstance(s, ast.Assign) and _adds_to(s.value, text)]
    if sums and not [s for s in written if s.lineno < sums[0].lineno and s not in sums]:
        return "sum", sums[0], sums[0]
    early = [s for s in read if s.lineno < first.lineno or s is first]
    if early:
        return "turn", written[-1], early[0]
    if not steady:
        return "sometimes", first, next((s for s in read if s.lineno > first.lineno), read[0])
    return None


def _adds_to(node: Any, text: str) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and text in (ast.unparse(node.left), ast.unparse(node.right))
    )


def _always(code: Code, statement: Any, body: Any, written: list[Any]) -> bool:
    """Whether a statement runs in each turn: under no condition, or with a like one in the other branch."""
    inner = statement
    for around in code.source.around(statement):
        if around is body:
            break
        if isinstance(around, ast.If):
            other = around.orelse if inner in around.body else around.body
            if not any(s is w for part in other for s in ast.walk(part) for w in written):
                return False
        elif isinstance(around, (ast.Try, ast.ExceptHandler)):
            return False
        inner = around
    return True


def steady(code: Code, written: list[Any]) -> list[Any]:
    """Of the statements that give something its value those that run at each call."""
    return [s for s in written if _always(code, s, code.node, written)]


def filled(statements: list[Any], text: str) -> Any | None:
    """The statement that puts something into a container of this name, where it isn't made anew among them."""
    if writes(statements, text):
        return None
    for statement in statements:
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Subscript) and ast.unparse(t.value) == text for t in statement.targets
        ):
            return statement
        if isinstance(statement, ast.Expr) and any(
            last(call.func) in ("append", "extend", "insert", "add", "appendleft", "update", "put")
            and isinstance(call.func, ast.Attribute)
            and ast.unparse(call.func.value) == text
            for call in calls(statement)
        ):
            return statement
    return None


def backwards(code: Code, statements: list[Any], depth: int = 2) -> Iterator[tuple[Any, ast.Call, Code]]:
    """(statement, the call of backward, the function in which it stands) among statements and what they call."""
    for statement in statements:
        for node in heads(statement):
            if not isinstance(node, ast.Call):
                continue
            if last(node.func) == "backward" or last(node.func) == "grad" and "autograd" in ast.unparse(node.func):
                yield statement, node, code
            elif depth and (inner := entered(node, code)) is not None:
                for _, call, where in backwards(inner, list(inner.statements()), depth - 1):
                    yield statement, call, where


def keeps(call: ast.Call) -> bool:
    """Whether a backward keeps its graph."""
    return any(
        k.arg in ("retain_graph", "create_graph") and isinstance(k.value, ast.Constant) and k.value.value
        for k in call.keywords
    )
