"""When does a GradScaler take its scale out, and when does it leave a step out?

A step that is left out never reaches the optimizer, so that the optimizer's own hooks can't tell of it: two methods of
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
    """What is told. Each: (scaler, optimizer)."""

    def unscaling(self, scaler: Any, optimizer: Any) -> None: ...
    def asked(self, scaler: Any, optimizer: Any) -> None: ...
    def answered(self, scaler: Any, optimizer: Any) -> None: ...


class ScalerWatch:
    """Tells of enabled scalers while attached. unscaling: `unscale_` begins, called by the user or by `step`; asked,
    answered: `step` begins and has ended; told: calls a method of the listener, so that its faults stay its own."""

    _attached: ClassVar[list[ScalerWatch]] = []
    _wrapped: ClassVar[dict[str, tuple[Any, Any]]] = {}  # method: what stood there before, our wrapper

    def __init__(self, listener: ScalerListener, told: Callable[..., Any]):
        self.listener, self.told = listener, told

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

    def tell(self, what: str, scaler: Any, optimizer: Any) -> None:
        if scaler.is_enabled():
            self.told(getattr(self.listener, what), scaler, optimizer)


def _unscale(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def unscale_(self: Any, optimizer: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.tell("unscaling", self, optimizer)
        return before(self, optimizer)

    return unscale_


def _step(before: Callable, attached: list[ScalerWatch]) -> Callable:
    @functools.wraps(before)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        for watch in list(attached):
            watch.tell("asked", self, optimizer)
        result = before(self, optimizer, *args, **kwargs)
        for watch in list(attached):
            watch.tell("answered", self, optimizer)
        return result

    return step


class ScalerSteps:
    """What a scaler does with the optimizers of some rounds."""

    def __init__(self, rounds: Any):
        self.rounds, self.roster, self.gradients = rounds, rounds.roster, rounds.gradients
        self._watch: ScalerWatch | None = None
        self._looked: set[int] = set()  # optimizers whose gradients no longer carry the scale
        self._stepped: set[int] = set()  # those that have stepped since their scaler was asked
        self._written: dict[int, list[GroupNorms]] = {}

    def attach(self, told: Callable[..., Any]) -> None:
        """told: calls a method of ours at the border of the watch."""
        self._watch = ScalerWatch(self, told)
        self._watch.attach()

    def detach(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None

    def forget(self) -> None:
        self._written.clear()
        self._looked.clear()

    def _ours(self, optimizer: Any) -> bool:
        return any(known is optimizer for known in self.roster.optimizers.values())

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        """The scale is taken out: has something written into the gradients that carry it?"""
        if not self._ours(optimizer) or id(optimizer) in self._looked or is_capturing_graph():
            return
        self._looked.add(id(optimizer))
        with unobserved():
            changed = self.gradients.written(self.roster.refresh(optimizer))
            self._written[id(optimizer)] = group_norms(changed, self.gradients.wide) if changed else []

    def asked(self, scaler: Any, optimizer: Any) -> None:
        """The scaler is to step: a fused optimizer takes the scale out itself."""
        if self._ours(optimizer):
            self._stepped.discard(id(optimizer))
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self.unscaling(scaler, optimizer)

    def parcels(self, scaler: Any, optimizer: Any, there: list[Any]) -> list[tuple[str, GroupNorms, frozenset[int]]]:
        """The optimizer is about to step: the scale, once for each step, and what was written."""
        self._stepped.add(id(optimizer))
        self.rounds.history.scales.growth = scaler.get_growth_interval()
        ours, scale = frozenset(self.roster.held(optimizer)), scaler._scale
        found = [("written", n.over(scale), ours) for n in self._written.pop(id(optimizer), [])]
        if not any(what == "scale" for what, _, _ in there):
            found.append(
                ("scale", GroupNorms((), scale.detach().to(torch.float32, copy=True).reshape(())), frozenset())
            )
        return found

    def answered(self, scaler: Any, optimizer: Any) -> None:
        """The scaler has stepped, or left the step out."""
        if not self._ours(optimizer):
            return
        self._looked.discard(id(optimizer))
        if id(optimizer) not in self._stepped and not is_capturing_graph():
            with unobserved():
                self._left_out(scaler, optimizer)

    def _left_out(self, scaler: Any, optimizer: Any) -> None:
        numbers = self.roster.held(optimizer)
        held, before, _ = self.gradients.at_the_step(numbers, False)
        scale = scaler._scale.detach().to(torch.float32, copy=True).reshape(())
        self._written.pop(id(optimizer), None)
        self.rounds.dropped(numbers)
        self.rounds.post.send(
            [scale, *(n.values for n in before)],
            functools.partial(self._take, self.rounds.number, [n.numbers for n in before], frozenset(held)),
        )

    def _take(self, step: int, numbers: list[tuple[int, ...]], held: frozenset[int], values: list[list[float]]) -> None:
        norms = {n: v for group, known in zip(numbers, values[1:]) for n, v in zip(group, known) if n in held}
        self.rounds.history.scales.add(step, values[0][0], True, norms)
