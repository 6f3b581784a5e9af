"""Dead and saturated units: the outputs of a model's activation modules, sampled every few steps.

A ReLU's unit is dead when it is zero for every sample of several batches: no gradient passes it, and training can't
revive it. A unit of tanh or sigmoid is saturated where its slope is under a hundredth of the largest. Masks stay on the
device until somebody asks. Activations that are called as functions (`F.relu`) have no module, and are not seen.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.modules import ModelHook, ModuleNames
from nbdebug.observe.norms import is_capturing_graph, unobserved

BATCHES, VALUES = 3, 100
"""Batches, and values in them, before a unit is judged."""
_LAST = 8
_MOSTLY = 0.8
"""A unit is saturated when this share of its values is."""
_FLAT: dict[type, Callable[[Any, Any], torch.Tensor]] = {
    nn.Tanh: lambda module, y: y.abs() > 0.995,
    nn.Sigmoid: lambda module, y: y * (1 - y) < 0.0025,
    nn.Softsign: lambda module, y: y.abs() > 0.9,
    nn.Hardtanh: lambda module, y: (y <= module.min_val) | (y >= module.max_val),
    nn.Hardsigmoid: lambda module, y: (y <= 0) | (y >= 1),
}
_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)


@dataclasses.dataclass(frozen=True)
class LayerUnits:
    """One activation module. feeds: the layer before it, by name. share: of its units that are dead (kind "dead") or
    saturated ("saturated"), in the last sampled batches; batches: how many these are."""

    module: str
    type: str
    kind: str
    feeds: str
    units: int
    share: float
    batches: int


class UnitWatch:
    """The activation modules between a model's first and last layer. error_boundary: calls something of ours, and
    keeps its faults from the training; due: the step, if its units are sampled. why_not: why none are, or ""."""

    def __init__(self, models: Mapping[str, nn.Module], error_boundary: Callable, due: Callable[[], int | None]):
        self.error_boundary, self.due = error_boundary, due
        self._modules: dict[str, tuple[nn.Module, str, bool]] = {}
        self._masks: dict[tuple[str, int], collections.deque] = {}
        self._handles: list[Any] = []
        self.seen: list[LayerUnits] = []
        self.why_not = ""
        modules = [m for model in models.values() for m in model.modules()]
        if any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules):
            self.why_not = "the model is compiled: its activations can't be seen"
            return
        names = ModuleNames(models)
        for model in models.values():
            self._find(list(model.modules()), names)
        if models and not self._modules:
            self.why_not = (
                "the model has no activation modules such as nn.ReLU between its layers (F.relu is not "
                "seen here; nbdebug.diagnose sees it)"
            )

    def _find(self, modules: list[nn.Module], names: ModuleNames) -> None:
        layers = [i for i, m in enumerate(modules) if any(p.dim() > 1 for p in m._parameters.values() if p is not None)]
        for place, module in enumerate(modules):
            if not isinstance(module, (nn.ReLU, nn.ReLU6, *_FLAT)) or not layers or place > layers[-1]:
                continue  # the last activation is the model's answer: it may saturate
            before = [m for m in modules[:place] if any(p is not None for p in m._parameters.values())]
            first = bool(before) and isinstance(before[-1], _CHANNELS_FIRST)
            feeds = next((names.of(modules[i]) or "" for i in reversed(layers) if i < place), "")
            self._modules.setdefault(names.of(module) or "", (module, feeds, first))

    def attach(self) -> None:
        self._handles = [
            module.register_forward_hook(ModelHook(self, "ran", name)) for name, (module, _, _) in self._modules.items()
        ]

    def detach(self) -> None:
        """Leave the modules, and hold plain numbers only."""
        while self._handles:
            self._handles.pop().remove()

    def ran(self, name: str, args: tuple, output: Any) -> None:
        """An activation module has run."""
        step = self.due()
        if step is None or not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.dim() < 2:
            return
        if not torch.is_grad_enabled() or not output.requires_grad or is_capturing_graph():
            return
        module, _, first = self._modules[name]
        with unobserved():
            values = output.detach()
            by_unit = values.movedim(1 if first else -1, 0).flatten(1)
            flat = next((test for kind, test in _FLAT.items() if isinstance(module, kind)), None)
            dead = isinstance(module, nn.ReLU6) or flat is None  # ReLU6 is a Hardtanh
            mask = (by_unit > 0).any(1) if dead or flat is None else flat(module, by_unit).float().mean(1)
            self._note(name, step, mask, by_unit.shape[1])

    def _note(self, name: str, step: int, mask: torch.Tensor, values: int) -> None:
        """Several calls within one step count as one batch."""
        masks = self._masks.setdefault((name, mask.numel()), collections.deque(maxlen=_LAST))
        if masks and masks[-1][0] == step:
            _, before, more = masks.pop()
            mask = before | mask if mask.dtype is torch.bool else (before * more + mask * values) / (more + values)
            values += more
        masks.append((step, mask, values))

    def read(self) -> list[LayerUnits]:
        """What the last batches showed, of modules that were sampled in enough of them; waits for the device."""
        results = []
        for (name, units), samples in self._masks.items():
            module, feeds, _ = self._modules[name]
            if len(samples) < BATCHES or sum(values for _, _, values in samples) < VALUES:
                continue
            masks = torch.stack([mask for _, mask, _ in samples])
            dead = masks.dtype is torch.bool
            share = float((~masks.any(0)).float().mean() if dead else (masks.mean(0) >= _MOSTLY).float().mean())
            results.append(
                LayerUnits(
                    name, type(module).__name__, "dead" if dead else "saturated", feeds, units, share, len(samples)
                )
            )
        self.seen = results
        return results

    def forget(self) -> None:
        """Hold no module and no mask any more; `seen` stays."""
        self.detach()
        self._masks.clear()
        self._modules.clear()
