"""Modules: their names, the stack of those that run, and hooks on their calls, compiled ones too.

Global forward hooks keep a stack of the modules being called; names come from the models that the user named, or that
were found among the variables. A module that belongs to none of them (a loss object, say) has no name: its ops count
for the module around it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from nbdebug.interrupts import uninterrupted
from nbdebug.observe.locations import Site, locate
from nbdebug.observe.variables import attributes


class ModuleNames:
    """Names of modules, parameters and buffers of some models; with several models a name starts with its model's."""

    def __init__(self, models: Mapping[str, nn.Module]):
        self.models = dict(models)
        self._names: dict[int, str] = {}
        self.tensors: dict[int, tuple[str, str, str]] = {}  # id(tensor) -> role, name, module
        for prefix, model in self.models.items():
            self._add(prefix if len(self.models) > 1 else "", model)

    def adopt(self, module: nn.Module) -> None:
        """Take the names of a model that nobody named, when it is called; those of the models before are dropped."""
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
        tensors = []
        for module in {id(m): m for model in self.models.values() for m in model.modules()}.values():
            name = self.of(module) or ""
            for role, items in (("parameter", module._parameters), ("buffer", module._buffers)):
                tensors += [
                    (t, (role, f"{name}.{k}" if name else k, name))
                    for k, t in items.items()
                    if t is not None and not is_lazy(t)
                ]
        return tensors

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
    """A module's name as the user wrote it, without the wrapper that `torch.compile` puts around a model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def unwrapped(model: Any) -> tuple[Any, str]:
    """The user's model inside a compiled or parallel wrapper, and what was taken off; of other things themselves."""
    notes: list[str] = []
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model, ", ".join(notes)
        notes.append(type(model).__name__)
        model = inner


def unsaved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of what a model keeps and no state dict holds: plain attributes, buffers that are not
    persistent. Of a graph it is a result, which the next forward makes anew."""
    for path, part in model.named_modules():
        others = {n: b for n, b in part._buffers.items() if n in part._non_persistent_buffers_set}
        for name, value in {**attributes(part), **others}.items():
            if isinstance(value, torch.Tensor) and value.grad_fn is None:
                yield f"{path}.{name}".lstrip("."), value


class ModuleStack:
    """Follows module calls while attached. `on_root(module, args, kwargs, site)` is called for those outside of any."""

    def __init__(self, names: ModuleNames, on_root: Callable[[nn.Module, tuple, dict, Site | None], None]):
        self.names, self.on_root = names, on_root
        self._stacks: dict[int, list[nn.Module]] = {}
        self._handles: list[Any] = []

    @uninterrupted
    def attach(self) -> None:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    @uninterrupted
    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._stacks.clear()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        if not stack and torch._C._current_autograd_node() is None:  # else a checkpointed block is recomputed
            # Global hooks get no keyword arguments; the frame that calls the hooks has them.
            kwargs = sys._getframe(1).f_locals.get("kwargs") or {}
            self.on_root(module, args, kwargs, locate().site)
        stack.append(module)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        stack = self._stacks.get(threading.get_ident(), [])
        if any(one is module for one in stack):  # else the hooks were attached inside the call
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


def callable_modules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that a step may call: each model ("model") and its direct children ("model/child"); in place of a
    child without a forward, as a ModuleList, its items ("model/list.0")."""
    modules: dict[int, tuple[str, nn.Module]] = {}
    for name, model in models.items():
        modules.setdefault(id(model), (name, model))
        children = list(model.named_children())
        while children:
            path, module = children.pop()
            if type(module).forward is nn.Module.forward:
                children += [(f"{path}.{n}", m) for n, m in module.named_children()]
            else:
                modules.setdefault(id(module), (f"{name}/{path}", module))
    return dict(modules.values())


