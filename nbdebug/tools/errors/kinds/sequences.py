"""An index beyond a list, a tuple, a NumPy array, a data frame or a container of modules."""

from __future__ import annotations

import ast
import collections
import dataclasses
import operator
import re
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.sources import nodes_of, tree_of
from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.kinds.workers import iterator_of, loader_of
from nbdebug.tools.errors.operands import is_instance
from nbdebug.tools.errors.rules.indices import IndexFacts, OutOfRange
from nbdebug.tools.errors.syntax import comprehensions
from nbdebug.tools.errors.values import UNKNOWN, expression, value_of

_WHOLE: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def number(node: ast.AST, frame: Frame) -> int | None:
    """The value of an integer expression, such as `i` or `i + self.width`, computed only from plain ints."""
    if isinstance(node, ast.BinOp) and type(node.op) in _WHOLE:
        left, right = number(node.left, frame), number(node.right, frame)
        return None if left is None or right is None else _WHOLE[type(node.op)](left, right)
    value = value_of(node, frame)
    return value if type(value) is int else None


def sample_of(facts: IndexFacts, context: ErrorContext) -> IndexFacts:
    """In a data set's `__getitem__`: the facts with the length that it returns, the requested sample, the data set's
    name, and the correct length."""
    frame = context.users[0] if context.users else None
    methods = _methods(frame) if frame is not None else {}
    if frame is None or "__len__" not in methods:
        return facts
    returned = [r.value for r in ast.walk(methods["__len__"]) if isinstance(r, ast.Return) and r.value]
    if not returned:
        return facts
    parameters = methods["__getitem__"].args.args[1:2]
    parameter = parameters[0].arg if parameters else ""
    value = frame.names.get(parameter)
    name, promised = _promise(frame, context)
    separate = parameter != facts.key and type(value) is int
    head, fits = ast.unparse(returned[0]), _fits(facts, parameter, frame)
    if head == fits:  # its length is right: the index is what is wrong
        return facts
    return dataclasses.replace(
        facts,
        head=head,
        sample=f"`{parameter}` is {value}" if separate else "",
        data_set=name,
        promised=promised,
        fits=fits,
    )


def _methods(frame: Frame) -> dict[str, ast.FunctionDef]:
    """The methods of the class whose `__getitem__` was running."""
    if frame.site.function != "__getitem__":
        return {}
    for node in nodes_of(frame.site.file):
        if isinstance(node, ast.ClassDef):
            methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
            mine = methods.get("__getitem__")
            if mine is not None and mine.lineno <= frame.site.line <= (mine.end_lineno or 0):
                return methods
    return {}


def _fits(facts: IndexFacts, parameter: str, frame: Frame) -> str:
    """What `__len__` would have to return, where the failing index is the sample's or a fixed distance after it."""
    entries = f"{facts.table}.shape[{facts.dim}]" if facts.dim else f"len({facts.table})"
    ran = expression(frame)
    for node in ast.walk(ran) if ran is not None else ():
        if not isinstance(node, ast.Subscript) or ast.unparse(node.value) != facts.table:
            continue
        for key in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            if ast.unparse(key) == parameter == facts.key:
                return entries
            if isinstance(key, ast.BinOp) and isinstance(key.op, ast.Add) and ast.unparse(key) == facts.key:
                for mine, more in ((key.left, key.right), (key.right, key.left)):
                    ahead = number(more, frame)
                    lasting = all(
                        not isinstance(n, ast.Name) or n.id == "self" or n.id in frame.globals for n in ast.walk(more)
                    )  # known in `__len__` as well
                    if (
                        ast.unparse(mine) == parameter
                        and lasting
                        and ahead is not None
                        and 0 < ahead < (facts.size or 0)
                    ):
                        return f"{entries} - {ast.unparse(more)}"
    return ""


