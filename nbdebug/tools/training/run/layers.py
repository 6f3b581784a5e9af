"""Activations and gradients layer by layer: units that are zero for every sample, values on the flat ends; how the
gradient grows or fades with depth and back through time.

Every ReLU, sigmoid and tanh is recorded, whether it is a module or a function: both end in the same call of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.observe.tensors import output_tensors, read_scalars
from nbdebug.tools.training.facts import LayerSignal, TimeGradient, UnitsFact
from nbdebug.tools.training.run.evaluate import LossFn, loss_root, mode, preserve_rng

BATCHES = 4
"""Batches after which a unit that was zero for every sample counts as dead (a research tool's "over 3 batches")."""
FLAT = 0.01
"""Saturated: the slope is below a hundredth of its largest. For tanh that is beyond ±3.0, for a sigmoid beyond ±6.0."""
TIME_STEPS = 5
"""Shorter sequences are not followed through time."""
MOST = 2000
"""Calls of layers that are followed."""

RELUS = frozenset({"relu", "relu_", "relu6", "threshold", "hardtanh"})
SIGMOIDS = frozenset({"sigmoid", "sigmoid_"})
TANHS = frozenset({"tanh", "tanh_"})

Order = dict[str, tuple[str, int]]
"""Modules with parameters in the order of their calls: name → (type, calls in one forward)."""


# Activations


def activation_units(
    model: nn.Module, loss_fn: LossFn | None, batches: Sequence[Any]
) -> tuple[tuple[UnitsFact, ...], Order]:
    """Activations over some batches in train mode, and the order of the modules. Raises what the loss raises."""
    if loss_fn is None or not batches:
        return (), {}
    recorder = _ActivationRecorder(model)
    handles = recorder.hooks(model)
    try:
        with preserve_rng(loss_fn), torch.no_grad(), mode(model, training=True), recorder:
            for recorder.batch, batch in enumerate(batches[:BATCHES]):
                loss_fn(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(place.fact() for place in recorder.places.values()), recorder.order


@dataclasses.dataclass
class _Activation:
    """One activation of the model. channels: its dimension of units; dead: which of them were always zero."""

    module: str
    op: str
    layer: str
    channels: int
    hidden: bool = False
    dead: torch.Tensor | None = None
    saturated: list[float] = dataclasses.field(default_factory=list)

    def fact(self) -> UnitsFact:
        units = 0 if self.dead is None else self.dead.numel()
        dead = None if self.dead is None else float(self.dead.float().mean())
        saturated = sum(self.saturated) / len(self.saturated) if self.saturated else None
        return UnitsFact(self.module, self.op, self.layer, self.hidden, units, dead, saturated)


class _ActivationRecorder(TorchFunctionMode):
    """Records activations by the module in which they run, and the order in which modules with parameters are "
    "called."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {id(m): n for n, m in model.named_modules()}
        self.stack: list[str] = []
        self.places: dict[tuple[str, str, str], _Activation] = {}
        self.order: Order = {}
        self.last = ""
        self.batch = 0

    def hooks(self, model: nn.Module) -> list[Any]:
        return [
            handle
            for module in model.modules()
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module), "")
        self.stack.append(name)
        if module._parameters:
            kind, calls = self.order.get(name, (type(module).__name__, 0))
            self.order[name] = kind, calls + (self.batch == 0)
            if not isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm)):
                self.last = name
                for place in self.places.values():
                    place.hidden = place.hidden or place.layer != name

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in RELUS | SIGMOIDS | TANHS and isinstance(out, torch.Tensor) and self.stack:
            self._note(name.rstrip("_"), out.detach())
        return out

    def _note(self, op: str, out: torch.Tensor) -> None:
        module = self.stack[-1]
        place = self.places.get((module, op, self.last))
        if place is None:
            channels = 1 if out.dim() > 3 or "Conv" in self.order.get(self.last, ("", 0))[0] else out.dim() - 1
            place = self.places[module, op, self.last] = _Activation(module, op, self.last, channels)
        if op in RELUS:
            zero = (out <= 0) if op != "hardtanh" else (out <= out.amin())
            others = [d for d in range(out.dim()) if d != place.channels]
            dead = zero.all(dim=others) if others else zero
            place.dead = dead if place.dead is None or place.dead.shape != dead.shape else place.dead & dead
        else:
            slope = (1 - out.square()) if op == "tanh" else 4 * out * (1 - out)
            place.saturated.append(float((slope < FLAT).float().mean()))


# Gradients


def gradient_flow(
    model: nn.Module, loss_fn: LossFn, batch: Any
) -> tuple[tuple[LayerSignal, ...], tuple[TimeGradient, ...]]:
    """The calls of layers with weights, in order, and the gradients back through time. The gradients of parameters are
    left as they are. Raises what the loss raises, and RuntimeError where it has no gradient."""
    calls: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []
    sequences: list[tuple[str, list[torch.Tensor]]] = []
    leaves: list[torch.Tensor] = []  # inputs of recurrent modules with no trained parameter before them
    handles = []
    for name, module in model.named_modules():
        if any(p.dim() > 1 for p in module._parameters.values() if p is not None):
            handles.append(module.register_forward_hook(lambda module, args, out, name=name: _follow(calls, name, out)))
        if isinstance(module, nn.RNNBase):
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, name=name: _follow_in_time(sequences, leaves, name, module, args)
                )
            )
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with preserve_rng(loss_fn), torch.enable_grad():
            root = loss_root(loss_fn(model, batch))
            torch.autograd.grad(root, [*trained, *leaves], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    with_gradient = [(name, size, grads[0]) for name, size, grads in calls if grads]
    sizes = read_scalars([size.float() for _, size, _ in with_gradient])
    norms = read_scalars([norm.float() for _, _, norm in with_gradient])
    layer_calls = tuple(LayerSignal(name, size, norm) for (name, _, _), size, norm in zip(with_gradient, sizes, norms))
    in_time = [
        TimeGradient(n, len(norms[0]), float(norms[0][0]), float(norms[0][-1])) for n, norms in sequences if norms
    ]
    return layer_calls, (*in_time, *_handwritten_recurrences(layer_calls))


def _follow(calls: list[Any], name: str, out: Any) -> None:
    """Record the size of a layer's output, and the norm of the gradient there when it comes."""
    outputs = [t for t in output_tensors(out) if t.is_floating_point() and t.requires_grad]
    if not outputs or len(calls) >= MOST:
        return
    out = outputs[0]
    grads: list[torch.Tensor] = []
    calls.append((name, torch.linalg.vector_norm(out.detach()) / max(out.numel(), 1) ** 0.5, grads))
    out.register_hook(lambda grad: grads.append(torch.linalg.vector_norm(grad.detach())))


def _follow_in_time(
    sequences: list[Any], leaves: list[torch.Tensor], name: str, module: nn.RNNBase, args: tuple[Any, ...]
) -> Any:
    """Record the norm of the gradient at each time step of a recurrent module's input when it comes."""
    x = args[0]
    if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[1 if module.batch_first else 0] < TIME_STEPS:
        return None
    if not x.requires_grad:
        x = x.clone().requires_grad_(True)
        leaves.append(x)
    norms: list[torch.Tensor] = []
    sequences.append((name, norms))
    others = (0, 2) if module.batch_first else (1, 2)
    x.register_hook(lambda grad: norms.append(torch.linalg.vector_norm(grad.detach(), dim=others)))
    return (x, *args[1:])


def _handwritten_recurrences(calls: tuple[LayerSignal, ...]) -> list[TimeGradient]:
    """Modules that are called many times in one pass: a recurrence that is written by hand."""
    by_module: dict[str, list[float]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call.gradient)
    return [
        TimeGradient(name, len(norms), norms[0], norms[-1])
        for name, norms in by_module.items()
        if len(norms) >= TIME_STEPS
    ]
