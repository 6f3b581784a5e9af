"""The step log: a training step recorded at almost no cost, as the calls of models and the ops from there to backward.

The ops inside a model are left out, since its code can be run again. So only the lines around it cost anything,
usually a handful of ops that prepare the batch and compute the loss. Tensors are held by reference and nothing is
copied, except what the loss code overwrites. `Replay(log.tape, models=log.models)` repeats the calls, the ops between
them, and backward. Where there is no model, every op is recorded.

A call counts when it is not inside another call, and not inside backward (checkpointing runs a part of a model again);
under `no_grad` only a few do, which may compute a target. The parts of a model may be called by themselves, as a
method that is not `forward` does. A model that is called many times without a backward, as when validation lacks
`no_grad`, makes no step: calls whose graph is gone are dropped. Nor is much work between two steps (loading, averaging
weights, validation) a part of the next: it is left out when it is long or writes to tensors that are not its own.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

from nbdebug.interrupts import Uninterrupted, uninterrupted
from nbdebug.observe.backward import Backward, EngineWatch, leads_to, tag_nodes
from nbdebug.observe.locations import locate
from nbdebug.observe.modules import (
    WRAPPED_CALL,
    ModelHook,
    ModuleNames,
    ModuleStack,
    WrapperWatch,
    callable_module,
    callable_modules,
)
from nbdebug.observe.ops import is_distributed, schema_of, written_tensors
from nbdebug.observe.recorder import Recorder
from nbdebug.observe.snapshot import CallEnvironment
from nbdebug.observe.tape import BackwardEntry, CallEntry, Ref, Tape, TapeEntry
from nbdebug.observe.tensors import optional_storage_key, output_tensors, tensors_in
from nbdebug.text import in_a_line

MOST_OPS = 4000
"""Ops recorded between a model's call and backward, at most; a loss takes tens. More belong to something else."""
MOST_BEFORE = 256
"""Ops recorded before a model's first call in a step (the batch is prepared, a teacher asked), and after a backward
(gradients are clipped), at most."""
_MOST_WITHOUT_GRADIENT = 4
"""Calls of models under `no_grad` that are recorded in a step (a target is computed), at most: more are validation."""
_MOST_WRITTEN = 2**22
"""Bytes of parameters that an op may write outside of models (a renormalization) and is recorded, at most: they are
copied first."""
_MOST_OVERRUNS = 3
"""After so many steps in a row with more than that, the ops before a call are not recorded any more."""
_CALLS_WITHOUT_BACKWARD = 16
"""From so many calls on, those whose graph is gone are dropped."""
_CALL = nn.Module._call_impl.__code__


