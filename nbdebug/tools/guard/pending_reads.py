"""Decisions that are taken on the device: the host reads them when they have arrived, and waits at most two steps.

A fused optimizer's kernels leave everything as it is where `found_inf` is 1 (GradScaler's own way). After a bad step
the decision stays, so that later steps change nothing either, until the host knows and has rolled back what it must.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import torch

from nbdebug.tools.guard.finite_check import CheckResult, StepCheck
from nbdebug.tools.guard.step import GuardedStep

MOST_PENDING = 2
"""How many later steps may have begun before the host waits. One is not enough to keep a device busy."""
_UNSET = object()


@dataclasses.dataclass
class PendingRead:
    """Numbers on their way to the host: where they will be, and the event that says they are there."""

    numbers: torch.Tensor
    event: Any
    ranks: Any
    scaling: bool


class PendingReads:
    """The decisions of one guard's steps that are taken on devices. steps: those that are over and not yet read."""

    def __init__(self, tracker: Any):
        self.tracker, self.policy = tracker, tracker.policy
        self.steps: collections.deque[GuardedStep] = collections.deque()
        self._stopped: dict[torch.device, torch.Tensor] = {}  # one bool a device: a step was bad, until it is read
        self._dropped: torch.Tensor | None = None
        self._found_inf: dict[int, tuple[torch.optim.Optimizer, Any]] = {}  # optimizers and what they had there

    def decide(
        self, optimizer: torch.optim.Optimizer, step: GuardedStep, check: StepCheck, ignore_buffers: bool
    ) -> None:
        """Let the device decide, and tell the optimizer there."""
        scaling = self.tracker.scale is not None
        numbers = check.numbers()
        bad, above, scaler = check.decide(numbers, self.policy, scaling, ignore_buffers)
        if self.policy.stops:
            stopped = self._stopped.setdefault(check.device, torch.zeros((), dtype=torch.bool, device=check.device))
            bad = stopped.logical_or_(bad)
        if self.policy.max_grad_norm is not None:
            check.clip(self.policy.max_grad_norm, check.norm_to_clip(numbers))
        drop = bad | above | scaler
        self._dropped = drop if self._dropped is None else self._dropped | drop
        self._found_inf[id(optimizer)] = optimizer, getattr(optimizer, "found_inf", _UNSET)
        optimizer.found_inf = drop.float()  # type: ignore[attr-defined]
        values = torch.cat([numbers, torch.stack([bad, above]).float()])
        on_host = torch.empty(values.shape, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(check.device))
        step.reads.append(PendingRead(on_host, event, check.ranks, scaling))

    def after_update(self, optimizer: torch.optim.Optimizer, step: GuardedStep) -> None:
        """The optimizer has stepped: `found_inf` as it was, and buffers as before a step that was dropped."""
        _, before = self._found_inf.pop(id(optimizer), (None, None))
        if before is None:
            return
        _restore_found_inf(optimizer, before)
        if self._dropped is not None:
            self.tracker.buffers.restore_where(self._dropped, step.buffers)
            self._dropped = None

    def read(self, wait: bool = False) -> None:
        """Read the steps whose numbers have arrived. wait: all of them."""
        __tracebackhide__ = True
        while self.steps:
            reads = self.steps[0].reads
            together = self.tracker.ranks is not None
            due = wait or len(self.steps) > MOST_PENDING - together  # the step that has begun is the latest of them
            if not due and (together or not all(read.event.query() for read in reads)):
                return  # several processes have to read it at the same step
            for read in reads:
                read.event.synchronize()
            self._finish(self.steps.popleft())

    def _finish(self, step: GuardedStep) -> None:
        __tracebackhide__ = True
        reason = ""
        for read in step.reads:
            *values, bad, above = read.numbers.tolist()
            result = CheckResult(values, read.ranks, read.scaling)
            result.raise_if_left()
            step.note_result(result)
            if bad and not reason:  # buffers are not checked again: they have been put back since
                reason = result.reason() or ("gradient" if math.isfinite(result.buffers) else "buffer")
            step.clipped = step.clipped or self.policy.clips(result.norm)
            if step.outcome == "ok":
                step.outcome = "above" if above else "scaler" if result.scaler_skips else "ok"
        step.reads = []
        if not reason:
            self.tracker.write(step)
            return
        step.outcome, step.clipped = "skipped", False
        if self.policy.stops:
            self._roll_back(step, reason)
        else:  # what it had changed was put back on the device, and later steps have gone on
            self.tracker.write(step)

    def _roll_back(self, step: GuardedStep, reason: str) -> None:
        """Everything as it was before the step; what has begun since changed nothing, and is no step."""
        __tracebackhide__ = True
        tracker, later = self.tracker, list(self.steps)
        self.steps.clear()
        for stopped in self._stopped.values():
            stopped.zero_()
        for optimizer in tracker.guard.optimizers.values():
            step.restore_settings(optimizer)
        begun = tracker.current is not None
        tracker.discard_step()
        try:
            tracker.guard.trip(step, reason, late=len(later) + begun)
            tracker.write(step)
        finally:
            for dropped in later:
                read = dropped.reads[0]
                read.event.synchronize()
                dropped.note_result(CheckResult(read.numbers.tolist()[:-2], read.ranks, False))
                dropped.reads, dropped.outcome = [], "skipped"
                tracker.write(dropped)

    def leave(self) -> None:
        """Hold nothing, and leave nothing on the optimizers."""
        for optimizer, before in self._found_inf.values():
            _restore_found_inf(optimizer, before)
        self._found_inf.clear()
        self.steps.clear()
        self._stopped.clear()
        self._dropped = None


def _restore_found_inf(optimizer: Any, before: Any) -> None:
    if before is _UNSET:
        vars(optimizer).pop("found_inf", None)
    else:
        optimizer.found_inf = before
