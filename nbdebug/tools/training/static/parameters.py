"""The parameter table: each parameter by name, whether it is trained, used, reached by the loss, held by an optimizer;
and where the graph is cut between trained parameters and the loss."""

from __future__ import annotations

import dataclasses
import gc
import math
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.observe.variables import closure_variables
from nbdebug.tools.training.facts import DetachedAt, ForeignTensors, Parameter
from nbdebug.tools.training.static.one_step import WEIGHTED_OPS, Calls, OpCall, StepGraph, rms

DETACHES = frozenset({"detach", "detach_", "data"})
FLAT = frozenset("round floor ceil trunc sign sgn heaviside fix".split())
"""Ops through which autograd goes with a derivative of zero."""
ROUND_DEVIATIONS = (0.001, 0.01, 0.02, 0.05, 0.1, 1.0)
"""Deviations that people type (0.02 is that of BERT and GPT; 1 that of torch's Embedding)."""


def parameter_table(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    step: StepGraph,
    of_loss: Mapping[int, str],
) -> tuple[Parameter, ...]:
    """One row for each parameter that the model has or that the loss reaches under a name. of_loss: names of
    those of the loss function, by id."""
    own = {id(p) for p in model.parameters()}
    held: dict[int, tuple[float, bool]] = {}
    for optimizer in optimizers:
        members = [p for g in optimizer.param_groups for p in g["params"]]
        idle = not any(id(p) in step.reached for p in members) and any(p.requires_grad for p in members)
        for group in optimizer.param_groups:
            held |= {id(p): (float(group.get("lr") or 0.0), idle) for p in group["params"]}
    used = {id(t) for call in step.calls.calls for t in call.inputs}
    last, modules = _output_parameters(step.calls), dict(model.named_modules())
    rows = []
    for name, p in step.calls.parameters:
        if not (name := name or of_loss.get(id(p), "")):
            continue
        module, _, key = name.rpartition(".")
        gradient = step.gradients.get(id(p))
        rate, idle = held.get(id(p), (None, False))
        rows.append(
            Parameter(
                name,
                module,
                p.numel(),
                p.dim(),
                p.requires_grad,
                (id(p) in held) if optimizers else None,
                id(p) in used,
                id(p) in step.reached,
                None if gradient is None else rms(gradient),
                rate,
                idle,
                not bool(p.detach().any()) if p.numel() else False,
                "Norm" in type(modules.get(module)).__name__,
                id(p) in own or id(p) in of_loss,
                id(p) in last,
                key == "weight" and is_fresh(p),
                id(p) in of_loss,
            )
        )
    return tuple(rows)


def _output_parameters(calls: Calls) -> set[int]:
    """The ids of the parameters of the last op with weights in the model: those that make its output."""
    ids = {id(p) for _, p in calls.parameters}
    for call in reversed(calls.calls):
        own = {id(t) for t in call.inputs if id(t) in ids}
        if call.inside and call.op in WEIGHTED_OPS and own:
            return own
    return set()


def loss_parameters(loss_fn: Any, model: nn.Module) -> dict[int, str]:
    """id → name of the parameters that a loss function reaches by itself: of a criterion in a variable, an attribute
    or a closure, or its own. Parameters of the model are left out."""
    known = {id(p) for p in model.parameters()}
    names: dict[int, str] = {}
    for name, value in _members(loss_fn):
        if issubclass(type(value), nn.Parameter):
            names.setdefault(id(value), name)
        elif issubclass(type(value), nn.Module) and value is not model:
            for own, parameter in value.named_parameters(prefix=name):
                names.setdefault(id(parameter), own)
    return {key: name for key, name in names.items() if key not in known}


def _members(loss_fn: Any) -> Iterator[tuple[str, Any]]:
    """Attributes, closure variables and globals that a loss function uses, with their names."""
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
    yield from closure_variables(function).items()
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def held_elsewhere(
    table: Sequence[Parameter], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Parameter, ...]:
    """The table, in which `held` is None (not known) where an optimizer that is alive and was not given holds the
    parameter. It is looked for only where one is missing."""
    missing = {p.name for p in table if p.held is False and p.trained}
    if not missing:
        return tuple(table)
    others = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), torch.optim.Optimizer) and all(o is not own for own in optimizers)
    ]
    held = {id(p) for o in others for g in o.param_groups for p in g["params"]}
    known = {name: id(p) for name, p in model.named_parameters()}
    return tuple(
        dataclasses.replace(p, held=None) if p.name in missing and known.get(p.name) in held else p for p in table
    )


def optimizer_code(optimizers: Sequence[Any]) -> str:
    """ "SGD(model.parameters(), lr=0.1)", of the first optimizer; "" where there is none."""
    if not optimizers:
        return ""
    group = optimizers[0].param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))
    return f"{type(optimizers[0]).__name__}(model.parameters(), lr={float(rate or 0.0):g})"


