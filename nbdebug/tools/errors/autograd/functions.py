"""The user's functions as syntax, also those that no longer run, with the values of their variables as far as known.

A fault of the autograd graph shows in `backward()`, when the frames of the forward are gone. Their source is not. A
`FunctionSource` is a function (or a cell, or a file) with what is known of its variables: those of its frame where one
is left, its closure, its globals, and what the caller wrote for its parameters. From there `calls.py` follows a call
into the function or the module's `forward` that it runs. Nothing is run: a value is read where it lies.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import USER, Site, at_site, kind_of
from nbdebug.observe.sources import functions, nodes, parents, tree_of
from nbdebug.observe.variables import closure_variables
from nbdebug.report import Where
from nbdebug.tools.errors.values import UNKNOWN, expression, value_of


def word_set(text: str) -> frozenset[str]:
    """A list of names as a set: "argmax argmin"."""
    return frozenset(text.split())


def unwrap(function: Any) -> Any:
    """The function within its wrappers, as `functools.wraps` and bound methods keep it."""
    for _ in range(20):
        if type(function) is types.MethodType or type(function) in (staticmethod, classmethod):
            function = function.__func__
        elif type(function) is types.FunctionType and "__wrapped__" in function.__dict__:
            function = function.__dict__["__wrapped__"]
        else:
            break
    return function


def is_module(thing: Any) -> bool:
    return issubclass(type(thing), torch.nn.Module)


def package(thing: Any) -> str:
    """The module in which an object's class was made."""
    return str(type.__getattribute__(type(thing), "__module__"))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A file's or a cell's syntax tree. parents: of each node, by its id; bindings: the statements that give the
    variables of a function their values, by the function's id, filled on demand."""

    file: str
    tree: ast.Module
    parents: Mapping[int, ast.AST]
    bindings: dict[int, dict[str, list[Any]]] = dataclasses.field(default_factory=dict)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What stands around a node, from within, within its own function."""
        at = self.parents.get(id(node))
        while at is not None:
            yield at
            if isinstance(at, SCOPES):
                return
            at = self.parents.get(id(at))

    def outer(self, node: ast.AST) -> ast.AST | None:
        """The function around a function; the file where there is none."""
        at = self.parents.get(id(node))
        while at is not None and not isinstance(at, (*FUNCTIONS, ast.Module)):
            at = self.parents.get(id(at))
        return at


def source(file: str) -> Source | None:
    """None where the source can't be read, or is not Python."""
    tree = tree_of(file)
    return None if tree is None else _source(file, tree)


@functools.lru_cache(maxsize=64)
def _source(file: str, tree: ast.Module) -> Source:
    return Source(file, tree, parents(tree))


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionSource:
    """A function, or a cell. frame: what is known of its variables; live: it is a frame of the traceback, at `line`;
    arguments: for a parameter, what the caller wrote and the caller."""

    source: Source
    node: Any
    frame: Frame
    live: bool = False
    arguments: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """As a sentence names it: the function's name, "" for a cell or a file."""
        return getattr(self.node, "name", "lambda") if isinstance(self.node, FUNCTIONS) else ""

    @property
    def line(self) -> int:
        """The line that a running function has reached; for others the end."""
        return self.frame.site.line if self.live else getattr(self.node, "end_lineno", None) or 10**9

    def where(self, node: ast.AST) -> Where:
        return at_site(Where(), Site(self.source.file, node.lineno, self.name))  # type: ignore[attr-defined]

    @property
    def positional(self) -> list[str]:
        """The names of its positional parameters."""
        args = getattr(self.node, "args", None)
        return [a.arg for a in (*args.posonlyargs, *args.args)] if args is not None else []

    def in_scope(self, node: ast.AST) -> FunctionSource:
        """A scope around it, with the same variables."""
        return dataclasses.replace(self, node=node, live=False, arguments={})

    def in_frame(self, **changes: Any) -> FunctionSource:
        """The same with another module or other names in its frame."""
        return dataclasses.replace(self, frame=dataclasses.replace(self.frame, **changes))

    def statements(self) -> Iterator[Any]:
        """Its statements in the order of the source, without those of functions within it."""
        return statements_of(self.node)

    def returned(self) -> list[tuple[Any, Any]]:
        """(expression, statement) of what it returns."""
        if isinstance(self.node, ast.Lambda):
            return [(self.node.body, self.node.body)]
        return [(s.value, s) for s in self.statements() if isinstance(s, ast.Return) and s.value is not None]


def statements_of(body: Any) -> Iterator[Any]:
    """The statements of a function, a cell or a loop in the order of the source, without those of functions in it."""
    todo = list(reversed(body.body)) if isinstance(getattr(body, "body", None), list) else []
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, SCOPES):
            for part in ("finalbody", "orelse", "handlers", "cases", "body"):
                todo += [n for n in reversed(getattr(node, part, None) or []) if isinstance(n, ast.AST)]


def statement_of(node: Any, code: FunctionSource) -> Any:
    """The statement in which an expression stands; None where that is not known."""
    if node is None or isinstance(node, ast.stmt):
        return node
    return next((n for n in code.source.around(node) if isinstance(n, ast.stmt)), None)


