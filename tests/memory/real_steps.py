"""What real steps take on the CPU, by the profiler's own allocation events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves


def peak_of(model: nn.Module, batch: Any, step: Callable[[], Any]) -> int:
    """Bytes alive at most in two steps, parameters, buffers and the batch included."""
    there = [*model.parameters(), *model.buffers(), *(t for t in tree_leaves(batch) if isinstance(t, torch.Tensor))]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there}
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(2):
            step()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return sum(held.values()) + most


def training(
    model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer | None
) -> Callable[[], None]:
    """A plain step."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        loss = loss_fn(model, batch)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step
