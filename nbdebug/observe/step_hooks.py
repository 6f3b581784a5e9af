"""Hooks of optimizers that come and go at any time, from inside of a step as well; and a summary of one step by layer.

torch iterates over its ordered dicts of step hooks while it calls them: an entry that is added or removed meanwhile
ends the user's `optimizer.step()` with a RuntimeError. So nbdebug has one entry in a dict, a slot, and mostly changes
what this calls. The slot itself comes and goes where torch is not between two entries of its dict; else a hook on the
other side of the update (before it, after it), whose dict is not iterated then, makes the change. `BatchHook` is told
of the batches that data loaders give; `Patches` puts functions in the place of others.

`StepSummary` reduces each layer's output on its own device, and reads all numbers together at the end of the step, so
that the step waits for the device once. The step ends before the update of the first optimizer that holds parameters
of these models: the gradients exist by then.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

from nbdebug.interrupts import ShownAtUsersLine, uninterrupted
from nbdebug.observe.locations import Site, locate
from nbdebug.observe.tensors import output_tensors

_STEP = torch_optimizer.Optimizer.profile_hook_step(lambda self: None).__code__
"""torch's code around each `step`: it calls the hooks."""
_LONGEST_WAIT = 1.0
"""Seconds to wait for a step in another thread."""


