"""The user's source with marks in it: a rank's log then tells which arm of a branch it took, and how often it looped.

`if`, `else`, `except` and `case` call `nbdebug_mark(n)` first; the iterable of a `for` is passed through
`nbdebug_turns(n, iterable)`. Lines stay where they are. A file that compiles graphs is left as it is within its classes
and decorated functions, as a mark would break the graph.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.machinery
import itertools
import linecache
import math
import operator
import os
import re
import threading
import types
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nbdebug.tools.distributed import paths

MARK, TURNS, SIZED = "nbdebug_mark", "nbdebug_turns", "nbdebug_sized"
PARTS_OF_LENGTH = {"enumerate", "zip", "tqdm", "iter", "list", "reversed"}
"""Functions whose result is as long as their first argument, or the shortest of zip's."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place that a rank passes. kind: "arm" or "loop"; line: of its head; first, last: the lines of its body."""

    number: int
    kind: str
    file: str
    line: int
    first: int
    last: int


class Marker(ast.NodeTransformer):
    """Puts marks into a module's syntax, and lists them."""

    def __init__(self, file: str, compiles: bool) -> None:
        self.file, self.compiles, self.marks = file, compiles, list[Mark]()

    def _new(self, kind: str, line: int, body: list[ast.stmt]) -> int:
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        number = zlib.crc32(f"{os.path.basename(self.file)}:{kind}:{line}:{first}:{last}".encode()) & 0x7FFFFFFF
        self.marks.append(Mark(number, kind, self.file, line, first, last))
        return number

    def _arm(self, line: int, body: list[ast.stmt], kind: str = "arm") -> None:
        if body:
            body.insert(0, _located(ast.Expr(_call(MARK, self._new(kind, line, body))), body[0]))

    def _skipped(self, node: Any) -> ast.AST:
        return node if self.compiles else self.generic_visit(node)

    visit_ClassDef = _skipped

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.decorator_list and self.compiles else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        nested = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        self._arm(node.lineno, node.body)
        if not nested:
            self._arm(node.lineno, node.orelse)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        self._arm(node.lineno, node.body)
        return node

    def visit_match_case(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        self._arm(node.pattern.lineno, node.body)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        number = self._new("loop", node.lineno, node.body)
        node.body.insert(0, _located(ast.Expr(_call(MARK, number)), node.body[0]))
        if not (isinstance(node.test, ast.Constant) and node.test.value):
            end = _located(ast.Expr(_call(MARK, -number)), node)
            node.orelse.insert(0, end)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        number = self._new("loop", node.lineno, node.body)
        inner = node.iter
        if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in PARTS_OF_LENGTH:
            for place, argument in enumerate(inner.args if getattr(inner.func, "id", "") == "zip" else inner.args[:1]):
                if not isinstance(argument, ast.Starred):
                    inner.args[place] = _located(_call(SIZED, number, argument), argument)
        node.iter = _located(_call(TURNS, number, inner), inner)
        return node


def _call(name: str, number: int, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number), *arguments], [])


def _located(node: Any, place: Any) -> Any:
    for part in ast.walk(node):
        if isinstance(part, (ast.expr, ast.stmt)) and not hasattr(part, "lineno"):
            ast.copy_location(part, place)
    return node


def compiled(source: bytes | str, file: str, listed: Callable[[Mark], None]) -> Any:
    """The code of a file with marks in it; `listed` is called with each of them. Raises SyntaxError."""
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else source
    tree = ast.parse(source, file)
    marker = Marker(file, re.search(r"\bcompile\(|torch\.jit|@jit|torch\.compile", text) is not None)
    tree = ast.fix_missing_locations(marker.visit(tree))
    for mark in marker.marks:
        listed(mark)
    return compile(tree, file, "exec", dont_inherit=True)


def mark_imports(folder: str, listed: Callable[[Mark], None]) -> None:
    """Modules below the folder of the script get marks as well when they are imported."""
    plain = importlib.machinery.SourceFileLoader.get_code

    @functools.wraps(plain)
    def get_code(self: Any, fullname: str) -> Any:
        path = self.get_filename(fullname)
        inside = os.path.abspath(path).startswith(folder + os.sep) and "-packages" not in path
        return compiled(self.get_data(path), path, listed) if inside else plain(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


class Trail:
    """What a rank has passed since it last wrote: numbers of marks, a loop's negative number where it ran out.

    loops: number → (turns made, length or None, the iterator), of each loop as it ran last. At most 4,000 numbers are
    held, the latest."""

    def __init__(self) -> None:
        self.passed: list[int] = []
        self.loops: dict[int, list[Any]] = {}
        self.lengths: dict[int, int] = {}

    def mark(self, number: int) -> None:
        self.passed.append(number)
        if len(self.passed) > 8000:
            del self.passed[:4000]

    def sized(self, number: int, iterable: Any) -> Any:
        length = length_of(iterable)
        if length is not None:
            self.lengths[number] = min(length, self.lengths.get(number, length))
        return iterable

    def turns(self, number: int, iterable: Iterable[Any]) -> Iterable[Any]:
        length = length_of(iterable)
        self.loops[number] = [0, self.lengths.pop(number, None) if length is None else length, None]
        return Turns(self, number, iterable)

    def clear(self) -> None:
        self.passed.clear()
        self.loops.clear()
        self.lengths.clear()

    def take(self) -> list[int]:
        passed, self.passed = self.passed, []
        return passed


class Turns:
    """The iterator of a `for`; it holds no item."""

    def __init__(self, trail: Trail, number: int, iterable: Iterable[Any]) -> None:
        self.trail, self.number, self.loop = trail, number, trail.loops[number]
        self.iterator = self.loop[2] = iter(iterable)

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self.iterator)
        except StopIteration:
            self.trail.mark(-self.number)
            raise
        self.loop[0] += 1
        self.trail.mark(self.number)
        return item