def frame_source(frame: Frame) -> FunctionSource | None:
    """The function of a frame of the traceback, with the frame's variables."""
    file = source(frame.site.file)
    if file is None:
        return None
    if frame.site.function == "<module>":
        return FunctionSource(file, file.tree, frame, live=True)
    around = [
        n
        for n in functions(file.tree)
        if isinstance(n, FUNCTIONS) and _first_line(n) <= frame.site.line <= (n.end_lineno or 0)
    ]
    named = [n for n in around if getattr(n, "name", "<lambda>") == frame.site.function]
    if not named and frame.site.function in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"):
        named = around
    node: Any = min(named, key=lambda n: (n.end_lineno or 0) - _first_line(n), default=None)
    return FunctionSource(file, node, frame, live=True) if node is not None else None


def function_source(function: Any) -> FunctionSource | None:
    """A function of the user's, without its decorators."""
    function = unwrap(function)
    if type(function) is not types.FunctionType or kind_of(function.__code__) != USER:
        return None
    code = function.__code__
    file = source(code.co_filename)
    for node in functions(file.tree) if file is not None else ():
        if (
            file is not None
            and isinstance(node, FUNCTIONS)
            and _first_line(node) == code.co_firstlineno
            and getattr(node, "name", "<lambda>") == code.co_name
        ):
            names = closure_variables(function)
            around = function.__globals__
            if any(name in around for name in code.co_varnames):  # a variable of its own hides the file's
                around = {name: value for name, value in around.items() if name not in code.co_varnames}
            frame = Frame(names, Site(code.co_filename, code.co_firstlineno, code.co_name), True, None, around)
            return FunctionSource(file, node, frame)
    return None


def _first_line(node: Any) -> int:
    """The line at which Python says that a function begins: that of its first decorator."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def failing_node(code: FunctionSource) -> Any:
    """What ran in a function of the traceback: the smallest expression, else the statement; None where not known."""
    node = expression(code.frame)
    if node is None:
        return None
    alike = [n for n in nodes(code.source.tree) if type(n) is type(node)]
    return next((n for n in alike if _span(n) == _span(node)), None)


def _span(node: Any) -> tuple[Any, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def static_value(node: Any, code: Any) -> Any:
    """The value of an expression: from the frame, else by what the caller or an assignment gives; else UNKNOWN."""
    for _ in range(10):
        value = value_of(node, code.frame)
        if value is not UNKNOWN or not isinstance(node, ast.Name):
            return _static_part(node, code) if value is UNKNOWN else value
        if node.id in code.arguments:
            node, code = code.arguments[node.id]
            if not isinstance(node, ast.AST):
                return UNKNOWN
            continue
        bindings = [
            s
            for s in assignments(code, node.id, code.line)
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
        ]
        if not bindings or any(n.id == node.id for n in ast.walk(bindings[-1].value) if isinstance(n, ast.Name)):
            return UNKNOWN
        node = bindings[-1].value
    return UNKNOWN


def _static_part(node: Any, code: Any) -> Any:
    """An attribute or an item of what only the caller or an assignment knows."""
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return UNKNOWN
    whole = static_value(node.value, code)
    if whole is UNKNOWN:
        return UNKNOWN
    name = ast.Name("it", ast.Load())
    part = (
        ast.Attribute(name, node.attr, ast.Load())
        if isinstance(node, ast.Attribute)
        else ast.Subscript(name, node.slice, ast.Load())
    )
    return value_of(part, dataclasses.replace(code.frame, names={"it": whole}))


def assignments(code: FunctionSource, name: str, before: int | tuple[int, int]) -> list[Any]:
    """The statements that give a variable its value, those that end before a line, or before a (line, column); those
    after it (of a loop) if there are none and it is no parameter."""
    position = before if isinstance(before, tuple) else (before, 0)
    bindings = code.source.bindings.get(id(code.node))
    if bindings is None:
        bindings = code.source.bindings.setdefault(id(code.node), {})
        for statement in code.statements():
            for target in {t.id for t in targets(statement) if isinstance(t, ast.Name)}:
                bindings.setdefault(target, []).append(statement)
    statements = bindings.get(name, [])
    return [s for s in statements if end_position(s) <= position] or ([] if name in code.arguments else statements)


def end_position(statement: Any) -> tuple[int, int]:
    """Where a statement has given its value: a loop or a `with` at its head."""
    if hasattr(statement, "body"):
        return statement.lineno, statement.col_offset
    return statement.end_lineno, statement.end_col_offset


def targets(statement: Any) -> list[Any]:
    """What a statement assigns to: names, attributes, items, each for itself."""
    if isinstance(statement, ast.Assign):
        todo = list(statement.targets)
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        todo = [statement.target]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        todo = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        todo = [n.target for n in own_expressions(statement) if isinstance(n, ast.NamedExpr)]
    single = []
    while todo:
        target = todo.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            todo += target.elts
        else:
            single.append(target.value if isinstance(target, ast.Starred) else target)
    return single


def own_expressions(statement: Any) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without the statements within it."""
    for field, value in ast.iter_fields(statement):
        if field in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield from ast.walk(node)


def loops_around(code: FunctionSource, node: ast.AST) -> list[Any]:
    """The loops around a node, innermost first."""
    return [n for n in code.source.around(node) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))]


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Call))


def last_name(node: Any) -> str:
    """The last name of an expression: `nn.functional.one_hot` → "one_hot"."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
