"""Single statements of Python: what they bind, what stands behind a magic, which of them run with their cell."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINED = (*FUNCTIONS, ast.ClassDef)
Bound = tuple[str, str, ast.stmt, "ast.expr | None"]
"""(path, how, statement, value): of `model.fc = new()` "model.fc", "assign", the whole, `new()`."""
TIMED = frozenset({"time", "timeit", "capture", "prun", "mem", "nan_trace", "diagnose"})
"""Magics that run the Python they are given, as it stands."""


def dotted(node: ast.AST | None) -> str:
    """ "model.layers.fc" of a name or an attribute, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def names_in(node: ast.AST | None) -> set[str]:
    """The variables that an expression reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node is not None else set()


def unwrapped(statement: ast.stmt) -> list[ast.stmt]:
    """What stands behind `%time` or below `%%time`, as IPython writes it; of other statements themselves."""
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") not in ("run_cell_magic", "run_line_magic"):
        return [statement]
    given = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if len(given) != len(call.args) or not given or given[0] not in TIMED:
        return [statement]
    line = statement.lineno
    try:
        body = ast.parse(given[-1]).body
    except (SyntaxError, ValueError):
        return [statement]
    return [ast.increment_lineno(inner, line if len(given) == 3 else line - 1) for inner in body]


def running(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if not isinstance(statement, DEFINED):
            for part in ("body", "orelse", "finalbody"):
                yield from running(getattr(statement, part, ()))
            for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from running(handler.body)


def bound(statement: ast.stmt) -> Iterator[Bound]:
    """What a statement binds or deletes."""
    if isinstance(statement, DEFINED):
        yield statement.name, "class" if isinstance(statement, ast.ClassDef) else "def", statement, None
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], "import", statement, None
    elif isinstance(statement, ast.Delete):
        yield from ((path, "del", statement, None) for target in statement.targets for path in [dotted(target)] if path)
    else:
        loop = isinstance(statement, (ast.For, ast.AsyncFor))
        for target, value in _pairs(statement):
            for path, part in _targets(target, value):
                yield (path, "for", statement, None) if loop else (path, "assign", statement, part)


def _pairs(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, a loop or a with."""
    if isinstance(statement, ast.Assign):
        return [(target, statement.value) for target in statement.targets]
    if isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        return [(statement.target, statement.value)] if statement.value is not None else []
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return [(statement.target, statement.iter)]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [(item.optional_vars, item.context_expr) for item in statement.items if item.optional_vars is not None]
    return []


def _targets(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        given = value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else None
        for place, part in enumerate(target.elts):
            yield from _targets(part, given[place] if given else value)
    elif isinstance(target, ast.Starred):
        yield from _targets(target.value, value)
    elif dotted(target):
        yield dotted(target), value
