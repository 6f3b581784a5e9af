"""The layers of a model while it runs: which one is being called, from where, and what each has made so far."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import torch
from torch import nn

from nbdebug.observe.modules import plain_name
from nbdebug.observe.sites import locate
from nbdebug.observe.tensors import tensors_made
from nbdebug.stepper import numbers
from nbdebug.stepper.places import BEFORE, Call, Place

_node_number = torch._C._autograd._get_sequence_nr
"""What autograd will number the next node that this thread makes."""


@dataclasses.dataclass
class Layer:
    """What a layer has done: calls; low, high: the range of its last output; finite: of its last output, None before;
    gradient: whether what its backward has handed on was finite, None before."""

    name: str
    kind: str
    depth: int
    calls: int = 0
    low: float | None = None
    high: float | None = None
    finite: bool | None = None
    gradient: bool | None = None


class Layers:
    """Hooks on every module of the model, and on a criterion that is one. all: by module, in the order of
    `named_modules`; calls: all that have ended; outside: nodes of autograd that the step finds in its batch, made by
    another thread, which numbers its own."""

    def __init__(self, model: nn.Module, batch: Any = None, loss_fn: Any = None):
        self.all: dict[nn.Module, Layer] = {}
        for raw, module in model.named_modules():
            name = plain_name(raw)
            self.all.setdefault(module, Layer(name, type(module).__name__, name.count(".") + 1 if name else 0))
        if isinstance(loss_fn, nn.Module):
            self.all.setdefault(loss_fn, Layer("loss_fn", type(loss_fn).__name__, 0))
        self.calls: list[Call] = []
        self.outside = [tensor.grad_fn for tensor in (*tensors_made(batch), *model.buffers())]
        self.stack: list[Call] = []
        self.raised: Call | None = None
        self._handles: list[Any] = []
        self._run: Any = None

    def tell(self, run: Any) -> None:
        """run: its border, begins and ends are used."""
        self._run = run

    def attach(self) -> None:
        for module in self.all:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks of this kind: it is a part of the layer around it
            self._handles += [
                module.register_forward_pre_hook(_Hook(self, "enter"), with_kwargs=True),
                module.register_forward_hook(_Hook(self, "leave"), always_call=True),
            ]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def forget(self) -> None:
        """Let go of every tensor and node."""
        self.calls, self.outside, self.stack, self.raised, self._run = [], [], [], None, None

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        layer, parent = self.all[module], self.stack[-1] if self.stack else None
        layer.calls += 1
        call = Call(
            module, layer.name, layer.calls, parent, len(self.stack), site=locate().site, handled=sys.exc_info()[1]
        )
        given = numbers.arguments(module, args, kwargs)
        call.received = _edges(given)
        call.leaves = {id(tensor): name for name, tensor in given if tensor.requires_grad and tensor.grad_fn is None}
        call.given = [(name, tensor.detach()) for name, tensor in given]
        call.versions = [_version(tensor) for _, tensor in call.given]
        call.nodes = (_node_number(), 0)
        self.stack.append(call)
        self._run.begins(call)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not any(call.module is module for call in self.stack):
            return
        while (call := self.stack[-1]).module is not module:
            self.stack.pop()  # it ended in an exception before its hooks were asked
        error = sys.exc_info()[1]
        if error is not None and error is not call.handled:  # on its way through here
            self.raised = (
                self.raised
                if self.raised is not None and self.raised.handled is error
                else dataclasses.replace(call, handled=error, given=[], versions=[])
            )
        else:
            call.nodes = (call.nodes[0], _node_number())
            call.returned = _edges(numbers.named(output, "output"))
            self.calls.append(call)
            self._run.ends(call, output)
        call.given, call.versions = [], []
        self.stack.pop()

    def raised_in(self, error: BaseException) -> Place | None:
        """The innermost layer that an exception, or what it was raised from, came out of."""
        chain: list[BaseException | None] = [error]
        while chain[-1] is not None and len(chain) < 10:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)
        call = self.raised
        return call.place(BEFORE) if call is not None and any(e is call.handled for e in chain) else None

    def remarks(self, culprit: bool) -> list[str]:
        """What is to be said of the layer that has just run. culprit: it has made something that is not finite."""
        call = self.stack[-1]
        said = [
            f"`{name}` was changed in place by the layer: its numbers are those of now."
            for (name, tensor), version in zip(call.given, call.versions)
            if _version(tensor) != version
        ]
        if culprit:
            said += [
                f"Its parameter `{name}` is not finite itself."
                for name, parameter in call.module.named_parameters(recurse=False)
                if not numbers.finite([parameter])
            ]
            if next(call.module.children(), None) is not None:
                said.append("No layer inside it has done that: its own forward has, between them.")
        return said

    def note(self, call: Call, low: float | None, high: float | None, finite: bool) -> None:
        layer = self.all[call.module]
        layer.low, layer.high, layer.finite = low, high, finite

    def note_gradient(self, call: Call, finite: bool) -> None:
        layer = self.all[call.module]
        layer.gradient = finite and layer.gradient is not False

    def in_order(self) -> list[Call]:
        """The calls as they began, those around others first."""
        self.calls.sort(key=lambda call: (call.nodes[0], call.depth))
        return self.calls

    def told(self, method: str, *given: Any) -> None:
        if self._run is not None and torch._C._current_autograd_node() is None:  # else: computed again for backward
            self._run.border(getattr(self, method), *given)


class _Hook:
    """A hook that stays out of copies: a deepcopy or a pickle of the model has one that does nothing."""

    def __init__(self, layers: Layers, method: str):
        self.layers, self.method = layers, method

    def __call__(self, *given: Any) -> None:
        __tracebackhide__ = True
        self.layers.told(self.method, *given)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _edges(tensors: list[tuple[str, torch.Tensor]]) -> dict[tuple[Any, int], str]:
    return {(tensor.grad_fn, tensor.output_nr): name for name, tensor in tensors if tensor.grad_fn is not None}


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode: nothing is counted
        return None
