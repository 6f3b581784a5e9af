"""From hooks to steps: where a step begins and ends, how it is checked before each update and a bad one rolled back.

A step is a round: every optimizer steps once; an optimizer that steps again begins the next. A model's call after one
optimizer has stepped may belong to either, so the state before it is remembered until that is known.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nbdebug.observe.tensors import all_finite
from nbdebug.tools.guard.distributed import withheld_by_scaler
from nbdebug.tools.guard.finite_check import CheckResult, StepCheck, read_check, skips_on_device
from nbdebug.tools.guard.pending_reads import PendingReads
from nbdebug.tools.guard.rollback import BufferCopies, UpdateBackup, WithheldGradients
from nbdebug.tools.guard.step import GuardedStep, StepHistory


class StepTracker:
    """The steps of one guard. current: the one that has begun."""

    def __init__(self, guard: Any):
        self.guard, self.policy, self.ranks, self.buffers = guard, guard.policy, guard.ranks, guard.buffers
        self.current: GuardedStep | None = None
        self.history = StepHistory(guard.models, guard.optimizers)
        self.pending = PendingReads(self)
        self._next: tuple[int, BufferCopies] | None = None  # where on the tape the next step may have begun
        self._withheld: WithheldGradients | None = None
        self._backup: UpdateBackup | None = None
        self._ignore_buffers = False
        self.buffers.note_masks()

    # -- where steps begin and end ------------------------------------------------------------------------------------

    def model_called(self) -> None:
        """A model is about to be called."""
        if self.ranks is None:
            self.pending.read()
        else:
            self.ranks.model_called()
        if self.current is None:
            self._begin(self.buffers.take())
        elif self.current.stepped and self._next is None:
            self._next = len(self.current.tape.entries), self.buffers.take()

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        step = self.current or self._begin(self.buffers.take())
        if self._backup is None or not self._backup.closure or not step.losses:
            step.note_loss(roots)  # of a closure the first only: a search may try a point that overflows

    def _begin(self, buffers: BufferCopies) -> GuardedStep:
        self._next = None
        self.current = GuardedStep(self.guard.steps + len(self.pending.steps), buffers, self.guard.log.tape)
        return self.current

    def _begin_next(self) -> GuardedStep:
        """An optimizer steps again: what came since it last did belongs to the next step."""
        before, following = self.current, self._next
        assert before is not None
        tape, losses = self.guard.log.tape, before.losses[before.losses_checked :]
        self._end()
        step = self._begin(following[1] if following else self.buffers.take())
        if following:
            self.guard.log.continue_from(tape, following[0])
        step.losses = losses
        return step

    def _end(self) -> None:
        step, self.current, self._next = self.current, None, None
        assert step is not None
        step.tape = self.guard.log.tape
        if step.reads:
            self.pending.steps.append(step)
        else:
            self.write(step)
        self.guard.log.begin()

    def write(self, step: GuardedStep) -> None:
        """A step is over, and its outcome is known."""
        self.history.add(step)
        self.guard.note_step(step.line())

    def discard_step(self) -> None:
        """The step that has begun is no step."""
        self.current = self._next = self._backup = None
        self.guard.log.begin()

    def finish(self) -> None:
        """The guard is closed: read everything that is still on its way."""
        if self.current is not None and self.current.stepped:
            self._end()
        self.pending.read(wait=True)

    @property
    def progress(self) -> tuple[bool, set[int]]:
        """Whether a finished update has yet to be judged; the optimizers that have stepped in this step."""
        return self._backup is not None, set(self.current.stepped if self.current is not None else ())

    def give_back(self) -> None:
        """The gradients of an update that was not to be made."""
        if self._withheld is not None:
            self._withheld.give_back()
            self._withheld = None

    def leave(self) -> None:
        """Hold nothing any more, and leave nothing on the optimizers."""
        self.give_back()
        self._backup = self.current = self._next = None
        self.pending.leave()

    # -- before an update ---------------------------------------------------------------------------------------------

    def before_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """An optimizer is about to step."""
        __tracebackhide__ = True
        if self.guard.log.ignored:
            return
        self.guard.log.pause()
        step = self.current or self._begin(self.buffers.take())
        if id(optimizer) in step.stepped:
            step = self._begin_next()
        if self.ranks is not None:
            self.pending.read()  # here all processes are in the same place; when a model is called they need not be
            if self.current is None:  # rolled back, with an earlier step
                self._withheld, step.outcome = WithheldGradients(optimizer), "skipped"
                self.write(step)
                return
        step.tape = self.guard.log.tape
        step.note_settings(optimizer)
        self.history.note(optimizer)
        self._backup = UpdateBackup.if_needed(optimizer, args, kwargs)
        if self._backup is not None and self._backup.closure:
            return
        written = [] if self._ignore_buffers else self.buffers.written(step.buffers)
        check = StepCheck(optimizer, step.losses, self.ranks, written, self.scale)
        step.losses_checked = len(step.losses)
        if self._backup is None and skips_on_device(optimizer, check.device):
            self.pending.decide(optimizer, step, check, self._ignore_buffers)
        else:
            self._decide_now(optimizer, step, check)

    @property
    def scale(self) -> torch.Tensor | None:
        """The GradScaler's scale, on its device."""
        scaler = self.guard.scaler
        return scaler._scale if scaler is not None and scaler.is_enabled() else None

    def _decide_now(self, optimizer: torch.optim.Optimizer, step: GuardedStep, check: StepCheck) -> None:
        __tracebackhide__ = True
        result = read_check(check, self.scale is not None)
        step.note_result(result)
        reason = self._reason(result, step)
        if reason:
            self.guard.trip(step, reason)
            step.outcome = "skipped"
        elif result.scaler_skips:
            step.outcome = "scaler"
        elif self.policy.drops(result.norm):
            step.outcome = "above"
        elif self.policy.clips(result.norm):
            step.clipped = True
            check.clip(self.policy.max_grad_norm, torch.tensor(result.norm, device=check.device))
        if step.outcome in ("skipped", "above"):
            self._withheld = WithheldGradients(optimizer)

    def _reason(self, result: CheckResult, step: GuardedStep) -> str:
        """What is not finite; "" where all is well. A buffer that was not finite before (a mask) is no statistic."""
        if (reason := result.reason()) or math.isfinite(result.buffers):
            return reason
        return self._bad_buffers(step)

    def _bad_buffers(self, step: GuardedStep) -> str:
        """The same of the buffers alone."""
        bad = not self._ignore_buffers and self.buffers.became_nonfinite(step.buffers)
        if self.ranks is not None:
            bad = self.ranks.any(bad)
        self._ignore_buffers = not bad
        return "buffer" if bad else ""

    # -- after an update ----------------------------------------------------------------------------------------------

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or has been kept from it."""
        __tracebackhide__ = True
        step = self.current
        if self.guard.log.ignored:
            return
        if step is None:
            self.give_back()
            return
        if self._withheld is not None:
            self.give_back()
            self.buffers.restore(step.buffers)
        self.pending.after_update(optimizer, step)
        backup = self._backup
        if backup is not None and step.outcome == "ok":
            self._judge_update(step, backup)
        self._backup = None
        self._note_stepped(optimizer, step)

    def _judge_update(self, step: GuardedStep, backup: UpdateBackup) -> None:
        """The update has been made, and there is a copy: was it good?"""
        __tracebackhide__ = True
        reason, loss, norm = backup.judge(step.losses, self.ranks)
        if backup.closure:
            step.loss, step.norm, step.losses_checked = loss, norm, len(step.losses)
            step.bad_ranks = backup.bad_ranks
            if not reason and self.ranks is None and not all(map(all_finite, self.buffers.written(step.buffers))):
                reason = self._bad_buffers(step)
        if reason:
            backup.restore()
            self.guard.trip(step, reason, backup)
            step.outcome = "skipped"

    def _note_stepped(self, optimizer: torch.optim.Optimizer, step: GuardedStep) -> None:
        step.stepped.add(id(optimizer))
        if len(step.stepped) == len(self.guard.optimizers):
            self._end()

    def scaler_updates(self) -> None:
        """The GradScaler is about to set its scale: has it kept an optimizer from stepping?"""
        __tracebackhide__ = True
        step = self.current
        if step is None:
            return
        for optimizer in self.guard.optimizers.values():
            if not withheld_by_scaler(self.guard.scaler, optimizer) or id(optimizer) in step.stepped:
                continue
            step.note_settings(optimizer)
            result = read_check(StepCheck.of_scaler_skip(step.losses, self.ranks, self.scale), True)
            step.losses_checked = len(step.losses)
            step.note_result(result)
            step.norm, step.outcome = None, "scaler"
            if reason := result.reason():
                self.guard.trip(step, reason)
                step.outcome = "skipped"
            self._note_stepped(optimizer, step)
            if self.current is None:
                return
