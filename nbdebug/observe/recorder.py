"""Every op of a step, with its line, its module and, in backward, the forward op whose derivative it computes.

One dispatch mode sees each op below autograd, forward, backward and optimizer alike. An autograd node takes the next
number of a counter just before its op runs; so a counter that grew names the op's node, and when the engine later runs
that node, the number leads back to the forward op. What to make of an op is left to watchers; they get its operands'
history too.

A fault in a watcher must not break the training: it gives one warning, and the recorder is disabled.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nbdebug.observe.locations import Site, is_recomputation, locate
from nbdebug.observe.modules import ModuleStack
from nbdebug.observe.ops import Schema, argument_tensors, named_arguments, schema_of, written_tensors
from nbdebug.observe.tensors import PARAMETER, TARGET, StorageInfo, dense, optional_storage_key

_current_node = torch._C._current_autograd_node
_next_number = torch._C._autograd._get_sequence_nr
_ACCUMULATE = 2**63  # nodes that only store gradients have no number of their own


_SCALARS_KEPT = frozenset({"pow"})  # whose derivative's behaviour depends on a number


class Op:
    """One op that ran. forward: the forward op whose derivative this one computes (backward only). custom: run by the
    user's own backward. library: the innermost line of an installed package, where that is not the user's line. inputs:
    the ops that made its operands. scalars: its number arguments by name. grad: whether autograd recorded it.
    recomputed: a forward op that runs again during backward (checkpointing). after_model: run outside of a model that
    has been called."""

    __slots__ = (
        "after_model",
        "custom",
        "during",
        "forward",
        "func",
        "grad",
        "index",
        "inputs",
        "library",
        "module",
        "module_type",
        "name",
        "node",
        "recomputed",
        "scalars",
        "site",
        "step",
    )

    def __init__(self, index: int, func: Any, name: str, step: int):
        self.index, self.func, self.name, self.step = index, func, name, step
        self.site: Site | None = None
        self.library: Site | None = None
        self.module, self.node, self.during = "", "", "forward"
        self.module_type: str | None = None
        self.forward: Op | None = None
        self.custom, self.recomputed, self.grad, self.after_model = False, False, True, False
        self.inputs: tuple[Op, ...] = ()
        self.scalars: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Op {self.index} {self.name} {self.during} {self.module} {self.site}>"


class Watcher(Protocol):
    """`before` may keep what the op is about to overwrite; its result is handed to `after`."""

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> Any: ...

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: Any) -> None: ...


class Recorder(TorchDispatchMode):
    """See the module's docstring. `on_external(tensor, storage)` is called with each tensor that comes from outside.
    light: only lines and modules of forward ops, for a tape; what tensors are made of is not followed."""

    light = False
    paused = False  # it may have to stay on the stack of modes while nothing is to be recorded

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap each call of a mode, to keep its compiler away;
        compiled code is run in eager here anyway."""
        return False

    def __init__(
        self, stack: ModuleStack, watchers: list[Watcher], on_external: Callable[[torch.Tensor, StorageInfo], None]
    ):
        super().__init__()
        self.stack, self.watchers, self.on_external = stack, watchers, on_external
        self.storages: dict[int, StorageInfo] = {}
        self.step, self.count, self.disabled_by = 0, 0, ""
        self.fault: Exception | None = None
        self.model_called = False
        self.opaque_types: set[str] = (
            set()
        )  # types of tensors that handle ops themselves, whose values can't be followed
        self.custom_backward = ""  # light: what has a backward of its own, which a replay of the ops does not know
        self.replaying: Op | None = None  # set while a recorded op is run again: its line and module are known
        self.called_from: Site | None = None  # set while a recorded call is made again: the line that made it first
        self.in_backward: Callable[..., Any] | None = None  # light: runs the ops of backward instead
        self.numbered = False  # light: whether forward ops can be found by the numbers of their autograd nodes
        self._by_number: dict[int, list[Op]] = {}
        self._last_number: dict[int, int] = {threading.get_ident(): _next_number()}
        self._line_modules: dict[Site, tuple[str, Any]] = {}

    def new_step(self, step: int) -> None:
        """Forget what only one step needs. Memories of tensors that died go too."""
        self.step, self.model_called = step, False
        self._by_number.clear()
        self.storages = {k: m for k, m in self.storages.items() if not m.ref.expired()}
        for storage in self.storages.values():
            storage.views = None
            if storage.maker is not None:
                storage.maker.inputs = ()  # or the ops of every step before would be kept

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
            kept = [w.before(op, schema, args, kwargs) for w in self.watchers]
        except Exception as fault:  # the border: nothing of ours may stop the training
            self.disable(fault)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        try:
            if not self.light:
                self.record_results(op, schema, args, kwargs, out, reach)
            for watcher, token in zip(self.watchers, kept, strict=True):
                watcher.after(op, schema, args, kwargs, out, token)
        except Exception as fault:
            self.disable(fault)
        return out

    def disable(self, fault: Exception) -> None:
        """Record nothing more, after a fault of our own, and warn once."""
        self.disabled_by = f"{type(fault).__name__}: {fault}"
        self.fault = fault
        warnings.warn(
            f"nbdebug stopped watching this run because of a fault of its own ({self.disabled_by}). "
            "The training itself goes on unharmed.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _describe(self, func: Any, schema: Schema, args: tuple, kwargs: dict) -> Op:
        op = Op(self.count, func, schema.base, self.step)
        self.count += 1
        node = _current_node()
        number, thread = _next_number(), threading.get_ident()
        if schema.base in _SCALARS_KEPT:
            op.scalars = {n: v for n, v in named_arguments(schema, args, kwargs) if isinstance(v, (int, float))}
        if self.replaying is not None and node is None:
            known = self.replaying
            op.site, op.library, op.module, op.module_type = known.site, known.library, known.module, known.module_type
            op.during, op.after_model, op.grad = known.during, known.after_model, known.grad
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
        """Autograd's counter has come to `number`: the nodes made in this thread since the op before are this op's."""
        thread = threading.get_ident()
        for missed in range(self._last_number.get(thread, max(number - 1, 0)), number):
            self._by_number.setdefault(missed, []).append(op)
        self._last_number[thread] = number

    def _place(self, op: Op, node: Any) -> None:
        """Line, module and phase of an op."""
        stop = locate()  # our own frames, and those that torch may put around a mode, are skipped
        if node is None and stop.user is None and self.called_from is not None:
            stop = stop._replace(user=self.called_from)
        op.site, op.library = stop.site, stop.library
        op.grad = torch.is_grad_enabled()
        op.after_model = self.model_called and not self.stack.inside
        op.recomputed = node is not None and stop.site is not None and is_recomputation(stop.frame)
        if node is not None and not op.recomputed:
            op.during, op.node = "backward", node.name()
            op.forward = self.forward_op(node)
            if stop.site is None and op.forward is not None:
                made = op.forward
                op.site, op.library, op.module, op.module_type = made.site, made.library, made.module, made.module_type
                return
            op.custom = stop.site is not None
        elif stop.optimizer:
            op.during = "optimizer"
        self._name_module(op, stop)

    def _name_module(self, op: Op, stop: Any) -> None:
        name, module = self.stack.current()
        if module is None and (op.during == "backward" or op.recomputed):
            found = self.stack.from_frame(stop.frame) or (self._line_modules.get(op.site) if op.site else None)
            name, module = found or ((op.forward.module, None) if op.forward else ("", None))
        elif op.site is not None and module is not None:
            self._line_modules[op.site] = (name, module)
        op.module = name
        if module is not None:
            op.module_type = type(module).__name__
        else:
            op.module_type = op.forward.module_type if op.forward else None

    def forward_op(self, node: Any) -> Op | None:
        """The op that made this node. Numbers of two threads may collide: then the op named like the node is meant."""
        number = node._sequence_nr()
        made = self._by_number.get(number, []) if number < _ACCUMULATE else []
        if len(made) > 1:
            plain = node.name().split("Backward")[0].split("::")[-1].lower()
            alike = [op for op in made if op.name.replace("_", "") in plain or plain in op.name.replace("_", "")]
            made = alike or made
        if not made:
            return None
        return made[-1] if made[-1].forward is None else made[-1].forward

    def record_operands(self, op: Op, args: tuple, kwargs: dict) -> int:
        """Note what the op is given; returns which of parameters, inputs and targets flow into it."""
        reach = 0
        makers: list[Op] = []
        for tensor in argument_tensors(args, kwargs):
            storage = self.storage_info(tensor)
            if storage is not None:
                reach |= storage.reach
                if storage.maker is not None and len(makers) < 4:
                    makers.append(storage.maker)
        op.inputs = tuple(makers)
        return reach

    def storage_info(self, tensor: torch.Tensor) -> StorageInfo | None:
        """What is known of a tensor's memory; made known when it is seen for the first time."""
        number = optional_storage_key(tensor)
        if number is None:
            if type(tensor) is not torch.Tensor:
                self.opaque_types.add(type(tensor).__name__)
            return None
        known = self.storages.get(number)
        if known is not None and known.role not in ("input", "target"):
            return known
        values = dense(tensor)
        if values is None:
            return None
        if known is None:
            leaf = tensor.requires_grad and tensor.is_leaf
            reach, role = (PARAMETER, "parameter") if leaf else (TARGET, "target")
            known = StorageInfo(values.untyped_storage(), None, reach, role)
            self.storages[number] = known
            if leaf:
                self.on_external(tensor, known)
        if known.role in ("input", "target"):
            view = _view(values)
            if known.views is None:
                known.views = set()
            if view not in known.views:  # a step may use any part of a data set that lies in one memory
                known.views.add(view)
                self.on_external(tensor, known)
        return known

    def record_results(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, reach: int) -> None:
        """Note who made what the op gives, and what flowed into it."""
        for tensor in argument_tensors(out if isinstance(out, (list, tuple)) else (out,), {}):
            number = optional_storage_key(tensor)
            values = dense(tensor)
            if number is None or values is None:
                continue
            known = self.storages.get(number)
            if known is None:
                self.storages[number] = StorageInfo(values.untyped_storage(), op, reach)
            elif known.role in ("input", "target") and known.views is not None:
                known.views.add(_view(values))  # a part of what was looked at already
        for tensor in written_tensors(schema, args, kwargs) if schema.writes else ():
            number = optional_storage_key(tensor)
            storage = None if number is None else self.storages.get(number)
            if storage is not None:
                storage.maker, storage.reach = op, storage.reach | reach


def _view(values: torch.Tensor) -> tuple:
    return values.storage_offset(), values.shape, values.stride()
