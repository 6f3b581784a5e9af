"""`keep_fp32`: let some modules of a model run in float32 whatever is around them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.precision.copies import hold


class Kept:
    """Modules that are kept in float32 until `remove()`, or until the end of a `with` block. names: which."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        self.names = names
        self._undo: list[Callable[[], object]] = []
        for name in names:
            module = model.get_submodule(name)
            dtypes = [(t, t.dtype) for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
            half = next((d for _, d in dtypes if d != torch.float32), None)
            module.float()
            self._undo += [hold(module, half), lambda kept=dtypes: _give_back(kept)]  # type: ignore[misc]

    def remove(self) -> None:
        """Let the modules run as before, their weights in the dtype that they had."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"kept in float32: {', '.join(self.names) or 'nothing'}" + ("" if self._undo else " (removed)")


def keep_fp32(model: nn.Module, modules: str | Iterable[str]) -> Kept:
    """Let these modules, and all that is in them, run in float32, under autocast as well as in a model that was cast.

    modules: names as in `model.named_modules()`, or patterns such as "blocks.*.norm". In them autocast is off,
    floating inputs are cast to float32 and floating outputs back to the dtype of the first input, and weights become
    float32 (of a model that was cast: create the optimizer afterwards). `state_dict` keeps its keys; nothing else of
    the model changes.
    Returns a Kept, to be undone by `.remove()` or used as a context manager. Raises TypeError where the model is no
    Module, ValueError for a name that fits nothing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"keep_fp32 takes a torch.nn.Module; got {type(model).__name__}")
    wanted = [modules] if isinstance(modules, str) else list(modules)
    known = [name for name, _ in model.named_modules()]
    found: list[str] = []
    for pattern in wanted:
        fits = [pattern] if pattern in known else fnmatch.filter(known, pattern)
        if not fits:
            raise ValueError(f"no module of the model is called {pattern!r}")
        found += fits
    tops = [
        name
        for name in known
        if name in found and not any(other != name and (not other or name.startswith(other + ".")) for other in found)
    ]
    return Kept(model, tuple(tops))


def _give_back(kept: list[tuple[torch.Tensor, torch.dtype]]) -> None:
    for tensor, dtype in kept:
        tensor.data = tensor.data.to(dtype)