class LossRecorder(Recorder):
    """A recorder beside which compiled code runs as usual; its ops are not recorded then. room: how many ops to record
    at most. careful: "before" (the first call of a model) or "after" (a backward), where an op that writes to a tensor
    that is not the step's own, or exchanges data with other processes, is no part of the step; else "". overrun: there
    were more ops than room, or such a one, and what it tells is not to be used. parameters: the models' own;
    gradients_known: whether the tape has the gradients, for ops after a backward."""

    room = MOST_OPS
    overrun = False
    careful = ""
    gradients_known = True
    parameters: Callable[[], list[torch.Tensor]]
    on_fault: Callable[[Exception], Any]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True  # of the method below: torch asks the class that defines it

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else torch.compile would not use compiled code below this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            if not (self.paused or self.disabled_by):
                if self.careful == "after" and not self.gradients_known:
                    self._note_gradients(func, args)
                if self.count >= self.room or self.careful and self._has_side_effects(func, args, kwargs or {}):
                    self.paused, self.overrun = True, self.careful != "after"  # after a backward the step is known
        except Exception as fault:
            self.disable(fault)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_gradients(self, func: Any, args: tuple) -> None:
        """The first op after a backward that takes gradients: the tape gets to know them. A GradScaler's own is no part
        of what made the step bad, and ends the recording."""
        if "_amp_" in str(func):
            self.paused = True
        elif any(tensor.dim() for tensor in tensors_in(args)):  # before it a scaler only computes numbers
            self.gradients_known = True
            self.tape.enter_gradients(self.parameters())

    def disable(self, fault: Exception) -> None:
        """A fault of ours goes to the error boundary."""
        self.disabled_by, self.fault = in_a_line(fault), fault
        self.on_fault(fault)

    def _has_side_effects(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if is_distributed(func):
            return True
        schema = schema_of(func)
        written = written_tensors(schema, args, kwargs) if schema.writes else []
        foreign = [t for t in written if self.tape.find(t) is None]
        if not foreign or self.careful == "after":
            return bool(foreign)
        own = {optional_storage_key(p) for p in self.parameters()}
        few = sum(t.nbytes for t in foreign) <= _MOST_WRITTEN
        return not few or any(optional_storage_key(t) not in own for t in foreign)

    @property
    def tape(self) -> Tape:
        tape = self.watchers[0]
        assert isinstance(tape, Tape), "it is the only watcher of a step log"
        return tape


def leave_mode_stack(recorder: LossRecorder) -> bool:
    """Take a recorder off the stack of modes, also from below those of other guards; False where that can't be done."""
    above = []
    while isinstance(top := _get_current_dispatch_mode(), LossRecorder) and top is not recorder:
        top.__exit__(None, None, None)
        above.append(top)
    gone = top is recorder
    if gone:
        recorder.__exit__(None, None, None)
    elif not any(mode is recorder for mode in _get_current_dispatch_mode_stack()):
        recorder.left()  # it was put on within a backward, whose engine has put back its own stack
        gone = True
    for other in reversed(above):
        other.__enter__()
    return gone


class StepLog:
    """See the module's docstring. models: by the user's names. on_call: called before each call; on_loss: called with
    the roots of each backward that fills `.grad`. error_boundary: runs what a hook does, and lets no fault of ours out.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        on_call: Callable[[], None],
        on_loss: Callable[[tuple[torch.Tensor, ...]], None],
        error_boundary: Callable[..., Any],
    ):
        self.models, self.on_call, self.on_loss, self.error_boundary = dict(models), on_call, on_loss, error_boundary
        self.recorder = LossRecorder(ModuleStack(ModuleNames(models), lambda *_: None), [], lambda *_: None)
        self.recorder.light = self.recorder.paused = True
        self.recorder.parameters = self._parameters
        self.recorder.on_fault = lambda fault: error_boundary(_raise, fault)
        self.engine = EngineWatch(
            lambda call: self.error_boundary(self._before_backward, call),
            lambda call, result: self.error_boundary(self._after_backward, call, result),
        )
        self.compiled = WrapperWatch(
            callable_modules(models),
            lambda *call: self.error_boundary(self._enter, *call),
            lambda *call: self.error_boundary(self._leave, *call),
        )
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        self._on_stack = self._resume = self._loads = False
        self._of_others = False  # whether the backward that runs is of other models
        self._depth, self._outermost = 0, ""
        self._key = f"nbdebug {id(self)}"
        self.rerunning = False  # while we run the step again, which is no step of the user's
        self._overruns = 0
        self._reset()

    def begin(self) -> None:
        """Drop the step so far: the next one begins."""
        self._overruns = self._overruns + 1 if self.recorder.overrun else 0
        self._reset()
        if self._handles:
            self.compiled.refresh()
        if not self.models:
            self._record()
        elif self._overruns < _MOST_OVERRUNS and self._handles:
            self._begin_part("before")
            self._record()

    def _begin_part(self, careful: str) -> None:
        """From here on so many ops are recorded. careful: as the recorder's."""
        self.recorder.careful = careful
        self.recorder.room = self.recorder.count + (MOST_BEFORE if careful else MOST_OPS)

    def _reset(self) -> None:
        self.pause()
        self.tape = Tape(self.recorder)
        self.recorder.watchers = [self.tape]
        self.recorder.new_step(0)
        self.recorder.count, self.recorder.overrun, self._without_gradient = 0, False, 0
        self._begin_part("")
        self._calls: list[list[weakref.ref]] = []  # since the last backward: the tags of each call's outputs

    def continue_from(self, tape: Tape, position: int) -> None:
        """Take the entries of this tape from `position` on as the beginning of this step."""
        tape.entries = tape.entries[position:]
        self.tape, self.recorder.watchers = tape, [tape]

    # -- attaching ----------------------------------------------------------------------------------------------------

    @uninterrupted
    def attach(self) -> None:
        self.engine.attach()
        self.compiled.attach()
        for name, module in callable_modules(self.models).items():
            self._handles += [
                module.register_forward_pre_hook(ModelHook(self, "_enter", name), with_kwargs=True, prepend=True),
                module.register_forward_hook(ModelHook(self, "_leave", name), with_kwargs=True, always_call=True),
            ]
        self.begin()

    @uninterrupted
    def detach(self) -> None:
        self.pause()
        self.engine.detach()
        self.compiled.detach()
        while self._handles:
            self._handles.pop().remove()

    def pause(self) -> None:
        """Record no ops from here on, and leave the stack of modes where that is possible: not in inference mode, which
        restores the stack when it ends."""
        self.recorder.paused = True
        if self._on_stack and not torch.is_inference_mode_enabled():
            with Uninterrupted():
                self._on_stack = not leave_mode_stack(self.recorder)

    def _record(self) -> None:
        """Record ops from here on, unless a mode of the user's own is active: its end would remove ours."""
        if torch.is_inference_mode_enabled():  # nothing in here can be a part of a step
            return
        if not self._on_stack and all(isinstance(m, LossRecorder) for m in _get_current_dispatch_mode_stack()):
            with Uninterrupted():
                self.recorder.__enter__()
                self._on_stack = True
        if self._on_stack:
            self.recorder.paused = False
        else:
            self._unfit("another dispatch mode was active")

    def loading(self, begins: bool) -> None:
        """A data loader begins to read a batch, or has read it: what runs there makes the data, and is no part of the
        step, as in a loader with workers."""
        if threading.get_ident() != self._thread:
            return
        if begins and not self.recorder.paused:
            self._loads = True
            self.pause()
        elif not begins and self._loads:
            self._loads = False
            self._record()

    def _unfit(self, reason: str) -> None:
        self.tape.entries.append(TapeEntry(None, (), {}, (), False, reason))  # type: ignore[arg-type]

    # -- hooks --------------------------------------------------------------------------------------------------------

    @property
    def ignored(self) -> bool:
        """Whether this is no step to record: we run it again, or a tracer records it already."""
        return self.rerunning or any(
            isinstance(mode, Recorder) and not isinstance(mode, LossRecorder)
            for mode in _get_current_dispatch_mode_stack()
        )

    def _relevant(self) -> bool:
        return not self.ignored and not torch.is_inference_mode_enabled() and torch._C._current_autograd_node() is None

    def count_nested(self, name: str, change: int) -> bool:
        """Whether the call of a part begins or ends inside another call; if so, count it. In another thread copies of
        the model run, as of DataParallel."""
        if threading.get_ident() != self._thread:
            return True
        inside = self._depth > (change < 0) and name != self._outermost
        if inside:
            self._depth += change
        return inside

    def _interrupted(self, name: str) -> bool:
        """Whether the outermost call has ended without its hook: Ctrl-C in a forward runs none. Checked where the next
        call from outside may come."""
        if name != self._outermost and "/" in name:
            return False
        module, calls, frame = callable_module(self.models, self._outermost), 0, sys._getframe(1)
        while frame is not None:
            calls += (
                frame.f_code is _CALL
                and frame.f_locals.get("self") is module
                or frame.f_code is WRAPPED_CALL
                and any(called == self._outermost for _, called in frame.f_locals["watches"])
            )
            frame = frame.f_back  # type: ignore[assignment]
        return calls <= (name == self._outermost)

    def _enter(self, name: str, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._depth and self._interrupted(name):
            self._depth = 0
        if self._depth or not self._relevant() or self._validates():
            self._depth += bool(self._depth)
            if not self._depth and not self.ignored:
                self.pause()  # validation, for example: not a part of the step
                self.on_call()
            return
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        self._depth, self._outermost = int(not transformed), name
        self.pause()
        if self.recorder.overrun:
            self.tape.reset()
            self.recorder.overrun = False
            self._overruns += 1
        self._begin_part("" if torch.is_grad_enabled() else self.recorder.careful)
        self.on_call()
        self._drop_dead_calls()
        if transformed:  # inside torch.func its tensors can't be kept: its ops are recorded one by one, as a loss's are
            self.tape.transformed = True
            self._record()
            return
        leaves, spec = tree_flatten((args, kwargs))
        module = callable_module(self.models, name)
        self._call = self.tape.references(leaves), spec, locate().site, CallEnvironment(module)

    def _leave(self, name: str, args: tuple, kwargs: dict, out: Any = None) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._depth != 1:
            self._depth = max(self._depth - 1, 0)
            return
        self._depth = 0
        leaves, spec, site, environment = self._call
        outputs = output_tensors(out)
        self._calls.append(tag_nodes(outputs, self._key))
        self.tape.call(name, leaves, spec, outputs, site, environment)
        self._record()

    def _validates(self) -> bool:
        """Whether the model is called under `no_grad` more often than a target needs. What was recorded of such calls
        is dropped, or it would hold their batches."""
        if torch.is_grad_enabled():
            self._without_gradient = 0
            return False
        self._without_gradient += 1
        if self._without_gradient <= _MOST_WITHOUT_GRADIENT:
            return False
        if self._without_gradient == _MOST_WITHOUT_GRADIENT + 1 and self.recorder.careful == "before":
            self._reset()
            self._without_gradient = _MOST_WITHOUT_GRADIENT + 1
        return True

    def _before_backward(self, call: Backward) -> None:
        if self._depth or self.ignored or threading.get_ident() != self._thread:  # in a call: it will be made again
            return
        self._resume = not self.recorder.paused
        self.pause()
        self._of_others = (
            call.accumulate and bool(self.models) and not leads_to(call.roots, self._key, self._parameters)
        )
        if call.accumulate and not self._of_others:
            self.on_loss(call.roots)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for model in self.models.values() for p in model.parameters()]

    def _after_backward(self, call: Backward, result: Any) -> None:
        if self._depth or self.ignored or threading.get_ident() != self._thread:
            return
        if self._of_others:
            self._of_others = False
            if self._resume:
                self._record()
            return
        if self.recorder.overrun:
            self._unfit(f"more than {MOST_OPS:,} ops ran outside the model")
        self.tape.backward(call, result)
        if call.accumulate:
            self._calls.clear()
            if self.models:
                self._begin_part("after")
                self.recorder.gradients_known = False
            self._record()
        elif self.tape.entries:
            self._record()  # what is computed from these gradients is part of the loss

    def _drop_dead_calls(self) -> None:
        """After many calls without a backward, drop them all if no graph is left that backward could use."""
        if len(self._calls) < _CALLS_WITHOUT_BACKWARD or any(isinstance(e, BackwardEntry) for e in self.tape.entries):
            return
        if not any(tag() is not None for tags in self._calls for tag in tags):
            self._reset()


def model_inputs(tape: Tape) -> list[tuple[str, tuple, dict]]:
    """The calls of models in a step: name, args, kwargs. References, no copies."""

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        external = tape.externals.get(leaf.value)
        return tape.call_inputs.get(leaf) if external is None else external.tensor

    calls = [e for e in tape.entries if isinstance(e, CallEntry)]
    calls = [e for e in calls if e.environment.grad] or calls
    return [(e.model, *e._replace(leaves=tuple(map(tensor, e.leaves))).arguments) for e in calls]


def _raise(fault: Exception) -> None:
    raise fault
