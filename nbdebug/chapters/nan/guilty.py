"""Which module call made the bad value? Found by halving the calls of a step, one run of the step for each half.

The calls of a step end in some order. A bad loss: hand on mended outputs from the first of them. If the loss is finite
then, the fault is among these calls. Bad gradients: cut the graph at the outputs of the first of them, so that backward
runs only through code that came later. If all gradients are finite then, the fault is among these calls. Both ask what
a bad value does, not where one is seen; so an intended -inf that a softmax absorbs is innocent.

The code between the end of one call and the end of the next is that of the next call, or of a call around it. One look
tells which: at what the next call (and those around it) are given, or at the gradients that they pass back.
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
    """The search for one bad event of the run `first`. `replay(change)` runs the step again from the same state."""

    def __init__(self, first: Rerun, event: int, replay: Callable[[Change], Rerun]):
        self.ended, self.event, self.replay = first.ended, event, replay
        self.backward = first.events[event].what == "gradients"
        self._seen: dict[int, tuple[set[int], set[int]]] = {}

    def find(self) -> Call | None:
        """The guilty call; None for code outside of all modules. Needs `saw(0, …)` to have been told first."""
        return self._blame(first_bad(0, len(self.ended), self._healed_by))

    def look(self, number: int) -> Treated:
        """The change that treats all calls which end before call `number`, and looks at what that call is given."""
        stack = self.ended[number].stack if number < len(self.ended) else []
        looked = {call.start for call in stack if not self.backward or call.done == number}
        return (Cut if self.backward else Mended)(number, looked)

    def saw(self, number: int, look: Treated, run: Rerun) -> None:
        """Keep what a run with `look(number)` showed: the calls given something bad, the parameters with bad gradients."""
        bad = run.events[self.event].bad if self.event < len(run.events) else frozenset()
        self._seen[number] = look.given_bad, {id(p) for name, p in run.parameters().items() if name in bad}

    def _healed_by(self, last: int) -> bool:
        look = self.look(last + 1)
        run = self.replay(look)
        self.saw(last + 1, look, run)
        return self.event < len(run.events) and not run.events[self.event].bad

    def _blame(self, number: int) -> Call | None:
        """Whose own code ran between the end of call number - 1 and the end of call `number`, and is to blame?"""
        if number == len(self.ended):
            return None
        call = self.ended[number]
        given_bad, parameters = self._seen[number]
        if not self.backward:
            return next((c.parent for c in call.stack if c.start in given_bad), call)
        begun = [c for c in call.stack if c.done == number]
        if not begun:
            return call  # its last inner call has ended: only its own code is left
        guilty = (c for c in reversed(begun) if c.start in given_bad or any(id(p) in parameters for p in c.module.parameters()))
        return next(guilty, begun[0].parent)


class Treated(Change):
    """All calls that end before call `number` are treated; those in `looked` are looked at. given_bad: where it was bad."""

    def __init__(self, number: int, looked: set[int]):
        super().__init__()
        self.number, self.looked, self.given_bad = number, looked, set[int]()

    def leave(self, call: Call, output: Any) -> Any:
        return changed(output, self.treat) if call.end is not None and call.end < self.number else None

    def treat(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Mended(Treated):
    """For a bad loss. A -inf alone is no sign of a fault: masks are made of it."""

    def treat(self, tensor: torch.Tensor) -> torch.Tensor:
        return mend(tensor)

    def enter(self, call: Call, args: tuple, kwargs: dict) -> None:
        if call.start in self.looked and any(map(_has_nan_or_inf, tensors_in((args, kwargs)))):
            self.given_bad.add(call.start)


class Cut(Treated):
    """For bad gradients. One that arrives at a cut counts: the fault may have no parameter of its own."""

    def treat(self, tensor: torch.Tensor) -> torch.Tensor:
        return cut(tensor, lambda gradient: self.bad.add("a module's output") if is_bad(gradient) else None)

    def enter(self, call: Call, args: tuple, kwargs: dict) -> None:
        if call.start in self.looked:
            self.handles += [tensor.register_hook(lambda gradient: self._passed_back(call, gradient))
                             for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]

    def _passed_back(self, call: Call, gradient: torch.Tensor) -> None:
        if is_bad(gradient):
            self.given_bad.add(call.start)


def _has_nan_or_inf(tensor: torch.Tensor) -> bool:
    values = dense(tensor)
    return values is not None and is_bad(tensor) and bool((values[~finite(values)] != -math.inf).any())
