"""Faults planted in the guard itself: one of its functions at a time raises, from a given step on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import nbdebug.tools.guard as package

CORE = ["finite_check", "guard", "locate", "rollback", "step"]
"""The guard proper. Its record and its agreement with other processes have tests of their own."""
BENEATH = ["tensors", "step_log", "backward", "modules", "snapshot", "tape"]
NORMS = {"gradients_of", "total_norm", "exact_norm", "unobserved", "has_norm", "group_norms", "is_capturing_graph"}
"""Of `tensors` these alone: without the others nothing could be told."""
MODULES = [importlib.import_module(f"{package.__name__}.{name}") for name in CORE]
MODULES += [importlib.import_module(f"nbdebug.observe.{name}") for name in BENEATH]
ASKED = {"close", "report", "__enter__", "__exit__", "__repr__", "_repr_mimebundle_", "guard", "__post_init__"}
"""What a person calls: a fault there is told as an exception, to that person."""
BORDER = {
    "_error_boundary",
    "_before",
    "_after",
    "_scaler_updates",
    "_own_update",
    "_updating",
    "_detach",
    "__call__",
    "__torch_dispatch__",
    "disable",
    "_raise",
    "_inputs",
    "count_nested",
}
"""What catches faults, and what leaves after one."""
WORDS = {"sentence", "_message", "_number"}
"""What the exception itself is made of."""
LEAVING = {"detach", "leave", "pause", "leave_mode_stack", "give_back"}
TORCHS = {"is_infra_mode", "_should_skip_dynamo", "__deepcopy__", "__reduce__", "__init__"}
"""What torch asks classes for; and makers, which raise before there is anything to guard or are planted by `Guard`."""
LEFT_OUT = ASKED | BORDER | LEAVING | TORCHS | WORDS


class Planted(Exception):
    """The fault."""


class Switch:
    """armed: whether the function raises now; once: the first call only; calls: how often it has raised."""

    def __init__(self, error: type[BaseException], once: bool) -> None:
        self.error, self.once = error, once
        self.armed, self.calls = False, 0

    def raise_if_armed(self, name: str) -> None:
        if self.armed and not (self.once and self.calls):
            self.calls += 1
            raise self.error(f"planted in {name}")


def places() -> list[str]:
    """ "module:function" and "module:Class.method" for each function that the guard's own code defines."""
    found = []
    for module in MODULES:
        for name, thing in vars(module).items():
            if module.__name__.endswith(".snapshot") and name != "CallEnvironment":
                continue  # what puts the state back can't be put back itself
            if module.__name__.endswith(".tensors") and name not in NORMS:
                continue
            if inspect.isfunction(thing) and thing.__module__ == module.__name__ and name not in LEFT_OUT:
                found.append(f"{module.__name__}:{name}")
            if inspect.isclass(thing) and thing.__module__ == module.__name__:
                found += [
                    f"{module.__name__}:{name}.{key}"
                    for key, value in vars(thing).items()
                    if _function_of(value) is not None and key not in LEFT_OUT and _written(value)
                ]
    return sorted(set(found))


def _function_of(value: Any) -> Any:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if inspect.isfunction(value) else None


def _written(value: Any) -> bool:
    """Not one that `dataclass` or `NamedTuple` made."""
    return "nbdebug" in _function_of(value).__code__.co_filename


@contextlib.contextmanager
def planted(place: str, error: type[BaseException] = Planted, once: bool = False) -> Iterator[Switch]:
    """While open, the function raises whenever the switch is armed, wherever its name has been imported to."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    switch = Switch(error, once)
    broken = _breaking(original, switch)
    homes = (
        [owner]
        if outer
        else [
            m
            for m in list(sys.modules.values())
            if isinstance(m, ModuleType) and m.__name__.startswith("nbdebug") and vars(m).get(name) is original
        ]
    )
    for home in homes:
        setattr(home, name, broken)
    try:
        yield switch
    finally:
        for home in homes:
            setattr(home, name, original)


def _breaking(original: Any, switch: Switch) -> Any:
    """The same function, property, static or class method, that raises while the switch is armed."""
    function = _function_of(original)

    @functools.wraps(function)
    def raises(*args: Any, **kwargs: Any) -> Any:
        switch.raise_if_armed(function.__qualname__)
        return function(*args, **kwargs)

    if isinstance(original, property):
        return property(raises, original.fset)
    return type(original)(raises) if isinstance(original, (staticmethod, classmethod)) else raises
