"""Where a stop waits: a layer's forward is reached, before it, at its first line, at its return, or after it; or the
gradient of a layer's output arrives.

Full backward hooks of torch put an op of their own around a layer, after which an output can't be changed in place.
So each output tensor gets a hook of its own, which changes nothing. Where the output is changed in place later, the
gradient is still that of what the layer returned. Under a checkpoint the hook is on the outputs that backward goes
through, whichever of the two forwards made them.

Such a hook lives as long as the graph does. It holds the layer's input and output without their graph, so that a
forward that nobody calls backward for keeps nothing.
"""

from __future__ import annotations

import dataclasses
import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from nbdebug.observe.tensors import output_tensors, tensors_in
from nbdebug.tools.breakpoints.condition import BreakpointHook, is_fake, only_value
from nbdebug.tools.breakpoints.stop import calling_backward, calling_frame, mode, own_code


@dataclasses.dataclass(eq=False)
class FrameTrap:
    """A call of a layer, before its forward. by: who set it. code: the forward's; None where there is none to stop in.
    caller: the frame that makes the call. entered(frame) is called when the forward begins; returned(frame, out) when
    it returns; raised(frame) when an exception leaves it, with the frame None where there was none. sure: the condition
    has been evaluated. frame: the forward's own, once it has begun."""

    by: Any
    code: CodeType | None
    owner: Any
    caller: FrameType
    entered: Callable[[FrameType], None] | None = None
    returned: Callable[[FrameType, Any], None] | None = None
    raised: Callable[[FrameType | None], None] | None = None
    sure: bool = False
    frame: FrameType | None = None


class _FrameThread(threading.local):
    def __init__(self) -> None:
        self.calls: list[FrameTrap] = []


_here = _FrameThread()


def set_trap(call: FrameTrap) -> bool:
    """Wait for this call from now on; False where another profiler is set."""
    if sys.getprofile() not in (None, _profile):
        return False
    if sys.getprofile() is None:
        _here.calls.clear()  # whatever waits there was cut off together with its profile function
        sys.setprofile(_profile)
    _here.calls.append(call)
    return True


def release_trap(caller: FrameType, by: Any) -> FrameTrap | None:
    """The call that this frame makes has returned: its trap, which is removed."""
    call = next((call for call in reversed(_here.calls) if call.caller is caller and call.by is by), None)
    if call is not None:
        _drop(call)
    return call


def _drop(call: FrameTrap) -> None:
    place = _here.calls.index(call)  # those above it are calls inside it, or wait for the same one
    _here.calls[place:] = [other for other in _here.calls[place + 1 :] if other.caller is call.caller]
    if not _here.calls and sys.getprofile() is _profile:
        sys.setprofile(None)


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    if event not in ("call", "return"):
        return
    if not _here.calls:
        sys.setprofile(None)
        return
    caller = _here.calls[-1].caller
    try:
        for call in [call for call in _here.calls if call.caller is caller]:
            if event == "return":
                _on_return(call, frame, argument)
            elif call.frame is None and frame.f_code is call.code and _is_call_of(frame, call.owner):
                _on_call(call, frame)
    except BaseException:  # it goes on to the user's code, and Python takes the profile function away
        _here.calls.clear()
        raise


def _on_return(call: FrameTrap, frame: FrameType, argument: Any) -> None:
    if frame is call.caller:  # and it was not `over` before: an exception
        _drop(call)
        _on_exception(call)
    elif frame is call.frame:
        if _is_exception(frame, argument):
            _on_exception(call)
        elif call.returned is not None:
            call.returned(frame, argument)


def _on_exception(call: FrameTrap) -> None:
    callback, call.raised = call.raised, None
    if callback is not None:
        callback(call.frame)


def _on_call(call: FrameTrap, frame: FrameType) -> None:
    call.frame = frame
    if call.entered is not None:
        _drop(call)
        call.entered(frame)