def callable_module(models: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module of this name in `callable_modules`. Raises KeyError or AttributeError where there is none."""
    model, _, path = name.partition("/")
    return models[model].get_submodule(path)


class ModelHook:
    """A hook on a model that does not travel with copies: in a deepcopy or a pickle of the model it is a function of
    Python's library that does nothing, so that the pickle loads without nbdebug."""

    def __init__(self, log: Any, method: str, name: str):
        self.log, self.callback, self.name = log, getattr(log, method), name
        self.part, self.change = "/" in name, 1 if method == "_enter" else -1

    def __call__(self, module: nn.Module, *inputs: Any) -> None:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():  # traced by a compiler: nothing to do
            return
        log = self.log
        if self.part and log.count_nested(self.name, self.change):  # nearly all calls: this path has to be quick
            return
        log.error_boundary(self.callback, self.name, *inputs)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class WrapperWatch:
    """While attached: `before(name, args, kwargs)` and `after(name, args, kwargs, output)` are called around each call
    of one of these modules that runs compiled code, which calls no hooks, or copies in the threads of DataParallel,
    whose hooks are called there; output is None where it raised."""

    _attached: ClassVar[list[WrapperWatch]] = []
    _originals: ClassVar[dict[type, tuple[str, Any]]] = {}

    def __init__(self, modules: Mapping[str, nn.Module], before: Callable[..., None], after: Callable[..., None]):
        self.modules, self.before, self.after = dict(modules), before, after
        self._names = {id(module): name for name, module in modules.items()}
        self._replaced: list[tuple[nn.Module, Any]] = []  # modules with their own compiled code, which we wrapped

    @uninterrupted
    def attach(self) -> None:
        self._attached.append(self)
        self.refresh()

    def refresh(self) -> None:
        """Wrap what has been compiled since."""
        self._exchange(nn.DataParallel, "forward")
        if "torch._dynamo" not in sys.modules:
            return
        from torch._dynamo import OptimizedModule

        self._exchange(OptimizedModule, "__call__")
        for name, module in self.modules.items():
            own = module._compiled_call_impl
            if own is not None and not isinstance(own, _CompiledCode):
                self._replaced.append((module, own))
                module._compiled_call_impl = _CompiledCode(own, self, name)

    def _exchange(self, kind: type, method: str) -> None:
        if kind not in self._originals:
            self._originals[kind] = method, getattr(kind, method)
            setattr(kind, method, _watched(getattr(kind, method), self._attached))

    @uninterrupted
    def detach(self) -> None:
        if self in self._attached:
            self._attached.remove(self)
        while self._replaced:
            module, own = self._replaced.pop()
            if isinstance(module._compiled_call_impl, _CompiledCode):
                module._compiled_call_impl = own
        while self._originals and not self._attached:
            kind, (method, original) = self._originals.popitem()
            setattr(kind, method, original)

    def name_of(self, wrapper: nn.Module) -> str | None:
        """The name of the module that a wrapper compiles, or copies; None for one that is watched itself, by its own
        hooks."""
        if isinstance(wrapper, nn.DataParallel):
            inner = wrapper.module if len(wrapper.device_ids) > 1 else None  # else it calls the module itself
        else:
            inner = wrapper._modules.get("_orig_mod")
        return None if id(wrapper) in self._names else self._names.get(id(inner))


class _CompiledCode:
    """Takes the place of a module's compiled code, and calls it."""

    def __init__(self, own: Any, watch: WrapperWatch, name: str):
        self.own, self.watch, self.name = own, watch, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        return _call([(self.watch, self.name)], self.own, args, kwargs, args)


def _watched(original: Callable, attached: Iterable[WrapperWatch]) -> Callable:
    """The call of a wrapper, which calls the watches that are attached at the time of the call."""

    def call(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            return original(wrapper, *args, **kwargs)
        watches = [(watch, name) for watch in attached if (name := watch.name_of(wrapper)) is not None]
        return _call(watches, original, (wrapper, *args), kwargs, args)

    return call


def _call(
    watches: list[tuple[WrapperWatch, str]], original: Callable, arguments: tuple, kwargs: dict, args: tuple
) -> Any:
    __tracebackhide__ = True
    for watch, name in watches:
        watch.before(name, args, kwargs)
    output = None
    try:
        output = original(*arguments, **kwargs)
        return output
    finally:
        for watch, name in reversed(watches):
            watch.after(name, args, kwargs, output)


WRAPPED_CALL = _call.__code__
"""The code of a call that a `WrapperWatch` wraps; its local `watches` names the module."""


ON_ONE_GPU = "DataParallel ran on its first GPU alone here: copies in other threads can't be followed."


@contextlib.contextmanager
def on_one_gpu() -> Iterator[list[str]]:
    """Have DataParallel call its module in this thread, with the whole batch, on its first GPU; yields a note for the
    report where one did. With one GPU it does so by itself."""
    notes, plain, ended = list[str](), nn.DataParallel.forward, list[bool]()

    @functools.wraps(plain)
    def forward(self: nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
        devices = self.device_ids
        if len(devices) < 2 or ended:
            return plain(self, *inputs, **kwargs)
        notes[:] = [ON_ONE_GPU]
        self.device_ids = devices[:1]
        try:
            return plain(self, *inputs, **kwargs)
        finally:
            self.device_ids = devices

    nn.DataParallel.forward = forward  # type: ignore[method-assign]
    try:
        yield notes
    finally:
        ended.append(True)
        if nn.DataParallel.forward is forward:  # else a guard that began meanwhile calls it, and puts it back
            nn.DataParallel.forward = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def eager() -> Iterator[list[str]]:
    """Run compiled code in eager and DataParallel on one GPU, so that every op is seen; yields notes for the report."""
    with warnings.catch_warnings(), on_one_gpu() as notes:
        # Torch warns that our hooks see a compiled module twice; they know.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        if "torch._dynamo" not in sys.modules:
            yield notes
            return
        with torch.compiler.set_stance("force_eager"):
            yield notes
