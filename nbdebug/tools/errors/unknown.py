"""An error of no known kind: the facts of its frames, and where they are sure, what was perhaps meant. No guess.

What is told of plain Python's errors: a name or an attribute that is nearly one that exists, a key that is nearly one
of the dict's, what a module's `forward` takes. Strings of the user's own are not shown: a key only where it is nearly
the one asked for, which the error shows anyway.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch

from nbdebug.observe.variables import key_text, members, registered
from nbdebug.report import Report, Table
from nbdebug.tools.errors.context import MOST, ErrorContext, fact, is_tensor
from nbdebug.tools.errors.facts import TensorFact
from nbdebug.tools.errors.values import expression, operands, value_of

READ = 20_000_000
"""Elements of all tensors together whose range is read: a fifth of a second."""
ENTRIES = 50
"""Entries of a list or a dict that are looked into for tensors."""
SURE = 0.75
"""How alike two names must be (difflib's ratio) for one to be offered for the other: one slip in four or five letters.
Our choice: below it, "did you mean" is wrong more often than right."""


def report_of(scene: ErrorContext) -> Report:
    """A report without a finding: where the error was raised, and the table of the tensors."""
    said = scene.message.strip().partition("\n")[0]
    said = said if len(said) <= 200 else said[:197] + "..."
    headline = f"No cause is known for this {scene.type}" + (f": {said}" if said else "")
    rows = [[t.name, str(list(t.shape)), t.dtype, t.device, _range(t)] for t in tensors(scene)]
    columns = ("name", "shape", "dtype", "device", "values")
    table = Table("Tensors among your variables when it failed, innermost first", columns, rows)
    return Report(
        "explain()", notes=tuple(notes_of(scene)), headline=headline, failed=True, tables=(table,) if rows else ()
    )


def notes_of(scene: ErrorContext) -> list[str]:
    """Where it was raised, and what was perhaps meant."""
    raised = scene.raised()
    where, notes = raised.where, []
    if where.text or where.place:
        at = f"Raised from {where.place}" + (f": `{where.text}`" if where.text else "")
        inside = f", in module `{where.module}` ({where.module_type})" if where.module else ""
        notes.append(f"{at}{inside}.")
    hint = next(iter(hints(scene)), None)
    notes += [hint] if hint else []
    notes += [f"It was raised {scene.carried.where}."] if scene.carried else []
    notes += [f"`{type(error).__name__}` followed from it." for error in scene.led_to[:3]]
    return notes


def tensors(scene: ErrorContext) -> list[TensorFact]:
    """The tensors among the user's variables, with their ranges as long as that is quick."""
    seen: dict[int, TensorFact] = {}
    left = READ
    for name, value in _opened(scene):
        if len(seen) >= MOST:
            break
        if id(value) not in seen:
            plain = fact(name, value)
            count = 1
            for side in plain.shape:
                count *= side
            read = count <= left
            left -= count if read else 0
            seen[id(value)] = fact(name, value, read=True) if read else plain
    return list(seen.values())


def _opened(scene: ErrorContext) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the variables, and of what lies in their lists, tuples and dicts."""
    for name, value, _ in scene.variables():
        if is_tensor(value):
            yield name, value
        elif type(value) in (list, tuple, dict):
            inside = value.items() if type(value) is dict else enumerate(value)
            for key, item in itertools.islice(inside, ENTRIES):
                if is_tensor(item):
                    yield f"{name}[{key_text(key)}]", item


def _range(told: TensorFact) -> str:
    if told.low is None or told.high is None:
        return "all of them NaN or infinite" if told.nonfinite else ""
    bad = f", {told.nonfinite} NaN or infinite" if told.nonfinite else ""
    return f"{told.low:.4g} to {told.high:.4g}{bad}"


def hints(scene: ErrorContext) -> Iterator[str]:
    """What was perhaps meant, where the names that exist tell it."""
    kind, said = scene.type, scene.message
    if kind in ("NameError", "UnboundLocalError") and (asked := re.search(r"name '(\w+)' is not defined", said)):
        yield from _name(scene, asked[1])
    elif kind == "AttributeError" and (asked := re.search(r"(?:has no|no such) attribute '(\w+)'", said)):
        yield from _attribute(scene, asked[1])
    elif kind == "KeyError":
        yield from _key(scene)
    elif kind == "UnpicklingError" and (asked := re.search(r"GLOBAL ([\w.]+) was not an allowed global", said)):
        yield (
            f"The file holds an object of `{asked[1]}`, and `torch.load` reads weights alone (weights_only=True, "
            "the default since torch 2.6). Where you trust the file: `torch.load(path, weights_only=False)`."
        )
    elif kind == "TypeError" and "argument" in said:
        yield from _arguments(scene, said)


def _name(scene: ErrorContext, asked: str) -> Iterator[str]:
    for frame in scene.users[:1]:
        there = [*frame.names, *frame.globals, *scene.names, *vars(builtins)]
        for near in _near(asked, there):
            yield f"`{asked}` is not defined; `{near}` is."


def _attribute(scene: ErrorContext, asked: str) -> Iterator[str]:
    thing = _asked_thing(scene)
    if thing is None:
        return
    name = f"`{type(thing).__name__}`"
    there = [*members(thing), *(key for kind in type(thing).__mro__ for key in vars(kind))]
    near = _near(asked, there)
    if near:
        yield f"{name} has no `{asked}`; it has `{near[0]}`."
    elif issubclass(type(thing), torch.nn.Module):
        parts = list(registered(thing, "_modules"))[:12]
        if parts:
            yield f"{name} has no `{asked}`; its modules are {', '.join(f'`{part}`' for part in parts)}."


def _asked_thing(scene: ErrorContext) -> Any:
    """The object of an AttributeError: what Python keeps, or the module whose `__getattr__` was asked."""
    slot: Any = AttributeError.__dict__.get("obj")
    found = slot.__get__(scene.error) if slot is not None and type(scene.error) is AttributeError else None
    if found is None and scene.trail and scene.trail[-1].site.function == "__getattr__":
        found = scene.trail[-1].names.get("self")
    return found


def _key(scene: ErrorContext) -> Iterator[str]:
    given = BaseException.__dict__["args"].__get__(scene.error)
    asked = given[0] if len(given) == 1 else None
    node = expression(scene.users[0]) if scene.users and type(asked) is str else None
    for part in ast.walk(node) if node is not None else ():
        if not isinstance(part, ast.Subscript):
            continue
        holder, key = (value_of(one, scene.users[0]) for one in (part.value, part.slice))
        if type(holder) is not dict or type(key) is not str or key != asked:
            continue
        for near in _near(asked, holder):
            yield f"There is no key {asked!r}; there is {near!r}."
        held = [key for key, value in holder.items() if type(key) is str and is_tensor(value)]
        if held:
            yield f"There is no key {asked!r}; the tensors are under {', '.join(map(repr, held[:12]))}."


def _arguments(scene: ErrorContext, said: str) -> Iterator[str]:
    asked = re.match(r"(?:[\w.<>]*\.)?(\w+)\(\)", said)
    code = _called(scene, asked[1]) if asked else None
    if code is not None and asked is not None:
        count = code.co_argcount + code.co_kwonlyargcount
        takes = [name for name in code.co_varnames[:count] if name != "self"]
        more = ["*" + code.co_varnames[count]] if code.co_flags & inspect.CO_VARARGS else []
        yield f"`{asked[1]}` takes ({', '.join([*takes, *more])})."


def _called(scene: ErrorContext, name: str) -> CodeType | None:
    """The code of the function that was called with the wrong arguments."""
    if name in ("forward", "__init__") and scene.trail and scene.trail[-1].module is not None:
        module = scene.trail[-1].module
        found = next((vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind)), None)
        return getattr(found, "__code__", None) if inspect.isfunction(found) else None
    for frame in scene.users[:1]:
        for text, value in operands(frame):
            if text.rpartition(".")[2] == name and type(value) in (type(_called), type(scene.raised)):
                return value.__code__
    return None


def _near(asked: str, there: Iterable[Any]) -> list[str]:
    names = {name for name in there if type(name) is str and name != asked and not name.startswith("__")}
    return difflib.get_close_matches(asked, names, n=1, cutoff=SURE)
