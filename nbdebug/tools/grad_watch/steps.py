"""From hooks to steps: where a step begins and ends, and what of it is measured.

A step is a round: every optimizer steps once; an optimizer that steps again begins the next. With a closure (LBFGS) the
gradients are those of its first evaluation, where the step starts from.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import sys
from array import array
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.observe.backward import UNCHANGED, ScalerWatch
from nbdebug.observe.tensors import GroupNorms, group_norms, is_capturing_graph, reads_asynchronously, unobserved
from nbdebug.tools.grad_watch.history import StepRow, Total, WatchHistory, doubles, joint_norm
from nbdebug.tools.grad_watch.probe import GradientProbe, Updates, WatchedParameters, calling_scaler

MOST_PENDING = 2
"""How many later steps may be over before the host waits. One is not enough to keep a device busy."""


@dataclasses.dataclass
class PendingMeasurement:
    """Tensors of one step: `there` once their numbers are copied, in the order of `sizes`."""

    sizes: list[int]
    there: list[torch.Tensor]
    events: list[Any]
    take: Callable[[list[list[float]]], None]

    def ready(self) -> bool:
        return all(event.query() for event in self.events)

    def read(self) -> None:
        for event in self.events:
            event.synchronize()
        flat = [t.tolist() for t in self.there]
        self.take([values if isinstance(values, list) else [values] for values in flat])


class DeferredMeasurements:
    """Measurements that the device has not finished, oldest first."""

    def __init__(self) -> None:
        self.pending: collections.deque[PendingMeasurement] = collections.deque()

    def send(self, tensors: list[torch.Tensor], take: Callable[[list[list[float]]], None]) -> None:
        """take: gets the numbers of each tensor, in order, when they are there; those of earlier steps come first."""
        there, events = [], []
        for tensor in tensors:
            if not reads_asynchronously(tensor.device):
                there.append(tensor)
                continue
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            there.append(pinned.copy_(tensor, non_blocking=True))
        for device in {t.device for t in tensors if reads_asynchronously(t.device)}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        self.pending.append(PendingMeasurement([t.numel() for t in tensors], there, events, take))
        self.read_ready()

    def read_ready(self, wait: bool = False) -> None:
        """Read what has arrived, in order. wait: for all."""
        while self.pending and (wait or len(self.pending) > MOST_PENDING or self.pending[0].ready()):
            self.pending.popleft().read()


@dataclasses.dataclass
class WatchedStep:
    """A step that has begun. parcels: what was measured, by what it is ("before", "after", "weight", "moved", "loss",
    "found", "scale", "written"), and of which parameters it counts; held: parameters with a gradient; again: of those
    in "after", which have the version that they had before."""

    number: int
    parcels: list[tuple[str, GroupNorms, frozenset[int]]] = dataclasses.field(default_factory=list)
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    held: list[int] = dataclasses.field(default_factory=list)
    stepped: set[int] = dataclasses.field(default_factory=set)
    again: set[int] = dataclasses.field(default_factory=set)
    lr: float | None = None
    measured: bool = False


class WatchSteps:
    """The steps of one watch. on_step: called with the number of each step that has been read."""

    def __init__(
        self, roster: WatchedParameters, history: WatchHistory, every: int, ratios_every: int, scaler: Any, on_step: Any
    ):
        self.roster, self.history, self.every, self.ratios_every = roster, history, every, ratios_every
        self.gradients, self.updates, self.deferred = GradientProbe(roster), Updates(roster), DeferredMeasurements()
        self.scaler, self.on_step = scaler, on_step
        self.number, self.current = 0, None
        self.scaled = ScalerSteps(self)
        self._roots: list[tuple[torch.Tensor, set[int]]] = []  # losses, and whose gradients came of them
        self.smoothing: tuple[float, int] | None = None  # of the first loss; (0, 0): none
        self._closure = 0  # evaluations seen within a step with a closure, counted from 1; 0: not in one

    current: WatchedStep | None

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward_began(self, call: Any) -> None:
        if call.accumulate and not is_capturing_graph():
            self.gradients.began()
            if self.smoothing is None:
                self.smoothing = _smoothing(call.roots) if len(call.roots) == 1 else (0.0, 0)

    def backward_ended(self, call: Any, result: Any) -> None:
        if not call.accumulate or is_capturing_graph():
            return
        with unobserved():
            changed, fresh = self.gradients.ended()
            self.scaled.backward_ended(changed)
            if not changed or self._closure > 1:
                return
            self._closure += self._closure > 0
            if fresh:  # gradients of these that were never used are gone, and their losses with them
                self._roots = [known for known in self._roots if not known[1].issubset(changed)]
            self._roots += [
                (r.detach().to(torch.float32, copy=True).reshape(()), set(changed)) for r in call.roots if _is_loss(r)
            ]
            if self._due(self.number) or len(self.roster.optimizers) > 1 and self._due(self.number + 1):
                self.gradients.measure(changed)
            else:
                self.gradients.skip(changed)

    def _due(self, number: int) -> bool:
        return number % self.every == 0

    def _updates_due(self, step: WatchedStep) -> bool:
        """Whether updates are measured in this step: in every `ratios_every`-th that is measured itself."""
        return (
            step.measured
            and self.ratios_every > 0
            and (step.number // self.every) % max(1, self.ratios_every // self.every) == 0
        )

    # -- the update ---------------------------------------------------------------------------------------------------

    def before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if is_capturing_graph():
            return
        if self.current is not None and id(optimizer) in self.current.stepped:
            self.end()
        step = self.current = self.current or WatchedStep(self.number, measured=self._due(self.number))
        if step.lr is None:
            step.lr = _learning_rate(optimizer)
        numbers = self.roster.refresh(optimizer)
        with unobserved():
            if any(map(callable, (*args, *kwargs.values()))):
                self._closure = 1
            else:
                self._measure(optimizer, step, numbers)
            if self._updates_due(step):
                self.updates.before(numbers if self._closure else [n for n, _ in self.roster.gradients(numbers)])

    def _measure(self, optimizer: Any, step: WatchedStep, numbers: list[int]) -> None:
        """What the optimizer is about to use: before clipping, and now."""
        around = calling_scaler(sys._getframe(2))
        self.scaler = around or self.scaler
        scale = around._scale if around is not None and around.is_enabled() else None
        step.losses += [r if scale is None else r / scale.to(r.device).reshape(()) for r, _ in self._roots]
        self._roots = []
        if scale is not None:
            step.parcels += self.scaled.parcels(around, optimizer, step.parcels)
        if not step.measured:
            return
        if scale is None:
            step.parcels += self.scaled.left_in(optimizer, numbers, step.parcels)
        again = self._updates_due(step)
        step.again |= self.gradients.unmarked(numbers) if again else set()
        held, before, now = self.gradients.at_the_step(numbers, again)
        step.held += [n for n in held if n not in step.held] if step.held else held
        ours = frozenset(held)
        left = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
        step.parcels += [("before", n.over(scale), ours) for n in before] + [("after", n.over(left), ours) for n in now]
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            step.parcels.append(("found", GroupNorms((), found_inf.detach().float().reshape(())), ours))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.current
        if step is None or is_capturing_graph():
            return
        with unobserved():
            if self._closure:
                self._closure = 0
                self._measure(optimizer, step, self.roster.held(optimizer))
            if self._updates_due(step):
                weights, moved = self.updates.after()
                ours = frozenset(self.roster.held(optimizer))
                step.parcels += [("weight", n, ours) for n in weights] + [("moved", n, ours) for n in moved]
            self.gradients.used(self.roster.held(optimizer))
            step.stepped.add(id(optimizer))
            if len(step.stepped) == len(self.roster.optimizers):
                self.end()

    # -- the end of a step --------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The step is over: what was measured is read later."""
        step, self.current = self.current, None
        if step is None:
            return
        self.number += 1
        with unobserved():
            if step.losses:
                device = step.losses[0].device
                total = torch.stack([x.to(device, non_blocking=True) for x in step.losses]).sum()
                step.parcels.append(("loss", GroupNorms((), total), frozenset()))
            self.deferred.send([norms.values for _, norms, _ in step.parcels], functools.partial(self._take, step))

    def _take(self, step: WatchedStep, values: list[list[float]]) -> None:
        """The numbers of a step have arrived."""
        read: dict[str, dict[int, float]] = {}
        plain: dict[str, float] = {}
        for (what, norms, ours), known in zip(step.parcels, values):
            if norms.numbers:
                read.setdefault(what, {}).update((n, v) for n, v in zip(norms.numbers, known) if n in ours)
            else:
                plain[what] = plain.get(what, 0.0) + sum(known)
        before, after = read.get("before", {}), read.get("after", {})
        self._check_versions(step, before, after)
        self.gradients.wide = self.gradients.wide or any(map(math.isinf, (*before.values(), *after.values())))
        skipped, loss = plain.get("found", 0.0) > 0, plain.get("loss")
        numbers = [n for n in sorted(step.held) if n in before]
        row, first, last = None, None, None
        if step.measured and numbers:
            was = doubles(before[n] for n in numbers)
            now = doubles(after.get(n, before[n]) for n in numbers)
            first, last = joint_norm(was), joint_norm(now)
            row = StepRow(step.number, array("l", numbers), was, now, *_ratios(numbers, read))
        self.history.steps += 1
        self.history.add(Total(step.number, loss, first, last, skipped, step.lr, plain.get("scale")), row)
        if "scale" in plain:
            self.history.scales.add(step.number, plain["scale"], skipped, before)
            if step.measured:
                self.history.scales.written(before, read.get("written", {}))
        untouched = first and last and self.gradients.trusted and abs(last / first - 1) < UNCHANGED
        if untouched and plain.get("carried", 1.0) != 1:  # else somebody may have divided them by hand
            self.history.scales.carried.append((last or 0.0, plain["carried"]))
        self.on_step(step.number)

    def _check_versions(self, step: WatchedStep, before: dict[int, float], after: dict[int, float]) -> None:
        for number in step.again:
            was, now = before.get(number, 0.0), after.get(number, 0.0)
            if number in after and math.isfinite(was) and abs(now - was) > 1e-5 * abs(was):
                self.gradients.trusted = False

    def finish(self) -> None:
        """No more steps: read everything that is still pending."""
        if self.current is not None and self.current.stepped:
            self.end()
        self.deferred.read_ready(wait=True)

    def skipped_step(self, numbers: list[int]) -> None:
        """A step with these gradients was skipped."""
        self._roots = [known for known in self._roots if not known[1].issubset(numbers)]
        self.gradients.used(numbers)

    def leave(self) -> None:
        """Release everything."""
        self.scaled.forget()
        self.current, self._roots = None, []
        self.gradients.forget()
        self.updates.forget()
        self.deferred.pending.clear()


