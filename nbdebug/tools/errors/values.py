"""The user's sources as syntax, and the values of the failing expression, by the user's text for them.

Python (3.11 and newer) knows which expression of a line was running; before that it is the line's statement. Names,
attributes, and items with a constant or a named key are looked up in the frame. A call, a property, a slice
or arithmetic would run code of the user's: its value is unknown, and its own parts are looked up instead.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.observe.frames import Frame
from nbdebug.observe.sources import SCOPES, nodes, parents, tree_of
from nbdebug.observe.variables import class_attribute, members, named_children

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


def tensor_attribute(value: Any, name: str) -> Any:
    """An attribute of a tensor as torch itself has it, whatever a subclass defines. Raises what torch raises:
    a nested tensor has no shape, a lazy parameter none yet."""
    return torch._C.TensorBase.__dict__[name].__get__(value)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor; None of other objects, and of a tensor without one (nested, lazy)."""
    if not issubclass(type(value), torch.Tensor):
        return None
    try:
        return tuple(int(side) for side in tensor_attribute(value, "shape"))
    except (RuntimeError, TypeError, ValueError):
        return None


def message_of(error: BaseException) -> str:
    """The message of an exception of torch's or Python's: the text among its arguments."""
    arguments: Any = BaseException.__dict__["args"].__get__(error)
    if type(error) is KeyError and len(arguments) == 1 and type(arguments[0]) in (str, int):
        return repr(arguments[0])
    if issubclass(type(error), OSError) and len(arguments) >= 2 and type(arguments[1]) is str:
        return arguments[1]
    texts = [part for part in arguments if issubclass(type(part), (str, int, float))]
    if texts:
        text = texts[0]
        return str.__str__(text) if isinstance(text, str) else str(text) if type(text) in (int, float, bool) else ""
    if issubclass(type(error), (ImportError, SyntaxError)):
        slot = (ImportError if isinstance(error, ImportError) else SyntaxError).__dict__["msg"]
        text = slot.__get__(error)
        return text if type(text) is str else ""
    return type(arguments[0]).__name__ if type(error) is KeyError and arguments else ""


UNKNOWN = object()
"""Stands for a value that can't be looked up without running code."""


def expression(frame: Frame) -> ast.AST | None:
    """The syntax of what ran in this frame: the smallest expression, else the statement of the line. None where the
    source is not available, or no longer the one that runs."""
    tree = tree_of(frame.site.file)
    if tree is not None and frame.span is None and frame.site.function == "<lambda>":
        alone = _lambda(tree, frame.site.line)
        if alone is not None:
            return alone
    return None if tree is None else _at(tree, frame.span or (frame.site.line, frame.site.line, None, None))


def statement(frame: Frame) -> ast.stmt | None:
    """The statement that ran in this frame, or None as for `expression`."""
    tree = tree_of(frame.site.file)
    if tree is None:
        return None
    return _around(tree, frame.span[0], frame.span[2]) if frame.span else _around(tree, frame.site.line)


@functools.lru_cache(maxsize=256)
def _lambda(tree: ast.Module, line: int) -> ast.expr | None:
    """The body of the only lambda of a line."""
    lambdas = [n for n in nodes(tree) if isinstance(n, ast.Lambda) and n.lineno <= line <= (n.end_lineno or 0)]
    return lambdas[0].body if len(lambdas) == 1 else None


