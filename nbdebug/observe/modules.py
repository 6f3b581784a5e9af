"""Which module is running, under which name?

Global forward hooks keep a stack of the modules being called; names come from the models that the user gave, or that
were found. A module that belongs to none of them (a loss object, say) lends no name: its ops count for the module
around it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from nbdebug.observe.sites import Site, locate


class ModuleNames:
    """Names of modules, parameters and buffers of some models;
    with several models each name starts with its model's."""

    def __init__(self, models: Mapping[str, nn.Module]):
        self.models = dict(models)
        self._names: dict[int, str] = {}
        self.tensors: dict[int, tuple[str, str, str]] = {}  # id(tensor) -> role, name, module
        for prefix, model in self.models.items():
            self._add(prefix if len(self.models) > 1 else "", model)

    def adopt(self, module: nn.Module) -> None:
        """A model that nobody named: it was met when it was called. Found models that have not been called make way."""
        self._names, self.tensors = {}, {}
        self.models = {"model": module}
        self._add("", module)

    def _add(self, prefix: str, model: nn.Module) -> None:
        for raw, module in model.named_modules(prefix=prefix):
            name = plain_name(raw)
            self._names.setdefault(id(module), name)
            for role, items in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, tensor in items.items():
                    if tensor is not None and not is_lazy(tensor):
                        self.tensors.setdefault(id(tensor), (role, f"{name}.{key}" if name else key, name))

    def all_tensors(self) -> list[tuple[torch.Tensor, tuple[str, str, str]]]:
        """Every parameter and buffer as it is now, with its role, its name and its module's name."""
        found = []
        for module in {id(m): m for model in self.models.values() for m in model.modules()}.values():
            name = self.of(module) or ""
            for role, items in (("parameter", module._parameters), ("buffer", module._buffers)):
                found += [
                    (t, (role, f"{name}.{k}" if name else k, name))
                    for k, t in items.items()
                    if t is not None and not is_lazy(t)
                ]
        return found

    def of(self, module: nn.Module) -> str | None:
        """The module's dotted name; None when it is not a part of the models."""
        return self._names.get(id(module))

    def owner(self, tensor: torch.Tensor) -> tuple[str, str, str] | None:
        """(role, tensor's name, module's name) of a parameter or buffer; None for any other tensor."""
        return self.tensors.get(id(tensor))

    def types(self) -> list[tuple[str, str]]:
        """(name, type) of every module, in the order of `named_modules`."""
        return [
            (plain_name(name), type(module).__name__)
            for prefix, model in self.models.items()
            for name, module in model.named_modules(prefix=prefix if len(self.models) > 1 else "")
        ]


def plain_name(name: str) -> str:
    """A module's name as the user wrote it, without what `torch.compile` puts around a model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class ModuleStack:
    """Follows module calls while attached. `on_root(module, args, kwargs,
    site)` is told of calls made outside of any."""

    def __init__(self, names: ModuleNames, on_root: Callable[[nn.Module, tuple, dict, Site | None], None]):
        self.names, self.on_root = names, on_root
        self._stacks: dict[int, list[nn.Module]] = {}
        self._handles: list[Any] = []

    def attach(self) -> None:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._stacks.clear()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        if not stack and torch._C._current_autograd_node() is None:  # else a checkpointed part is computed again
            # Global hooks get no keyword arguments; they stand in the frame that calls the hooks.
            kwargs = sys._getframe(1).f_locals.get("kwargs") or {}
            self.on_root(module, args, kwargs, locate().site)
        stack.append(module)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        stack = self._stacks.get(threading.get_ident(), [])
        if module in stack:  # a call that never entered (hooks attached inside it) leaves nothing to remove
            while stack.pop() is not module:
                pass

    @property
    def inside(self) -> bool:
        return bool(self._stacks.get(threading.get_ident()))

    def current(self) -> tuple[str, nn.Module | None]:
        """(name, module) of the innermost running module that has a name; ("", None) outside."""
        for module in reversed(self._stacks.get(threading.get_ident(), [])):
            name = self.names.of(module)
            if name is not None:
                return name, module
        return "", None

    def from_frame(self, frame: Any) -> tuple[str, nn.Module] | None:
        """The named module whose method a frame runs, found by its `self`: for code that runs without the hooks."""
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and self.names.of(owner) is not None:
                return self.names.of(owner) or "", owner
            frame = frame.f_back
        return None
