"""What the user's source says of a holder: which statement puts something in, and whether any takes it out again."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from nbdebug.observe import locations as sites
from nbdebug.observe.locations import Site
from nbdebug.observe.sources import tree_of
from nbdebug.observe.variables import attributes

PUTS = frozenset(
    {
        "append",
        "appendleft",
        "extend",
        "add",
        "update",
        "insert",
        "setdefault",
        "put",
        "register_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
    }
)
TAKES = frozenset({"clear", "pop", "popleft", "popitem", "remove", "discard", "cache_clear"})


def collected_near(site: Site | None) -> tuple[str, Site | None]:
    """The variable that the loop around a line adds to, with its graph, and where; ("", None) where there is none."""
    tree = tree_of(site.file) if site is not None else None
    loops = [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))] if tree is not None else []
    around = [n for n in loops if site is not None and n.lineno <= site.line <= (n.end_lineno or 0)]
    within: Iterable[Any] = ast.walk(max(around, key=lambda n: n.lineno)) if around else ()
    for node in within:
        call = node.value if isinstance(node, ast.Expr) else None
        name = ast.unparse(node.target) if isinstance(node, ast.AugAssign) else ""
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
            name = ast.unparse(call.func.value)
        if name and site is not None and not _CUT.search(ast.unparse(node)):
            return name, Site(site.file, node.lineno, "")
    return "", None


_CUT = re.compile(r"\.(?:item|detach|tolist|numpy|data)\b|\b(?:float|int|len)\(|[+]= *1$")


def last_name(name: str) -> str:
    """The variable or attribute that a path ends in: `probe.seen["a"]` → "seen"."""
    plain = re.sub(r"\[.*?\]", "", name)
    return plain.split(".")[-1]


def storing_line(files: Iterable[str], name: str) -> Site | None:
    """The first statement in these files that puts something into what bears this name."""
    attribute = last_name(name)
    for file in files:
        for node in statements(file):
            if _puts(node, attribute):
                return Site(file, node.lineno, "")
    return None


def attribute_line(file: str, first: int, attribute: str) -> Site | None:
    """The last statement of the function that begins at a line, decorators included, that sets this attribute."""
    tree = tree_of(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.lineno - len(node.decorator_list) <= first <= node.lineno:
            lines = [
                part.lineno
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and part.attr == attribute and isinstance(part.ctx, ast.Store)
            ]
            return Site(file, max(lines), node.name) if lines else None
    return None


def second_backward(files: Iterable[str]) -> Site | None:
    """The first statement `loss.backward(create_graph=True)`."""
    for file in files:
        for node in statements(file):
            if isinstance(node, ast.Expr) and re.search(r"\.backward\(.*create_graph=True", ast.unparse(node)):
                return Site(file, node.lineno, "")
    return None


def cycle_line(files: Iterable[str], name: str) -> Site | None:
    """The statement that calls `cycle` or `tee`, rather one that gives the result this name."""
    found = [
        (last_name(name) in ast.unparse(node).partition("=")[0], Site(file, node.lineno, ""))
        for file in files
        for node in statements(file)
        if any(
            isinstance(part, ast.Call) and getattr(part.func, "attr", getattr(part.func, "id", "")) in ("cycle", "tee")
            for part in ast.walk(node)
        )
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


class Taker(NamedTuple):
    """A statement that takes something out of a holder. outer: the first line of the function or class of the file's
    top level around it, 0 outside of any. flags: plain names in the conditions around it, each with the
    value that it must have for the statement to run."""

    file: str
    line: int
    outer: int
    function: str
    flags: tuple[tuple[Any, bool], ...]


def callers(files: Iterable[str], function: str) -> list[Taker]:
    """The statements that call a function or a method of this name."""
    result: list[Taker] = []
    for file in files:
        tree = tree_of(file)
        for node in tree.body if tree is not None else ():
            outer = node.lineno if isinstance(node, _SCOPES) else 0
            result += _takers_in([node], function, Taker(file, 0, outer, "", ()), _calls_it)
    return [call for call in result if call.function != function]


def takers(files: Iterable[str], name: str) -> list[Taker]:
    """The statements that take something out of what bears this name, or empty it, after it was made."""
    attribute = last_name(name)
    result: list[Taker] = []
    for file in files:
        tree = tree_of(file)
        if tree is not None:
            for node in tree.body:
                outer = node.lineno if isinstance(node, _SCOPES) else 0
                result += _takers_in([node], attribute, Taker(file, 0, outer, "", ()))
    return [taker for taker in result if taker.function != "__init__"]


def _takers_in(
    body: list[Any], name: str, at: Taker, matches: Callable[[Any, str], bool] | None = None
) -> Iterator[Taker]:
    matches = matches or _takes
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _takers_in(node.body, name, at._replace(function=node.name, flags=()), matches)
            continue
        if matches(node, name):
            yield at._replace(line=node.lineno)
        if isinstance(node, ast.If):
            yield from _takers_in(node.body, name, at._replace(flags=(*at.flags, *_flags(node.test, True))), matches)
            yield from _takers_in(node.orelse, name, at._replace(flags=(*at.flags, *_flags(node.test, False))), matches)
            continue
        for part in ("body", "orelse", "finalbody", "handlers"):
            inner = [x for x in getattr(node, part, ()) if isinstance(x, (ast.stmt, ast.ExceptHandler))]
            yield from _takers_in(inner, name, at, matches)


def _calls_it(node: Any, name: str) -> bool:
    """Whether a simple statement, or the head of a block, calls a function or a method of this name."""
    heads = [getattr(node, part, None) for part in ("value", "test", "iter", "exc")]
    inside = (part for head in heads if isinstance(head, ast.AST) for part in ast.walk(head))
    return any(
        isinstance(part, ast.Call) and getattr(part.func, "attr", getattr(part.func, "id", "")) == name
        for part in inside
    )


def same_variable(taker: Taker, files: Iterable[str], name: str, site: Site | None) -> bool:
    """Whether a statement speaks of the holder into which a line puts things, and not of another of that name: an
    attribute, a variable of the file's top level, or one of the same function."""
    if site is None or "." in name or taker.outer == 0:
        return True
    plain = last_name(name)
    trees = [tree for file in files if (tree := tree_of(file)) is not None]
    if any(
        isinstance(t, ast.Name) and t.id == plain
        for tree in trees
        for node in tree.body
        for t in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
    ):
        return True
    tree = tree_of(site.file)
    body = tree.body if tree is not None else []
    around = [n.lineno for n in body if isinstance(n, _SCOPES) and n.lineno <= site.line <= (n.end_lineno or 0)]
    return taker.file == site.file and taker.outer in around


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _flags(test: Any, value: bool) -> list[tuple[Any, bool]]:
    """The plain names in a condition that must have this value for the condition to have it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _flags(test.operand, not value)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if value else ast.Or):
        return [flag for part in test.values for flag in _flags(part, value)]
    plain = isinstance(test, ast.Name) or (isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name))
    return [(test, value)] if plain else []


def never_runs(taker: Taker, frame: FrameType) -> bool:
    """Whether a flag around a statement prevents it, in a call of its function."""
    for node, flag in taker.flags:
        name: str = node.value.id if isinstance(node, ast.Attribute) else node.id  # type: ignore[attr-defined]
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        if isinstance(node, ast.Attribute):
            value = attributes(value).get(node.attr)
        if isinstance(value, (bool, int)) and bool(value) is not flag:
            return True
    return False


def reload_sources() -> None:
    """Read the source again: a file may have been written to since."""
    linecache.checkcache()


def statements(file: str) -> Iterator[Any]:
    """The statements of a file or a cell, as far as its source is available."""
    tree = tree_of(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node


def _puts(node: Any, attribute: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return _root(node.target) == attribute
    if isinstance(node, ast.Assign):
        return any(isinstance(t, (ast.Subscript, ast.Attribute)) and _root(t) == attribute for t in node.targets)
    return any(call.func.attr in PUTS and _root(call.func.value) == attribute for call in _calls(node))


def _takes(node: Any, attribute: str) -> bool:
    if isinstance(node, ast.Delete):
        return any(_root(target) == attribute for target in node.targets)
    if isinstance(node, ast.Assign):
        return any(
            isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Slice) and _root(t) == attribute
            for t in node.targets
        )
    if any(
        call.func.attr.startswith(("heappop", "heapreplace")) and call.args and _root(call.args[0]) == attribute
        for call in _calls(node)
    ):
        return True
    return any(call.func.attr in TAKES and _root(call.func.value) == attribute for call in _calls(node))


def _calls(node: Any) -> Iterator[Any]:
    """Calls of methods in a simple statement, or in the head of a block."""
    if isinstance(node, (ast.Expr, ast.Assign, ast.Return)) and node.value is not None:
        for part in ast.walk(node.value):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                yield part


def _root(target: Any) -> str:
    """The name that a target ends in, past its indices: `self.seen[name]` → "seen"."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


