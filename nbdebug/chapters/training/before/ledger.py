"""The ledger: each parameter by name, whether it is trained, used, reached by the loss, and held by an optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.before.calls import LEARNS, Calls, rms
from nbdebug.chapters.training.before.step import Step
from nbdebug.chapters.training.facts_before import Cut, Parameter, Strangers

DETACHES = frozenset({"detach", "detach_", "data"})


def ledger(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: Step) -> tuple[Parameter, ...]:
    """One line for each parameter that the model has or that the loss reaches under a name."""
    own = {id(p) for p in model.parameters()}
    held: dict[int, tuple[float, bool]] = {}
    for optimizer in optimizers:
        members = [p for g in optimizer.param_groups for p in g["params"]]
        idle = not any(id(p) in step.reached for p in members) and any(p.requires_grad for p in members)
        for group in optimizer.param_groups:
            held |= {id(p): (float(group.get("lr") or 0.0), idle) for p in group["params"]}
    used = {id(t) for call in step.calls.calls for t in call.given}
    last, parts = _last(step.calls), dict(model.named_modules())
    lines = []
    for name, p in step.calls.parameters:
        if not name:
            continue
        module, _, key = name.rpartition(".")
        gradient = step.gradients.get(id(p))
        kind = type(parts.get(module)).__name__
        rate, idle = held.get(id(p), (None, False))
        lines.append(Parameter(
            name, module, p.numel(), p.dim(), p.requires_grad, (id(p) in held) if optimizers else None, id(p) in used,
            id(p) in step.reached, None if gradient is None else rms(gradient), rate, idle,
            not bool(p.detach().any()) if p.numel() else False, "Norm" in kind, id(p) in own, id(p) in last,
            key == "weight" and is_fresh(p)))
    return tuple(lines)


def _last(calls: Calls) -> set[int]:
    """The parameters of the last op with weights in the model: those that make its output."""
    names = {id(p) for _, p in calls.parameters}
    for call in reversed(calls.calls):
        own = {id(t) for t in call.given if id(t) in names}
        if call.inside and call.op in LEARNS and own:
            return own
    return set()


def is_fresh(weight: torch.Tensor) -> bool:
    """Whether the values fit the law from which torch draws the weights of Linear and Conv layers: uniform within
    1 / sqrt(fan_in). Trained weights go beyond that bound."""
    if weight.dim() < 2 or weight.numel() < 16:
        return False
    bound = 1 / math.sqrt(weight[0].numel())
    values = weight.detach().float()
    top = float(values.abs().max())
    return 0.85 * bound <= top <= 1.0001 * bound and abs(float(values.std()) * math.sqrt(3) / bound - 1) < 0.25


def cuts(step: Step, parameters: Sequence[Parameter], has_optimizer: bool) -> tuple[Cut, ...]:
    """Where the graph ends for trained parameters whose values reach the loss and which autograd does not reach."""
    calls = step.calls
    position = {name: i for i, (name, _) in enumerate(calls.parameters)}
    lost = {position[p.name] for p in parameters if p.trained and p.used and not p.reached
            and (p.held or not has_optimizer) and not p.idle}
    alive = calls.dye(step.loss).params
    found: list[Cut] = []
    for call in calls.cuts:
        here = {i for i in lost if call.params >> i & 1 and alive >> i & 1}
        if here:
            how = "no_grad" if not call.grad else "detach" if call.op in DETACHES else "no gradient"
            found.append(_cut(calls, call, how, here))
            lost -= here
    for call in calls.leaks:
        here = {i for i in lost if call.params >> i & 1}
        if here and call.op != "item" and call.inside:
            found.append(_cut(calls, call, "left torch", here))
            lost -= here
    return tuple(sorted(found, key=lambda cut: -len(cut.parameters)))


def _cut(calls: Calls, call: Any, how: str, here: set[int]) -> Cut:
    return Cut(call.op, how, tuple(calls.parameters[i][0] for i in sorted(here)),
               dataclasses.replace(call.where, op=call.op))


def strangers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: Step) -> Strangers | None:
    """Tensors in the optimizers that are none of the model's and that this loss does not reach."""
    own = {id(p): p for _, p in step.calls.parameters} | {id(p): p for p in model.parameters()}
    members = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    held = {id(p) for p in members}
    foreign = [p for p in members if id(p) not in own and id(p) not in step.reached]
    if not foreign:
        return None
    waiting = Counter(tuple(p.shape) for key, p in own.items() if key not in held and p.requires_grad)
    alike = sum((Counter(tuple(p.shape) for p in foreign) & waiting).values())
    return Strangers(len(foreign), alike)
