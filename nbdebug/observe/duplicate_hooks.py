"""Hooks that a cell, run a second time, has registered once more on the same module, parameter or optimizer.

Two hooks of one module are the same one twice when it is the same function, or a function made anew from the same code
that holds nothing different: closures over other names or numbers are meant to be there side by side. A method of
another object of the same class is a second registration when nothing of the user's leads to the older object; so is a
function that holds another container than the older one, when nothing leads to that.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import code_fingerprint
from nbdebug.observe.variables import attributes, closure_variables, is_user_module

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
    """A hook that was registered several times. module: the name of the module, parameter or optimizer that has it;
    hook: of the function; older: (table, key, hook) of all but the newest."""

    module: str
    hook: str
    word: str
    code: types.CodeType
    older: list[tuple[dict[int, Any], int, Any]]
    newest: Any = None

    def remove(self) -> None:
        """Take away all but the newest, as their handles would."""
        for table, key, hook in self.older:
            if table.get(key) is hook:
                del table[key]

    @property
    def obsolete(self) -> list[Any]:
        """The hooks that would not be there any more."""
        newest = list(self.older[0][0].values())
        return [hook for _, _, hook in self.older if sum(h is hook for h in newest) == 1]


def find_duplicate_hooks(met: list[tuple[str, Any]]) -> list[DuplicateHook]:
    """The hooks that are there more than once on one thing. met: the user's things by name."""
    seen, done, found = {id(thing) for _, thing in met}, set(), []
    todo = [(name, thing) for name, thing in met if issubclass(type(thing), (nn.Module, torch.optim.Optimizer))]
    with torch._C.DisableTorchFunctionSubclass():
        while todo:
            name, thing = todo.pop(0)
            if id(thing) in done:
                continue
            done.add(id(thing))
            inside = attributes(thing)
            if not issubclass(type(thing), nn.Module):
                found += list(_of(name, inside, OF_OPTIMIZERS, seen))
                continue
            found += list(_of(name, inside, OF_MODULES, seen))
            for key, tensor in (inside.get("_parameters") or {}).items():
                if tensor is not None and id(tensor) not in done:
                    done.add(id(tensor))
                    tables = {table: getattr(tensor, table, None) for table in OF_TENSORS}
                    found += list(_of(f"{name}.{key}", tables, OF_TENSORS, seen))
            todo += [
                (f"{name}.{key}", child) for key, child in (inside.get("_modules") or {}).items() if child is not None
            ]
    return found


def _of(name: str, inside: Mapping[str, Any], words: Mapping[str, str], seen: set[int]) -> Iterator[DuplicateHook]:
    """Of one thing, given by its attributes. seen: ids of what the user's variables lead to by name."""
    for table_name, word in words.items():
        table = inside.get(table_name) or {}
        groups: list[list[tuple[int, Any]]] = []
        for key, hook in table.items():
            if _code(hook) is None:
                continue
            group = next((g for g in groups if _same(g[-1][1], hook, seen)), None)
            if group is None:
                groups.append(group := [])
            group.append((key, hook))
        for group in groups:
            if len(group) > 1:
                code = _code(group[0][1])
                assert code is not None
                yield DuplicateHook(
                    name, code.co_name, word, code, [(table, k, h) for k, h in group[:-1]], _bare(group[-1][1])
                )


def _bare(hook: Any) -> Any:
    """The user's function in what torch may have wrapped around it."""
    wrapped = type(hook).__name__ == "_WrappedHook" and type(hook).__module__.startswith("torch.")
    return attributes(hook).get("hook", hook) if wrapped else hook


def _code(hook: Any) -> types.CodeType | None:
    """The code of the user's own function behind a hook."""
    hook = _bare(hook)
    if type(hook) is functools.partial:
        return _code(hook.func)
    function = hook.__func__ if type(hook) is types.MethodType else hook
    if type(function) is not types.FunctionType or not is_user_module(str(function.__module__)):
        return None
    return function.__code__


def _same(old: Any, new: Any, seen: set[int]) -> bool:
    old, new = _bare(old), _bare(new)
    if old is new:
        return True
    if type(old) is not type(new) or _text(_code(old)) != _text(_code(new)):
        return False
    if type(old) is functools.partial:
        return old.args == new.args and old.keywords == new.keywords if _simple(old) and _simple(new) else False
    if type(old) is types.MethodType:
        return old.__self__ is new.__self__ or id(old.__self__) not in seen
    return all(_alike(a, b, seen) for a, b in zip(_cells(old), _cells(new)))


def _alike(old: Any, new: Any, seen: set[int]) -> bool:
    """Whether two functions hold the same here: equal plain values, or the older one is nobody's any more."""
    if type(old) in _SIMPLE or type(new) in _SIMPLE:
        return type(old) is type(new) and bool(old == new)
    if old is new:
        return True
    return type(old) is type(new) and not issubclass(type(old), torch.Tensor) and id(old) not in seen


def _text(code: types.CodeType | None) -> tuple[Any, ...]:
    return () if code is None else code_fingerprint(code)


def _simple(hook: functools.partial[Any]) -> bool:
    return all(type(value) in _SIMPLE for value in (*hook.args, *hook.keywords.values()))


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function carries along: its closure and its defaults (`lambda …, name=name: …`)."""
    return [
        *closure_variables(function).values(),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
