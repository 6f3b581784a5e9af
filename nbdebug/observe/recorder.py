"""Records every op of a step: its line, its module and, in backward, the forward op whose derivative it computes.

One dispatch mode gets each op below autograd, in forward, backward and optimizer alike. An autograd node takes the next
number of a counter just before its op runs; so the numbers that the counter has passed name the op's node, and when the
engine later runs that node, its number leads back to the forward op. Watchers decide what to do with an op; they also
get the history of its operands.

A fault in a watcher must not break the training: it gives one warning, and the recorder is disabled.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

import torch

from nbdebug.observe.locations import Site, StackLines, is_recomputation, locate
from nbdebug.observe.modules import ModuleStack
from nbdebug.observe.ops import Schema, WatchMode, argument_tensors, named_arguments, schema_of, written_tensors
from nbdebug.observe.tensors import PARAMETER, TARGET, StorageInfo, dense, optional_storage_key
from nbdebug.text import in_a_line

_current_node = torch._C._current_autograd_node
_next_number = torch._C._autograd._get_sequence_nr
_ACCUMULATE = 2**63  # nodes that only store gradients have no number of their own
_OPS_WITH_SCALARS = frozenset({"pow"})  # the behaviour of their derivative depends on a number


class Op:
    """One op that ran. during: "forward", "backward" or "optimizer"; forward: the forward op whose derivative this one
    computes (backward only); node: the name of its autograd node (backward only); custom: run by the user's own
    backward; library: the innermost line of an installed package, where that is not the user's line; call: the user's
    code and its instruction, where known; inputs: the ops that made its operands; scalars: its number arguments by
    name; grad: whether autograd recorded it; recomputed: a forward op that runs again during backward (checkpointing);
    after_model: run outside of the model, after its call; loading: run by a data loader that reads a batch; ahead: in
    a loop, after the updates of its step, so that it may prepare the next one; reach: which of parameters, inputs and
    targets flow into it (0: not followed)."""

    __slots__ = (
        "after_model",
        "ahead",
        "call",
        "custom",
        "during",
        "forward",
        "func",
        "grad",
        "index",
        "inputs",
        "library",
        "loading",
        "module",
        "module_type",
        "name",
        "node",
        "reach",
        "recomputed",
        "scalars",
        "site",
        "step",
    )

    def __init__(self, index: int, func: Any, name: str, step: int):
        self.index, self.func, self.name, self.step = index, func, name, step
        self.site: Site | None = None
        self.library: Site | None = None
        self.call: tuple[CodeType, int] | None = None
        self.module, self.node, self.during = "", "", "forward"
        self.module_type: str | None = None
        self.forward: Op | None = None
        self.reach = 0
        self.custom, self.recomputed, self.grad, self.after_model = False, False, True, False
        self.loading = self.ahead = False
        self.inputs: tuple[Op, ...] = ()
        self.scalars: dict[str, Any] = {}

    def take_place(self, other: Op) -> None:
        """Take the line and the module of another op."""
        self.site, self.library, self.call = other.site, other.library, other.call
        self.module, self.module_type = other.module, other.module_type

    def __repr__(self) -> str:
        return f"<Op {self.index} {self.name} {self.during} {self.module} {self.site}>"


class Watcher(Protocol):
    """`before` may save what the op is about to overwrite; `after` gets its result as `saved`."""

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> Any: ...

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, saved: Any) -> None: ...


class Recorder(WatchMode):
    """See the module's docstring. `on_external(tensor, storage)` is called with each tensor that comes from outside.
    light: only lines and modules of forward ops, for a tape; what tensors are made of is not followed."""

    light = False
    paused = False  # a recorder may have to stay on the stack of modes while nothing is to be recorded

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap each call of a mode to keep its compiler away; here compiled code runs eagerly anyway."""
        return False

    def __init__(
        self, stack: ModuleStack, watchers: list[Watcher], on_external: Callable[[torch.Tensor, StorageInfo], None]
    ):
        super().__init__()
        self.stack, self.watchers, self.on_external = stack, watchers, on_external
        self.storages: dict[int, StorageInfo] = {}
        self.step, self.count, self.disabled_by, self.loading, self.ahead = 0, 0, "", False, False
        self.fault: Exception | None = None
        self.model_called = False
        self.opaque_types: set[str] = set()  # of tensors that handle ops themselves: their values can't be followed
        self.custom_backward = ""  # light: what has a backward of its own, which a replay of the ops lacks
        self.replaying: Op | None = None  # set while a recorded op is run again: its line and module are known
        self.called_from: Site | None = None  # set while a recorded call is made again: the line that made it first
        self.in_backward: Callable[..., Any] | None = None  # light: runs the ops of backward instead
        self.numbered = False  # light: whether forward ops can be found by the numbers of their autograd nodes
        self._by_number: dict[int, list[Op]] = {}
        self._last_number: dict[int, int] = {threading.get_ident(): _next_number()}
        self._line_modules: dict[Site, tuple[str, Any]] = {}

    def new_step(self, step: int) -> None:
        """Drop what only one step needs, and the records of storages that have been freed."""
        self.step, self.model_called, self.ahead = step, False, False
        self._by_number.clear()
        self.storages = {k: m for k, m in self.storages.items() if not m.ref.expired()}
        for storage in self.storages.values():
            storage.views = None
            if storage.maker is not None:
                storage.maker.inputs = ()  # else this would keep the ops of every step before alive

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if self.disabled_by or self.paused or schema.ignored:
            return func(*args, **kwargs)
        if self.in_backward is not None and (node := _current_node()) is not None:
            return self.in_backward(func, schema, args, kwargs, node)
        try:
            op = self._describe(func, schema, args, kwargs)
            reach = 0 if self.light else self.record_operands(op, args, kwargs)
            saved = [w.before(op, schema, args, kwargs) for w in self.watchers]
        except Exception as fault:  # the error boundary: nothing of ours may stop the training
            self._skip(fault, args, kwargs)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        try:
            if not self.light:
                self.record_results(op, schema, args, kwargs, out, reach)
            for watcher, item in zip(self.watchers, saved, strict=True):
                watcher.after(op, schema, args, kwargs, out, item)
        except Exception as fault:
            self._skip(fault, (*args, out), kwargs)
        return out

    def _skip(self, fault: Exception, args: tuple, kwargs: dict) -> None:
        """Go on without an op that works on a tensor which can't be read; any other fault of our own ends it all."""
        odd = {f"{type(t).__name__} ({t.layout})" for t in argument_tensors(args, kwargs) if dense(t) is not t}
        if not odd or self.light:  # a tape without this op can't be replayed
            self.disable(fault)
        self.opaque_types |= odd

    def disable(self, fault: Exception) -> None:
        """Record nothing more, after a fault of our own, and warn once."""
        self.disabled_by = in_a_line(fault)
        self.fault = fault
        warnings.warn(
            f"nbdebug stopped watching this run because of a fault of its own ({self.disabled_by}). "
            "The training itself goes on unharmed.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _describe(self, func: Any, schema: Schema, args: tuple, kwargs: dict) -> Op:
        op = Op(self.count, func, schema.base, self.step)
        op.loading, op.ahead = self.loading, self.ahead
        self.count += 1
        node = _current_node()
        number, thread = _next_number(), threading.get_ident()
        if schema.base in _OPS_WITH_SCALARS:
            op.scalars = {n: v for n, v in named_arguments(schema, args, kwargs) if isinstance(v, (int, float))}
        if self.replaying is not None and node is None:
            original = self.replaying
            op.take_place(original)
            op.during, op.after_model, op.grad = original.during, original.after_model, original.grad
        else:
            self._place(op, node)
        if self.light and number > self._last_number.get(thread, number) and not op.grad:
            self.custom_backward = "a custom autograd Function or a reentrant checkpoint"
        if self.light and not self.numbered:
            self._last_number[thread] = number
        else:
            self.number(op, number)
        return op

    def continue_from(self, other: Recorder, storages: dict[int, StorageInfo]) -> None:
        """Take over the forward ops of another recorder, by their autograd nodes, and what is known of storages."""
        self._by_number, self._last_number = other._by_number, dict(other._last_number)
        self.storages |= storages

    def number(self, op: Op, number: int) -> None:
        """Autograd's counter is at `number`: the nodes made in this thread since the op before belong to this op."""
        thread = threading.get_ident()
        for passed in range(self._last_number.get(thread, max(number - 1, 0)), number):
            self._by_number.setdefault(passed, []).append(op)
        self._last_number[thread] = number

    def _place(self, op: Op, node: Any) -> None:
        """Line, module and phase of an op."""
        stack = locate()  # our own frames, and those that torch may put around a mode, are skipped
        if node is None and stack.user is None and self.called_from is not None:
            stack = stack._replace(user=self.called_from)
        op.site, op.library, op.call = stack.site, stack.library, stack.call
        op.grad = torch.is_grad_enabled()
        op.after_model = self.model_called and not (self.stack.inside or self.ahead)
        op.recomputed = node is not None and stack.site is not None and is_recomputation(stack.frame)
        if node is not None and not op.recomputed:
            op.during, op.node = "backward", node.name()
            op.forward = self.forward_op(node)
            if stack.site is None and op.forward is not None:
                op.take_place(op.forward)
                return
            op.custom = stack.site is not None
        elif stack.optimizer:
            op.during = "optimizer"
        self._name_module(op, stack)

    def _name_module(self, op: Op, stack: StackLines) -> None:
        name, module = self.stack.current()
        if module is None and (op.during == "backward" or op.recomputed):
            running = self.stack.from_frame(stack.frame) or (self._line_modules.get(op.site) if op.site else None)
            name, module = running or ((op.forward.module, None) if op.forward else ("", None))
        elif op.site is not None and module is not None:
            self._line_modules[op.site] = (name, module)
        op.module = name
        if module is not None:
            op.module_type = type(module).__name__
        else:
            op.module_type = op.forward.module_type if op.forward else None

    def forward_op(self, node: Any) -> Op | None:
        """The op that made this node. Numbers of two threads may collide: then it is the op with the node's name."""
        number = node._sequence_nr()
        ops = self._by_number.get(number, []) if number < _ACCUMULATE else []
        if len(ops) > 1:
            base = node.name().split("Backward")[0].split("::")[-1].lower()
            alike = [op for op in ops if op.name.replace("_", "") in base or base in op.name.replace("_", "")]
            ops = alike or ops
        if not ops:
            return None
        return ops[-1] if ops[-1].forward is None else ops[-1].forward

    def record_operands(self, op: Op, args: tuple, kwargs: dict) -> int:
        """Record the op's inputs; returns which of parameters, inputs and targets flow into it."""
        reach = 0
        makers: list[Op] = []
        for tensor in argument_tensors(args, kwargs):
            storage = self.storage_info(tensor)
            if storage is not None:
                reach |= storage.reach
                if storage.maker is not None and len(makers) < 4:
                    makers.append(storage.maker)
        op.inputs, op.reach = tuple(makers), reach
        return reach

    def storage_info(self, tensor: torch.Tensor) -> StorageInfo | None:
        """The record of a tensor's storage; a storage without one comes from outside the step, and gets its record."""
        key = optional_storage_key(tensor)
        if key is None:
            if type(tensor) is not torch.Tensor:
                self.opaque_types.add(type(tensor).__name__)
            return None
        known = self.storages.get(key)
        if known is not None and known.role not in ("input", "target"):
            return known
        values = dense(tensor)
        if values is None:
            return None
        if known is None:
            leaf = tensor.requires_grad and tensor.is_leaf
            reach, role = (PARAMETER, "parameter") if leaf else (TARGET, "target")
            known = StorageInfo(values.untyped_storage(), None, reach, role)
            self.storages[key] = known
            if leaf:
                self.on_external(tensor, known)
        if known.role in ("input", "target"):
            view = _view(values)
            if known.views is None:
                known.views = set()
            if view not in known.views:  # a step may use any part of a data set in one storage
                known.views.add(view)
                self.on_external(tensor, known)
        return known

    def record_results(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, reach: int) -> None:
        """Record which op made each output, and what flowed into it."""
        for tensor in argument_tensors(out if isinstance(out, (list, tuple)) else (out,), {}):
            key = optional_storage_key(tensor)
            values = dense(tensor)
            if key is None or values is None:
                continue
            known = self.storages.get(key)
            if known is None:
                self.storages[key] = StorageInfo(values.untyped_storage(), op, reach)
            elif known.role in ("input", "target") and known.views is not None:
                known.views.add(_view(values))  # a part of what has been checked
        for tensor in written_tensors(schema, args, kwargs) if schema.writes else ():
            key = optional_storage_key(tensor)
            storage = None if key is None else self.storages.get(key)
            if storage is not None:
                storage.maker, storage.reach = op, storage.reach | reach


def _view(values: torch.Tensor) -> tuple:
    return values.storage_offset(), values.shape, values.stride()
