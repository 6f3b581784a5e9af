"""From hooks to steps: where a step begins and ends, how it is judged before each update, how a bad one is undone.

A step is a round: every optimizer steps once; an optimizer that steps again begins the next. A model's call after one
optimizer has stepped may belong to either, so the state before it is remembered until that is known.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nbdebug.observe.tensors import all_finite
from nbdebug.tools.guard.finite_check import CheckResult, StepCheck, at_once, decides_itself
from nbdebug.tools.guard.pending_reads import DeferredReads
from nbdebug.tools.guard.rollback import Kept, SetAside, Undo
from nbdebug.tools.guard.step import GuardedStep, StepHistory


class StepTracker:
    """The steps of one guard."""

    def __init__(self, guard: Any):
        self.guard, self.policy, self.ranks, self.buffers = guard, guard.policy, guard.ranks, guard.buffers
        self.current: GuardedStep | None = None
        self.history = StepHistory(guard.models, guard.optimizers)
        self.late = DeferredReads(self)
        self._next: tuple[int, Kept] | None = None  # where on the tape the next step may have begun
        self._aside: SetAside | None = None
        self._undo: Undo | None = None
        self._excused = any(
            not all_finite(b)
            for m in guard.models.values()
            for b in m.buffers()
            if b.is_floating_point() and b.layout is torch.strided and b.device.type != "meta"
        )

    # -- where steps begin and end ------------------------------------------------------------------------------------

    def called(self) -> None:
        """A model is about to be called."""
        if self.ranks is None:
            self.late.hear()
        else:
            self.ranks.notice()
        if self.current is None:
            self._begin(self.buffers.keep())
        elif self.current.stepped and self._next is None:
            self._next = len(self.current.tape.entries), self.buffers.keep()

    def loss_seen(self, roots: tuple[torch.Tensor, ...]) -> None:
        """A backward begins."""
        step = self.current or self._begin(self.buffers.keep())
        if self._undo is None or not self._undo.closure or not step.losses:  # a search may try a point that overflows
            step.note_loss(roots)

    def _begin(self, kept: Kept) -> GuardedStep:
        self._next = None
        self.current = GuardedStep(self.guard.steps + len(self.late.pending), kept, self.guard.script.tape)
        return self.current

    def _again(self) -> GuardedStep:
        """An optimizer steps again: what came since it last did belongs to the next step."""
        before, following = self.current, self._next
        assert before is not None
        tape, losses = self.guard.script.tape, before.losses[before.judged :]
        self._end()
        step = self._begin(following[1] if following else self.buffers.keep())
        if following:
            self.guard.script.continue_from(tape, following[0])
        step.losses = losses
        return step

    def _end(self) -> None:
        step, self.current, self._next = self.current, None, None
        assert step is not None
        step.tape = self.guard.script.tape
        if step.reads:
            self.late.pending.append(step)
        else:
            self.write(step)
        self.guard.script.begin()

    def write(self, step: GuardedStep) -> None:
        """A step is over and known."""
        self.history.add(step)
        self.guard.wrote(step.line())

    def forget(self) -> None:
        """The step that has begun is no step."""
        self.current = self._next = self._undo = None
        self.guard.script.begin()

    def finish(self) -> None:
        """The guard is closed: hear of everything that is still on its way."""
        if self.current is not None and self.current.stepped:
            self._end()
        self.late.hear(wait=True)

    @property
    def standing(self) -> tuple[bool, set[int]]:
        """Whether an update has yet to be looked back at; the optimizers that have stepped in this step."""
        return self._undo is not None, set(self.current.stepped if self.current is not None else ())

    def give_back(self) -> None:
        """The gradients of an update that was not to be made."""
        if self._aside is not None:
            self._aside.give_back()
            self._aside = None

    def leave(self) -> None:
        """Hold nothing any more, and leave nothing on the optimizers."""
        self.give_back()
        self._undo = self.current = self._next = None
        self.late.leave()

    # -- before an update ---------------------------------------------------------------------------------------------

    def before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """An optimizer is about to step: look, and let it, or not."""
        __tracebackhide__ = True
        if self.guard.script.ignored:
            return
        self.guard.script.pause()
        step = self.current or self._begin(self.buffers.keep())
        if id(optimizer) in step.stepped:
            step = self._again()
        if self.ranks is not None:
            self.late.hear()  # here all processes are in the same place, which they need not be when a model is called
            if self.current is None:  # undone, with an earlier step
                self._aside, step.outcome = SetAside(optimizer), "skipped"
                self.write(step)
                return
        step.tape = self.guard.script.tape
        step.note_settings(optimizer)
        self.history.note(optimizer)
        self._undo = Undo.needed(optimizer, args, kwargs)
        if self._undo is not None and self._undo.closure:
            return
        moved = [] if self._excused else self.buffers.moved(step.buffers)
        look = StepCheck(optimizer, step.losses, self.ranks, moved, self.scale)
        step.judged = len(step.losses)
        if self._undo is None and decides_itself(optimizer, look.device):
            self.late.decide(optimizer, step, look, self._excused)
        else:
            self._at_once(optimizer, step, look)

    @property
    def scale(self) -> torch.Tensor | None:
        """The GradScaler's scale, on its device."""
        scaler = self.guard.scaler
        return scaler._scale if scaler is not None and scaler.is_enabled() else None

    def _at_once(self, optimizer: torch.optim.Optimizer, step: GuardedStep, look: StepCheck) -> None:
        __tracebackhide__ = True
        numbers = at_once(look, self.scale is not None)
        step.take_down(numbers)
        reason = self.reason(numbers, step)
        if reason:
            self.guard.trip(step, reason)
            step.outcome = "skipped"
        elif numbers.scaler_skips:
            step.outcome = "scaler"
        elif self.policy.above(numbers.norm):
            step.outcome = "above"
        elif self.policy.clips(numbers.norm):
            step.clipped = True
            look.clip(self.policy.max_grad_norm, torch.tensor(numbers.norm, device=look.device))
        if step.outcome in ("skipped", "above"):
            self._aside = SetAside(optimizer)

    def reason(self, numbers: CheckResult, step: GuardedStep) -> str:
        """What is not finite; "" where all is well. A buffer that was not finite before (a mask) is no statistic."""
        if (reason := numbers.reason()) or math.isfinite(numbers.buffers):
            return reason
        spoiled = not self._excused and self.buffers.spoiled(step.buffers)
        if self.ranks is not None:
            spoiled = self.ranks.any(spoiled)
        self._excused = not spoiled
        return "buffer" if spoiled else ""

    # -- after an update ----------------------------------------------------------------------------------------------

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or has been kept from it."""
        __tracebackhide__ = True
        step = self.current
        if self.guard.script.ignored:
            return
        if step is None:
            self.give_back()
            return
        if self._aside is not None:
            self.give_back()
            self.buffers.restore(step.buffers)
        self.late.after(optimizer, step)
        undo = self._undo
        if undo is not None and step.outcome == "ok":
            self._look_back(step, undo)
        self._undo = None
        self._stepped(optimizer, step)

    def _look_back(self, step: GuardedStep, undo: Undo) -> None:
        """The update has been made, with a copy at hand: was it good?"""
        __tracebackhide__ = True
        reason, loss, norm = undo.judge(step.losses, self.ranks)
        if undo.closure:
            step.loss, step.norm, step.judged, step.bad_ranks = loss, norm, len(step.losses), undo.bad_ranks
        if reason:
            undo.restore()
            self.guard.trip(step, reason, undo)
            step.outcome = "skipped"

    def _stepped(self, optimizer: torch.optim.Optimizer, step: GuardedStep) -> None:
        step.stepped.add(id(optimizer))
        if len(step.stepped) == len(self.guard.optimizers):
            self._end()

    def scaler_updates(self) -> None:
        """The GradScaler is about to set its scale: has it kept an optimizer from stepping?"""
        __tracebackhide__ = True
        step, scaler = self.current, self.guard.scaler
        if step is None:
            return
        for optimizer in self.guard.optimizers.values():
            stage = scaler._per_optimizer_states[id(optimizer)].get("stage")
            if getattr(stage, "name", "") != "STEPPED" or id(optimizer) in step.stepped:
                continue
            step.note_settings(optimizer)
            numbers = at_once(StepCheck.of_a_skip(step.losses, self.ranks, self.scale), True)
            step.judged = len(step.losses)
            step.take_down(numbers)
            step.norm, step.outcome = None, "scaler"
            if reason := numbers.reason():
                self.guard.trip(step, reason)
                step.outcome = "skipped"
            self._stepped(optimizer, step)
            if self.current is None:
                return
