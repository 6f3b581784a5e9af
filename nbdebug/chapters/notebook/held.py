"""Which parameters belong to which model among the variables, and what each optimizer holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.observe.named import attributes

PLAIN = (list, tuple, dict, set)


def is_module(thing: Any) -> bool:
    return issubclass(type(thing), nn.Module)


def is_optimizer(thing: Any) -> bool:
    return issubclass(type(thing), torch.optim.Optimizer)


def is_tensor(thing: Any) -> bool:
    return issubclass(type(thing), torch.Tensor)


def modules_of(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, module) of a module and all within it, each once, read past any code of the user's."""
    seen: set[int] = set()
    todo = [(name, module)]
    while todo:
        path, now = todo.pop(0)
        if id(now) not in seen:
            seen.add(id(now))
            yield path, now
            children = attributes(now).get("_modules") or {}
            todo += [(f"{path}.{key}" if path else key, child) for key, child in children.items() if child is not None]


def parameters_of(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, parameter) of a module and all within it; of a tensor itself."""
    if is_tensor(module):
        yield name, module
        return
    for path, part in modules_of(module, name):
        for key, value in (attributes(part).get("_parameters") or {}).items():
            if value is not None:
                yield (f"{path}.{key}" if path else key), value


def held_by(optimizer: Any) -> list[Any]:
    """The tensors that an optimizer holds."""
    groups = attributes(optimizer).get("param_groups") or []
    return [p for group in groups if type(group) is dict for p in group.get("params", ()) if is_tensor(p)]


class Held:
    """The models and optimizers among the user's things. top: (name, module) of variables and of what lies in lists
    and dicts of them; inner: of modules in other objects; whole: those of top that are no part of another; weights:
    variables that are trainable tensors."""

    def __init__(self, names: dict[str, Any], met: list[tuple[str, Any]]) -> None:
        modules = [(name, thing) for name, thing in met if is_module(thing)]
        self.top = [
            (name, module)
            for name, module in modules
            if "." not in name.partition("[")[0] and "]." not in name and not name.startswith("an item")
        ]
        tops = {id(module) for _, module in self.top}
        self.inner = [(name, module) for name, module in modules if id(module) not in tops]
        parts = {id(part) for _, module in self.top for _, part in modules_of(module) if part is not module}
        self.whole = [(name, module) for name, module in self.top if id(module) not in parts]
        self.weights = [
            (name, value) for name, value in names.items() if is_tensor(value) and value.is_leaf and value.requires_grad
        ]
        self.optimizers = [(name, thing) for name, thing in met if is_optimizer(thing)]
        self.in_optimizers = {id(p) for _, optimizer in self.optimizers for p in held_by(optimizer)}
        self.loose = {id(tensor) for tensor in loose_tensors(names, met)}
        self.named = self._ids(self.top)
        self.anywhere = self.named | self._ids(self.inner)

    @staticmethod
    def _ids(modules: list[tuple[str, Any]]) -> set[int]:
        return {id(p) for _, module in modules for _, p in parameters_of(module)}

    def missing(self, name: str, module: Any) -> tuple[list[tuple[str, Any]], int]:
        """The trainable parameters of a model that no optimizer holds, and how many it has."""
        trained = {id(p): (path, p) for path, p in parameters_of(module, name) if p.requires_grad}
        return [pair for key, pair in trained.items() if key not in self.in_optimizers], len(trained)

    def strangers(self, optimizer: Any, inner: bool) -> list[Any]:
        """The tensors of an optimizer that no variable has. inner: those of modules within objects count as had."""
        known = (self.anywhere if inner else self.named) | self.loose
        return [p for p in held_by(optimizer) if id(p) not in known]


def loose_tensors(names: dict[str, Any], met: list[tuple[str, Any]]) -> list[Any]:
    """The tensors that lie in variables, in lists and dicts of them, and in attributes of objects."""
    found = [value for value in names.values() if is_tensor(value)]
    for _, thing in met:
        kind = type(thing)
        if kind in (list, tuple, set):
            found += [value for value in thing if is_tensor(value)]
        elif kind is dict:
            found += [value for value in thing.values() if is_tensor(value)]
        elif not is_module(thing) and not is_optimizer(thing) and not issubclass(kind, type):
            found += [value for value in attributes(thing).values() if is_tensor(value)]
    return found
