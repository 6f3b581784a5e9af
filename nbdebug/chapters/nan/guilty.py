"""Which module call made the bad value? Found by halving the calls of a step, one run of the step for each half.

The calls of a step end in some order. A bad loss: hand on mended outputs from the first of them. If the loss is finite
then, the fault lies before the last of these ends. Bad gradients: cut the graph at the outputs of the first of them, so
that backward runs only through what came later. If all gradients are finite then, the same. Both ask what a bad value
does, not where one is seen; so an intended -inf that a softmax absorbs is innocent.

The call with whose end it heals is the guilty one, or hands on what the code before it made, in the module around it.
One look during the last run that did not heal tells which: at what the call, and those around it, are given; or at the
gradients that they pass back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.bisect import first_bad
from nbdebug.observe.rerun import Call, Change, Rerun, changed, cut, is_bad, mend
from nbdebug.observe.tensors import dense, finite, tensors_in


class ModuleSearch:
    """The search for one bad event of the run `first`. `replay(change)` runs the step again from the same state.

    It takes at most ceil(log2(modules)) + 1 replays. Where modules are called many times this may not be enough to come
    down to one call; then the answer is the innermost call around those that are left, and `exact` is False.
    """

    def __init__(self, first: Rerun, event: int, modules: int, replay: Callable[[Change], Rerun]):
        self.event, self.replay = event, replay
        bad = first.events[event]
        self.ended, self.running = first.ended[: bad.ended], bad.running
        self.kind = Cut if bad.what == "gradients" else Mended
        self.left = 1 + math.ceil(math.log2(max(modules, 1)))
        self.exact = True
        self._between = 0, len(self.ended)  # the first call with whose end it heals lies here, or is the second number
        self._seen: dict[int, Treated] = {}

    def find(self) -> Call | None:
        """The guilty call; None for code outside of modules. Needs `saw` of the run with `look(0)`."""
        try:
            number = first_bad(*self._between, self._heals_with)
        except _Enough:
            self.exact = False
            return _around(self.ended[self._between[0] : self._between[1] + 1], self._between[1] < len(self.ended))
        if number == len(self.ended):
            return self.running
        call, seen = self.ended[number], self._seen[number]
        return self._gradient_came_from(call, seen) if self.kind is Cut else self._value_came_from(call, seen)

    def _heals_with(self, last: int) -> bool:
        """Whether it heals when all calls up to the one that ends as number `last` are treated."""
        if not self.left:
            raise _Enough
        low, high = self._between
        heals = self._finite_with(self.look(last + 1))
        self._between = (low, last) if heals else (last + 1, high)
        return heals

    def look(self, number: int, mend_given: bool = False) -> Treated:
        """The change that treats all calls that end before call `number`, and looks at what that call is given."""
        return self.kind(number, self.ended[number].stack if number < len(self.ended) else [], mend_given)

    def saw(self, look: Treated, run: Rerun) -> None:
        """Keep what a run with this look showed."""
        bad = run.events[self.event].bad if self.event < len(run.events) else frozenset()
        look.bad_parameters = {id(p) for name, p in run.parameters().items() if name in bad}
        self._seen[look.number] = look

    def _finite_with(self, look: Treated) -> bool:
        self.left -= 1
        run = self.replay(look)
        self.saw(look, run)
        return self.event < len(run.events) and not run.events[self.event].bad

    def _value_came_from(self, call: Call, seen: Treated) -> Call | None:
        """The call itself, unless it was given something bad that matters: then the code that gave it."""
        giver = next((c for c in call.stack if c.start in seen.bad_at), None)
        if giver is None:
            return call
        self.exact = self.left > 0
        if self.exact and not self._finite_with(self.look(seen.number, mend_given=True)):
            return call  # what it was given does not matter: mending that does not help
        return giver.parent

    def _gradient_came_from(self, call: Call, seen: Treated) -> Call | None:
        """The innermost call that passes bad gradients on: to what it was given, its parameters, or calls in it."""
        for c in reversed(call.stack):
            inner = c.start in seen.bad_inside or any(id(p) in seen.bad_parameters for p in c.module.parameters())
            if inner or c.start in seen.bad_at:
                return c
        return None


def _around(calls: list[Call], all_inside: bool) -> Call | None:
    """The innermost call around some calls; None if there is none, or if what is meant may lie outside of all."""
    levels = zip(*(call.stack for call in calls), strict=False) if all_inside else ()
    common = [level[0] for level in levels if len({call.start for call in level}) == 1]
    return common[-1] if common else None


class _Enough(Exception):
    """The number of replays allowed is used up."""


class Treated(Change):
    """All calls that end before call `number` are treated, and the calls of a stack are looked at.

    bad_at: those that were given something bad, or passed back a bad gradient. bad_inside: those with a call inside at
    whose output a bad gradient arrived. bad_parameters: ids of parameters whose gradient was bad. (Calls by `start`.)
    """

    def __init__(self, number: int, stack: list[Call], mend_given: bool):
        super().__init__()
        self.number, self.mend_given = number, mend_given
        self.looked = {call.start for call in stack}
        self.bad_at: set[int] = set()
        self.bad_inside: set[int] = set()
        self.bad_parameters: set[int] = set()


class Mended(Treated):
    """For a bad loss. A -inf alone is no sign of a fault: masks are made of it."""

    def enter(self, call: Call, args: tuple, kwargs: dict) -> Any:
        if call.start in self.looked and any(map(_has_nan_or_inf, tensors_in((args, kwargs)))):
            self.bad_at.add(call.start)
            return changed((args, kwargs), mend) if self.mend_given else None
        return None

    def leave(self, call: Call, output: Any) -> Any:
        return changed(output, mend) if call.end is not None and call.end < self.number else None


class Cut(Treated):
    """For bad gradients. One that arrives at a cut counts as bad: the fault may have no parameter of its own."""

    def enter(self, call: Call, args: tuple, kwargs: dict) -> None:
        if call.start in self.looked:
            self.handles += [
                tensor.register_hook(lambda gradient: self._passed_back(call, gradient))
                for tensor in tensors_in((args, kwargs))
                if tensor.requires_grad
            ]

    def leave(self, call: Call, output: Any) -> Any:
        if call.end is None or call.end >= self.number:
            return None
        return changed(output, lambda tensor: cut(tensor, lambda gradient: self._arrived(call, gradient)))

    def _passed_back(self, call: Call, gradient: torch.Tensor) -> None:
        if is_bad(gradient):
            self.bad_at.add(call.start)

    def _arrived(self, call: Call, gradient: torch.Tensor) -> None:
        if is_bad(gradient):
            self.bad.add("the output of a module")
            self.bad_inside |= {c.start for c in call.stack[:-1]}


def _has_nan_or_inf(tensor: torch.Tensor) -> bool:
    values = dense(tensor)
    return values is not None and is_bad(tensor) and bool((values[~finite(values)] != -math.inf).any())