_MODULE = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "module.py")


class StoringLine(NamedTuple):
    """The line, and whether it runs inside a hook, on which module."""

    site: Site
    hook: bool = False
    module: Any = None


class Tracer:
    """Calls a step with every line of the user's own followed. watches: functions that give a comparable state; takers:
    statements that take things out, of which `dead` are those that a flag keeps from running."""

    def __init__(self, watches: list[Callable[[], Any]], takers: Iterable[Taker] = ()):
        self.watches, self.takers = watches, list(takers)
        self.dead: set[Taker] = set()
        self.entered: set[tuple[str, str]] = set()  # (file, name) of the functions of the user's that ran
        self.lines: list[StoringLine | None] = [None] * len(watches)
        self._before = [watch() for watch in watches]
        self._last: FrameType | None = None
        self._line = 0

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs the step, not traced where a debugger or a measure of coverage traces already."""
        if sys.gettrace() is not None:
            return step()
        sys.settrace(self._called)
        try:
            return step()
        finally:
            sys.settrace(None)
            self._last = None

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if sites.kind_of(frame.f_code) != sites.USER:
            return None
        self.entered.add((frame.f_code.co_filename, frame.f_code.co_name))
        self._check_watches()
        return self._traced

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._check_watches()
        if event == "return":
            self.dead |= {
                t
                for t in self.takers
                if t.function == frame.f_code.co_name and t.file == frame.f_code.co_filename and never_runs(t, frame)
            }
            self._set_last(_users_frame(frame.f_back))
        else:
            self._set_last(frame)
        return self._traced

    def _set_last(self, frame: FrameType | None) -> None:
        self._last, self._line = frame, frame.f_lineno if frame is not None else 0

    def _check_watches(self) -> None:
        for number, watch in enumerate(self.watches):
            now = watch()
            if now != self._before[number]:
                self._before[number] = now
                if self.lines[number] is None and self._last is not None:
                    self.lines[number] = self._storing_line(self._last)

    def _storing_line(self, frame: FrameType) -> StoringLine:
        site = Site(frame.f_code.co_filename, self._line, frame.f_code.co_name)
        inner: FrameType | None = frame
        while inner is not None and inner.f_back is not None:
            outer = inner.f_back
            if outer.f_code.co_name == "_engine_run_backward" and sites.kind_of(inner.f_code) == sites.USER:
                return StoringLine(site, True)  # a tensor's hook is called by the engine itself
            if (
                outer.f_code.co_filename == _MODULE
                and inner.f_code.co_name != "forward"
                and sites.kind_of(inner.f_code) == sites.USER
            ):
                return StoringLine(site, True, outer.f_locals.get("self"))
            inner = outer
        return StoringLine(site)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and sites.kind_of(frame.f_code) != sites.USER:
        frame = frame.f_back
    return frame
