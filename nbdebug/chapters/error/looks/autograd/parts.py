"""Small questions to the user's syntax: what a call is given, which branch ran, which of several targets is meant."""

from __future__ import annotations

import ast
import types
from typing import Any

from nbdebug.chapters.error.facts_autograd import Cut
from nbdebug.chapters.error.looks.autograd.cutting import closing, truth
from nbdebug.chapters.error.looks.autograd.source import SCOPES, Code, assignments, calls, last, loops, value


def given_to(node: ast.Call) -> list[Any]:
    return [*node.args, *(k.value for k in node.keywords)]


def is_function(node: ast.Call, code: Code) -> bool:
    """`torch.argmax(x)` and `float(x)`, not `x.argmax()`."""
    if isinstance(node.func, ast.Name):
        return True
    base = node.func.value if isinstance(node.func, ast.Attribute) else None
    return issubclass(type(value(base, code)), (types.ModuleType, type)) if base is not None else False


def operands_of(node: ast.Call, code: Code) -> list[Any]:
    base = [node.func.value] if isinstance(node.func, ast.Attribute) and not is_function(node, code) else []
    return base + given_to(node)


def package_of(called: Any) -> str:
    kind = called if issubclass(type(called), type) else type(called)
    plain = kind in (types.BuiltinFunctionType, types.FunctionType)
    return str(called.__module__ if plain else type.__getattribute__(kind, "__module__")).partition(".")[0]


def comprehensions(node: ast.Name, code: Code) -> list[Any]:
    """The `for` of a comprehension around a name that gives it its value."""
    return [
        g
        for n in code.source.around(node)
        for g in getattr(n, "generators", ())
        if any(isinstance(t, ast.Name) and t.id == node.id for t in ast.walk(g.target))
    ]


def put_in(code: Code, name: str) -> list[Any]:
    """What is put into a container of this name: `name.append(x)`, `name[k] = x`."""
    found: list[Any] = []
    for statement in code.statements():
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name) and t.value.id == name
            for t in statement.targets
        ):
            found.append(statement.value)
        elif isinstance(statement, ast.Expr):
            found += [
                a
                for call in calls(statement)
                if last(call.func) in ("append", "extend", "insert", "add")
                and isinstance(call.func, ast.Attribute)
                and last(call.func.value) == name
                and isinstance(call.func.value, ast.Name)
                for a in call.args[-1:]
            ]
    return found


def skipped(statement: Any, code: Code) -> bool:
    """Whether a statement stands in a branch that plain values say was not taken."""
    inner = statement
    for around in code.source.around(statement):
        if isinstance(around, ast.If) and not changes_in_loop(around.test, code):
            holds = truth(around.test, code)
            if holds is not None and (inner in around.body) is not holds:
                return True
        inner = around
    return False


def changes_in_loop(test: Any, code: Code) -> bool:
    """Whether a name in a condition is given its value in a loop: what it is now is not what it was."""
    return any(
        loops(code, s)
        for n in ast.walk(test)
        if isinstance(n, ast.Name)
        for s in assignments(code, n.id, code.line)
        if not isinstance(s, SCOPES)
    )


def first_value(statement: Any, name: str, code: Code) -> bool:
    return not any(s.lineno < statement.lineno for s in assignments(code, name, statement.lineno))


def place_of(statement: Any, name: str) -> int | None:
    """Which of several targets a variable is: `_, best = …` → 1 for `best`."""
    for whole in getattr(statement, "targets", ()):
        if isinstance(whole, (ast.Tuple, ast.List)):
            return next((i for i, t in enumerate(whole.elts) if isinstance(t, ast.Name) and t.id == name), None)
    return None


def statement_of(node: Any, code: Code) -> Any:
    if isinstance(node, ast.stmt):
        return node
    return next((n for n in code.source.around(node) if isinstance(n, ast.stmt)), None)


def sign_of(node: ast.Compare) -> str:
    signs = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
    return signs.get(type(node.ops[0]), "in")


def short(node: Any) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 80 else text[:77] + "..."


def block(node: Any, code: Code, name: str | None = None) -> Cut | None:
    """The no_grad around a statement, if one is."""
    for around in code.source.around(node):
        if isinstance(around, (ast.With, ast.AsyncWith)):
            for item in around.items:
                off = closing(item.context_expr, code)
                if off is not None:
                    call = item.context_expr
                    name_of = last(call.func if isinstance(call, ast.Call) else call)
                    return (
                        Cut(
                            "block",
                            name_of,
                            f"with {short(call)}:",
                            None,
                            name,
                            code.name,
                            code.where(around),
                            written=short(node),
                        )
                        if off
                        else None
                    )
        if around is code.node:
            break
    return None
