"""What a step starts from, so that the user's own code can run again from there: models, optimizers, random numbers,
and the variables that the step uses, batches that it takes from an iterator included.

    before = StepState.take(step, models, optimizers)
    step()
    before.restore(); step()         # the same step once more, on copies of its iterators

A step that uses something of which this is not known (a writer, an open file, a generator, hooks) is not run again:
`why_not` names it. Iterators of Python's own kinds can be copied; the copies advance, the user's own stay where they
are.
"""

from __future__ import annotations

import copy
import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import USER, kind_of
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.variables import MODULES_OWN, is_user_module

_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_CONTAINERS = (list, dict, set)
_OWNERS = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
_EMPTY: tuple[Any, ...] = ([], (), range(0), "", {}, set(), {}.items(), {}.values(), b"")
_ITERATORS = (zip, enumerate, map, filter, reversed, type(reversed([])), *{type(iter(thing)) for thing in _EMPTY})
_OUTSIDE = frozenset({"open", "input", "save", "system", "savez", "to_csv", "imsave", "savefig"})
"""Calls that leave the process: a step that makes one is not run again."""
_REACH_OUT = (
    "os shutil subprocess socket ssl http urllib ftplib smtplib sqlite3 logging asyncio multiprocessing threading"
)
_KNOWN = frozenset(
    {"torch", "numpy", "pandas", "einops", "nbdebug", *sys.stdlib_module_names.difference(_REACH_OUT.split())}
)
"""Packages whose functions leave nothing outside of what is saved here."""
_MOST = 500
"""Variables and members that are looked at: a step uses tens."""


