"""Where a value came from, by the user's sources: `x` ← `for x, y in loader` ← `TensorDataset(features, …)` ←
`features = torch.from_numpy(values)`.

The text is read, never run. The values of the names on the way are checked in the frames, so that a wrong way (its
tensor has another dtype or device) is left.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import Site, at_site, other_cells
from nbdebug.observe.sources import SCOPES, functions, nodes_of, tree_of
from nbdebug.report import Where
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.operands import CALLS, is_instance
from nbdebug.tools.errors.values import UNKNOWN, Key, bindings, callee_name, entries, expression, value_of, value_parts

STEPS = 40


@dataclasses.dataclass(frozen=True)
class ExpressionBinding:
    """One binding on the way. name: what was bound ("features", "self.table", "return"); code: the text of its value;
    node: the same as syntax."""

    name: str
    code: str
    where: Where
    node: ast.expr = dataclasses.field(repr=False, compare=False)
    entry: bool = False  # it is one entry of the value, or a loop over it
    maker: ast.expr | None = dataclasses.field(default=None, repr=False, compare=False)  # the origin within `node`

    @property
    def phrase(self) -> str:
        code = self.code if len(self.code) <= 80 else self.code[:77] + "..."
        return f"`{self.name}` {'comes from' if self.entry else 'is'} `{code}`"


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """Where a name is looked up: a file, the line, the frame with the names there (None: no frame)."""

    file: str
    line: int
    frame: Frame | None


def origin_of(
    name: str,
    context: ErrorContext,
    is_origin: Callable[[ast.expr], bool],
    fits: Callable[[Any], bool] = lambda value: True,
    partial: bool = False,
) -> tuple[ExpressionBinding, ...]:
    """The way from the origin (the expression that set the dtype, the device …) to `name` in the user's innermost
    frame; the origin first. fits: whether a value on the way can be part of it. () where the sources don't show it;
    partial: as far as they do."""
    if not context.users:
        return ()
    frame = context.users[0]
    try:
        node = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError):
        return ()
    search = _OriginSearch(context, is_origin, fits)
    way = search.run(node, _Lookup(frame.site.file, frame.site.line, frame))
    return way or (search.longest if partial else ())


class _OriginSearch:
    """Breadth first over the bindings: the shortest way to an origin."""

    def __init__(self, context: ErrorContext, is_origin: Callable[[ast.expr], bool], fits: Callable[[Any], bool]):
        self.context, self.is_origin, self.fits = context, is_origin, fits
        self.longest: tuple[ExpressionBinding, ...] = ()

    def run(self, node: ast.expr, place: _Lookup) -> tuple[ExpressionBinding, ...]:
        todo: list[tuple[ast.expr, tuple[Key, ...], _Lookup, tuple[ExpressionBinding, ...]]] = [(node, (), place, ())]
        visited: set[tuple[str, str, tuple[Key, ...]]] = set()
        for _ in range(STEPS):
            if not todo:
                break
            node, path, place, way = todo.pop(0)
            for part, rest in self._parts(node, path):
                mark = (place.file, ast.unparse(part), rest)
                if mark in visited:
                    continue
                visited.add(mark)
                for binding, then, at in self._bindings(part, rest, place):
                    longer = (binding, *way)
                    maker = self._origin_in(binding.node, then)
                    if maker is not None:
                        return dataclasses.replace(binding, maker=maker), *way
                    todo.append((binding.node, then, at, longer))
                    self.longest = max(self.longest, longer, key=len)
        return ()

    def _origin_in(self, node: ast.expr, path: tuple[Key, ...]) -> ast.expr | None:
        """The part of an expression, or of its entry under the path, that is an origin."""
        return next(
            (inner for part, _ in entries(node, path) for inner in value_parts(part) if self.is_origin(inner)), None
        )

    def _parts(self, node: ast.expr, path: tuple[Key, ...]) -> Iterator[tuple[ast.expr, tuple[Key, ...]]]:
        """The names in an expression that its value, or its entry under the path, can come from."""
        for entry, rest in entries(node, path):
            for part in value_parts(entry):
                named = isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
                if named or isinstance(part, (ast.Name, ast.Call)):
                    yield part, rest

    def _bindings(
        self, node: ast.expr, path: tuple[Key, ...], place: _Lookup
    ) -> Iterator[tuple[ExpressionBinding, tuple[Key, ...], _Lookup]]:
        """What was bound to a name: (the binding, the path of the entry, where its names are looked up)."""
        if isinstance(node, ast.Call):
            yield from _returns(node, path, place)
            return
        live = value_of(node, place.frame) if place.frame is not None else UNKNOWN
        if live is not UNKNOWN and not path and not self.fits(live):
            return
        text = ast.unparse(node)
        if self._untouched(text, place, live):
            yield from self._argument(text, path, place, live)
            return
        for file, scope in _scopes(place, text):
            matches = [b for b in bindings(scope, text) if b[0].lineno <= place.line or scope is not _innermost(place)]
            for value, keys in _reaching(scope, matches, text, place.line):
                binding = ExpressionBinding(text, ast.unparse(value), where_of(file, value), value, bool(keys))
                yield binding, (*keys, *path), _Lookup(file, value.lineno, place.frame)
            if matches:
                return
        yield from self._argument(text, path, place, live)

    def _untouched(self, text: str, place: _Lookup, live: Any) -> bool:
        """Whether a parameter still is the caller's very object: what would bind it in the function has not run."""
        at = next((i for i, frame in enumerate(self.context.users) if frame is place.frame), None)
        shared = live is UNKNOWN or is_instance(live, (int, float, str, type(None)))  # one object for all of a value
        if at is None or at + 1 >= len(self.context.users) or shared:
            return False
        caller = self.context.users[at + 1]
        node = _passed(_innermost(place), expression(caller), text, _is_method(place))
        return node is not None and value_of(node, caller) is live

    def _argument(
        self, text: str, path: tuple[Key, ...], place: _Lookup, live: Any
    ) -> Iterator[tuple[ExpressionBinding, tuple[Key, ...], _Lookup]]:
        """A parameter of the function: the caller's expression for the very same object."""
        users = self.context.users
        at = next((i for i, frame in enumerate(users) if frame is place.frame), None)
        if at is None or at + 1 >= len(users):
            return
        caller = users[at + 1]
        node = _passed(_innermost(place), expression(caller), text, _is_method(place))
        value = UNKNOWN if node is None else value_of(node, caller)
        if node is None or value is UNKNOWN and not self._direct(place.frame, caller):
            return
        if value is not UNKNOWN and value is not live:
            return
        where = _Lookup(caller.site.file, caller.site.line, caller)
        if ast.unparse(node) == text:
            yield from self._bindings(node, path, where)
        else:
            yield ExpressionBinding(text, ast.unparse(node), caller.where, node), path, where

    def _direct(self, inner: Frame | None, caller: Frame) -> bool:
        """Whether only the call of a module is between the two frames."""
        places = {id(frame): i for i, frame in enumerate(self.context.trail)}
        between = self.context.trail[places[id(caller)] + 1 : places.get(id(inner), 0)]
        return all(frame.site.function in CALLS for frame in between)


