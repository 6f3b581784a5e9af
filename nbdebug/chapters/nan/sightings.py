"""What was seen bad, and mattered: a loss, a gradient that an optimizer uses, a parameter after its update.

Live, the books of bad values answer at once, and say where the values came from. On an accelerator reading a value
would make the host wait, so there the largest magnitudes are kept on the device, and all of a step are read in one go
at its end; where they came from is found afterwards, by replaying the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from nbdebug.chapters.nan.facts import Target
from nbdebug.chapters.nan.flow import Flow
from nbdebug.chapters.nan.places import at_site
from nbdebug.finding import Where
from nbdebug.observe.sites import Stop
from nbdebug.observe.tape import Ref, Tape
from nbdebug.observe.tensors import all_finite, can_be_bad, dense, largest, read, tensors_in


@dataclasses.dataclass
class Seen:
    """Something bad that mattered: what, and the births that it comes from. position: how far the tape had come then;
    ref: the tape's name for the tensor, where it is neither a loss nor a gradient."""

    target: Target
    origins: set[int]
    position: int = 0
    ref: Ref | None = None

    def rename(self, name: str) -> None:
        """Say which of the tensors that were looked at together is the first bad one."""
        self.target = dataclasses.replace(self.target, name=name)


class Sightings:
    """What was seen in one step, in order. live: whether the books are kept while the step runs."""

    def __init__(self, flow: Flow, tape: Tape, live: bool):
        self.flow, self.tape, self.live = flow, tape, live
        self.step = 0
        self.clear()

    def clear(self) -> None:
        self.found: list[Seen] = []
        self._waiting: list[tuple[torch.Tensor, Seen]] = []

    def look(
        self,
        kind: str,
        tensors: Iterable[tuple[str, torch.Tensor]],
        place: Stop | Where | None = None,
        born_only: bool = False,
    ) -> None:
        """Note whether any of these is bad. born_only: bad values that came in from outside do not count."""
        named = [(n, t) for n, t in tensors if (v := dense(t)) is not None and can_be_bad(v)]
        if not named:
            return
        where = place if isinstance(place, Where) else at_site(Where(step=self.step), place)
        ref = self.tape.find(named[0][1]) if kind == "returned" else None
        made = Seen(Target(kind, where, named[0][0]), set(), len(self.tape.entries) - (kind != "loss"), ref)
        if not self.live:
            self._waiting += [(size, made) for size in largest([t for _, t in named])]
            return
        for name, tensor in named:
            born = {b for b in self.flow.origins(tensor) if not born_only or self.flow.births[b].memory is None}
            if born and not made.origins:
                made.rename(name)
                self.found.append(made)
            made.origins |= born
        if made.origins and not self.flow.settled:
            self.flow.settled = set(made.origins)

    def add(self, kind: str, origins: set[int], name: str = "") -> None:
        """Note something whose origins are known already."""
        if origins:
            self.found.append(Seen(Target(kind, Where(step=self.step), name), set(origins), len(self.tape.entries) - 1))

    def settle(self) -> None:
        """Read what is still on the device: one wait for the whole step."""
        values = read([size for size, _ in self._waiting])
        for value, (_, seen) in zip(values, self._waiting, strict=True):
            if not math.isfinite(value) and seen not in self.found:
                self.found.append(seen)
        self._waiting.clear()


def finite_scalars(returned: Any) -> bool:
    """Whether the single numbers among what a step returned are finite."""
    if isinstance(returned, float):
        return math.isfinite(returned)
    return all(all_finite(t) for t in tensors_in(returned) if t.numel() == 1 and can_be_bad(t))
