"""When does a GradScaler unscale the gradients, and when does it skip a step?

A skipped step never reaches the optimizer, so that the optimizer's own hooks don't notice it: two methods of
GradScaler are wrapped for the length of a watch. However many watch, they are wrapped once, and put back when the last
of them leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from nbdebug.observe.norms import GroupNorms, group_norms, is_capturing_graph, unobserved


class ScalerListener(Protocol):
    """The callbacks of a ScalerWatch. Each: (scaler, optimizer)."""

    def unscaling(self, scaler: Any, optimizer: Any) -> None: ...
    def step_began(self, scaler: Any, optimizer: Any) -> None: ...
    def step_ended(self, scaler: Any, optimizer: Any) -> None: ...


class ScalerWatch:
    """Notifies a listener of enabled scalers while attached. unscaling: `unscale_` begins, called by the user or by
    `step`; step_began, step_ended: of `step`. call: calls a method of the listener and catches its faults."""

    _attached: ClassVar[list[ScalerWatch]] = []
    _wrapped: ClassVar[dict[str, tuple[Any, Any]]] = {}  # method: the original, our wrapper

    def __init__(self, listener: ScalerListener, call: Callable[..., Any]):
        self.listener, self.call = listener, call

    def attach(self) -> None:
        self._attached.append(self)
        if not self._wrapped:
            kind = torch.amp.GradScaler
            for name, wrap in (("unscale_", _unscale), ("step", _step)):
                before = getattr(kind, name)
                self._wrapped[name] = before, wrap(before, self._attached)
                setattr(kind, name, self._wrapped[name][1])

    def detach(self) -> None:
        if self in self._attached:
            self._attached.remove(self)
        while self._wrapped and not self._attached:
            name, (before, ours) = self._wrapped.popitem()
            if getattr(torch.amp.GradScaler, name) is ours:  # else somebody has wrapped ours, which now only passes on
                setattr(torch.amp.GradScaler, name, before)

    def notify(self, what: str, scaler: Any, optimizer: Any) -> None:
        if scaler.is_enabled():
            self.call(getattr(self.listener, what), scaler, optimizer)


def _unscale(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def unscale_(self: Any, optimizer: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.notify("unscaling", self, optimizer)
        return before(self, optimizer)

    return unscale_


def _step(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.notify("step_began", self, optimizer)
        result = before(self, optimizer, *args, **kwargs)
        for watch in list(attached):
            watch.notify("step_ended", self, optimizer)
        return result

    return step


class ScalerSteps:
    """What a scaler does with the watched optimizers."""

    def __init__(self, steps: Any):
        self.steps, self.roster, self.gradients = steps, steps.roster, steps.gradients
        self._watch: ScalerWatch | None = None
        self._unscaled: set[int] = set()  # optimizers whose gradients no longer carry the scale
        self._stepped: set[int] = set()  # those that have stepped since their scaler's `step` began
        self._written: dict[int, list[GroupNorms]] = {}

    def attach(self, call: Callable[..., Any]) -> None:
        """call: calls a method of ours and catches its faults."""
        self._watch = ScalerWatch(self, call)
        self._watch.attach()

    def detach(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None

    def forget(self) -> None:
        self._written.clear()
        self._unscaled.clear()

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