def _promise(frame: Frame, context: ErrorContext) -> tuple[str, int | None]:
    """(the data set by the user's name or its loader's, the number of samples that the loader's sampler got)."""
    mine, iterator = frame.names.get("self"), iterator_of(context)
    state = attributes(iterator) if iterator is not None else {}
    if mine is not None and state.get("_dataset") is mine:
        loader, name, _ = loader_of(context)
        if name == type(mine).__name__ and loader:
            name = f"{loader}.dataset"
        return name, _sampler_length(state.get("_sampler_iter"))
    return next(
        (
            name
            for name, value, _ in context.variables()
            if value is mine and mine is not None and name.partition(".")[0] != "self"
        ),
        "",
    ), None


def _sampler_length(running: Any) -> int | None:
    """The length over which torch's sampler runs, from its own frames: the user's `__len__` is not called."""
    if type(running) is type(iter(range(0))):
        whole = running.__reduce__()[1][0]
        return whole.stop if type(whole) is range else None  # from Python 3.12 on it has only the rest
    frame = running.gi_frame if type(running) is GeneratorType else None
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torch.utils.data"):
        return None
    length = frame.f_locals.get("n")
    return length if type(length) is int else _sampler_length(frame.f_locals.get("sampler_iter"))


WORDS = re.compile(
    r"^(?:list|tuple|string|deque|range object|bytes)(?: assignment)? index out of range|"
    r"^index -?\d+ is out of range|^single positional indexer is out-of-bounds"
)
SAMPLES = 10_000
"""Numbers of a comprehension that are compared."""
EXACT = (list, tuple, str, range, bytes, collections.deque, torch.Size)


def sequence_facts(facts: IndexFacts, context: ErrorContext) -> IndexFacts | None:
    """The subscript of the failing line that is out of range."""
    if context.type != "IndexError" or not WORDS.search(context.message) or not context.users:
        return None
    frame = context.users[0]
    subscripts = _subscripts(frame)
    alone = (
        context.carried is not None and len(subscripts) == 1 and context.trail[-1] is frame
    )  # raised in this very line
    for base, key, size, value in subscripts:
        if value is not None and not -size <= value < size or value is None and alone:
            text = "" if isinstance(key, (ast.Constant, ast.UnaryOp)) else ast.unparse(key)
            beyond = OutOfRange(value) if value is not None else OutOfRange(size, total=0)
            return sample_of(
                dataclasses.replace(
                    facts, kind="sequence", table=ast.unparse(base), size=size, least=-size, key=text, beyond=beyond
                ),
                context,
            )
    return None


def array_facts(facts: IndexFacts, context: ErrorContext, value: int, dim: int | None, size: int) -> IndexFacts | None:
    """NumPy's message is torch's: the array of the failing line whose size the message names."""
    frame = context.users[0] if context.users else None
    for node in ast.walk(_ran(frame)) if frame is not None else ():
        if not isinstance(node, ast.Subscript):
            continue
        table = value_of(node.value, frame) if frame is not None else UNKNOWN
        if type(table) is not np.ndarray or dim is None or dim >= table.ndim or table.shape[dim] != size:
            continue
        facts = dataclasses.replace(
            facts,
            kind="sequence",
            table=ast.unparse(node.value),
            size=size,
            dim=dim,
            shape=table.shape,
            least=-size,
            beyond=OutOfRange(value),
        )
        keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        mine = [ast.unparse(key) for key in keys if _reaches(key, value, frame)]
        return sample_of(dataclasses.replace(facts, key=mine[0] if mine else ""), context)
    single = [n for n in ast.walk(_ran(frame)) if isinstance(n, ast.Subscript)] if frame is not None else []
    ran = _ran(frame)
    value_node = ran.value if isinstance(ran, (ast.Return, ast.Expr, ast.Assign)) else ran
    if len(single) != 1 or single[0] is not value_node or context.trail[-1] is not frame:
        return None
    key = "" if isinstance(single[0].slice, (ast.Constant, ast.UnaryOp)) else ast.unparse(single[0].slice)
    return sample_of(
        dataclasses.replace(
            facts,
            kind="sequence",
            table=ast.unparse(single[0].value),
            size=size,
            dim=dim,
            least=-size,
            beyond=OutOfRange(value),
            key=key if key.isidentifier() else "",
        ),
        context,
    )


