"""Calls of torch that are answered otherwise than the user's code asked: a way to try a fix without touching the code.

with Instead({"softmax"}, where, lambda func, args, kwargs: args[0]):
    loss_fn(model, batch)        # as if the line had no softmax
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from nbdebug.chapters.training.before.calls import GETTERS
from nbdebug.finding import Where
from nbdebug.observe.sites import locate

Answer = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""What is given back for `func(*args, **kwargs)`."""


class Instead(TorchFunctionMode):
    """ops: names as torch has them, without the underscore of an op in place; all where there are none. where: only
    calls from this line; all where it has none. answered: how often."""

    def __init__(self, ops: Iterable[str], where: Where, answer: Answer):
        super().__init__()
        self.ops, self.where, self.answer, self.answered = frozenset(ops), where, answer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (not self.ops or name_of(func) in self.ops) and self._here():
            self.answered += 1
            return self.answer(func, args, kwargs)
        return func(*args, **kwargs)

    def _here(self) -> bool:
        if self.where.line is None:
            return True
        site = locate().site
        return site is not None and (site.file, site.line) == (self.where.file, self.where.line)


def name_of(func: Any) -> str:
    """The name of an op; that of the attribute where one is read (`tensor.data`)."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner if owner in GETTERS else name
    return name if name.startswith("__") else name.rstrip("_")


def first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an op is given in the first place."""
    return args[0] if args else kwargs.get("input")


def with_first(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another one in the first place."""
    return ((value, *args[1:]), dict(kwargs)) if args else ((), {**kwargs, "input": value})


def with_second(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """… and in the second, the target of a loss."""
    return ((args[0], value, *args[2:]), dict(kwargs)) if len(args) > 1 else (args, {**kwargs, "target": value})
