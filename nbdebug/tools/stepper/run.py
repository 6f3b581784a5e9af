"""The step in its own thread: what happens at each layer, and what is put back at the end."""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

import nbdebug
from nbdebug.observe.backward import Backward, EngineWatch
from nbdebug.observe.rerun import map_tensors, uncompiled
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import loss_in, output_tensors
from nbdebug.report import Finding
from nbdebug.tools.stepper import events as numbers
from nbdebug.tools.stepper.events import (
    AFTER,
    BACKWARD,
    BACKWARD_DONE,
    BEFORE,
    LOSS,
    LayerCall,
    LayerPlace,
    StepEvent,
    StepStop,
)
from nbdebug.tools.stepper.hooks import Layers, Named, NodeHooks
from nbdebug.tools.stepper.threads import Abandoned, CallContext, ProcessState, ThreadHandoff

Goal = Callable[[StepEvent], bool]


def into(event: StepEvent) -> bool:
    """The very next thing that happens."""
    return True


def never(event: StepEvent) -> bool:
    """On to the end."""
    return False


def non_finite(event: StepEvent) -> bool:
    """What makes something non-finite of finite values."""
    return event.culprit


def end_of_layer(here: LayerPlace) -> Goal:
    """The end of this layer; from there, of the next one beside it or around it. Where backward begins, too."""
    return _left(here, here.depth)


def end_of_parent(here: LayerPlace) -> Goal:
    """The end of the layer around this one."""
    return _left(here, max(0, here.depth - 1))


def _left(here: LayerPlace, depth: int) -> Goal:
    forward = not StepEvent(here).backward
    return lambda event: event.leaving and event.place.depth <= depth or forward and event.backward


def start_of(pattern: str) -> Goal:
    """Where a layer begins whose name or type the pattern fits, or its backward; "loss": at the loss."""
    return lambda event: (
        event.place.phase in (BEFORE, BACKWARD)
        and matches(pattern, event.place.name, event.place.module_type)
        or event.place.phase == LOSS
        and pattern == "loss"
    )