def _reaches(key: ast.expr, value: int, frame: Frame | None) -> bool:
    """Whether a key other than a constant has or contains the value."""
    result: Any = value_of(key, frame) if frame is not None else UNKNOWN
    result = _computed(key, frame) if result is UNKNOWN and frame is not None else result
    if isinstance(key, ast.Constant) or result is UNKNOWN:
        return False
    if type(result) is np.ndarray and result.dtype.kind in "iu":
        return bool((result == value).any())
    if is_tensor(result) and not result.is_meta and not result.dtype.is_floating_point:
        return bool((result == value).any())
    return is_instance(result, (int, np.integer)) and int(result) == value


def _computed(key: ast.expr, frame: Frame) -> Any:
    result = number(key, frame) if isinstance(key, ast.BinOp) else None
    return UNKNOWN if result is None else result


def _ran(frame: Frame | None) -> ast.AST:
    node = expression(frame) if frame is not None else None
    return node if node is not None else ast.Module([], [])


def _subscripts(frame: Frame) -> list[tuple[ast.expr, ast.expr, int, int | None]]:
    """(what is indexed, the index, the number of entries, the value where known) of the failing line's subscripts."""
    subscripts = []
    for node in ast.walk(_ran(frame)):
        if isinstance(node, ast.Subscript):
            size = _size(node.value, frame)
            value: Any = value_of(node.slice, frame)
            value = _computed(node.slice, frame) if value is UNKNOWN else value
            if value is UNKNOWN and isinstance(node.slice, ast.Name) and size is not None:
                value = _first_beyond(node, node.slice.id, size, frame)
            whole = is_instance(value, (int, np.integer)) and type(value) is not bool
            if size is not None and (whole or value is UNKNOWN and isinstance(node.slice, ast.Name)):
                subscripts.append((node.value, node.slice, size, int(value) if whole else None))
    return subscripts


def _first_beyond(node: ast.AST, name: str, size: int, frame: Frame) -> Any:
    """The first value beyond `size` entries that a comprehension gives a variable of its own; UNKNOWN where it is not
    over known numbers."""
    tree = tree_of(frame.site.file)
    for clause in comprehensions(tree, node) if tree is not None else ():
        if isinstance(clause.target, ast.Name) and clause.target.id == name and not clause.ifs:
            numbers: Any = value_of(clause.iter, frame)
            if isinstance(clause.iter, ast.Call) and value_of(clause.iter.func, frame) is range:
                limits = [number(arg, frame) for arg in clause.iter.args]
                numbers = range(*limits) if limits and None not in limits else UNKNOWN  # type: ignore[arg-type]
            if type(numbers) in (range, list, tuple) and all(type(n) is int for n in numbers[:SAMPLES]):
                return next((n for n in numbers[:SAMPLES] if not -size <= n < size), UNKNOWN)
    return UNKNOWN


def _size(node: ast.expr, frame: Frame) -> int | None:
    """The number of entries of an object, where its length needs no code of the user's."""
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "iloc"):
        inner = value_of(node.value, frame)
        if node.attr == "shape":
            return inner.ndim if is_tensor(inner) or type(inner) is np.ndarray else None
        return _pandas(inner)
    if isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(part, ast.Starred) for part in node.elts):
        return len(node.elts)
    value: Any = value_of(node, frame)
    if type(value) in EXACT:
        return len(value)
    if type(value) in (nn.Sequential, nn.ModuleList, nn.ParameterList):
        return len(value)
    return None


def _pandas(value: Any) -> int | None:
    home, name = type(value).__module__.partition(".")[0], type(value).__name__
    return int(value.shape[0]) if home == "pandas" and name in ("DataFrame", "Series") else None