def _is_method(place: _Lookup) -> bool:
    """Whether the innermost function is one of a class, so that its first parameter is the object."""
    function = _innermost(place)
    return any(
        isinstance(node, ast.ClassDef) and any(part is function for part in node.body) for node in nodes_of(place.file)
    )


def _passed(function: ast.AST | None, call: ast.AST | None, name: str, method: bool) -> ast.expr | None:
    """The argument that a call gives for a parameter of the function."""
    calls = [node for node in ast.walk(call) if isinstance(node, ast.Call)] if call is not None else []
    if not isinstance(function, SCOPES) or not calls:
        return None
    by_name = [node for node in calls if callee_name(node) == getattr(function, "name", None)]
    call = (by_name or calls)[0]
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if method or names[:1] in (["self"], ["cls"]) else names
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in names or names.index(name) >= len(call.args):
        return None
    arguments = call.args[: names.index(name) + 1]
    return None if any(isinstance(arg, ast.Starred) for arg in arguments) else arguments[-1]


def _returns(
    node: ast.Call, path: tuple[Key, ...], place: _Lookup
) -> Iterator[tuple[ExpressionBinding, tuple[Key, ...], _Lookup]]:
    """What a function of the same file returns; of a class what its items are."""
    name = callee_name(node)
    for definition in nodes_of(place.file):
        if not isinstance(definition, (ast.FunctionDef, ast.ClassDef)) or definition.name != name:
            continue
        body = (
            definition
            if isinstance(definition, ast.FunctionDef)
            else next((f for f in definition.body if isinstance(f, ast.FunctionDef) and f.name == "__getitem__"), None)
        )
        for inner in ast.walk(body) if body is not None else ():
            if isinstance(inner, ast.Return) and inner.value is not None:
                binding = ExpressionBinding(
                    f"{name}()", ast.unparse(inner.value), where_of(place.file, inner.value), inner.value
                )
                yield binding, path, _Lookup(place.file, inner.lineno, None)


def _scopes(place: _Lookup, text: str) -> Iterator[tuple[str, ast.AST]]:
    """Where a name can have been bound: the functions around the line, innermost first, the file, the other cells. An
    attribute of `self`: anywhere in the file."""
    tree = tree_of(place.file)
    if tree is None:
        return
    if not text.startswith("self."):
        around = [n for n in functions(tree) if isinstance(n, SCOPES) and n.lineno <= place.line <= (n.end_lineno or 0)]
        for scope in sorted(around, key=lambda n: (n.end_lineno or 0) - n.lineno):
            yield place.file, scope
            if any(arg.arg == text for arg in ast.walk(scope.args) if isinstance(arg, ast.arg)):
                return  # a parameter: its value is the caller's
    yield place.file, tree
    for file in other_cells(place.file):
        other = tree_of(file)
        if other is not None:
            yield file, other


def _reaching(
    scope: ast.AST, matches: list[tuple[ast.expr, tuple[Key, ...]]], text: str, line: int
) -> Iterator[tuple[ast.expr, tuple[Key, ...]]]:
    """The bindings whose value can still be current. The last comes first; one that uses the name itself is followed by
    the one before it. A binding in a branch without the line comes later, and so does that of the line itself, which
    has run only in an earlier iteration of a loop."""
    later: list[tuple[ast.expr, tuple[Key, ...]]] = []
    for value, keys in reversed(matches):
        again = any(isinstance(n, (ast.Name, ast.Attribute)) and ast.unparse(n) == text for n in ast.walk(value))
        own = value.lineno <= line <= (value.end_lineno or 0)
        branch = any(
            isinstance(n, (ast.If, ast.Try))
            and n.lineno <= value.lineno <= (n.end_lineno or 0)
            and not (n.lineno <= line <= (n.end_lineno or 0))
            for n in ast.walk(scope)
        )
        if own or branch:
            later.append((value, keys))
            continue
        yield value, keys
        if not again:
            break
    yield from later


def _innermost(place: _Lookup) -> ast.AST | None:
    return next((scope for _, scope in _scopes(place, "")), None)


def where_of(file: str, node: ast.expr) -> Where:
    return at_site(Where(), Site(file, node.lineno, ""))