class StepState:
    """See the module's docstring. why_not: why the step can't run again, or ""."""

    def __init__(self) -> None:
        self.why_not = ""
        self.snapshot: Snapshot | None = None
        self._visited: dict[int, Any] = {}
        self._undo: list[Callable[[], Any]] = []
        self._iterators: list[tuple[Callable[[Any], Any], Any, Any]] = []  # how it is set, itself, a copy

    @classmethod
    def take(
        cls,
        step: Callable[[], Any],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        others: Iterable[Any] = (),
    ) -> StepState:
        """Save what the step starts from. Costs one copy of the memory of models and optimizers."""
        state = cls()
        try:
            state._visit("the step", step, None)
            for name, model in models.items():
                state._visit(name, model, None)
            if not state.why_not:
                state.snapshot = Snapshot.take(models, optimizers, others=others)
        except Exception as fault:  # of the user's objects, which are only read
            state.why_not = f"its variables can't be read ({type(fault).__name__})"
        return state

    def restore(self) -> None:
        """As it was at `take`; iterators are copies that give the same again."""
        self._put_back()
        for put, _, saved in self._iterators:
            put(_copied(saved))

    def leave(self) -> None:
        """As it was at `take`, with the user's own iterators."""
        self._put_back()
        for put, own, _ in self._iterators:
            put(own)

    def _put_back(self) -> None:
        assert self.snapshot is not None, "the step can run again"
        self.snapshot.restore()
        for undo in self._undo:
            undo()

    # -- what the step uses -------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any, put: Callable[[Any], Any] | None) -> None:
        kind = type(value)  # and no isinstance: a class of the user's may answer that as it likes
        if self.why_not or issubclass(kind, (torch.Tensor, types.BuiltinFunctionType, property)):
            return
        if issubclass(kind, _ATOMS):
            if put is not None:
                self._undo.append(functools.partial(put, value))
            return
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if len(self._visited) > _MOST:
            self.why_not = "it uses too many variables"
        else:
            self._thing(name, value, put)

    def _thing(self, name: str, value: Any, put: Callable[[Any], Any] | None) -> None:
        kind = type(value)
        if kind is types.FunctionType:
            self._function(name, value)
        elif kind in (types.MethodType, functools.partial):
            parts = (value.__self__, value.__func__) if kind is types.MethodType else (value.func,)
            for part in (*parts, *getattr(value, "args", ()), *getattr(value, "keywords", {}).values()):
                self._visit(name, part, None)
        elif issubclass(kind, _OWNERS):
            self._owner(name, value)
        elif kind in _ITERATORS:
            self._iterator(name, value, put)
        elif kind in _CONTAINERS or issubclass(kind, tuple):
            self._container(name, value)
        else:
            self._other(name, value)

    def _function(self, name: str, function: types.FunctionType) -> None:
        code = function.__code__
        if kind_of(code) != USER and code.co_name != "<lambda>":
            if _home(function) not in _KNOWN:
                self.why_not = f"it calls `{name}` of {_home(function)}"
            return
        cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]  # those that are not empty
        lines = [cell.cell_contents for cell in cells if type(cell.cell_contents) is types.CodeType]
        if lines:  # of a magic: the code of the line that was typed, and the user's variables
            spaces = [cell.cell_contents for cell in cells if type(cell.cell_contents) is dict]
            self._code(lines[0], spaces[0] if spaces else {})
            return
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if any(cell is full for full in cells):
                self._visit(variable, cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(name, default, None)
        self._code(code, function.__globals__)

    def _code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        for used in code.co_names:
            if used in _OUTSIDE:
                self.why_not = f"it calls `{used}`"
            elif used in names:
                self._visit(used, names[used], functools.partial(names.__setitem__, used))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names)

    def _owner(self, name: str, owner: Any) -> None:
        for part in owner.modules() if isinstance(owner, nn.Module) else ():
            self._visited[id(part)] = part
            if _home(type(part)) == "torch":
                continue
            self._methods(name, type(part))
            for key, value in vars(part).items():
                if key not in MODULES_OWN and not isinstance(value, _OWNERS):
                    self._visit(f"{name}.{key}", value, functools.partial(vars(part).__setitem__, key))

    def _methods(self, name: str, kind: type) -> None:
        if id(kind) not in self._visited:
            self._visited[id(kind)] = kind
            for method in [m for m in vars(kind).values() if isinstance(m, types.FunctionType)]:
                if method.__name__ != "__init__":
                    self._visit(name, method, None)

    def _iterator(self, name: str, iterator: Any, put: Callable[[Any], Any] | None) -> None:
        try:
            if put is None:
                raise TypeError("it stands where it can't be exchanged")
            self._iterators.append((put, iterator, _copied(iterator)))
            if type(iterator) in (map, filter):
                self._visit(name, iterator.__reduce__()[1][0], None)
        except TypeError:
            self.why_not = f"`{name}` can't be wound back"

    def _container(self, name: str, container: Any) -> None:
        if isinstance(container, dict):
            members = [*container.items()]
        elif isinstance(container, (list, tuple)):
            members = [*enumerate(container)]
        else:
            members = [(None, value) for value in container]
        changes = isinstance(container, (list, dict))
        if isinstance(container, _CONTAINERS):
            self._undo.append(functools.partial(_refill, container, copy.copy(container)))
        for key, value in members[:_MOST] if not isinstance(members[0][1] if members else None, _ATOMS) else ():
            self._visit(f"{name}[{key!r}]", value, functools.partial(container.__setitem__, key) if changes else None)

    def _other(self, name: str, value: Any) -> None:
        kind = type(value)
        iterates = hasattr(kind, "__next__")
        if issubclass(kind, (torch.Generator, random.Random, *_numpy("random.Generator"))):
            self._generator(value)
        elif kind is types.ModuleType:
            if value.__name__.partition(".")[0] not in _KNOWN:
                self.why_not = f"it uses the module `{value.__name__}`"
        elif issubclass(kind, type):
            if is_user_module(value.__module__):
                self._methods(name, value)
            elif _home(value) not in _KNOWN:
                self.why_not = f"it uses `{name}` of {_home(value)}"
        elif not iterates and (kind is types.SimpleNamespace or is_user_module(kind.__module__)):
            self._methods(name, kind)
            members = object.__getattribute__(value, "__dict__")
            self._undo.append(functools.partial(_refill, members, dict(members)))
            for key, member in list(members.items()):
                self._visit(f"{name}.{key}", member, functools.partial(members.__setitem__, key))
        elif iterates or not (
            _home(kind) in ("torch", "pandas") or issubclass(kind, (types.CodeType, *_numpy("ndarray", "generic")))
        ):
            self.why_not = f"`{name}` ({kind.__name__}) can't be wound back"

    def _generator(self, value: Any) -> None:
        if issubclass(type(value), torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif issubclass(type(value), random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        else:
            self._undo.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))


def _home(thing: Any) -> str:
    """The package of a class or function."""
    return str(thing.__module__).partition(".")[0]


def _copied(iterator: Any) -> Any:
    """A copy that gives the same, of an iterator of Python's own kinds, with those inside it. Raises TypeError."""
    if type(iterator) not in _ITERATORS:
        return iterator
    make, parts, *state = iterator.__reduce__()
    if make is iter:  # the list itself and a place in it
        copied = make(*parts)
    else:
        for part in parts:
            if hasattr(part, "__next__") and type(part) not in _ITERATORS:
                raise TypeError(f"{type(part).__name__} can't be copied")
        copied = make(*map(_copied, parts))
    if state and state[0] is not None:
        copied.__setstate__(state[0])
    return copied


def _refill(container: Any, before: Any) -> None:
    container.clear()
    container.extend(before) if isinstance(container, list) else container.update(before)


def _numpy(*names: str) -> list[type]:
    """Classes of numpy, where it is imported."""
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [operator.attrgetter(name)(numpy) for name in names]


def has_hooks(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> bool:
    """Whether somebody watches these: a step that runs again would be seen twice."""
    modules = [part for model in models.values() for part in model.modules()]
    return (
        bool(torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_forward_pre_hooks)
        or any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in modules)
        or any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in optimizers.values())
    )
