"""What counts though it was not given: modules that the loss function brings along, and optimizers that nobody named.

A criterion may have weights of its own (proxies, class centres, a temperature), which an optimizer has to hold like the
model's. And a parameter that no given optimizer holds may well be in another one: a GAN's two networks have two.
"""

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.before.mixing import quiet
from nbdebug.chapters.training.facts_before import Parameter
from nbdebug.chapters.training.run.checkup import loss_value
from nbdebug.chapters.training.run.sources import unnoticed


def brought_along(loss_fn: Any, model: nn.Module) -> dict[int, str]:
    """id → name of the parameters that a loss function reaches by itself: of a criterion in a variable, an attribute
    or a closure, or its own. What the model has under a name is left out."""
    known = {id(p) for p in model.parameters()}
    found: dict[int, str] = {}
    for name, value in _members(loss_fn):
        if isinstance(value, nn.Parameter):
            found.setdefault(id(value), name)
        elif isinstance(value, nn.Module) and value is not model:
            for own, parameter in value.named_parameters(prefix=name):
                found.setdefault(id(parameter), own)
    return {key: name for key, name in found.items() if key not in known}


def _members(loss_fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(loss_fn, nn.Module):
        yield "loss_fn", loss_fn
        return
    function = getattr(loss_fn, "__func__", loss_fn)
    owner = getattr(loss_fn, "__self__", None)
    if owner is not None:
        yield from list(getattr(owner, "__dict__", {}).items())
    if not isinstance(function, types.FunctionType):
        yield from list(getattr(function, "__dict__", {}).items())
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def held_elsewhere(parameters: Sequence[Parameter], model: nn.Module, given: Sequence[Any]) -> tuple[Parameter, ...]:
    """The ledger, in which `held` is None (not known) where an optimizer that is alive and was not given holds the
    parameter. It is looked for only where one is missing."""
    missing = {p.name for p in parameters if p.held is False and p.trained}
    if not missing:
        return tuple(parameters)
    others = [
        o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer) and all(o is not own for own in given)
    ]
    ids = {id(p) for o in others for g in o.param_groups for p in g["params"]}
    known = {name: id(p) for name, p in model.named_parameters()}
    return tuple(
        dataclasses.replace(p, held=None) if p.name in missing and known.get(p.name) in ids else p for p in parameters
    )


def matters(parameters: Sequence[torch.Tensor], loss: Callable[[], float]) -> bool:
    """Whether the loss changes when these are changed: then their values reach it, whatever autograd knows. loss: gives
    it again, with the same random numbers each time. The parameters are left as they were."""
    kept = [p.detach().clone() for p in parameters]
    before = loss()
    try:
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.9).add_(0.01)
        return abs(loss() - before) > 1e-6 * max(abs(before), 1e-6)
    finally:
        with torch.no_grad():
            for p, own in zip(parameters, kept):
                p.copy_(own)


def again(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any) -> float:
    """The loss of a batch in a quiet mode, with the same random numbers each time."""
    with quiet(model), unnoticed(ask), torch.no_grad():
        torch.manual_seed(0)
        return loss_value(ask(model, batch))


def as_written(optimizers: Sequence[Any]) -> str:
    """ "SGD(model.parameters(), lr=0.1)", of the first optimizer; "" where there is none."""
    if not optimizers:
        return ""
    group = optimizers[0].param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))
    return f"{type(optimizers[0]).__name__}(model.parameters(), lr={float(rate or 0.0):g})"