def is_fresh(weight: torch.Tensor) -> bool:
    """Whether the values fit a distribution from which initial weights are drawn: uniform within 1 / sqrt(fan_in), as
    torch draws those of Linear and Conv layers, or normal with a deviation that recipes use. Trained weights go beyond
    that bound, and have heavier tails than a bell."""
    if weight.dim() < 2 or weight.numel() < 16:
        return False
    values = weight.detach().float()
    bound, top, std = 1 / math.sqrt(weight[0].numel()), float(values.abs().max()), float(values.std())
    uniform = 0.85 * bound <= top <= 1.0001 * bound and abs(std * math.sqrt(3) / bound - 1) < 0.25
    return uniform or _is_normal(values, std)


def _is_normal(values: torch.Tensor, std: float) -> bool:
    """Normal, by mean, deviation and kurtosis, each to four standard errors."""
    n, fan_in, fan_out = values.numel(), values[0].numel(), values.shape[0] * values[0].numel() / values.shape[1]
    if n < 200 or std <= 0:
        return False
    usual = (*ROUND_DEVIATIONS, math.sqrt(2 / fan_in), math.sqrt(1 / fan_in), math.sqrt(2 / (fan_in + fan_out)))
    scaled = (values - values.mean()) / std
    return (
        min(abs(std / known - 1) for known in usual) < 4 / math.sqrt(2 * n)
        and abs(float(values.mean())) < 4 * std / math.sqrt(n)
        and abs(float(scaled.pow(4).mean()) - 3) < 4 * math.sqrt(24 / n)
    )


def detached_places(
    step: StepGraph, table: Sequence[Parameter], has_optimizer: bool, loss: Callable[[], float]
) -> tuple[DetachedAt, ...]:
    """Where the graph ends for trained parameters whose values reach the loss and which autograd does not reach. loss:
    the loss again, to see whether values that were taken out of torch come back into it."""
    calls = step.calls
    position = {name: i for i, (name, _) in enumerate(calls.parameters)}
    lost = {
        position[p.name]
        for p in table
        if p.name in position
        and p.trained
        and p.used
        and not p.reached
        and (p.held or not has_optimizer)
        and not p.idle
    }
    alive = calls.dependence(step.loss).params
    places: list[DetachedAt] = []
    for call in calls.detached:
        cut_off = {i for i in lost if call.params >> i & 1 and alive >> i & 1}
        if cut_off:
            places.append(detached_at(calls, call, cut_off))
            lost -= cut_off
    harmless: list[set[int]] = []  # values that were only printed or counted
    for call in calls.left_torch:
        cut_off = {i for i in lost if call.params >> i & 1}
        if not cut_off or cut_off in harmless:
            continue
        if not loss_depends_on([calls.parameters[i][1] for i in sorted(cut_off)], loss):
            harmless.append(cut_off)
        else:
            places.append(_place(calls, call, "left torch", cut_off))
            lost -= cut_off
    places += _flat_places(step, table)
    return tuple(sorted(places, key=lambda place: -len(place.parameters)))


def _flat_places(step: StepGraph, table: Sequence[Parameter]) -> list[DetachedAt]:
    """Steps such as round, whose derivative is zero everywhere, behind which all gradients are exactly zero."""
    calls = step.calls
    gradients = {p.name: p.gradient for p in table if p.trained and p.reached and p.held is not False}
    zero = {i for i, (name, _) in enumerate(calls.parameters) if gradients.get(name) == 0.0}
    if not zero or not any(gradients.values()):
        return []
    flat = [call for call in calls.calls if call.op in FLAT and call.grad and call.params]
    for call in flat:
        behind = set(calls.positions(call.params))
        if any(t.requires_grad for t in call.outputs) and behind <= zero:
            return [_place(calls, call, "flat", behind)]
    return []


def detached_at(calls: Calls, call: OpCall, cut_off: set[int]) -> DetachedAt:
    """The place of a call that cuts parameters off, given by position."""
    how = "checkpoint" if call.checkpoint else "no_grad" if not call.grad else ""
    return _place(calls, call, how or ("detach" if call.op in DETACHES else "no gradient"), cut_off)


def _place(calls: Calls, call: OpCall, how: str, cut_off: set[int]) -> DetachedAt:
    names = tuple(calls.parameters[i][0] for i in sorted(cut_off))
    return DetachedAt(call.op, how, names, dataclasses.replace(call.where, op=call.op))


def loss_depends_on(parameters: Sequence[torch.Tensor], loss: Callable[[], float]) -> bool:
    """Whether the loss changes when these are changed: then their values reach it, whatever autograd knows. loss: the
    loss, with the same random numbers each time. The parameters are put back."""
    values = [p.detach().clone() for p in parameters]
    before = loss()
    try:
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.9).add_(0.01)
        return abs(loss() - before) > 1e-6 * max(abs(before), 1e-6)
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, values):
                p.copy_(value)


def foreign_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: StepGraph
) -> ForeignTensors | None:
    """Tensors in the optimizers that do not belong to the model and that this loss does not reach."""
    own = {id(p): p for _, p in step.calls.parameters} | {id(p): p for p in model.parameters()}
    members = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    held = {id(p) for p in members}
    foreign = [p for p in members if id(p) not in own and id(p) not in step.reached]
    if not foreign:
        return None
    waiting = Counter(tuple(p.shape) for key, p in own.items() if key not in held and p.requires_grad)
    alike = sum((Counter(tuple(p.shape) for p in foreign) & waiting).values())
    return ForeignTensors(len(foreign), alike)
