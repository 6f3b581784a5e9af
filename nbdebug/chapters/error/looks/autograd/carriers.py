"""Variables that hold a graph: their tensors, whether these belong to a loss's graph, where they got their value."""

from __future__ import annotations

import collections
import types
from typing import Any

from nbdebug.chapters.error.facts import NOWHERE
from nbdebug.chapters.error.facts_autograd import Carrier
from nbdebug.chapters.error.looks.autograd.calls import outward
from nbdebug.chapters.error.looks.autograd.carried import writes
from nbdebug.chapters.error.looks.autograd.graph import freed, meet, op_of
from nbdebug.chapters.error.looks.autograd.held import is_module
from nbdebug.chapters.error.looks.autograd.parts import skipped
from nbdebug.chapters.error.looks.autograd.source import Code, last
from nbdebug.chapters.error.scene import is_tensor
from nbdebug.finding import Where
from nbdebug.observe.named import attributes

CONTAINERS = (list, tuple, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
"""What holds no tensor."""


def tensors_of(thing: Any) -> list[Any]:
    """The tensors with a history that a variable holds: itself, those of an exact container, an object's attributes."""
    if is_tensor(thing):
        return [thing] if thing.grad_fn is not None else []
    if type(thing) in CONTAINERS:
        inside = list(thing.values() if issubclass(type(thing), dict) else thing)[:200]
        return [t for one in inside for t in (tensors_of(one) if type(one) in (list, tuple) else _one(one))]
    if is_module(thing) or issubclass(type(thing), PLAIN):
        return []
    return [t for one in attributes(thing).values() for t in _one(one)]


def _one(thing: Any) -> list[Any]:
    return [thing] if is_tensor(thing) and thing.grad_fn is not None else []


def part_of(thing: Any, found: dict[Any, int]) -> bool:
    """Whether the history of a variable and that of the loss meet."""
    mine = tensors_of(thing)
    return bool(mine) and (not found or meet(mine, found))


def carrier(name: str, how: str, thing: Any, assigned: Where, read: Where = NOWHERE) -> Carrier:
    mine = tensors_of(thing)
    one = mine[0] if mine else None
    if one is None:
        return Carrier(name, how, assigned=assigned, read=read)
    return Carrier(
        name,
        how,
        tuple(one.shape),
        op_of(one.grad_fn),
        assigned,
        read,
        freed(one.grad_fn),
        not is_tensor(thing),
        not is_tensor(thing) and type(thing) not in CONTAINERS,
    )


def written(code: Code, name: str) -> Where:
    for scope in outward(code):
        made = [
            s
            for s in writes(list(scope.statements()), name)
            if (scope is not code or s.lineno < code.line)
            and not skipped(s, scope)
            and last(getattr(getattr(s, "value", None), "func", None)) != "detach"
        ]
        if made:
            return scope.where(made[-1])
    return NOWHERE