def _is_call_of(frame: FrameType, owner: Any) -> bool:
    """Another layer of the same type may be called first, by a forward pre-hook of the user's, say. A function that was
    put in the place of a forward takes no layer."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0], owner) if code.co_argcount else owner
    return first is owner or not isinstance(first, type(owner))


def _is_exception(frame: FrameType, argument: Any) -> bool:
    """An exception that leaves a frame looks like a return of None, but for the instruction that it stands at."""
    if argument is not None:
        return False
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


class Forwards:
    """The hooks on forwards of a stop."""

    def __init__(self, stop: Any):
        self.stop = stop
        self._taken = False  # the only hit has come, and is being recorded
        self._warned = False

    def attach(self, name: str, module: nn.Module) -> list[Any]:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.stop.border(self._before, name, module, args, kwargs, sys._getframe(2))

        def after(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            self.stop.border(self._after, name, module, args, kwargs, out, sys._getframe(2))

        return [
            module.register_forward_pre_hook(BreakpointHook(before), with_kwargs=True),
            module.register_forward_hook(BreakpointHook(after), with_kwargs=True),
        ]

    def _listens(self, args: tuple, kwargs: dict) -> bool:
        """Not to what a checkpoint computes again: that is no new forward."""
        return (
            self.stop.listens() and torch._C._current_autograd_node() is None and not is_fake(*args, *kwargs.values())
        )

    def _values(self, name: str, module: nn.Module, args: tuple, kwargs: dict, *out: Any) -> dict[str, Any]:
        output = {"out": only_value(out[0])} if out else {}
        return {
            "inp": only_value((*args, *kwargs.values())),
            **output,
            "module": module,
            "name": name,
            "step": self.stop.step,
        }

    def _before(self, name: str, module: nn.Module, args: tuple, kwargs: dict, caller: FrameType) -> None:
        if self._taken or not self._listens(args, kwargs):
            return
        values, code = self._values(name, module, args, kwargs), own_code(module)
        sure = not self.stop.condition.late(code)
        if sure and not self.stop.holds(values):
            return
        recorded = sure and mode() == "record"  # nobody can type: the output is worth the wait
        if sure and code is None and not recorded:
            self._stop("before", values, calling_frame(caller))
        elif code is not None or recorded:
            self._taken = recorded and self.stop.once
            trap = FrameTrap(self, code, module, caller, sure=sure, **self._callbacks(values, sure, recorded, caller))
            if not set_trap(trap):
                self._warn_of_profiler(code)
                if sure:
                    self._stop("before", values, calling_frame(caller))

    def _callbacks(self, values: dict[str, Any], sure: bool, recorded: bool, caller: FrameType) -> dict[str, Any]:
        """The callbacks for the frame of the forward: it begins, returns, or an exception leaves it."""
        border = self.stop.border

        def entered(frame: FrameType) -> None:
            border(self._stop, "first line", values, frame)

        def returned(frame: FrameType, out: Any) -> None:
            border(self._out, "return", {**values, "out": only_value(out)}, sure, frame)

        def raised(frame: FrameType | None) -> None:
            border(self._stop, "raised", values, frame or calling_frame(caller))

        if sure and not recorded:
            return {"entered": entered}
        return {"returned": returned, "raised": raised} if recorded else {"returned": returned}

    def _warn_of_profiler(self, code: CodeType | None) -> None:
        if code is not None and not self._warned:
            self._warned = True
            print(
                f"nbdebug: another profiler is on, so {self.stop.question} stops at the line that calls the layer, "
                "not inside its forward, and a condition sees no locals of the forward. This message is shown once.",
                file=sys.stderr,
            )

    def _out(self, moment: str, values: dict[str, Any], sure: bool, frame: FrameType | None) -> None:
        own = frame if moment == "return" else None
        if self.stop.listens() and (sure or self.stop.holds(values, own)):
            self._stop(moment, values, frame)

    def _stop(self, moment: str, values: dict[str, Any], frame: FrameType | None) -> None:
        self.stop.stop(values["name"], moment, values["step"], values, frame)

    def _after(self, name: str, module: nn.Module, args: tuple, kwargs: dict, out: Any, caller: FrameType) -> None:
        """Layers whose forward had a frame are done by then; the others stop here."""
        call = release_trap(caller, self)
        if call is not None and call.frame is not None or not self._listens(args, kwargs):
            return
        if call is None and not self.stop.condition.late(own_code(module)):  # done before the forward
            return
        values = self._values(name, module, args, kwargs, out)
        self._out("after", values, call is not None and call.sure, calling_frame(caller))


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
