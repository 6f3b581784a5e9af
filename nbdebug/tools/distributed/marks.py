"""The user's source with marks in it: a rank's log then tells which arm of a branch it took, and how often it looped.

`if`, `else`, `except`, `case`, and the arms of `a if b else c` that speak of communication, call `nbdebug_mark(n)`
first; the iterable of a `for` is passed through `nbdebug_turns(n, iterable)`. Lines stay where they are. A file that
compiles graphs is left as it is within its classes and decorated functions, as a mark would break the graph.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import itertools
import math
import operator
import os
import threading
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.observe.sources import tree_of
from nbdebug.observe.tensors import fingerprint, tensors_in
from nbdebug.tools.distributed import paths
from nbdebug.tools.distributed.facts import Line, Place

MARK, TURNS = "nbdebug_mark", "nbdebug_turns"


class Marker(ast.NodeTransformer):
    """Puts marks into a module's syntax, and lists them."""

    def __init__(self, file: str, compiles: bool) -> None:
        self.file, self.compiles, self.places = file, compiles, list[Place]()

    def _place(self, kind: str, line: int, body: Sequence[ast.stmt | ast.expr]) -> int:
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        place = f"{os.path.basename(self.file)}:{kind}:{line}:{first}:{last}:{body[0].col_offset}"
        number = zlib.crc32(place.encode()) & 0x7FFFFFFF
        self.places.append(Place(number, kind, self.file, line, first, last))
        return number

    def visit(self, node: Any) -> ast.AST:
        if self.compiles and (isinstance(node, ast.ClassDef) or getattr(node, "decorator_list", False)):
            return node
        self.generic_visit(node)
        if isinstance(node, (ast.If, ast.ExceptHandler, ast.match_case)):
            line = getattr(node, "lineno", 0) or node.pattern.lineno  # type: ignore[union-attr]
            for body in (node.body, getattr(node, "orelse", [])):
                if body and not (body is not node.body and len(body) == 1 and isinstance(body[0], ast.If)):
                    body.insert(0, ast.Expr(_call(MARK, self._place("arm", line, body))))
        elif isinstance(node, ast.IfExp) and paths.COMMUNICATES.search(ast.unparse(node)):
            for name, value in (("body", node.body), ("orelse", node.orelse)):
                number = self._place("arm", node.lineno, [value])
                setattr(node, name, ast.BoolOp(ast.Or(), [_call(MARK, number), value]))  # a mark is None
        elif isinstance(node, ast.While):
            number = self._place("loop", node.lineno, node.body)
            node.body.insert(0, ast.Expr(_call(MARK, number)))
            if not (isinstance(node.test, ast.Constant) and node.test.value):
                node.orelse.insert(0, ast.Expr(_call(MARK, -number)))
        elif isinstance(node, ast.For):
            node.iter = _call(TURNS, self._place("loop", node.lineno, node.body), node.iter)
        return node


def _call(name: str, number: int, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number), *arguments], [])


def marked(tree: ast.Module, file: str, listed: Callable[[Place], None]) -> ast.Module:
    """The same tree with marks in it; `listed` is called with each of them."""
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)}
    marker = Marker(file, bool(names & {"compile", "jit"}))
    marker.visit(tree)
    for place in marker.places:
        listed(place)
    return ast.fix_missing_locations(tree)


def compiled(source: bytes, file: str, listed: Callable[[Place], None]) -> Any:
    """The code of a file with marks in it. Raises SyntaxError."""
    return compile(marked(ast.parse(source, file), file, listed), file, "exec", dont_inherit=True)


def mark_imports(folder: str, listed: Callable[[Place], None]) -> None:
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

    loops: number → (turns made, length or None, the iterator), of each loop as it ran last. At most 8,000 numbers are
    held, the latest."""

    def __init__(self) -> None:
        self.passed: list[int] = []
        self.loops: dict[int, list[Any]] = {}

    def mark(self, number: int) -> None:
        self.passed.append(number)
        if len(self.passed) > 8000:
            del self.passed[:4000]

    def turns(self, number: int, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items of a `for`; none is held."""
        loop = self.loops[number] = [0, length_of(iterable), iter(iterable)]

        def turn(item: Any) -> Any:
            loop[0] += 1
            self.mark(number)
            return item

        def end() -> Iterator[Any]:
            self.mark(-number)
            yield from ()

        return itertools.chain(map(turn, loop[2]), end())

    def clear(self) -> None:
        self.passed.clear()
        self.loops.clear()

    def take(self) -> list[int]:
        passed, self.passed = self.passed, []
        return passed


def length_of(iterable: Any) -> int | None:
    """`len()`, or what an iterator says that is left, also of what enumerate and zip go over; None where nothing is
    known."""
    if isinstance(iterable, (enumerate, zip)):
        parts = iterable.__reduce__()[1]
        lengths = map(length_of, parts if isinstance(iterable, zip) else parts[:1])
        return min((length for length in lengths if length is not None), default=None)
    with contextlib.suppress(Exception):  # the user's `__len__` may raise what it likes; the loop then shows it, or not
        length = operator.length_hint(iterable, -1)
        return length if length >= 0 else None
    return None


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