def length_of(iterable: Any) -> int | None:
    """`len()`, or what an iterator says that is left; None where nothing is known."""
    try:
        return len(iterable)
    except Exception:  # the user's `__len__` may raise what it likes; the loop then shows it, or not
        hint = -1
    try:
        hint = operator.length_hint(iterable, -1)
    except Exception:
        return None
    return hint if hint >= 0 else None


# -- what the user's values say: another rank's part is never asked for, that rank may be elsewhere -------------------


def within(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """What a function gives, in a thread; None where it takes longer: a GPU that waits for a rank answers nothing."""
    results: list[Any] = []

    def call() -> None:
        with contextlib.suppress(Exception):  # of the user's values
            results.append(function(*args))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def is_bad(value: Any) -> bool:
    """Of a tensor's own part, where it is shared out: all of it is no business of one rank. On a stream of its own: the
    user's may wait for another rank."""
    value = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor):
        aside = torch.cuda.stream(torch.cuda.Stream(value.device)) if value.is_cuda else contextlib.nullcontext()
        with aside:
            return value.is_floating_point() and not bool(torch.isfinite(value.detach()).all())
    return isinstance(value, float) and not math.isfinite(value)


def nonfinite(frame: types.FrameType | None) -> tuple[list[str], tuple[str, int, str] | None]:
    """The names of single numbers among a frame's variables that are not finite, and where they came about."""
    if frame is None:
        return [], None
    small = {
        n: v
        for n, v in frame.f_locals.items()
        if isinstance(v, float) or isinstance(v, torch.Tensor) and v.numel() == 1
    }
    names = [name for name, value in small.items() if is_bad(value) and not name.startswith("_")]
    return names, culprit(frame, frame.f_lineno, names) if names else None


def culprit(frame: types.FrameType, line: int, names: list[str] | None = None) -> tuple[str, int, str] | None:
    """The assignment in which a number that is not finite came about: that of the loss, or of the model's output that
    went into it, where that is bad already."""
    file = frame.f_code.co_filename
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None
    here = paths.statement(tree, line)
    wanted, variables, best = names or paths.names_in(here), {**frame.f_globals, **frame.f_locals}, None
    for _ in range(8):
        bad = [n for n in wanted if is_bad(variables.get(n))]
        made = [node for n in bad for node in paths.assignments(tree, n, line)[:1] if node.lineno <= line]
        calls = [node for node in made if best is None or _calls_model(node, variables)]
        if not calls:
            break
        best = calls[0]
        line, wanted = best.lineno, [n for n in paths.names_in(getattr(best, "value", None)) if n in variables]
    return None if best is None else (file, best.lineno, frame.f_code.co_name)


def _calls_model(node: Any, variables: dict[str, Any]) -> bool:
    calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    roots = [f.id for f in calls if isinstance(f, ast.Name)]
    return any(isinstance(variables.get(name), nn.Module) for name in roots)


def digest(value: Any, most: int | None = None) -> str:
    """Of an object that is saved: its tensors by their sums, all else by its text. most: only so many elements of each
    part and parts in all, and of other objects their attributes."""
    total, waiting, parts = hashlib.sha256(), [(value, 0)], 0
    while waiting and (most is None or parts < most):
        part, depth = waiting.pop()
        parts += 1
        total.update(_own(part, most))
        waiting += [(inner, depth + 1) for inner in _inner(part, most)] if depth < 8 else []
    return total.hexdigest()[:16]


def _own(part: Any, most: int | None) -> bytes:
    if isinstance(part, torch.Tensor):
        some = part.detach()
        some = some.view(-1)[:most] if most is not None and some.is_contiguous() else some
        number = some.double().sum().item() if part.numel() and not part.is_complex() else 0
        return f"{tuple(part.shape)}{part.dtype}{number}".encode()
    if isinstance(part, dict):
        return str(list(itertools.islice(part, most))).encode()
    if isinstance(part, (list, tuple)):
        return str(len(part)).encode()
    if most is not None and hasattr(part, "tobytes"):  # an array
        return f"{part.shape}".encode() + bytes(part.ravel()[:most].tobytes())
    return repr(part).encode() if isinstance(part, (str, int, float, bool, bytes, type(None))) else b""


def _inner(part: Any, most: int | None) -> list[Any]:
    if isinstance(part, nn.Module):
        return [part.state_dict()]
    if isinstance(part, dict):
        return list(itertools.islice(part.values(), most))
    if isinstance(part, (list, tuple)):
        return list(part[:most])
    own = None if most is None or isinstance(part, torch.Tensor) else getattr(part, "__dict__", None)
    return [own] if own else []


def follow_writes(stream: Any, over: Callable[[str], None]) -> None:
    """Call `over` with the digest of what was written, when the file is closed."""
    total, write, close, state = hashlib.sha256(), stream.write, stream.close, {"closed": False}

    def noted(data: Any) -> Any:
        total.update(data.encode("utf-8", "replace") if isinstance(data, str) else bytes(data))
        return write(data)

    def closed() -> Any:
        if not state["closed"]:
            state["closed"] = True
            over(total.hexdigest()[:16])
        return close()

    try:
        stream.write, stream.close = noted, closed
    except AttributeError:  # a stream without attributes of its own
        return


def rows_of(batch: Any) -> list[str]:
    """A digest of each row of a batch's first tensor that is no single number a row."""
    parts = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.dim() > 0]
    if not tensors:
        return []
    best = max(tensors, key=lambda part: part.numel())
    rows = best.detach().cpu().reshape(len(best), -1).contiguous().view(torch.uint8)
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12] for row in rows]
