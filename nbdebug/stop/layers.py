"""Which layers does a pattern mean?"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from nbdebug.observe.modules import plain_name

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
"""Their only part is the model: its layers go by their own names as well."""


def chosen(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The layers by name, in the model's order, each once: those whose dotted name the glob matches (`*` also matches
    dots), else those whose type is so named. "" is the model itself.

    Raises ValueError, with the nearest names, where there is none."""
    if not isinstance(pattern, str):
        raise ValueError(
            "pattern is a glob over layer names, such as 'layers.3*', or a layer's type, such as "
            f"'Dropout'; got {pattern!r}"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "The layers of a TorchScript model run outside Python, where nothing can stop them. Set "
            f"the stop in the model that it was made from; got a {type(model).__name__}"
        )
    named = list(_named(model))
    found = [(name, module) for name, module in named if fnmatchcase(name, pattern)]
    found = found or [(name, module) for name, module in named if fnmatchcase(type(module).__name__, pattern)]
    if not found:
        raise ValueError(
            f"No layer of this {type(model).__name__} is called {pattern!r}, and none is of a type so "
            f"called. {_nearest(pattern, named)}"
        )
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, module in found:
        first.setdefault(id(module), (name, module))
    return dict(first.values())


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every name of every layer. What `torch.compile` puts around a model is left out: it runs no hooks."""
    wrapped = type(model).__name__ in _WRAPPERS
    for raw, module in model.named_modules(remove_duplicate=False):
        if "_orig_mod" in module._modules:
            continue
        name = plain_name(raw)
        if wrapped and name.startswith("module."):
            yield name.removeprefix("module."), module
        yield name, module


def _nearest(pattern: str, named: list[tuple[str, nn.Module]]) -> str:
    names = list(dict.fromkeys([*(name for name, _ in named if name), *(type(module).__name__ for _, module in named)]))
    close = difflib.get_close_matches(pattern.strip("*"), names, n=5, cutoff=0.5)
    listed = ", ".join(map(repr, close or names[:8]))
    return f"Nearest: {listed}." if close else f"There are: {listed}{', …' * (len(names) > 8)}."


def label(name: str, module: nn.Module) -> str:
    """ "`layers.3` (Block)"; the model itself by its type alone."""
    return f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