@functools.lru_cache(maxsize=256)
def _at(tree: ast.Module, at: tuple[int, int, int | None, int | None]) -> ast.AST | None:
    exact = [
        n
        for n in nodes(tree)
        if isinstance(n, (ast.expr, ast.stmt)) and (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == at
    ]
    exact.sort(key=lambda n: isinstance(n, ast.stmt))  # `f(x)` alone on a line is a statement and a call
    return exact[0] if exact else _around(tree, at[0])


@functools.lru_cache(maxsize=256)
def _around(tree: ast.Module, line: int, column: int | None = None) -> ast.stmt | None:
    """The smallest statement over a line; of several on one line, the one at the column."""
    statements = [n for n in nodes(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    if column is not None:
        here = (line, column)
        statements = [
            n for n in statements if (n.lineno, n.col_offset) <= here < (n.end_lineno, n.end_col_offset)
        ] or statements
    return min(statements, key=lambda n: ((n.end_lineno or 0) - n.lineno, -n.col_offset), default=None)


def operands(frame: Frame, *, whole: bool = False) -> Iterator[tuple[str, Any]]:
    """(text, value) of the names, attributes and items in the failing expression whose value is known: arguments and
    both sides of an operator first, their parts after them. Each text once. whole: of all its statement."""
    line = statement(frame) if whole else None
    node, texts = line if line is not None and not hasattr(line, "body") else expression(frame), set()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
            text = ast.unparse(part)
            if text not in texts:
                texts.add(text)
                value = value_of(part, frame)
                if value is not UNKNOWN:
                    yield text, value


def value_of(node: ast.AST, frame: Frame) -> Any:
    """The value of an expression in the frame, or UNKNOWN. None of the user's code runs."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for space in (frame.names, frame.globals, vars(builtins)):
            if node.id in space:
                return space[node.id]
        return UNKNOWN
    if isinstance(node, ast.Attribute):
        return _attribute(value_of(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(value_of(node.value, frame), value_of(node.slice, frame))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = value_of(node.operand, frame)
        return -value if type(value) in (int, float) else UNKNOWN
    return UNKNOWN


def _attribute(thing: Any, name: str) -> Any:
    if thing is UNKNOWN:
        return UNKNOWN
    if type(thing) is types.ModuleType:  # torch's own has two thousand names
        return thing.__dict__.get(name, UNKNOWN)
    value = members(thing).get(name, UNKNOWN)
    if value is not UNKNOWN:
        return value
    shared = class_attribute(thing, name, UNKNOWN)
    if type(shared) in _PLAIN:  # `eps = 0.1` of the class
        return shared
    return shared.__get__(thing) if type(shared) is _FUNCTION else UNKNOWN


_PLAIN = (int, float, bool, str, type(None))
_FUNCTION = type(expression)


def _item(thing: Any, key: Any) -> Any:
    """An item of an exact list, tuple or dict, or of a container of modules or parameters, under a plain key."""
    if thing is UNKNOWN or type(key) not in (int, str):
        return UNKNOWN
    from torch import nn

    if type(thing) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        children = named_children(thing)
        if type(key) is int and type(thing) is not nn.ModuleDict:
            inside = list(children.values())
            return inside[key] if -len(inside) <= key < len(inside) else UNKNOWN
        return children.get(str(key), UNKNOWN)
    if type(thing) in (list, tuple) and type(key) is int:
        return thing[key] if -len(thing) <= key < len(thing) else UNKNOWN
    return thing.get(key, UNKNOWN) if type(thing) is dict else UNKNOWN


def path_text(value: Any) -> str:
    """The path that a value is, or that an open file was opened with; "" for all else. No code of the user's runs."""
    if issubclass(type(value), pathlib.PurePath) and type(value).__module__.startswith("pathlib"):
        return str(value)
    if type(value) is str:
        return value if _may_be_path(value) else ""
    if type(value) is io.TextIOWrapper:
        return path_text(value.buffer)
    if type(value) in (io.BufferedReader, io.BufferedRandom, io.BufferedWriter):
        return path_text(value.raw)
    if type(value) is io.FileIO:
        return path_text(value.name) or (value.name if type(value.name) is str else "")
    return ""


def _may_be_path(text: str) -> bool:
    """Whether a text is written as a path: it has a separator or an ending, and is no sentence and no address."""
    if not 0 < len(text) <= 400 or "\n" in text or "://" in text:
        return False
    return re.search(r"[\\/]|\.\w{1,12}$", text) is not None and text.count(" ") < 8
