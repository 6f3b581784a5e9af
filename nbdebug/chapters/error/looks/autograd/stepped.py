"""Weights that an optimizer's `step()` changed between a forward and its backward."""

from __future__ import annotations

import ast
from typing import Any

import torch

from nbdebug.chapters.error.facts_autograd import Change
from nbdebug.chapters.error.looks.autograd.calls import entered, trail
from nbdebug.chapters.error.looks.autograd.carried import within
from nbdebug.chapters.error.looks.autograd.source import Code, failing, heads, last, loops, value
from nbdebug.chapters.error.scene import Scene
from nbdebug.observe.named import attributes


def holds(optimizer: Any, parameter: Any) -> bool:
    """Whether an optimizer changes a parameter."""
    if not issubclass(type(optimizer), torch.optim.Optimizer):
        return False
    lies = attributes(optimizer)
    plain = type(optimizer) is torch.optim.SGD  # which keeps no state without momentum
    if not lies.get("state") and not plain:  # it has not made a step yet
        return False
    groups = lies.get("param_groups") or []
    return any(p is parameter for group in groups for p in group.get("params", ()))


def optimizer_of(scene: Scene, parameter: Any) -> str | None:
    """The name of the optimizer that holds a parameter."""
    return next((name for name, one in scene.owners.optimizers.items() if holds(one, parameter)), None)


def stepping(scene: Scene, parameter: Any, earlier: bool) -> tuple[Change | None, tuple[str, ...]]:
    """(the `step()` that changed the parameter, all the steps there). earlier: only one above the failing line."""
    for code in trail(scene):
        node = failing(code)
        around = loops(code, node) if node is not None else []
        body = within(around[-1]) if around else list(code.statements())
        found = [
            (s, call, where)
            for s in body
            for call, where in _steps(s, code)
            if holds(value(call.func.value, where), parameter)
        ]
        before = [entry for entry in found if entry[0].lineno < code.line]
        for _, call, where in (before or [] if earlier else found)[-1:]:
            target = ast.unparse(call.func.value)
            change = Change(ast.unparse(call), target, "step", "step", None, "", None, where.name, where.where(call))
            return change, tuple(ast.unparse(c) for _, c, _ in found)
    return None, ()


def _steps(statement: Any, code: Code, depth: int = 2) -> list[tuple[Any, Code]]:
    """The calls of `.step()` in a statement and in the functions that it calls."""
    found: list[tuple[Any, Code]] = []
    for node in heads(statement):
        if isinstance(node, ast.Call) and last(node.func) == "step" and isinstance(node.func, ast.Attribute):
            found.append((node, code))
        elif isinstance(node, ast.Call) and depth and (inner := entered(node, code)) is not None:
            found += [entry for s in inner.statements() for entry in _steps(s, inner, depth - 1)]
    return found
