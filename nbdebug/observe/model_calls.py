"""Which modules of a model a step may call, and hooks on them that stay out of copies."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def parts_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that a step may call: each model, and its direct parts; a list of parts counts as those in it. By
    "model" or "model/part"."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, model in models.items():
        found.setdefault(id(model), (name, model))
        inside = list(model.named_children())
        while inside:
            path, module = inside.pop()
            if type(module).forward is nn.Module.forward:  # a ModuleList: not to be called itself
                inside += [(f"{path}.{n}", m) for n, m in module.named_children()]
            else:
                found.setdefault(id(module), (f"{name}/{path}", module))
    return dict(found.values())


def part_of(models: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module that `parts_of` calls by this name. Raises KeyError or AttributeError where there is none."""
    model, _, path = name.partition("/")
    return models[model].get_submodule(path)


class Hook:
    """A hook on a model, which stays out of copies: a deepcopy or a pickle of the model has one that does nothing, and
    is loaded without nbdebug."""

    def __init__(self, script: Any, method: str, name: str):
        self.script, self.tell, self.name = script, getattr(script, method), name
        self.part, self.change = "/" in name, 1 if method == "_enter" else -1

    def __call__(self, module: nn.Module, *given: Any) -> None:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():  # a compiler that reads this finds nothing to do
            return
        script = self.script
        if self.part and script.nested(self.name, self.change):  # nearly all calls: nothing else may be done here
            return
        script.border(self.tell, self.name, *given)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
