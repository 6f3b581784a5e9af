"""A cure for bad scales, for experiments: each layer's output gets mean zero and variance one on a batch.

This is what "layer-sequential unit variance" initialisation does (Mishkin and Matas, "All you need is a good init",
2016), with the means as well. It takes nothing from the data but scale, and cures dead, saturated and fading layers
where their start is at fault. `as_relus` puts the textbook's cure for sigmoids in place: relu, and He's init.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
SQUASHING = (nn.Sigmoid, nn.Tanh, nn.Softsign, nn.LogSigmoid)


def rescaled(loss_fn: Callable[[Any, Any], Any], batch: Any, names: Iterable[str]) -> Callable[[nn.Module], None]:
    """A change of the model: the named layers, in this order, are scaled on this batch."""
    wanted = list(names)

    def change(model: nn.Module) -> None:
        for name in wanted:
            layer = model.get_submodule(name)
            if isinstance(layer, LAYERS):
                _scale(model, layer, loss_fn, batch)

    return change


def normalised(loss_fn: Callable[[Any, Any], Any], batch: Any, names: Iterable[str]) -> Callable[[nn.Module], None]:
    """A change of the model: from each named layer's output its mean on this batch is taken, and it is divided by its
    deviation. The weights stay; what multiplies a layer's inputs in the forward is cured by this, not by `rescaled`."""
    wanted = list(names)

    def change(model: nn.Module) -> None:
        for name in wanted:
            layer = model.get_submodule(name)
            found = _moments(model, layer, loss_fn, batch) if isinstance(layer, LAYERS) else None
            if found is not None:
                layer.register_forward_hook(lambda module, args, out, m=found: (out - m[0]) / m[1])

    return change


def _moments(
    model: nn.Module, layer: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any
) -> tuple[torch.Tensor, float] | None:
    """Mean by channel, shaped as the output is, and deviation over all, of a layer's output."""
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    try:
        with torch.no_grad():
            loss_fn(model, batch)
    finally:
        handle.remove()
    if not seen:
        return None
    out = seen[0].float()
    channel = out.dim() - 1 if isinstance(layer, nn.Linear) else 1
    spread = float(out.std()) if out.numel() > 1 else 0.0
    mean = out.mean([d for d in range(out.dim()) if d != channel], keepdim=True)[0]
    return (mean, spread) if math.isfinite(spread) and spread > 0 else None


def _scale(model: nn.Module, layer: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any) -> None:
    found = _moments(model, layer, loss_fn, batch)
    if found is None:
        return
    mean, spread = found
    weight, bias = layer.weight, layer.bias
    with torch.no_grad():
        weight.div_(spread)  # type: ignore[operator]
        if bias is not None:
            bias.sub_(mean.flatten().to(bias.dtype)).div_(spread)  # type: ignore[operator, arg-type]


def as_relus(model: nn.Module) -> None:
    """Squashing activations become relus, and layers get He's init."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SQUASHING) and name:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], nn.ReLU())
        elif isinstance(module, LAYERS):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
