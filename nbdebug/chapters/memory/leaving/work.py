"""What the failed call was doing: which part of the step, for what result, over how large a batch."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.memory.facts import Holding
from nbdebug.chapters.memory.facts_failure import Work
from nbdebug.chapters.memory.leaving.reach import Block
from nbdebug.observe.frames import Frame, Owners, running_module

CLOSE = 0.01
"""How far a size may lie from what the error says, which is rounded to two decimals of its unit, or to blocks."""


def looked_at(trail: list[Frame], owners: Owners, active: list[Block], holdings: list[Holding]) -> Work:
    """The step as its frames show it."""
    outer = next((frame for frame in trail if frame.module is not None), None)
    root = outer.module if outer is not None else next(iter(owners.models.values()), None)
    batch = _rows(outer.names) if outer is not None else None
    of_kind = collections.Counter[str]()
    for holding in holdings:
        of_kind[holding.kind] += holding.bytes
    optimizer = next(iter(owners.optimizers.values()), None)
    return Work(
        batch,
        sum(b.bytes for b in active if batch and b.shape and b.shape[0] and b.shape[0] % batch == 0),
        sum(b.bytes for b in active),
        sum(b.bytes for b in active if b.dtype == "float32"),
        None if root is None else bool(root.training),
        _records(outer),
        None if root is None else _blocks(root),
        of_kind["parameter"],
        of_kind["optimizer state"],
        None if optimizer is None else _steps(optimizer),
        "" if optimizer is None else type(optimizer).__name__,
        _through(running_module(trail, owners)[0], None if root is None else _blocks(root)),
    )


def _rows(names: Mapping[str, Any]) -> int | None:
    """The rows of the first tensor among the arguments of a forward."""
    todo = [value for name, value in names.items() if name != "self"]
    while todo:
        value = todo.pop(0)
        if issubclass(type(value), torch.Tensor):
            return int(value.shape[0]) if value.dim() else None
        if type(value) in (list, tuple):
            todo = [*value, *todo]
        elif type(value) is dict:
            todo = [*value.values(), *todo]
    return None


def _records(frame: Frame | None) -> bool:
    """Whether tensors made in the forward have a graph; where there are none, whether autograd records now."""
    made = [] if frame is None else [v for v in frame.names.values() if issubclass(type(v), torch.Tensor)]
    return torch.is_grad_enabled() if not made else any(v.grad_fn is not None for v in made) or torch.is_grad_enabled()


def _blocks(model: nn.Module) -> tuple[str, int] | None:
    """The container with the most children of one class, at least three that have children of their own."""
    found: list[tuple[int, str]] = []
    for name, part in model.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            kinds = collections.Counter(type(child) for child in part if next(child.children(), None) is not None)
            if kinds:
                found.append((kinds.most_common(1)[0][1], name))
    count, name = max(found, default=(0, ""))
    return (name, count) if count >= 3 else None


def _steps(optimizer: torch.optim.Optimizer) -> int | None:
    """How many steps it has done, where it counts them; 0 where its state is empty and it would count."""
    for state in optimizer.state.values():
        step: Any = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, (int, float)):
            return int(step)
        if issubclass(type(step), torch.Tensor) and step.numel() == 1:
            return int(step.item())
    counts = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop))
    return 0 if counts and not optimizer.state else None


def asked_as(trail: list[Frame], asked: int | None) -> tuple[str, tuple[int, ...]]:
    """What the memory was for, and its shape, where the variables of the innermost lines explain its size; else ""."""
    if not asked:
        return "", ()
    for frame in reversed(trail):
        for words, shape, item in _candidates(frame):
            if abs(math.prod(shape) * item - asked) <= CLOSE * asked:
                return f"{words}, of shape {tuple(shape)}", tuple(shape)
        if frame.users:
            break
    return "", ()


def _candidates(frame: Frame) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(words, shape, bytes of an element) of what this frame may have been making."""
    given = {name: value for name, value in frame.names.items() if issubclass(type(value), torch.Tensor)}
    module = frame.module
    if isinstance(module, (nn.Linear, nn.Embedding)):
        wide = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
        for value in given.values():
            before = value.shape[:-1] if isinstance(module, nn.Linear) else value.shape
            yield f"the output of a {type(module).__name__}", (*before, wide), module.weight.element_size()
    for one, other in _pairs(given):
        a, b = given[one], given[other]
        if a.dim() > 1 and b.dim() > 1 and a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]:
            yield f"the product of `{one}` and `{other}`", (*a.shape[:-1], b.shape[-1]), a.element_size()
        if a.dim() > 1 and a.dim() == b.dim() and a.shape[-1] == b.shape[-1] and a.shape[:-2] == b.shape[:-2]:
            yield f"all pairs of rows of `{one}` and `{other}`", (*a.shape[:-1], b.shape[-2]), a.element_size()
    for name, value in given.items():
        yield f"as much as `{name}`", tuple(value.shape), value.element_size()
    sizes = {name: value for name, value in frame.names.items() if type(value) is int and value > 1}
    for one, other in _pairs(sizes):
        n, m = sizes[one], sizes[other]
        yield f"`{one}` by `{other}`", (n, m), 4
        yield f"`{one} * {other}` squared", (n * m, n * m), 4


def _pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """All pairs, those of two different names first."""
    given = list(names)
    return sorted(((one, other) for one in given for other in given), key=lambda pair: pair[0] == pair[1])


def _through(module: str | None, blocks: tuple[str, int] | None) -> float | None:
    """Which share of the model's blocks the forward had come through: where it fails in the third of four, a half and
    an eighth of it; None outside of them."""
    if module is None or blocks is None:
        return None
    name, count = blocks
    inside = module.removeprefix(f"{name}.") if name else module
    place = inside.partition(".")[0]
    return (int(place) + 0.5) / count if place.isdigit() and (inside != module or not name) else None
