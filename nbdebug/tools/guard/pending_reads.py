"""Decisions that are taken on the device: the host hears of them when they have arrived, and waits at most two steps.

A fused optimizer's kernels leave everything as it is where `found_inf` is 1 (GradScaler's own way). After a bad step
the decision stays, so that later steps change nothing either, until the host knows and has undone what it must.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import torch

from nbdebug.tools.guard.finite_check import CheckResult, StepCheck
from nbdebug.tools.guard.step import GuardedStep

LATE = 2
"""How many later steps may have begun before the host waits. One is not enough to keep a device busy."""
_NOTHING = object()


@dataclasses.dataclass
class PendingRead:
    """Numbers on their way to the host: where they will be, and the event that says they are there."""

    there: torch.Tensor
    event: Any
    ranks: Any
    scaling: bool


class DeferredReads:
    """The decisions of one guard's rounds that are taken on devices."""

    def __init__(self, rounds: Any):
        self.rounds, self.policy = rounds, rounds.policy
        self.pending: collections.deque[GuardedStep] = collections.deque()
        self._sticky: dict[torch.device, torch.Tensor] = {}
        self._dropped: torch.Tensor | None = None
        self._found: dict[int, tuple[torch.optim.Optimizer, Any]] = {}  # optimizers and what stood in their found_inf

    def decide(self, optimizer: torch.optim.Optimizer, step: GuardedStep, look: StepCheck, excused: bool) -> None:
        """Let the device decide, and tell the optimizer there."""
        scaling = self.rounds.scale is not None
        numbers = look.numbers()
        bad, above, scaler = look.judged(numbers, self.policy, scaling, excused)
        if self.policy.stops:
            sticky = self._sticky.setdefault(look.device, torch.zeros((), dtype=torch.bool, device=look.device))
            bad = sticky.logical_or_(bad)
        if self.policy.max_grad_norm is not None:
            look.clip(self.policy.max_grad_norm, look.norm_to_clip(numbers))
        drop = bad | above | scaler
        self._dropped = drop if self._dropped is None else self._dropped | drop
        self._found[id(optimizer)] = optimizer, getattr(optimizer, "found_inf", _NOTHING)
        optimizer.found_inf = drop.float()  # type: ignore[attr-defined]
        told = torch.cat([numbers, torch.stack([bad, above]).float()])
        there = torch.empty(told.shape, pin_memory=True)
        there.copy_(told, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(look.device))
        step.reads.append(PendingRead(there, event, look.ranks, scaling))

    def after(self, optimizer: torch.optim.Optimizer, step: GuardedStep) -> None:
        """The optimizer has stepped: `found_inf` as it was, and buffers as before a step that was dropped."""
        _, before = self._found.pop(id(optimizer), (None, None))
        if before is None:
            return
        _set(optimizer, before)
        if self._dropped is not None:
            self.rounds.buffers.restore_where(self._dropped, step.buffers)
            self._dropped = None

    def hear(self, wait: bool = False) -> None:
        """Judge the steps whose numbers have arrived. wait: for all."""
        __tracebackhide__ = True
        while self.pending:
            reads = self.pending[0].reads
            together = self.rounds.ranks is not None
            due = wait or len(self.pending) > LATE - together  # the step that has begun is the latest of them
            if not due and (together or not all(read.event.query() for read in reads)):
                return  # several processes have to hear of it at the same step
            for read in reads:
                read.event.synchronize()
            self._judge(self.pending.popleft())

    def _judge(self, step: GuardedStep) -> None:
        __tracebackhide__ = True
        reason = ""
        for read in step.reads:
            *values, bad, above = read.there.tolist()
            numbers = CheckResult(values, read.ranks, read.scaling)
            numbers.check()
            step.take_down(numbers)
            if bad and not reason:  # buffers are not asked again: they have been put back since
                reason = numbers.reason() or ("gradient" if math.isfinite(numbers.buffers) else "buffer")
            step.clipped = step.clipped or self.policy.clips(numbers.norm)
            if step.outcome == "ok":
                step.outcome = "above" if above else "scaler" if numbers.scaler_skips else "ok"
        step.reads = []
        if not reason:
            self.rounds.write(step)
            return
        step.outcome, step.clipped = "skipped", False
        if not self.policy.stops:  # what it had changed was put back on the device, and later steps have gone on
            self.rounds.write(step)
            return
        self._undo(step, reason)

    def _undo(self, step: GuardedStep, reason: str) -> None:
        """Everything as it was before the step; what has begun since changed nothing, and is no step."""
        __tracebackhide__ = True
        rounds, later = self.rounds, list(self.pending)
        self.pending.clear()
        for sticky in self._sticky.values():
            sticky.zero_()
        for optimizer in rounds.guard.optimizers.values():
            step.put_back(optimizer)
        begun = rounds.current is not None
        rounds.forget()
        try:
            rounds.guard.trip(step, reason, late=len(later) + begun)
            rounds.write(step)
        finally:
            for dropped in later:
                dropped.reads[0].event.synchronize()
                dropped.take_down(CheckResult(dropped.reads[0].there.tolist()[:-2], dropped.reads[0].ranks, False))
                dropped.reads, dropped.outcome = [], "skipped"
                rounds.write(dropped)

    def leave(self) -> None:
        """Hold nothing, and leave nothing on the optimizers."""
        for optimizer, before in self._found.values():
            _set(optimizer, before)
        self._found.clear()
        self.pending.clear()
        self._sticky.clear()
        self._dropped = None


def _set(optimizer: Any, before: Any) -> None:
    if before is _NOTHING:
        vars(optimizer).pop("found_inf", None)
    else:
        optimizer.found_inf = before