def is_shared_out(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a part of it alone, as FSDP and DTensor do."""
    return hasattr(parameter, "_local_tensor") or hasattr(parameter, "_sharded_size")


def is_bad(value: Any) -> bool:
    """Of a tensor's own part, where it is shared out: all of it is no business of one rank. On a stream of its own: the
    user's may wait for another rank."""
    value = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor):
        with torch.cuda.stream(torch.cuda.Stream(value.device)) if value.is_cuda else contextlib.nullcontext():
            return value.is_floating_point() and not bool(torch.isfinite(value.detach()).all())
    return isinstance(value, float) and not math.isfinite(value)


def nonfinite(frame: types.FrameType) -> tuple[list[str], Line | None]:
    """The names of single numbers among a frame's variables that are not finite, and where they came about."""
    values = [(name, value) for name, value in frame.f_locals.items() if name[0] != "_"]
    single = [(n, v) for n, v in values if type(v) is float or isinstance(v, torch.Tensor) and v.numel() == 1]
    names = [name for name, value in single if is_bad(value)]
    return names, culprit(frame, frame.f_lineno, names) if names else None


def culprit(frame: types.FrameType, line: int, names: list[str] | None = None) -> Line | None:
    """The assignment in which a number that is not finite came about: that of the loss, or of the model's output that
    went into it, where that is bad already."""
    file, tree = frame.f_code.co_filename, tree_of(frame.f_code.co_filename) or ast.Module([], [])
    wanted, best = names or paths.names_in(paths.statement(tree, line)), None
    variables = {**frame.f_globals, **frame.f_locals}
    models = {name for name, value in variables.items() if isinstance(value, nn.Module)}
    for _ in range(8):
        made = [paths.assignments(tree, name, line)[:1] for name in wanted if is_bad(variables.get(name))]
        nodes = [node for each in made for node in each if node.lineno <= line]
        if best is not None:
            calls = [(node, getattr(part, "func", None)) for node in nodes for part in ast.walk(paths.value_of(node))]
            nodes = [node for node, called in calls if getattr(called, "id", "") in models]
        if not nodes:
            break
        best = nodes[0]
        line, wanted = best.lineno, [n for n in paths.names_in(paths.value_of(best)) if n in variables]
    return None if best is None else (file, best.lineno, frame.f_code.co_name)


def digest(value: Any, most: int | None = None) -> str:
    """Of an object that is saved: its tensors by their sums, all else by its text. most: only so many elements of each
    part and parts in all, and of other objects their attributes."""
    total, waiting, parts = hashlib.sha256(), [(value, 0)], 0
    while waiting and (most is None or parts < most):
        (part, depth), parts = waiting.pop(), parts + 1
        own: object = ""
        inner: Iterable[Any] = ()
        if isinstance(part, torch.Tensor):
            some = part.detach()
            some = some.view(-1)[:most] if most is not None and some.is_contiguous() else some
            own = tuple(part.shape), part.dtype, some.double().sum().item() if not part.is_complex() else 0
        elif isinstance(part, nn.Module):
            inner = [part.state_dict()]
        elif isinstance(part, dict):
            own, inner = list(itertools.islice(part, most)), itertools.islice(part.values(), most)
        elif isinstance(part, (list, tuple)):
            own, inner = len(part), part[:most]
        elif isinstance(part, (str, int, float, bool, bytes, type(None))):
            own = part
        elif hasattr(part, "tobytes"):  # an array
            own = part.shape, part.ravel()[:most].tobytes()
        elif most is not None:
            inner = [getattr(part, "__dict__", None)]
        total.update(repr(own).encode())
        waiting += [(each, depth + 1) for each in inner] if depth < 8 else []
    return total.hexdigest()[:16]


def follow_writes(stream: Any, over: Callable[[str], None], shown: Callable[[Any], None]) -> None:
    """Call `shown` with the text that is written, and `over` with its digest when the file is closed."""
    total, write, close = hashlib.sha256(), stream.write, stream.close

    def noted(data: Any) -> Any:
        if isinstance(data, str):
            shown(data[:1000])
        total.update(data.encode("utf-8", "replace") if isinstance(data, str) else bytes(data))
        return write(data)

    def closed() -> Any:
        stream.close = close
        over(total.hexdigest()[:16])
        return close()

    with contextlib.suppress(AttributeError):  # a stream without attributes of its own
        stream.write, stream.close = noted, closed


def rows_of(batch: Any) -> list[str]:
    """A digest of each row of a batch's first tensor that is no single number a row."""
    best = max((part for part in tensors_in(batch) if part.dim()), key=torch.Tensor.numel, default=None)
    return [] if best is None else [str(fingerprint(row)[-1]) for row in best.detach().cpu()]