def matches(pattern: str, name: str, kind: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(kind, pattern)


def check(pattern: str, types: Mapping[str, str]) -> None:
    """types: every layer's name and type. Raises ValueError where nothing fits."""
    if not isinstance(pattern, str) or not pattern.strip():
        raise ValueError(f'run_to takes the name or type of a layer, or a pattern such as "blocks.*"; got {pattern!r}')
    if pattern != "loss" and not any(matches(pattern, name, kind) for name, kind in types.items()):
        near = [name for name in types if name and pattern.strip("*") in name] or [name for name in types if name]
        more = f" and {len(near) - 6} more" if len(near) > 6 else ""
        raise ValueError(f"No layer has the name or the type {pattern!r}. There are {', '.join(near[:6])}{more}")


_OURS = os.path.dirname(nbdebug.__file__) + os.sep


class StepRun:
    """step: computes the loss, or whatever the model gives. layers: whose calls are followed. before: what is put back
    at the end, and always when the step is abandoned; restore: also when it is finished.

    stop: where it waits, None while it does not; last: the stop before; result, error: what came of it; raised: where
    the error was; explained: its cause, once it was requested; fault: why nbdebug no longer stops, or "".
    """

    def __init__(
        self,
        step: Callable[[], Any],
        layers: Layers,
        before: Snapshot,
        caller: CallContext,
        *,
        backward: bool,
        restore: bool,
    ):
        self.step, self.layers, self.before, self.backward, self.restore = step, layers, before, backward, restore
        self.goal: Goal = into
        self.stop: StepStop | None = None
        self.last: LayerPlace | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.raised: LayerPlace | None = None
        self.explained: tuple[Finding, ...] | None = None
        self.fault, self._went_back = "", False
        self._caller, self._shared, self._callers_turn = caller, ProcessState(), True
        self._gradients: list[NodeHooks] = []
        self._open: list[LayerCall] = []  # whose backward has begun
        self._sound = self._spoilable = True  # until now; at the beginning of a backward
        context = contextvars.copy_context()
        self.turns = ThreadHandoff(lambda: context.run(self._whole), "nbdebug step_through")
        layers.connect(self)

    # The thread of the step ------------------------------------------------------------------------------------------

    def _whole(self) -> None:
        self._change_over()  # the same numbers, and from here on each has its own
        try:
            with self._caller.resume(), contextlib.ExitStack() as attached:
                attached.enter_context(uncompiled())
                attached.callback(self.layers.detach)
                self.layers.attach()
                engine = EngineWatch(self._backward_begins, self._backward_ended)
                attached.callback(engine.detach)
                engine.attach()
                attached.callback(self._detach_gradients)
                self._stepped()
        except Abandoned:
            pass
        except BaseException as error:  # the user's, whatever it is: it is reported, and it ends this thread only
            self.error, self.raised = _from_users_frame(error), self._where(error)
        finally:
            with numbers.unobserved():  # modes that the caller had are this thread's until it ends
                self._finished()

    def _stepped(self) -> None:
        returned = self.step()
        with numbers.unobserved():
            loss = _loss(returned)
            due = self.backward and not self._went_back and loss is not None and loss.requires_grad
        if loss is not None and not self._went_back:
            self.border(self._at_loss, loss)
            if due and torch.is_grad_enabled():
                loss.backward()
        with numbers.unobserved():
            self.result = map_tensors(
                returned, lambda tensor: tensor.detach()
            )  # its graph would keep the step's memory

    def _finished(self) -> None:
        """Everything as it was, or as a plain step leaves it; the caller's random numbers as the caller left them."""
        self.stop, undo = None, self.restore or self.turns.abandoned
        self.layers.forget()
        self._open.clear()
        if undo:
            if not self._callers_turn:
                self._change_over()
            callers = ProcessState()
            self.before.restore()
            callers.put_back()
        self.step = self.before = self._caller = self._shared = None  # type: ignore[assignment]

    def event(self, event: StepEvent, inputs: Named, outputs: Named, site: Any = None) -> None:
        """Wait here, where the goal asks for it. Raises Abandoned."""
        self.turns.check()
        if self.fault or not self.goal(event):
            return
        self.stop = StepStop(event.place, inputs, outputs, site=site, culprit=event.culprit)
        if event.place.phase == AFTER:
            self.stop.notes += self.layers.remarks(event.culprit)
        self.stop.read()
        self._change_over()
        self.turns.wait()  # abandoned: the numbers in force stay the caller's
        self._change_over()
        self.stop, self.last = None, event.place

    def _change_over(self) -> None:
        self._shared.change_over()
        self._callers_turn = not self._callers_turn

    def border(self, what: Callable[..., Any], *args: Any) -> None:
        """A fault of nbdebug's own ends the stops, not the step."""
        if self.fault or not self.turns.inside:
            return
        try:
            with numbers.unobserved():
                what(*args)
        except Abandoned:
            raise
        except Exception as fault:
            self.fault = f"{type(fault).__name__}: {fault}"

    # What happens in it ----------------------------------------------------------------------------------------------

    def begins(self, call: LayerCall) -> None:
        call.worst = numbers.worst_value([tensor for _, tensor in call.given])
        culprit = call.depth == 0 and call.worst > numbers.FINE and self._sound
        self.event(StepEvent(call.place(BEFORE), culprit), call.given, [], call.site)

    def ends(self, call: LayerCall, output: Any) -> None:
        outputs = [(name, tensor.detach()) for name, tensor in numbers.named_tensors(output, "output")]
        low, high, worst = numbers.value_range([tensor for _, tensor in outputs])
        self.layers.note(call, low, high, worst == numbers.FINE)
        culprit = call.spoils(worst)
        if culprit:
            call.blame()
        if call.depth == 0:
            self._sound = self._sound and worst == numbers.FINE
        self.event(StepEvent(call.place(AFTER), culprit), call.given, outputs, call.site)

    def _detach_gradients(self) -> None:
        while self._gradients:
            self._gradients.pop().detach()

    def _where(self, error: BaseException) -> LayerPlace | None:
        """The layer that an error came out of; of one in backward, the innermost that had begun."""
        raised = self.layers.raised_in(error)
        return raised or (self._open[-1].place(BACKWARD) if self._open else None)

    def _at_loss(self, loss: torch.Tensor) -> None:
        culprit = self._sound and not numbers.finite([loss])
        self._sound = self._sound and not culprit
        self.event(StepEvent(LayerPlace("the loss", "", LOSS, 0), culprit), [], [("loss", loss.detach())])

    def _backward_begins(self, backward: Backward) -> None:
        self.border(self._follow, backward)

    def _follow(self, backward: Backward) -> None:
        self._went_back = self._went_back or backward.accumulate
        for call in self.layers.in_order():
            call.blamed, call.finite_gradient = False, True
        # Of a loss that is not finite no gradient can be: nothing is to blame then.
        self._sound = self._spoilable = numbers.finite([r for r in backward.roots if isinstance(r, torch.Tensor)])
        gradients = NodeHooks(
            self.layers.calls, self.layers.outside, self._arrived, self._handed_on, numbers.finite, self.border
        )
        gradients.attach(backward)
        self._gradients.append(gradients)

    def _backward_ended(self, backward: Backward, result: Any) -> None:
        if self.turns.inside:
            self._open.clear()
            self._detach_gradients()

    def _arrived(self, call: LayerCall, gradients: Named) -> None:
        """A gradient that is not finite and comes to an outermost layer was made outside of any, unless a layer that
        ran backward before has made one."""
        self._open.append(call)
        culprit = self._sound and call.depth == 0 and not call.finite_gradient
        self._sound = self._sound and not culprit
        self.event(StepEvent(call.place(BACKWARD), culprit), gradients, [])

    def _handed_on(self, call: LayerCall, arrived: Named, went: Named, finite: bool) -> None:
        culprit = self._spoilable and not finite and call.finite_gradient and not call.blamed
        self._sound = self._sound and finite
        if culprit:
            call.blame()
        if call in self._open:
            self._open.remove(call)
        self.layers.note_gradient(call, finite)
        self.event(StepEvent(call.place(BACKWARD_DONE), culprit), arrived, went)


def _loss(returned: Any) -> torch.Tensor | None:
    """The one number in what a step has returned: itself, what it calls loss, or the first number that wants a
    gradient."""
    named = loss_in(returned)
    candidates = [t for t in (returned, named) if isinstance(t, torch.Tensor)]
    candidates += output_tensors(returned) if isinstance(returned, (tuple, list)) else []
    return next((t for t in candidates if t.numel() == 1 and (t.requires_grad or t is returned or t is named)), None)


def _from_users_frame(error: BaseException) -> BaseException:
    """Its traceback without the first frames, which are nbdebug's and hold the whole run."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_OURS):
        at = at.tb_next
    return error.with_traceback(at)