def _is_loss(root: torch.Tensor) -> bool:
    return root.numel() == 1 and root.is_floating_point() and type(root) is torch.Tensor


def _smoothing(roots: list[torch.Tensor]) -> tuple[float, int]:
    """(share, classes) of a loss that is one mean cross entropy of smoothed labels, as its graph shows; else (0, 0)."""
    node: Any = roots[0].grad_fn
    terms = [part for part, _ in node.next_functions if part is not None] if node is not None else []
    if [part.name() for part in terms] != ["MulBackward1"] * 2 or node.name() != "AddBackward0":
        return 0.0, 0
    own, even = ((part._saved_other, part.next_functions[0][0]) for part in terms)
    if own[1] is None or even[1] is None:
        return 0.0, 0
    mean = own[1].name().startswith("NllLoss") and own[1]._saved_reduction == 1 and even[1].name() == "DivBackward0"
    if not mean or own[1]._saved_weight is not None or not even[0] > 0:
        return 0.0, 0
    return 1 - own[0], round((1 - own[0]) / even[0])


def _learning_rate(optimizer: Any) -> float | None:
    """The learning rate of the first group; None where reading it would make the host wait."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
    return float(rate) if isinstance(rate, (int, float)) else None


def _ratios(numbers: list[int], read: dict[str, dict[int, float]]) -> tuple[Any, Any]:
    """Weights' norms and update ratios, where they were measured. The ratio to a weight of zero is not defined."""
    weights, moved = read.get("weight"), read.get("moved")
    if not weights or not moved:
        return None, None
    norms = doubles(weights.get(n, math.nan) for n in numbers)
    return norms, doubles(moved.get(n, math.nan) / w if w > 0 else math.nan for n, w in zip(numbers, norms))


