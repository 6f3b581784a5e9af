"""The user's sources as syntax: the parts of an expression, the bindings of a name, the entry of a value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from nbdebug.observe.sources import SCOPES, parents

Key = Any
"""An index of a tuple or a list, or a key of a dict."""
FIRST = ("DataLoader", "iter", "next", "list", "tuple", "tqdm", "trange", "reversed", "sorted", "cycle", "Subset")
"""Calls that return the items of their first argument."""


def comprehensions(tree: ast.Module, node: ast.AST) -> Iterator[ast.comprehension]:
    """The `for … in …` clauses of the list, set and dict comprehensions in which an expression runs, innermost first:
    from Python 3.12 on these have no frame of their own."""
    around = parents(tree)
    inner, outer = node, around.get(id(node))
    while outer is not None and not isinstance(outer, (*SCOPES, ast.ClassDef, ast.GeneratorExp)):
        if isinstance(outer, (ast.ListComp, ast.SetComp, ast.DictComp)):
            clauses = outer.generators
            last = clauses.index(inner) if isinstance(inner, ast.comprehension) else len(clauses)
            yield from reversed(clauses[:last])
        elif isinstance(outer, ast.comprehension) and inner is not outer.iter:  # in a condition
            yield outer
        inner, outer = outer, around.get(id(outer))


def entries(node: ast.expr, path: tuple[Key, ...]) -> Iterator[tuple[ast.expr, tuple[Key, ...]]]:
    """An expression; of a tuple, a dict or a call that returns items, the part under the path, and the rest of it."""
    then = _opened(node, path)
    if then is None:
        yield node, path
        return
    for part, rest in then:
        yield from entries(part, rest)


def _opened(node: ast.expr, path: tuple[Key, ...]) -> list[tuple[ast.expr, tuple[Key, ...]]] | None:
    """One step into the expression; None where there is none."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return [(node.value, (node.slice.value, *path))]
    if isinstance(node, ast.Call) and node.args and callee_name(node) in FIRST:
        return [(node.args[0], path)]
    if not path:
        return None
    key, rest = path[0], path[1:]
    if isinstance(node, ast.Call) and node.args and callee_name(node) == "enumerate" and key == 1:
        return [(node.args[0], rest)]
    if isinstance(node, ast.Dict) and type(key) is str:
        return [
            (value, rest)
            for name, value in zip(node.keys, node.values)
            if isinstance(name, ast.Constant) and name.value == key
        ]
    inside: list[ast.expr] | None = None
    if isinstance(node, (ast.Tuple, ast.List)):
        inside = node.elts
    elif callee_name(node) in ("TensorDataset", "zip"):
        inside = getattr(node, "args", [])
    if inside is None or type(key) is not int:
        return None
    return [(inside[key], rest)] if key < len(inside) else []


def value_parts(node: ast.expr) -> Iterator[ast.expr]:
    """An expression and the parts of its value: receivers, operands and arguments, not indices or conditions."""
    yield node
    inner: list[ast.expr] = []
    if isinstance(node, ast.Call):
        inner = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args]
    elif isinstance(node, (ast.Subscript, ast.Starred, ast.Await, ast.Attribute)):
        inner = [node.value] if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)) else []
    elif isinstance(node, ast.BinOp):
        inner = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        inner = [node.operand]
    elif isinstance(node, ast.IfExp):
        inner = [node.body, node.orelse]
    elif isinstance(node, (ast.Tuple, ast.List)):
        inner = list(node.elts)
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        inner = [node.elt]
    for part in inner:
        yield from value_parts(part)


def callee_name(node: ast.AST) -> str:
    """The last name of what a call calls: "from_numpy" of `torch.from_numpy(a)`, "" for all else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def bindings(scope: ast.AST, text: str) -> list[tuple[ast.expr, tuple[Key, ...]]]:
    """(value, path of the entry) of each statement of this scope that binds a name, in the order of the lines."""
    results: list[tuple[ast.expr, tuple[Key, ...]]] = []
    everywhere = text.startswith("self.")
    for node in _inside(scope, everywhere):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.comprehension)):
            pairs = [(node.target, node.iter)]
        for target, value in pairs:
            keys = _keys(target, text)
            if keys is not None:
                results.append((value, keys))
    return sorted(results, key=lambda pair: pair[0].lineno)


def _inside(scope: ast.AST, everywhere: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(scope):
        yield child
        if everywhere or not isinstance(child, (*SCOPES, ast.ClassDef)):
            yield from _inside(child, everywhere)


def _keys(target: ast.expr, text: str) -> tuple[Key, ...] | None:
    """() when the target is the name, (1,) when it is the second of a tuple, None when it is not there."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for i, part in enumerate(target.elts):
            inner = _keys(part, text)
            if inner is not None:
                return (i, *inner)
        return None
    return () if isinstance(target, (ast.Name, ast.Attribute)) and ast.unparse(target) == text else None
