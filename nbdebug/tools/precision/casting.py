"""A copy of a model that runs in a half precision dtype, with some of its modules kept in float32.

"cast": parameters, buffers and the floating inputs of its modules are cast to the dtype. "autocast": everything stays
as it is and the step runs under torch.autocast. A module that is kept has float32 parameters, buffers and inputs, runs
without autocast, and returns the dtype of its input.

Copies share the memory of weights that need no cast; buffers are always their own, since a forward may write to them.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from nbdebug.observe.validation import check_model
from nbdebug.observe.variables import MODULES_OWN, attributes

MODES = ("autocast", "cast")


class CastCopies:
    """Makes copies of one model. mode: one of MODES; the casts of the weights are made once and shared."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, mode: str):
        self.model, self.dtype, self.mode = model, dtype, mode
        self._cast: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def reference(self, dtype: torch.dtype) -> nn.Module:
        """A copy that runs in this dtype (float32 or float64) throughout."""
        model = self._copy(dtype)
        for module in model.modules():
            module.register_forward_pre_hook(_input_cast(dtype), with_kwargs=True)
        return model

    def half(self, fp32: Iterable[str] = ()) -> nn.Module:
        """A copy in half precision, with the modules of these names, and all that is in them, in float32. Run it within
        `running()`."""
        model = self._copy(self.dtype if self.mode == "cast" else None)
        named = dict(model.named_modules())
        tops = [named[name] for name in fp32]
        below = {id(module) for top in tops for module in top.modules()}
        originals = dict(self.model.named_modules())
        for name, module in named.items():
            if id(module) in below:
                self._use_float32(module, originals[name])
            elif self.mode == "cast":
                module.register_forward_pre_hook(_input_cast(self.dtype), with_kwargs=True)
        for top in tops:
            keep_in_float32(top, self.dtype if self.mode == "cast" else None)
        return model

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Autocast where that is the mode; nothing for casts."""
        if self.mode == "cast":
            yield
            return
        with torch.autocast(device_of(self.model).type, dtype=self.dtype):
            yield

    def _copy(self, dtype: torch.dtype | None) -> nn.Module:
        memo: dict[int, Any] = {}
        for parameter in self.model.parameters():
            memo[id(parameter)] = self._parameter(parameter, dtype)
            if parameter.grad is not None:
                memo[id(parameter.grad)] = None
        for buffer in self.model.buffers():
            memo[id(buffer)] = _to(buffer.detach(), dtype).clone()
        try:
            return copy.deepcopy(self.model, dict(memo))
        except Exception:  # a lock, an open file, a tensor with a history: both use it
            for value in (v for m in self.model.modules() for k, v in attributes(m).items() if k not in MODULES_OWN):
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    memo[id(value)] = value
            return copy.deepcopy(self.model, memo)

    def _parameter(self, parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
        key = (id(parameter), dtype or parameter.dtype)
        if key not in self._cast:
            self._cast[key] = _to(parameter.detach(), dtype)
        return nn.Parameter(self._cast[key], requires_grad=parameter.requires_grad)

    def _use_float32(self, module: nn.Module, original: nn.Module) -> None:
        """A module's own parameters and buffers, in float32. A weight that is tied to a module in half is untied."""
        for name, parameter in original._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                setattr(module, name, self._parameter(parameter, torch.float32))
        for name, buffer in original._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.detach().float().clone()


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter or buffer lies; the CPU where it has none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


class InFloat32:
    """The `forward` of a module that is kept: autocast off, floating inputs cast to float32, floating outputs to the
    dtype of the first floating input (`back`, where it has none). own: the forward that the instance had, or None for
    its class's. It is copied and saved along with its module."""

    def __init__(self, module: nn.Module, back: torch.dtype | None):
        self.module, self.back, self.own = module, back, module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next((t for t in _tensors((args, kwargs)) if t.is_floating_point()), None)
        device = first.device if first is not None else device_of(self.module)
        args, kwargs = cast((args, kwargs), torch.float32)
        with torch.autocast(device.type, enabled=False):
            output = (self.own or types.MethodType(type(self.module).forward, self.module))(*args, **kwargs)
        dtype = first.dtype if first is not None else self.back
        return output if dtype is None else cast(output, dtype)

    def undo(self) -> None:
        """Give the module back the forward that it had."""
        if self.own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self.own


def keep_in_float32(module: nn.Module, back: torch.dtype | None) -> Callable[[], None]:
    """Make a module run in float32 whatever is around it, and return what undoes it. Its class, its hooks and its
    state_dict stay as they are; its `forward` is replaced on the instance."""
    forward = InFloat32(module, back)
    module.forward = forward
    return forward.undo


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """A tree of arguments with every floating tensor in it cast."""
    return tree_map(lambda leaf: _to(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _input_cast(dtype: torch.dtype) -> Callable[..., tuple[tuple, dict]]:
    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return cast(args, dtype), cast(kwargs, dtype)

    return before


def _to(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class KeptInFloat32:
    """Modules that are kept in float32 until `remove()`, or until the end of a `with` block. names: which."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        self.names = names
        self._undo: list[Callable[[], object]] = []
        for name in names:
            module = model.get_submodule(name)
            dtypes = [(t, t.dtype) for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
            half = next((d for _, d in dtypes if d != torch.float32), None)
            module.float()
            self._undo += [keep_in_float32(module, half), lambda dtypes=dtypes: _restore_dtypes(dtypes)]  # type: ignore[misc]

    def remove(self) -> None:
        """Let the modules run as before, their weights in the dtype that they had."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> KeptInFloat32:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"kept in float32: {', '.join(self.names) or 'nothing'}" + ("" if self._undo else " (removed)")


def keep_fp32(model: nn.Module, modules: str | Iterable[str]) -> KeptInFloat32:
    """Let these modules, and all that is in them, run in float32, under autocast as well as in a model that was cast.

    modules: names as in `model.named_modules()`, or patterns such as "blocks.*.norm". In them autocast is off,
    floating inputs are cast to float32 and floating outputs back to the dtype of the first input, and weights become
    float32 (of a model that was cast: create the optimizer afterwards). `state_dict` keeps its keys; nothing else of
    the model changes.
    Returns a KeptInFloat32, to be undone by `.remove()` or used as a context manager. Raises TypeError where the model
    is no Module, ValueError for a name that matches nothing.
    """
    check_model(model, "keep_fp32(model, modules)")
    patterns = [modules] if isinstance(modules, str) else list(modules)
    known = [name for name, _ in model.named_modules()]
    chosen: list[str] = []
    for pattern in patterns:
        matches = [pattern] if pattern in known else fnmatch.filter(known, pattern)
        if not matches:
            raise ValueError(f"no module of the model is called {pattern!r}")
        chosen += matches
    tops = [
        name
        for name in known
        if name in chosen and not any(other != name and (not other or name.startswith(other + ".")) for other in chosen)
    ]
    return KeptInFloat32(model, tuple(tops))


def _restore_dtypes(dtypes: list[tuple[torch.Tensor, torch.dtype]]) -> None:
    for tensor, dtype in dtypes:
        tensor.data = tensor.data.to(dtype)