class ScalerSteps:
    """What a scaler does with the watched optimizers."""

    def __init__(self, steps: Any):
        self.steps, self.roster, self.gradients = steps, steps.roster, steps.gradients
        self._watch: ScalerWatch | None = None
        self._unscaled: set[int] = set()  # optimizers whose gradients no longer carry the scale
        self._stepped: set[int] = set()  # those that have stepped since their scaler's `step` began
        self._written: dict[int, list[GroupNorms]] = {}
        self._scaling: Any = None  # the scaler of the loss that goes backward next
        self._carried: dict[int, Any] = {}  # parameters whose gradients came of a scaled loss, and its scale

    def attach(self, call: Callable[..., Any]) -> None:
        """call: calls a method of ours and catches its faults."""
        self._watch = ScalerWatch(self, call, scaling=self._scale_began)
        self._watch.attach()

    def detach(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None

    def forget(self) -> None:
        self._written.clear()
        self._unscaled.clear()
        self._carried.clear()

    def _scale_began(self, scaler: Any) -> None:
        self._scaling = scaler if scaler.is_enabled() else None

    def backward_ended(self, changed: Any) -> None:
        """changed: the numbers of the parameters whose gradients it has changed."""
        scaler, self._scaling = self._scaling, None
        scale = getattr(scaler, "_scale", None)
        for number in changed:
            self._carried.pop(number, None)
            if scale is not None:
                self._carried[number] = scale.detach().to(torch.float32, copy=True).reshape(())

    def left_in(self, optimizer: Any, numbers: list[int], there: list[Any]) -> list[Any]:
        """The optimizer steps by itself: the scale that its gradients carry, where nobody has taken it out."""
        scales = [self._carried.pop(number, None) for number in numbers]
        left = next((scale for scale in scales if scale is not None), None)
        taken_out = id(optimizer) in self._unscaled or getattr(optimizer, "grad_scale", None) is not None
        if left is None or taken_out or any(what == "carried" for what, _, _ in there):
            return []
        return [("carried", GroupNorms((), left), frozenset())]

    def _watched(self, optimizer: Any) -> bool:
        return any(known is optimizer for known in self.roster.optimizers.values())

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        """Gradients are unscaled: has something written into them since the backward?"""
        if not self._watched(optimizer) or id(optimizer) in self._unscaled or is_capturing_graph():
            return
        self._unscaled.add(id(optimizer))
        with unobserved():
            changed = self.gradients.written(self.roster.refresh(optimizer))
            self._written[id(optimizer)] = group_norms(changed, self.gradients.wide) if changed else []

    def step_began(self, scaler: Any, optimizer: Any) -> None:
        """The scaler begins its step: a fused optimizer unscales by itself."""
        if self._watched(optimizer):
            self._stepped.discard(id(optimizer))
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self.unscaling(scaler, optimizer)

    def parcels(self, scaler: Any, optimizer: Any, there: list[Any]) -> list[tuple[str, GroupNorms, frozenset[int]]]:
        """The optimizer is about to step: the scale, once for each step, and what was written."""
        self._stepped.add(id(optimizer))
        self.steps.history.scales.growth = scaler.get_growth_interval()
        ours, scale = frozenset(self.roster.held(optimizer)), scaler._scale
        parcels = [("written", n.over(scale), ours) for n in self._written.pop(id(optimizer), [])]
        if not any(what == "scale" for what, _, _ in there):
            parcels.append(
                ("scale", GroupNorms((), scale.detach().to(torch.float32, copy=True).reshape(())), frozenset())
            )
        return parcels

    def step_ended(self, scaler: Any, optimizer: Any) -> None:
        """The scaler has stepped, or skipped the step."""
        if not self._watched(optimizer):
            return
        self._unscaled.discard(id(optimizer))
        if id(optimizer) not in self._stepped and not is_capturing_graph():
            with unobserved():
                self._skipped(scaler, optimizer)

    def _skipped(self, scaler: Any, optimizer: Any) -> None:
        numbers = self.roster.held(optimizer)
        held, before, _ = self.gradients.at_the_step(numbers, False)
        scale = scaler._scale.detach().to(torch.float32, copy=True).reshape(())
        self._written.pop(id(optimizer), None)
        self.steps.skipped_step(numbers)
        self.steps.deferred.send(
            [scale, *(n.values for n in before)],
            functools.partial(self._take, self.steps.number, [n.numbers for n in before], frozenset(held)),
        )

    def _take(self, step: int, numbers: list[tuple[int, ...]], held: frozenset[int], values: list[list[float]]) -> None:
        norms = {n: v for group, known in zip(numbers, values[1:]) for n, v in zip(group, known) if n in held}
        self.steps.history.scales.add(step, values[0][0], True, norms)
