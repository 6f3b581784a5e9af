"""What do the activations look like: units that are zero for every sample, values on the flat ends?

A few batches are sent through the model in train mode, and every relu, sigmoid and tanh is looked at, whether it is a
module or a function: both end in the same call of torch. The order in which modules are called is noted on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.observe.tensors import output_tensors, read_scalars
from nbdebug.tools.training.facts import Point, Through, UnitsFact
from nbdebug.tools.training.run.data import unnoticed
from nbdebug.tools.training.run.evaluate import loss_root, mode

BATCHES = 4
"""Batches after which a unit that was zero for every sample counts as dead (a research tool's "over 3 batches")."""
FLAT = 0.01
"""Saturated: the slope is below a hundredth of its largest. For tanh that is beyond ±3.0, for a sigmoid beyond ±6.0."""

RELUS = frozenset({"relu", "relu_", "relu6", "threshold", "hardtanh"})
SIGMOIDS = frozenset({"sigmoid", "sigmoid_"})
TANHS = frozenset({"tanh", "tanh_"})


@dataclasses.dataclass
class _ActivationPlace:
    module: str
    op: str
    feeds: str
    channels: int
    hidden: bool = False
    dead: torch.Tensor | None = None
    saturated: list[float] = dataclasses.field(default_factory=list)


class _LayerProbe(TorchFunctionMode):
    """Notes activations by the module in which they run, and the order in which modules with parameters are called."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {id(m): n for n, m in model.named_modules()}
        self.stack: list[str] = []
        self.places: dict[tuple[str, str, str], _ActivationPlace] = {}
        self.order: dict[str, tuple[str, int]] = {}
        self.last = ""
        self.batch = 0

    def hooks(self, model: nn.Module) -> list[Any]:
        handles = []
        for module in model.modules():
            handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        return handles

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module), "")
        self.stack.append(name)
        if module._parameters:
            kind, calls = self.order.get(name, (type(module).__name__, 0))
            self.order[name] = kind, calls + (self.batch == 0)
            if not isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm)):
                self.last = name
                for place in self.places.values():
                    place.hidden = place.hidden or place.feeds != name

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
            place = self.places[module, op, self.last] = _ActivationPlace(module, op, self.last, channels)
        if op in RELUS:
            zero = (out <= 0) if op != "hardtanh" else (out <= out.amin())
            others = [d for d in range(out.dim()) if d != place.channels]
            dead = zero.all(dim=others) if others else zero
            place.dead = dead if place.dead is None or place.dead.shape != dead.shape else place.dead & dead
        else:
            slope = (1 - out.square()) if op == "tanh" else 4 * out * (1 - out)
            place.saturated.append(float((slope < FLAT).float().mean()))


def look(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, batches: Sequence[Any]
) -> tuple[tuple[UnitsFact, ...], dict[str, tuple[str, int]]]:
    """Activations over some batches, and the modules with parameters in the order of their calls. Raises what the loss
    raises."""
    if loss_fn is None or not batches:
        return (), {}
    looking = _LayerProbe(model)
    handles = looking.hooks(model)
    try:
        with unnoticed(loss_fn), torch.no_grad(), mode(model, training=True), looking:
            for looking.batch, batch in enumerate(batches[:BATCHES]):
                loss_fn(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(_units(place) for place in looking.places.values()), looking.order


def _units(place: _ActivationPlace) -> UnitsFact:
    count = 0 if place.dead is None else place.dead.numel()
    dead = None if place.dead is None else float(place.dead.float().mean())
    saturated = sum(place.saturated) / len(place.saturated) if place.saturated else None
    return UnitsFact(place.module, place.op, place.feeds, place.hidden, count, dead, saturated)


MOMENTS = 5
"""Shorter sequences have no way to speak of."""
MOST = 2000
"""Calls that are followed."""


def flow(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any
) -> tuple[tuple[Point, ...], tuple[Through, ...]]:
    """The calls of layers with weights, in order, and the ways through time. The gradients of parameters are left as
    they are. Raises what the loss raises, and RuntimeError where it has no gradient."""
    calls: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []
    times: list[tuple[str, list[torch.Tensor]]] = []
    given: list[torch.Tensor] = []  # what recurrent modules are given, where no trained parameter lies before them
    handles = []
    for name, module in model.named_modules():
        if any(p.dim() > 1 for p in module._parameters.values() if p is not None):
            handles.append(module.register_forward_hook(lambda module, args, out, name=name: _follow(calls, name, out)))
        if isinstance(module, nn.RNNBase):
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, name=name: _through(times, given, name, module, args)
                )
            )
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with unnoticed(loss_fn), torch.enable_grad():
            root = loss_root(loss_fn(model, batch))
            torch.autograd.grad(root, [*trained, *given], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    with_gradient = [(name, size, grads[0]) for name, size, grads in calls if grads]
    sizes = read_scalars([size.float() for _, size, _ in with_gradient])
    norms = read_scalars([norm.float() for _, _, norm in with_gradient])
    points = tuple(Point(name, size, norm) for (name, _, _), size, norm in zip(with_gradient, sizes, norms))
    ways = [Through(name, len(norms[0]), float(norms[0][0]), float(norms[0][-1])) for name, norms in times if norms]
    return points, (*ways, *_again_and_again(points))


def _again_and_again(points: tuple[Point, ...]) -> list[Through]:
    """Modules that are called many times in one pass: a recurrence that is written by hand."""
    calls: dict[str, list[float]] = {}
    for point in points:
        calls.setdefault(point.module, []).append(point.gradient)
    return [Through(name, len(norms), norms[0], norms[-1]) for name, norms in calls.items() if len(norms) >= MOMENTS]


def _through(times: list[Any], leaves: list[torch.Tensor], name: str, module: nn.RNNBase, args: tuple[Any, ...]) -> Any:
    """Have the gradient at each moment of what a recurrent module is given told to `times`."""
    given = args[0]
    if not isinstance(given, torch.Tensor) or given.dim() != 3 or given.shape[1 if module.batch_first else 0] < MOMENTS:
        return None
    if not given.requires_grad:
        given = given.clone().requires_grad_(True)
        leaves.append(given)
    norms: list[torch.Tensor] = []
    times.append((name, norms))
    others = (0, 2) if module.batch_first else (1, 2)
    given.register_hook(lambda grad: norms.append(torch.linalg.vector_norm(grad.detach(), dim=others)))
    return (given, *args[1:])


def _follow(calls: list[Any], name: str, out: Any) -> None:
    made = [t for t in output_tensors(out) if t.is_floating_point() and t.requires_grad]
    if not made or len(calls) >= MOST:
        return
    out = made[0]
    grads: list[torch.Tensor] = []
    calls.append((name, torch.linalg.vector_norm(out.detach()) / max(out.numel(), 1) ** 0.5, grads))
    out.register_hook(lambda grad: grads.append(torch.linalg.vector_norm(grad.detach())))
