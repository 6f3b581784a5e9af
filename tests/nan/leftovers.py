"""What a tracer might leave behind in torch, and a check that it has not."""

from __future__ import annotations

import torch
from torch import nn

from nbdebug.observe.ops import WatchMode
from tests.nan.small import small


def global_hooks() -> dict[str, list]:
    """Everything that torch keeps for the whole process and that a tracer might have put there."""
    from torch.optim import optimizer

    module = nn.modules.module
    found = {
        name: list(value)
        for name, value in vars(module).items()
        if name.startswith("_global_") and hasattr(value, "keys")
    }
    found |= {
        name: list(value)
        for name, value in vars(optimizer).items()
        if name.startswith("_global_") and hasattr(value, "keys")
    }
    found["dispatch"] = list(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
    found["function"] = list(torch.overrides._get_current_function_mode_stack())
    return found


PATCHABLE = {
    "run_backward": lambda: torch.autograd.graph._engine_run_backward,
    "autograd's": lambda: torch.autograd._engine_run_backward,
    "backward": lambda: torch.autograd.backward,
    "grad": lambda: torch.autograd.grad,
    "tensor.backward": lambda: torch.Tensor.backward,
    "item": lambda: torch.Tensor.item,
    "bool": lambda: torch.Tensor.__bool__,
    "float": lambda: torch.Tensor.__float__,
    "numpy": lambda: torch.Tensor.numpy,
    "from_numpy": lambda: torch.from_numpy,
    "call": lambda: nn.Module.__call__,
    "apply": lambda: torch.autograd.Function.apply.__func__,
    "scaler": lambda: torch.amp.GradScaler.step,
    "step": lambda: torch.optim.AdamW.step,
    "empty": lambda: torch.empty,
}
small()  # torch itself wraps an optimizer's step when the first one is made
BEFORE = {name: read() for name, read in PATCHABLE.items()}


def assert_nothing_is_left() -> None:
    assert not WatchMode._entered, "a mode that watches ops is on"
    assert not any(global_hooks().values()), global_hooks()
    assert {name: read() for name, read in PATCHABLE.items()} == BEFORE
    assert not torch.is_anomaly_enabled()
    assert torch.is_grad_enabled()
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(value) for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")
    )
