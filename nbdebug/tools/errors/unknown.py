"""An error of no known kind: the facts of its frames, and where they are sure, what was perhaps meant. No guess.

Plain errors of Python get a hint: a name, an attribute or a key that exists and is nearly the missing one, or the
arguments that a module's `forward` takes. The user's own strings are not shown, but for keys of a dict.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import itertools
import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from nbdebug.observe.variables import class_attribute, key_text, members, registered
from nbdebug.report import Report, Symptom, Table
from nbdebug.text import clip, clip_start, listed
from nbdebug.tools.errors.context import ErrorContext, fact, is_tensor
from nbdebug.tools.errors.facts import TensorFact
from nbdebug.tools.errors.values import expression, operands, path_text, shape_of, value_of

LINES, WIDTH = 15, 100
"""Lines that the answer takes as text, and columns of one: as much as a person reads below a traceback."""
MOST_MESSAGE = 5
"""Lines of the message."""
MAX_READ = 20_000_000
"""Elements of all tensors together whose range is read: a fifth of a second."""
MAX_ENTRIES = 2
"""Entries of a list or a dict in the table: a history of losses would fill it."""
SURE = 0.75
"""How alike two names must be (difflib's ratio) for one to be offered for the other: one slip in four or five letters.
Our choice: below it, "did you mean" is wrong more often than right."""


def report_of(context: ErrorContext) -> Report:
    """A report without a finding: the whole message, where the error was raised, and the table of the values."""
    message = clip(re.sub(r"\s*\n\s*", " ", context.message.strip()), MOST_MESSAGE * WIDTH - 60)
    headline = f"No cause is known for this {context.type}" + (f": {message}" if message else "")
    notes = notes_of(context)
    used = sum(len(textwrap.wrap(text, WIDTH - 4)) for text in (headline, *notes))
    rows = list(itertools.islice(values(context), max(0, LINES - 7 - used)))
    columns = ("name", "shape", "dtype", "device", "values")
    table = Table("Your values when it failed, those of the failing line first", columns, rows)
    return Report(
        "explain()",
        notes=tuple(notes),
        headline=headline,
        symptoms=(Symptom(headline),),
        tables=(table,) if rows else (),
    )


def notes_of(context: ErrorContext) -> list[str]:
    """Where it was raised, and what was perhaps meant."""
    where, notes = context.raised().where, []
    if where.text or where.place:
        source = f": `{where.text}`" if where.text else ""
        module = f", in module `{where.module}` ({where.module_type})" if where.module else ""
        notes.append(f"Raised from {where.place}{source}{module}.")
    notes += itertools.islice(hints(context), 1)
    notes += [f"It was raised {context.carried.where}."] if context.carried else []
    followed = [type(error).__name__ for error in context.led_to[:3] if type(error) is not type(context.error)]
    notes += [f"{listed(followed)} followed from it."] if followed else []
    return notes


def values(context: ErrorContext) -> Iterator[list[str]]:
    """The rows of the table: tensors, with their ranges as long as that is quick, arrays, tables and paths; of the
    failing line, then of the functions that ran, innermost first. A cell's variables that its line does not name are
    left out: they are there whatever fails."""
    visited: set[int] = set()
    budget = MAX_READ
    for name, value in (*(operands(context.users[0], whole=True) if context.users else ()), *_variables(context)):
        for text, item in _opened(name, value):
            if id(item) in visited:
                continue
            visited.add(id(item))
            if is_tensor(item):
                count = math.prod(shape_of(item) or ())
                tensor = fact(text, item, read=count <= budget)
                budget -= count if count <= budget else 0
                yield [text, str(list(tensor.shape)), tensor.dtype, tensor.device, _range(tensor)]
            elif type(item) is np.ndarray:
                yield [text, str(list(item.shape)), str(item.dtype), "numpy", ""]
            elif _is_table(item):
                columns = [str(column) for column in item.columns[:6]]
                yield [text, str(list(item.shape)), type(item).__name__, "pandas", f"columns {listed(columns, 5, '')}"]
            elif (path := path_text(item)) and (type(item) is not str or _is_known_path(text, path)):
                there = "exists" if os.path.exists(path) else "does not exist"
                yield [text, "", type(item).__name__, "path", f"{clip_start(path, 60)}: {there}"]


def _is_table(value: Any) -> bool:
    return type(value).__name__ == "DataFrame" and type(value).__module__.partition(".")[0] == "pandas"


def _is_known_path(name: str, path: str) -> bool:
    """Whether a string is a path and no secret that looks like one: its folder exists, or its name says so."""
    folder = os.path.dirname(path)
    return os.path.exists(path) or bool(folder) and os.path.isdir(folder) or "path" in name or "file" in name


def _variables(context: ErrorContext) -> Iterator[tuple[str, Any]]:
    """(name, value) of the variables of the functions that ran, innermost first."""
    for frame in context.users:
        yield from frame.names.items()
        if "self" in frame.names:
            yield from ((f"self.{name}", value) for name, value in members(frame.names["self"]).items())


def _opened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value), and the tensors and arrays in a list, a tuple or a dict."""
    yield name, value
    if type(value) in (list, tuple, dict):
        inside = value.items() if type(value) is dict else enumerate(value)
        kinds = (torch.Tensor, np.ndarray)
        items = ((f"{name}[{key_text(key)}]", item) for key, item in inside if issubclass(type(item), kinds))
        yield from itertools.islice(items, MAX_ENTRIES)


def _range(tensor: TensorFact) -> str:
    if tensor.low is None or tensor.high is None:
        return "all of them NaN or infinite" if tensor.nonfinite else ""
    bad = f", {tensor.nonfinite} NaN or infinite" if tensor.nonfinite else ""
    return f"{tensor.low:.4g} to {tensor.high:.4g}{bad}"


def hints(context: ErrorContext) -> Iterator[str]:
    """What was perhaps meant, where the names that exist tell it."""
    kind, message = context.type, context.message
    if kind in ("NameError", "UnboundLocalError") and (match := re.search(r"name '(\w+)' is not defined", message)):
        yield from _name(context, match[1])
    elif kind == "AttributeError" and (match := re.search(r"(?:has no|no such) attribute '(\w+)'", message)):
        yield from _attribute(context, match[1])
    elif kind == "KeyError":
        yield from _key(context)
    elif kind == "UnpicklingError" and (match := re.search(r"GLOBAL ([\w.]+) was not an allowed global", message)):
        yield (
            f"The file contains an object of `{match[1]}`, and `torch.load` reads only tensors and plain values "
            "(weights_only=True, the default since torch 2.6). If you trust the file: "
            "`torch.load(path, weights_only=False)`."
        )
    elif kind == "TypeError" and "argument" in message:
        yield from _arguments(context, message)


def _name(context: ErrorContext, name: str) -> Iterator[str]:
    for frame in context.users[:1]:
        for near in _nearest(name, [*frame.names, *frame.globals, *context.names, *vars(builtins)]):
            yield f"`{name}` is not defined; `{near}` is."


def _attribute(context: ErrorContext, name: str) -> Iterator[str]:
    thing = _failing_object(context)
    if thing is None:
        return
    kind = f"`{type(thing).__name__}`"
    near = _nearest(name, [*members(thing), *(key for parent in type(thing).__mro__ for key in vars(parent))])
    if near:
        yield f"{kind} has no `{name}`; it has `{near[0]}`."
    elif issubclass(type(thing), torch.nn.Module) and (children := registered(thing, "_modules")):
        yield f"{kind} has no `{name}`; its modules are {listed(children, 12)}."


def _failing_object(context: ErrorContext) -> Any:
    """The object of an AttributeError: what Python keeps, or the module whose `__getattr__` ran."""
    slot: Any = AttributeError.__dict__.get("obj")
    thing = slot.__get__(context.error) if slot is not None and type(context.error) is AttributeError else None
    if thing is None and context.trail and context.trail[-1].site.function == "__getattr__":
        thing = context.trail[-1].names.get("self")
    return thing


def _key(context: ErrorContext) -> Iterator[str]:
    args = BaseException.__dict__["args"].__get__(context.error)
    missing = args[0] if len(args) == 1 else None
    node = expression(context.users[0]) if context.users and type(missing) is str else None
    for part in ast.walk(node) if node is not None else ():
        if not isinstance(part, ast.Subscript):
            continue
        holder, key = (value_of(one, context.users[0]) for one in (part.value, part.slice))
        if _is_table(holder) and key == missing:
            columns = [column for column in holder.columns if type(column) is str]
            yield from (f"There is no column {missing!r}; there is {near!r}." for near in _nearest(missing, columns))
            yield f"There is no column {missing!r}; the columns are {listed(columns, 12, '')}."
        holder = dict(registered(holder, "_modules")) if type(holder) is torch.nn.ModuleDict else holder
        if type(holder) is not dict or type(key) is not str or key != missing:
            continue
        for near in _nearest(missing, holder):
            yield f"There is no key {missing!r}; there is {near!r}."
        keys = [
            repr(key)
            for key, value in holder.items()
            if type(key) is str and issubclass(type(value), (torch.Tensor, torch.nn.Module))
        ]
        if keys:
            yield f"There is no key {missing!r}; there are {listed(keys, 12, '')}."


def _arguments(context: ErrorContext, message: str) -> Iterator[str]:
    match = re.match(r"(?:[\w.<>]*\.)?(\w+)\(\)", message)
    code = _code_of_callee(context, match[1]) if match else None
    if code is not None and match is not None:
        count = code.co_argcount + code.co_kwonlyargcount
        takes = [name for name in code.co_varnames[:count] if name != "self"]
        more = ["*" + code.co_varnames[count]] if code.co_flags & inspect.CO_VARARGS else []
        yield f"`{match[1]}` takes ({', '.join([*takes, *more])})."


def _code_of_callee(context: ErrorContext, name: str) -> CodeType | None:
    """Of the function that was called with the wrong arguments."""
    if name in ("forward", "__init__") and context.trail and context.trail[-1].module is not None:
        function = class_attribute(context.trail[-1].module, name)
        return getattr(function, "__code__", None) if inspect.isfunction(function) else None
    for frame in context.users[:1]:
        for text, value in operands(frame):
            if text.rpartition(".")[2] == name and type(value) in (FunctionType, MethodType):
                code: CodeType = value.__code__
                return code
    return None


def _nearest(name: str, others: Iterable[Any]) -> list[str]:
    """The one that is nearly this name, or none."""
    names = {other for other in others if type(other) is str and other != name and not other.startswith("__")}
    return difflib.get_close_matches(name, names, n=1, cutoff=SURE)
