"""Duplicate hooks: a cell that runs again registers its hook again on the same module, parameter or optimizer.

Two hooks are duplicates when they are the same function, or functions with the same code and equal closures: closures
over other names or numbers are registered side by side on purpose. A method of another object of the same class is a
duplicate when no variable of the user's leads to the older object; so is a function with another container in its
closure, when no variable leads to the older container.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import code_fingerprint, span_of
from nbdebug.observe.variables import attributes, closure_variables, is_user_module
from nbdebug.text import module_name

OF_MODULES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_state_dict_hooks": "state dict hook",
    "_state_dict_pre_hooks": "state dict pre-hook",
    "_load_state_dict_pre_hooks": "load pre-hook",
    "_load_state_dict_post_hooks": "load hook",
}
OF_TENSORS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "gradient hook behind accumulation"}
OF_OPTIMIZERS = {"_optimizer_step_pre_hooks": "step pre-hook", "_optimizer_step_post_hooks": "step hook"}
_SIMPLE = (str, int, float, bool, bytes, type(None))


@dataclasses.dataclass
class DuplicateHook:
    """A hook that is registered several times. module: the name of the module, parameter or optimizer that has it;
    hook: the name of the function; word: "forward hook"; older: (table, key, hook) of all but the newest."""

    module: str
    hook: str
    word: str
    code: types.CodeType
    older: list[tuple[dict[int, Any], int, Any]]
    newest: Any = None

    def remove(self) -> None:
        """Remove all but the newest, as their handles would."""
        for table, key, hook in self.older:
            if table.get(key) is hook:
                del table[key]

    @property
    def obsolete(self) -> list[Any]:
        """The hooks that nothing in this table would refer to after `remove`."""
        newest = list(self.older[0][0].values())
        return [hook for _, _, hook in self.older if sum(h is hook for h in newest) == 1]


def find_duplicate_hooks(objects: list[tuple[str, Any]]) -> list[DuplicateHook]:
    """The hooks that one object has more than once. objects: those that the user's variables lead to, by name."""
    named, visited, duplicates = {id(thing) for _, thing in objects}, set(), []
    todo = [(name, thing) for name, thing in objects if issubclass(type(thing), (nn.Module, torch.optim.Optimizer))]
    with torch._C.DisableTorchFunctionSubclass():
        while todo:
            name, thing = todo.pop(0)
            if id(thing) in visited:
                continue
            visited.add(id(thing))
            inside = attributes(thing)
            if not issubclass(type(thing), nn.Module):
                duplicates += list(_duplicates(name, inside, OF_OPTIMIZERS, named))
                continue
            duplicates += list(_duplicates(name, inside, OF_MODULES, named))
            for key, tensor in (inside.get("_parameters") or {}).items():
                if tensor is not None and id(tensor) not in visited:
                    visited.add(id(tensor))
                    tables = {table: getattr(tensor, table, None) for table in OF_TENSORS}
                    duplicates += list(_duplicates(f"{name}.{key}", tables, OF_TENSORS, named))
            todo += [
                (f"{name}.{key}", child) for key, child in (inside.get("_modules") or {}).items() if child is not None
            ]
    return duplicates


def _duplicates(
    name: str, attributes: Mapping[str, Any], words: Mapping[str, str], named: set[int]
) -> Iterator[DuplicateHook]:
    """Those of one object. named: the ids of what the user's variables lead to."""
    for table_name, word in words.items():
        table = attributes.get(table_name) or {}
        groups: list[list[tuple[int, Any]]] = []
        for key, hook in table.items():
            if _code(hook) is None:
                continue
            group = next((g for g in groups if _same(g[-1][1], hook, named)), None)
            if group is None:
                groups.append(group := [])
            group.append((key, hook))
        for group in groups:
            if len(group) > 1:
                code = _code(group[0][1])
                assert code is not None
                yield DuplicateHook(
                    name, code.co_name, word, code, [(table, k, h) for k, h in group[:-1]], _unwrapped(group[-1][1])
                )


def _unwrapped(hook: Any) -> Any:
    """The user's function, without torch's wrapper."""
    wrapped = type(hook).__name__ == "_WrappedHook" and module_name(type(hook)).startswith("torch.")
    return attributes(hook).get("hook", hook) if wrapped else hook


def _code(hook: Any) -> types.CodeType | None:
    """The code of the user's own function behind a hook."""
    hook = _unwrapped(hook)
    if type(hook) is functools.partial:
        return _code(hook.func)
    function = hook.__func__ if type(hook) is types.MethodType else hook
    if type(function) is not types.FunctionType or not is_user_module(str(function.__module__)):
        return None
    return function.__code__


def _same(old: Any, new: Any, named: set[int]) -> bool:
    old, new = _unwrapped(old), _unwrapped(new)
    if old is new:
        return True
    if type(old) is not type(new) or not (_fingerprint(old) == _fingerprint(new) or _edited(_code(old), _code(new))):
        return False
    if type(old) is functools.partial:
        return old.args == new.args and old.keywords == new.keywords if _simple(old) and _simple(new) else False
    if type(old) is types.MethodType:
        return old.__self__ is new.__self__ or id(old.__self__) not in named
    return all(_same_value(a, b, named) for a, b in zip(_bound_values(old), _bound_values(new)))


def _same_value(old: Any, new: Any, named: set[int]) -> bool:
    """Whether two functions are bound to the same here: equal plain values, or no variable leads to the older value."""
    if type(old) in _SIMPLE or type(new) in _SIMPLE:
        return type(old) is type(new) and bool(old == new)
    if old is new:
        return True
    return type(old) is type(new) and not issubclass(type(old), torch.Tensor) and id(old) not in named


def _fingerprint(hook: Any) -> tuple[Any, ...]:
    code = _code(hook)
    return () if code is None else code_fingerprint(code)


def _edited(old: types.CodeType | None, new: types.CodeType | None) -> bool:
    """Whether a cell ran again, or a file was loaded again, with another number in its function. In one version of a
    cell or file such a pair is on purpose, and begins at two places."""
    if old is None or new is None or old.co_code != new.co_code:
        return False
    if old.co_filename == new.co_filename and _beginning(old) != _beginning(new):
        return False
    return (old.co_name, old.co_names, old.co_freevars) == (new.co_name, new.co_names, new.co_freevars)


def _beginning(code: types.CodeType) -> tuple[int, int]:
    """Line and column of what a function computes first; where Python knows no columns, nothing that two share."""
    spans = (span_of(code, at) for at in range(2, 12, 2))
    return code.co_firstlineno, next((span[2] for span in spans if span is not None and span[3]), id(code))


def _simple(hook: functools.partial[Any]) -> bool:
    return all(type(value) in _SIMPLE for value in (*hook.args, *hook.keywords.values()))


def _bound_values(function: types.FunctionType) -> list[Any]:
    """The values of a function's closure and of its defaults (`lambda …, name=name: …`)."""
    return [
        *closure_variables(function).values(),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
