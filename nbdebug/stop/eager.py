"""Compiled code runs no hooks that a model got later. While a stop waits in a compiled model, it runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class _Held:
    """How many stops hold compiled code back, and torch's own switch for it."""

    count = 0
    switch: Any = None


def compiled(model: nn.Module) -> bool:
    """By `torch.compile(model)`, `model.compile()` or `@torch.compile` above a forward, as a whole or in a part."""
    return any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def hold() -> Callable[[], None]:
    """From now on compiled code runs uncompiled, everywhere; until what is returned has been called."""
    if not _Held.count:
        _Held.switch = torch.compiler.set_stance("force_eager")
    _Held.count += 1
    done: list[bool] = []

    def release() -> None:
        if not done:
            done.append(True)
            _Held.count -= 1
            if not _Held.count:
                _Held.switch.__exit__(None, None, None)
                _Held.switch = None

    return release
