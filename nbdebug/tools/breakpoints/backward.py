"""The gradient of a layer's output arrives.

Full backward hooks of torch put an op of their own around a layer, after which an output can't be changed in place.
So each output tensor gets a hook of its own, which changes nothing. Where the output is changed in place later, the
gradient is still that of what the layer returned. Under a checkpoint the hook is on the outputs that backward goes
through, whichever of the two forwards made them.

Such a hook lives as long as the graph does. It holds the layer's input and output without their graph, so that a
forward that nobody calls backward for keeps nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from nbdebug.observe.tensors import output_tensors, tensors_in
from nbdebug.tools.breakpoints.condition import BreakpointHook, is_fake, only_value
from nbdebug.tools.breakpoints.stop import calling_backward


class OutputGradients:
    """The hooks on outputs of a stop."""

    def __init__(self, stop: Any):
        self.stop = stop
        self._on_leaves: dict[str, list[Any]] = {}  # a leaf outlives the step, and its hooks with it

    def attach(self, name: str, module: nn.Module) -> list[Any]:
        def after(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            self.stop.border(self._after, name, module, args, kwargs, out)

        return [module.register_forward_hook(BreakpointHook(after), with_kwargs=True), _Handles(self._on_leaves, name)]

    def _after(self, name: str, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        _Handles(self._on_leaves, name).remove()
        if not self.stop.listens() or is_fake(*args, *kwargs.values()):
            return
        outputs = {id(tensor): tensor for tensor in output_tensors(out) if tensor.requires_grad}.values()
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        nodes = {tensor.grad_fn for tensor in outputs}
        # A layer that works in place returns its input: what leads there would keep the graph alive for ever.
        edges = None if any(t.grad_fn in nodes for t in inputs if t.grad_fn) else [get_gradient_edge(t) for t in inputs]
        values = {
            "inp": only_value(tree_map(_bare, (*args, *kwargs.values()))),
            "module": module,
            "name": name,
            "step": self.stop.step,
        }
        for tensor in outputs:
            handle = tensor.register_hook(self._hook(name, {**values, "out": tensor.detach()}, tensor.output_nr, edges))
            if tensor.grad_fn is None:
                self._on_leaves.setdefault(name, []).append(handle)

    def _hook(
        self, name: str, values: dict[str, Any], number: int, edges: list[GradientEdge] | None
    ) -> Callable[[torch.Tensor], None]:
        def arrived(grad: torch.Tensor) -> None:
            __tracebackhide__ = True
            if not isinstance(grad, torch.Tensor) or is_fake(grad):
                return
            self.stop.border(self._arrived, name, {**values, "grad": grad.detach()}, number, edges)

        return arrived

    def _arrived(self, name: str, values: dict[str, Any], number: int, edges: list[GradientEdge] | None) -> None:
        if not self.stop.listens() or not self.stop.holds(values):
            return
        values = {"grad": values["grad"], **values, "grad_in": _to_inputs(values["grad"], number, edges)}
        self.stop.stop(name, "gradient", values["step"], values, calling_backward(sys._getframe()))


class _Handles:
    """The hooks on leaves of one layer, as torch's own handles are: to be removed."""

    def __init__(self, held: dict[str, list[Any]], name: str):
        self.held, self.name = held, name

    def remove(self) -> None:
        for handle in self.held.pop(self.name, ()):
            handle.remove()


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _to_inputs(grad: torch.Tensor, number: int, edges: list[GradientEdge] | None) -> Callable[[], tuple]:
    """grad_in() at the prompt: the layer's own backward, run aside. No `.grad` is touched."""
    node = torch._C._current_autograd_node()

    def grad_in() -> tuple:
        """The gradients of the layer's inputs, of those that need one, computed from `grad` through this layer
        alone."""
        if edges is None or node is None or not edges:
            raise ValueError(
                "grad_in() is not available here: the layer changes its input in place, or none of its "
                "inputs needs a gradient"
            )
        return torch.autograd.grad([GradientEdge(node, number)], edges, [grad], retain_graph=True, allow_unused=True)

    return grad_in