class HookSlot:
    """nbdebug's one entry in a dict of step hooks."""

    def __init__(self) -> None:
        self.hooks: list[StepHook] = []

    def __call__(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        __tracebackhide__ = True
        for hook in list(self.hooks):
            if hook.function is not None:  # else one before it has removed it
                hook.function(optimizer, args, kwargs)


class StepHook:
    """Calls `function(optimizer, args, kwargs)` before each update of this optimizer (None: of every one), or after it;
    until `remove`. A function that is added while the hooks of its side run is called from the next update on."""

    def __init__(self, function: Callable[[Any, tuple, dict], Any], optimizer: Any = None, *, after: bool = False):
        if optimizer is None:
            dicts = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
        else:
            dicts = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        self.function: Callable[[Any, tuple, dict], Any] | None = function
        self._optimizer, self._after, self._dict = optimizer, after, dicts[after]
        if (slot := self._slot()) is not None:
            slot.hooks.append(self)
        else:
            self._between_hooks(self._enter)

    @uninterrupted
    def remove(self) -> None:
        """The function is not called any more. May be called twice."""
        self.function, slot = None, self._slot()
        if slot is not None and self in slot.hooks:
            slot.hooks.remove(self)
            if not slot.hooks:
                self._between_hooks(self._leave)

    def _slot(self) -> HookSlot | None:
        return next((entry for entry in list(self._dict.values()) if type(entry) is HookSlot), None)

    def _enter(self) -> None:
        if self.function is None:
            return
        slot = self._slot()
        if slot is None:
            slot = HookSlot()
            if self._optimizer is None:
                register = (
                    torch_optimizer.register_optimizer_step_post_hook
                    if self._after
                    else torch_optimizer.register_optimizer_step_pre_hook
                )
                register(slot)
            elif self._after:
                self._optimizer.register_step_post_hook(slot)
            else:
                self._optimizer.register_step_pre_hook(slot)
        slot.hooks.append(self)

    def _leave(self) -> None:
        for key, entry in list(self._dict.items()):
            if type(entry) is HookSlot and not entry.hooks:
                self._dict.pop(key, None)

    def _between_hooks(self, change: Callable[[], None]) -> None:
        """Make this change of the dict when torch does not iterate over it."""
        _wait_for_other_threads()
        if not _is_iterated(self._dict):
            change()
            return

        def make(*_: Any) -> None:
            change()
            once.remove()

        once = StepHook(make, self._optimizer, after=not self._after)


class OptimizerSteps:
    """Calls `before` and `after`, as step hooks, around the updates of these optimizers, by name. Of a model that none
    of them trains, each optimizer is taken at its first step, before its update, and `taken(optimizer)` is called; it
    replaces one that was taken before and trains the same parameters. stepping: the ids of all optimizers that have
    stepped, also of those that are not watched."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: dict[str, Any],
        before: Callable[..., Any],
        after: Callable[..., Any],
        taken: Callable[[Any], Any],
    ):
        self.optimizers, self.before, self.after, self.taken = optimizers, before, after, taken
        self.stepping = set(map(id, optimizers.values()))
        held = _parameters(*optimizers.values())
        self.waiting = [model for model in models.values() if held.isdisjoint(map(id, model.parameters()))]
        self._hooks: dict[int, list[StepHook]] = {}
        self._every: StepHook | None = None

    def attach(self) -> None:
        self._every = StepHook(self._steps)
        for optimizer in self.optimizers.values():
            self._hook(optimizer)

    @uninterrupted
    def detach(self) -> None:
        for hook in [*([self._every] if self._every else []), *(h for hooks in self._hooks.values() for h in hooks)]:
            hook.remove()
        self._hooks.clear()
        self.waiting.clear()
        self._every = None

    def _hook(self, optimizer: Any) -> None:
        hooks = self._hooks[id(optimizer)] = [StepHook(self.before, optimizer)]
        hooks.append(StepHook(self.after, optimizer, after=True))

    def _steps(self, optimizer: Any, *_: Any) -> None:
        self.stepping.add(id(optimizer))
        if not self.waiting or any(optimizer is known for known in self.optimizers.values()):
            return
        trained = {id(p) for model in self.waiting for p in model.parameters()} & _parameters(optimizer)
        if not trained:
            return
        for name, known in list(self.optimizers.items()):
            if trained & _parameters(known):
                del self.optimizers[name]
                self.stepping.discard(id(known))
                for hook in self._hooks.pop(id(known), []):
                    hook.remove()
        kind, number = type(optimizer).__name__, len(self.optimizers) + 1
        self.optimizers[f"{kind} {number}" if kind in self.optimizers else kind] = optimizer
        self._hook(optimizer)  # torch has not come to the optimizer's own hooks yet: it is called for this step
        self.taken(optimizer)


def _parameters(*optimizers: Any) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def exchanged(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Put something in the place of an attribute; the result puts back what was there."""
    nothing = object()
    own = vars(owner).get(name, nothing)
    setattr(owner, name, new)
    return lambda: delattr(owner, name) if own is nothing else setattr(owner, name, own)


class Patches:
    """Attributes of other people's that are exchanged, and put back in `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(exchanged(owner, name, new))

    def put(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """around: is called in place of a function, with that before its arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.set(owner, name, called)

    def put_loaded(self, functions: Iterable[tuple[str, str]], around: Callable[..., Any]) -> None:
        """What nobody has imported is not called."""
        for module, name in functions:
            if hasattr(sys.modules.get(module), name):
                self.put(sys.modules[module], name, around)

    @uninterrupted
    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class BatchHook:
    """Tells an `ItemLog` of all batches that data loaders give, until `detach`. log: None while there was none.
    loading: called with True where a loader begins to read a batch in this thread, and with False at its end."""

    _attached: ClassVar[list[BatchHook]] = []
    _originals: ClassVar[tuple[Any, Any] | None] = None

    def __init__(self, loading: Callable[[bool], Any]) -> None:
        self.log: Any = None
        self.loading = loading

    @uninterrupted
    def attach(self) -> None:
        self._thread = threading.get_ident()
        self._attached.append(self)
        if BatchHook._originals is None:
            kind: Any = dataloader._BaseDataLoaderIter
            BatchHook._originals = kind._next_index, kind.__next__
            kind._next_index = _followed(kind._next_index, "index")
            kind.__next__ = _followed(kind.__next__, "batch")

    @uninterrupted
    def detach(self) -> None:
        if self in self._attached:
            self._attached.remove(self)
        if not self._attached and BatchHook._originals is not None:
            kind: Any = dataloader._BaseDataLoaderIter
            kind._next_index, kind.__next__ = BatchHook._originals
            BatchHook._originals = None

    def read(self, begins: bool) -> None:
        if threading.get_ident() == self._thread:
            self.loading(begins)

    def note(self, what: str, iterator: Any, value: Any) -> None:
        self.read(what == "index")
        try:
            if self.log is None:
                from nbdebug.observe.items import ItemLog  # here: most steps read no loader

                self.log = ItemLog()
            getattr(self.log, what)(iterator, value)
        except Exception:  # the border: which item it was is not known then
            self.detach()


def _followed(original: Any, what: str) -> Any:
    @functools.wraps(original)
    def method(self: Any) -> Any:
        __tracebackhide__ = True
        try:
            value = original(self)
        except BaseException:  # the end of the data, or the user's own
            for hook in list(BatchHook._attached):
                hook.read(False)
            raise
        for hook in list(BatchHook._attached):
            hook.note(what, self, value)
        return value

    return method


def _is_iterated(hooks: Any) -> bool:
    """Whether this thread is in a step among these hooks, and not at the last: torch goes on in the dict then."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            names = frame.f_locals
            running = names.get("post_hook" if "out" in names else "pre_hook")
            entries = list(hooks.values())
            if any(entry is running for entry in entries[:-1]):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _wait_for_other_threads() -> None:
    end = time.monotonic() + _LONGEST_WAIT
    while _others_step() and time.monotonic() < end:
        time.sleep(0.001)


def _others_step() -> bool:
    for thread, frame in sys._current_frames().items():
        while thread != threading.get_ident() and frame is not None:
            if frame.f_code is _STEP:
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False


@dataclasses.dataclass
class LayerSummary:
    """A layer in one step. shape, dtype: of its output (the first tensor); low, high, std: of the finite values of all
    its calls; nonfinite: how many values were not finite; gradient: the 2-norm over its own parameters, None where it
    has none; sums: of each output, not read yet."""

    name: str
    kind: str
    calls: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    low: float | None = None
    high: float | None = None
    std: float | None = None
    nonfinite: int = 0
    gradient: float | None = None
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list, repr=False)


class StepSummary:
    """See the module's docstring. models: by the user's names. callback: called once, in the thread that trains, with
    the layers in the order in which they were first called. After a fault of ours it gets no layers, and the fault as
    text; the training goes on."""

    def __init__(self, models: Mapping[str, nn.Module], callback: Callable[..., Any]):
        self.models, self.callback = dict(models), callback
        self.layers: dict[str, LayerSummary] = {}
        self._own = {id(p) for model in self.models.values() for p in model.parameters()}
        self._handles: list[Any] = [StepHook(self._before_update)]
        for title, model in self.models.items():
            for name, module in model.named_modules():
                if name == "" or not any(module.children()):
                    hook = self._hook(self._layer_name(title, name), module)
                    self._handles.append(module.register_forward_hook(hook))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self.layers = {}

    def _layer_name(self, title: str, name: str) -> str:
        return f"{title}.{name}".rstrip(".") if len(self.models) > 1 else name

    def _hook(self, name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                layer = self.layers.setdefault(name, LayerSummary(name, type(module).__name__))
                layer.calls += 1
                try:
                    with _disable_current_modes(), torch.no_grad():
                        _summarize(layer, output_tensors(output))
                except Exception as fault:
                    self._fail(fault)

        return hook

    def _fail(self, fault: Exception) -> None:
        if self._handles:
            self.close()
            self.callback([], f"{type(fault).__name__}: {fault}")

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._handles or not self.layers or not held & self._own:
            return
        layers = list(self.layers.values())
        try:
            with _disable_current_modes(), torch.no_grad():
                self._gradients()
                _read(layers)
        except Exception as fault:
            self._fail(fault)
            return
        self.close()
        self.callback(layers)

    def _gradients(self) -> None:
        for title, model in self.models.items():
            for name, module in model.named_modules():
                layer = self.layers.get(self._layer_name(title, name))
                grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
                if layer is not None and grads:
                    norms = [
                        g.detach().to_dense().float().norm() if g.is_sparse else g.detach().float().norm()
                        for g in grads
                    ]
                    layer.gradient = float(torch.stack([n.to(norms[0].device) for n in norms]).norm())


def _summarize(layer: LayerSummary, outputs: list[torch.Tensor]) -> None:
    """Append [low, high, sum, sum of squares, number of finite values, number of others] of each output, not read."""
    for out in outputs:
        values = out.detach()
        if not layer.shape:
            layer.shape, layer.dtype = tuple(values.shape), str(values.dtype).removeprefix("torch.")
        if (
            not values.is_floating_point()
            or not values.numel()
            or values.device.type == "meta"
            or values.layout is not torch.strided
        ):
            continue
        finite = values.isfinite()
        masked = torch.where(finite, values, 0).to(torch.float32)
        count = finite.sum().to(torch.float32)
        layer.sums.append(
            torch.stack(
                [
                    torch.where(finite, values, float("inf")).amin().float(),
                    torch.where(finite, values, float("-inf")).amax().float(),
                    masked.sum(),
                    masked.square().sum(),
                    count,
                    values.numel() - count,
                ]
            )
        )


def _read(layers: list[LayerSummary]) -> None:
    for layer in layers:
        rows = [row.tolist() for row in layer.sums]
        layer.sums = []
        count = sum(row[4] for row in rows)
        layer.nonfinite = int(sum(row[5] for row in rows))
        if count:
            mean = sum(row[2] for row in rows) / count
            layer.low, layer.high = min(row[0] for row in rows), max(row[1] for row in rows)
            layer.std = max(0.0, sum(row[3] for row in rows) / count - mean * mean) ** 0.5


class SteppingOptimizers(dict[int, Any]):
    """The optimizers that have stepped, by id. One without any state yet takes the place of another of its class that
    has some, for the same parameters: it was made anew. renewals: how often; steps: of such a line of optimizers, the
    longest; site: the user's line of the first such step, kind: its class. keep: hand the state on."""

    def __init__(self, keep: bool = False):
        super().__init__()
        self.keep, self.renewals, self.kind = keep, 0, type(None)
        self.site: Site | None = None
        self._steps: dict[frozenset[int], int] = {}

    def note(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to step."""
        held = _held(optimizer)
        self._steps[held] = self._steps.get(held, 0) + 1
        if id(optimizer) in self:
            return
        fresh = all(not s or s.get("step", 1) == 0 for s in optimizer.state.values())
        for key, other in list(self.items()) if fresh else ():
            tensors = (t for s in other.state.values() for t in s.values() if isinstance(t, torch.Tensor))
            if type(other) is type(optimizer) and _held(other) == held and any(t.dim() for t in tensors):
                if self.keep:
                    optimizer.state.update(other.state)
                self.kind, self.renewals, self.site = type(other), self.renewals + 1, self.site or locate().user
                del self[key]
        self[id(optimizer)] = optimizer

    @property
    def steps(self) -> int:
        return max(self._steps.values(), default=0)


def _held(optimizer: Any) -> frozenset[int]:
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


class TrainingStopped(KeyboardInterrupt):
    """A training was asked to stop, and did so after a whole step."""

    _render_traceback_ = ShownAtUsersLine._render_traceback_


def stop_training() -> None:
    """End a training, called from inside of it. Raises TrainingStopped."""
    raise TrainingStopped("Stopped after a whole step, as you asked: weights and optimizer state are those after it.")
